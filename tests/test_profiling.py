"""Seconds by phase, and the trace of one round."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedtailor.profiling import Clock, Trace, exclusive_seconds, phase


def test_no_phase_gives_more_time_than_it_has() -> None:
    """As where workers say more seconds than the round took: their sum is an estimate."""
    clock = Clock({"train": 2.0})
    clock.move(0.5, "train", "data")
    clock.move(3.0, "train", "data")
    assert clock.seconds == {"train": 0.0, "data": 2.0}


def test_a_clock_adds_up_phases_and_moves_time_between_them() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.phase("train"):
            time.sleep(0.01)
    assert 0.02 <= clock.seconds["train"] < 1.0
    whole = clock.seconds["train"]
    clock.move(0.005, "train", "data")
    assert clock.seconds == pytest.approx({"train": whole - 0.005, "data": 0.005})


def test_a_phase_counts_without_the_phases_inside_it() -> None:
    spans = [
        (0, 10e6, "round"), (1e6, 6e6, "evaluate"), (2e6, 3e6, "forward"), (3e6, 5e6, "forward"),
        (7e6, 8e6, "data"),
    ]  # fmt: skip
    found = exclusive_seconds(spans)
    assert found == {"data": 1.0, "forward": 3.0, "evaluate": 2.0, "other": 4.0}


def rounds(count: int, ran: list[int]) -> Iterator[int]:
    for number in range(1, count + 1):
        with phase("forward"):
            torch.ones(200, 200) @ torch.ones(200, 200)
        ran.append(number)
        yield number


@pytest.mark.parametrize(("count", "traced"), [(1, 1), (3, 2)])
def test_the_second_round_is_traced_or_the_only_one(
    tmp_path: Path, count: int, traced: int
) -> None:
    trace, ran = Trace(tmp_path / "trace.json.gz"), []
    assert list(trace.follow(rounds(count, ran), "fedavg")) == list(range(1, count + 1)) == ran
    assert trace.title == f"fedavg, round {traced} of this command"
    seconds = trace.seconds()
    assert seconds.keys() == {"forward", "other"}
    assert all(0 < value < 10 for value in seconds.values())
    written = trace.path.read_bytes()
    assert list(trace.follow(rounds(2, ran), "another")) == [1, 2]
    assert trace.path.read_bytes() == written  # only the first iteration is traced
    assert trace.title.startswith("fedavg")
