"""TensorBoard's own reader finds the run's numbers in the event files, each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedtailor.trackers.follow import track
from fedtailor.trackers.trial import trials
from tests.trackers.conftest import points_of

Grow = Callable[[int], Path]
FINAL = "reported/personal/mean"


def scalars(folder: Path, label: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag."""
    path = folder if (folder / label).is_dir() else folder / "tensorboard"
    read = EventAccumulator(str(path / label / "seed-0"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


@pytest.mark.slow
def test_event_files_hold_every_point_once(grow: Grow) -> None:
    run = grow(4)
    assert track(run, "tensorboard") == track(run, "tensorboard") == 8
    assert FINAL not in scalars(run, "fedsdg")
    track(grow(8), "tensorboard")
    track(run, "tensorboard")
    trial = trials(run)[1]
    points, found = points_of(trial), scalars(run, "fedsdg")
    for tag in {tag for values in points.values() for tag in values}:
        expected = [(number, values[tag]) for number, values in points.items() if tag in values]
        assert [step for step, _ in found[tag]] == [number for number, _ in expected]
        assert [value for _, value in found[tag]] == pytest.approx([v for _, v in expected])
    result = {name: v for name, v in trial.result().items() if not isinstance(v, str)}
    assert {tag: v for tag, ((_, v),) in _final(found).items()} == pytest.approx(result, rel=1e-6)


def _final(found: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    return {tag: values for tag, values in found.items() if tag.startswith("reported/")}


def test_settings_are_there_and_files_of_others_stay(grow: Grow, tmp_path: Path) -> None:
    other = tmp_path / "board/fedavg/seed-0/events.out.tfevents.1.host.1.0"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"")
    track(grow(4), "tensorboard", str(tmp_path / "board"))
    assert other.exists()
    read = EventAccumulator(str(other.parent)).Reload()
    (text,) = read.Tensors("settings")
    assert b"| split.clients | 6 |" in text.tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in read.PluginTagToContent("hparams")
