"""What a run of several methods prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.runs.trials import chosen
from tests.small import digits, digits_backbone, two_methods


def test_each_methods_result_is_printed_before_the_next_one_begins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ft.run(two_methods(), tmp_path / "run", data=digits(), backbone=digits_backbone())
    lines = capfd.readouterr().err.splitlines()
    result = r", seed 0: accuracy \d+\.\d, worst client \d+\.\d \(round 1\)"
    (local,) = (at for at, line in enumerate(lines) if re.fullmatch("local" + result, line))
    (fedavg,) = (at for at, line in enumerate(lines) if re.fullmatch("fedavg" + result, line))
    assert local < fedavg
    assert lines[0].startswith("experiment: rounds 1, seeds 0; 2 rounds in all: local, fedavg")


@pytest.mark.parametrize("portion", ["0/2", "3/2", "2", "1/²", "1/" + 5000 * "9", "1/2/3", " 1/2"])
def test_a_portion_that_is_none_is_refused(portion: str) -> None:
    with pytest.raises(ft.InputError, match="must be K/N with 1 <= K <= N"):
        chosen((0,), ("local",), portion)
