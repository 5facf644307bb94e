"""``fedtailor completion``: the script completes commands, names and files in a real shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedtailor.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(source: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    code = f"""{source}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_fedtailor fedtailor "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = [str(shutil.which("bash")), "-c", code, "bash", "fedtailor", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.split()


def test_bash_completes_commands_names_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quiet.toml").write_text("")
    source = script("bash", capsys)
    assert completed(source, tmp_path, "comp") == ["compare", "completion"]
    assert completed(source, tmp_path, "describe", "fedp") == ["fedper", "fedprox"]
    assert completed(source, tmp_path, "list", "m") == ["methods", "models"]
    found = completed(source, tmp_path, "run", "qui")
    assert set(found) == {"quickstart", "quickstart-rates", "quiet.toml"}
    assert completed(source, tmp_path, "new", "qui") == ["quiet.toml"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fedsdg" in script(shell, capsys)
