"""Code of the user's own, by file or module."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fedtailor.errors import InputError
from fedtailor.user_code import absolute, load, origin

SOURCE = "class Mine:\n    pass\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def test_a_file_and_its_copy_give_the_same_class(file: Path, tmp_path: Path) -> None:
    mine = load("mine.py:Mine")
    assert load("mine:Mine") is mine
    copy = tmp_path / "copy" / "mine.py"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    assert load(absolute("mine.py:Mine", copy.parent)) is mine
    assert type(pickle.loads(pickle.dumps(mine()))) is mine
    found = origin(mine)
    assert (found.reference, found.path, found.source) == ("mine.py:Mine", file, SOURCE.encode())
    assert found.location == f"{file}:Mine"
    assert load(found.location, found.sha256) is mine


def test_a_module_is_imported() -> None:
    found = origin(load("fedtailor.errors:InputError"))
    assert (found.reference, found.path) == ("fedtailor.errors:InputError", None)
    assert load(found.reference, found.sha256) is InputError


def test_what_a_notebook_defines_is_found_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setattr("__main__.Mine", mine, raising=False)
    assert (origin(mine).reference, origin(mine).sha256) == ("__main__:Mine", None)
    assert load("__main__:Mine") is mine


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        (SOURCE, "yours.py:Mine", r"no file yours\.py; give FILE\.py:NAME or package"),
        (SOURCE, "mine.py:Yours", r"mine\.py defines no 'Yours'"),
        (SOURCE, "mine.py", "names no object; give"),
        (SOURCE, "no.such:Mine", "can't import 'no.such': .*PYTHONPATH"),
        (
            SOURCE,
            "__main__:Mine",
            "Mine was defined in a script or a notebook, not",
        ),
        ("class Mine\n", "mine.py:Mine", r"mine\.py, line 1: SyntaxError: "),
        ("x = 1\ny = z\n", "mine.py:Mine", r"mine\.py, line 2: NameError: name 'z' is not defined"),
        ("import no_such\n", "mine.py:Mine", r"mine\.py, line 1: ModuleNotFoundError: "),
        ("x = 1\nraise GeneratorExit\n", "mine.py:Mine", r"mine\.py, line 2: GeneratorExit"),
        (
            "class E(Exception):\n def __str__(self):\n  raise E\nraise E\n",
            "mine.py:Mine",
            r"mine\.py, line 4: E: an error without a text",
        ),
        ("import sys\nsys.exit()\n", "mine.py:Mine", r"mine\.py, line 2: SystemExit"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(
    file: Path, source: str, reference: str, message: str
) -> None:
    file.write_text(source)
    with pytest.raises(InputError, match=message):
        load(reference)


def test_a_changed_file_is_refused_by_name(file: Path) -> None:
    found = origin(load("mine.py:Mine"))
    file.write_text(SOURCE + "# changed\n")
    with pytest.raises(InputError, match=r"mine\.py has changed: its sha256 was .*; restore it"):
        load("mine.py:Mine", found.sha256)
