"""Whatever is read gives a result or an InputError: a few mutations of what `make fuzz` tries."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from benchmarks.mutations import Attempt, Change, RefusedError
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import (
    fuzz,
    fuzz_code,
    fuzz_formats,
    fuzz_images,
    fuzz_messages,
    fuzz_models,
    fuzz_names,
    fuzz_test_files,
)
from tests.report.conftest import write_run


def check(attempt: Attempt, examples: int) -> None:
    """Try mutations; what is wrong with one ends in another error than RefusedError."""

    @settings(max_examples=examples, deadline=60_000, database=None, derandomize=True)
    @given(st.randoms(use_true_random=False))
    def property_(rng: random.Random) -> None:
        with suppress(RefusedError):
            attempt(rng)

    property_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        (fuzz.experiments, 8),
        (partial(fuzz.plans, names=["fedavg", "fedmerge"]), 8),
        (fuzz_messages.wire, 16),
        (partial(fuzz_messages.answers, names=["fedper", "fedmask"]), 8),
        (partial(fuzz_messages.requests, names=["fedper", "hetlora"]), 8),
        (fuzz.stores, 8),
        (fuzz.damage, 8),
        (fuzz_images.images, 8),
        (fuzz_models.model_folders, 8),
        (fuzz_names.names, 4),
        (fuzz_code.own_code, 2),
        (fuzz_test_files.test_files, 4),
        (fuzz_formats.formats, 8),
    ],
)
def test_a_mutation_gives_a_result_or_an_input_error(
    kind: fuzz.Start, examples: int, tmp_path: Path
) -> None:
    check(kind(tmp_path), examples)


def test_a_mutated_run_is_compared_or_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tail=b"", rounds=2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    check(fuzz.run_directories(tmp_path, run), 8)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_finding_is_printed_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(rng: random.Random) -> Change:
        if rng.random() < 0.5:
            raise RefusedError
        return {}["key"]

    def endless(rng: random.Random) -> Change:
        while True:
            pass

    monkeypatch.setitem(fuzz._START, "wire", lambda folder: attempt)
    assert fuzz.fuzz("wire", range(20), 0, 60.0) == 1
    assert "KeyError" in capsys.readouterr().out
    monkeypatch.setitem(fuzz._START, "wire", lambda folder: endless)
    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    assert fuzz.fuzz("wire", [7], 0, 60.0) == 1
    assert "mutation 7: Hang" in capsys.readouterr().out
