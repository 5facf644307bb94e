"""``fedtailor predict`` and ``fedtailor onboard``, on pictures."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow

from fedtailor.cli import main
from tests import kinds
from tests.small import digits, without_checksum


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, values in enumerate(digits().inputs.values[:12]):
        Pillow.fromarray(values[0]).save(folder / f"{number:02d}.png")
    return folder


def test_a_new_client_takes_its_own_rows_and_says_which_are_left_out(
    run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads(without_checksum(run / "experiment.json").read_text())
    stored["data"]["client"] = "site"
    (run / "experiment.json").write_text(json.dumps(stored))
    paths = sorted(map(str, pictures.iterdir()))
    features = Features({"image": Image(), "label": Value("int64"), "site": Value("string")})
    rows = {"image": paths, "label": [None, *range(10), 10], "site": ["lagos", "oslo"] * 6}
    Dataset.from_dict(rows, features=features).to_parquet(run / "new.parquet")
    command = ["onboard", str(run), "--method", "fedsdg", "--data", str(run / "new.parquet")]
    capsys.readouterr()
    assert main([*command, "--client", "lagos"]) == 0
    told = capsys.readouterr()
    assert "3 train, 1 validation, 1 test examples" in told.out
    assert told.err.splitlines() == [
        "fedtailor: 6 rows of other clients, left out",
        "fedtailor: 1 row without a label, left out",
    ]
    assert main([*command, "--client", "oslo"]) == 2
    assert "row 12 of " + str(run / "new.parquet") + "; allowed: 0 to 9" in capsys.readouterr().err
    assert main([*command, "--client", "rome"]) == 2
    assert "has no rows of client 'rome', but of lagos (6), oslo (6)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_client_joins_and_predicts(
    run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = digits().labels
    assert labels is not None
    paths = sorted(map(str, pictures.iterdir()))
    features = Features({"image": Image(), "label": Value("int64")})
    rows = {"image": paths, "label": labels[:12].tolist()}
    Dataset.from_dict(rows, features=features).to_parquet(run / "new.parquet")
    new = ["--data", str(run / "new.parquet"), "--client", "lagos", "--passes", "2"]
    command = [str(run), "--method", "fedsdg"]
    assert main(["onboard", *command, *new]) == 0
    told = capsys.readouterr().out
    assert told.startswith("lagos (client 4) joins fedsdg, seed 0: 9 train, 1 validation, 2 test")
    assert "always the most frequent class" in told
    assert main(["onboard", *command, *new, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] in ("fitted", "guess", "global")
    assert main(["onboard", *command, *new]) == 2
    assert "lagos has joined already" in capsys.readouterr().err

    given = [*command, "--client", "lagos", "--input", str(pictures)]
    assert main(["predict", *given, "--out", str(run / "none/there.csv")]) == 2
    assert "/none for --out " in capsys.readouterr().err
    assert main(["predict", *given]) == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["file"] for row in table] == paths
    out = run / "out.jsonl"
    assert main(["predict", *given, "--json", "--out", str(out)]) == 0
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert [line["label"] for line in lines] == [row["label"] for row in table]
    kept = out.read_text()
    same = ["--input", str(out), "--out", str(run / "." / "out.jsonl")]
    assert main(["predict", *command, *same]) == 2
    assert "is the input itself; name another file" in capsys.readouterr().err
    assert out.read_text() == kept
    assert main(["predict", *given, "--which", "last"]) == 2
    assert "which = 'last': lagos joined after the training" in capsys.readouterr().err
    assert main(["predict", *command, "--input", str(pictures), "--which", "last"]) == 0
    assert main(["onboard", *command, *new, "--overwrite", "--which", "last"]) == 0
    capsys.readouterr()
    assert main(["predict", *command, "--client", "nowhere", "--input", str(pictures)]) == 2
    assert "no client nowhere; allowed: 0 to 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_shows_texts_as_they_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ask.txt").write_text("the ward has\nnight\n")
    command = ["predict", str(kinds.finished("instruct") / "run"), "--method", "fedsdg"]
    command += ["--client", "a", "--input", str(tmp_path / "ask.txt")]
    assert main(command) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == "text"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().out == f"> 'the ward has'\n{first}\n\n> 'night'\n{second}\n\n"
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"text": first}
