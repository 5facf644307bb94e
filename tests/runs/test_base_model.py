"""A run notices that its base model is another one, also of the same size and time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.cli import main
from fedtailor.errors import InputError
from fedtailor.models.config import ModelConfig
from fedtailor.runs import base_model
from tests.text import save_bert

EXPERIMENT = """
rounds = 1
data = {{path = "rows.csv", client = "site", max_length = 8}}
split = {{scheme = "natural", min_examples = 4}}
model = {{name = "{name}"}}
local = {{steps = 1}}
[methods.fedper]
trainable = "lora"
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the experiment, its data, its model and a finished run."""
    folder = tmp_path_factory.mktemp("base")
    save_bert(folder / "bert")
    rows = [f"{word} {site},{word in 'abcd'},{site}" for site in "gh" for word in "abcdefgh"]
    (folder / "rows.csv").write_text("\n".join(["text,label,site", *rows]) + "\n")
    (folder / "e.toml").write_text(EXPERIMENT.format(name=folder / "bert"))
    assert main(["run", str(folder / "e.toml"), "--out", str(folder / "run")]) == 0
    return folder


def overwrite(path: Path) -> None:
    """Change one byte, and neither size nor time."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda bert: overwrite(bert / "model.safetensors"),
        lambda bert: (bert / "tokenizer.json").write_text("{}"),
        lambda bert: (bert / "config.json").unlink(),
        lambda bert: (bert / "chat_template.jinja").write_text("{{ messages }}"),
    ],
)
def test_another_base_model_is_refused_and_the_old_one_goes_on(
    begun: Path, tmp_path: Path, change: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bert, run, kept = begun / "bert", str(begun / "run"), tmp_path / "bert"
    monkeypatch.chdir(begun)
    commands = [
        ["run", run, "--set", "rounds=2"],
        ["predict", run, "--client", "g", "--input", "rows.csv"],
        ["onboard", run, "--client", "new", "--data", "rows.csv"],
        ["export", run, "--client", "g", "--out", str(tmp_path / "out")],
        ["run", "e.toml", "--set", f'start_from="{run}"', "--out", str(tmp_path / "next")],
        ["check", run],
    ]
    shutil.copytree(bert, kept)
    change(bert)
    try:
        for command in commands:
            capsys.readouterr()
            if command[0] == "check":
                with pytest.raises(SystemExit, match="1"):
                    main(command)
            else:
                assert main(command) == 2, command
            said = capsys.readouterr()
            assert "the base model is not the one that" in said.out + said.err, command
            assert "put it back as it was" in said.out + said.err
    finally:
        shutil.rmtree(bert)
        shutil.copytree(kept, bert)
    assert not (tmp_path / "next").exists()
    assert main(["check", run]) == 0
    assert main(["predict", run, "--client", "g", "--input", "rows.csv"]) == 0


def test_check_says_that_a_run_without_hashes_has_nothing_to_compare(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun / "run", run)
    (run / "model.json").unlink()
    capsys.readouterr()
    assert main(["check", str(run)]) == 0
    note, last = capsys.readouterr().out.splitlines()
    assert note.startswith(f"{run} has no model.json")
    assert note.endswith("can't be checked")
    assert last.endswith("0 damaged")


def test_a_large_file_is_read_again_where_a_time_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "_SMALL", 1 << 10)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1 << 16))
    known = base_model._hash(path)
    assert base_model._is_same(known, path)
    overwrite(path)  # and its time of modification is set back
    assert not base_model._is_same(known, path)
    path.write_bytes(bytes(1 << 16))
    assert base_model._is_same(known, path)  # written again, with the same content


def test_a_model_of_the_hub_is_that_of_its_commit(begun: Path, tmp_path: Path) -> None:
    """The hub's cache, as huggingface_hub lays it out: main has moved to another commit."""
    snapshots = tmp_path / "models--me--bert" / "snapshots"
    shutil.copytree(begun / "bert", snapshots / "abc")
    out = tmp_path / "run"
    out.mkdir()
    base_model.record_model(ModelConfig(str(snapshots / "abc")), out)
    assert base_model.pinned(ModelConfig("me/bert"), out).revision == "abc"
    (snapshots / "abc" / "vocab.txt").write_text("fetched later")
    assert base_model.check_model(ModelConfig(str(snapshots / "abc")), out)
    overwrite(snapshots / "abc" / "model.safetensors")
    with pytest.raises(InputError, match=r"put it back as it was \(commit abc of the hub\)"):
        base_model.check_model(ModelConfig(str(snapshots / "abc")), out)
