"""Built-in experiments run by name, and a file goes before a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.errors import InputError
from fedtailor.runs import builtin
from fedtailor.runs.experiment import load


def test_a_name_stands_for_the_packages_file() -> None:
    assert load(Path("quickstart")).data.name == "20newsgroups"
    assert load(Path("quickstart"), ["preset=small"]).rounds == 2


def test_a_file_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("rounds = 3\n[methods.local]\n")
    assert load(Path("quickstart")).rounds == 3


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(
        InputError, match=r"did you mean 'quickstart'.*built-in: attacks, fashion-mnist, "
    ):
        load(Path("quikstart"))
    with pytest.raises(InputError, match=r"built-in one runs by name: fedsq$"):
        load(Path("elsewhere/fedsq.toml"))


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    with pytest.raises(InputError, match=r"^notes is no experiment file, and no run directory$"):
        load(Path("notes"))


def test_every_experiment_says_what_it_is_for() -> None:
    for name, file in builtin.experiments().items():
        assert 10 < len(builtin.purpose(file)) < 120, name
