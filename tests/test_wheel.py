"""The built wheel, installed away from the repository, has all that a run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

ROOT = Path(__file__).parent.parent
SMALL = (
    'methods=["local"]', "rounds=1", "data.limit=60", "data.limit_test=30", "data.max_length=8",
    "split.clients=2", "split.min_examples=5",
)  # fmt: skip


def build(folder: Path) -> Path:
    """The wheel, of a copy of the sources."""
    sources = folder / "sources"
    ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", sources / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources)
    (wheel,) = folder.glob("fedtailor-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; its dependencies are those of this environment. Its
    program."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = Path(torch.__file__).parents[1]  # a .pth file there, as of an editable
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")  # install, is not read
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return folder / "bin" / "fedtailor"


def pip(python: Path | str, *arguments: object) -> None:
    command = [python, "-m", "pip", *map(str, arguments), "-q"]
    subprocess.run(command, check=True, env=away())


def away() -> dict[str, str]:
    """The environment's variables, without the path to the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_a_wheel_away_from_the_repository_runs_a_built_in_experiment(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    with ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if name.startswith("fedtailor/")}
    sources = (path for path in (ROOT / "src/fedtailor").rglob("*") if path.is_file())
    files = {str(path.relative_to(ROOT / "src")) for path in sources if path.suffix != ".pyc"}
    assert packed == files
    program = install(wheel, tmp_path / "venv")
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*arguments: str) -> str:
        command = [str(program), *arguments]
        done = subprocess.run(
            command, cwd=empty, env=away(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "quickstart" in run("list", "experiments")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    assert "local" in run("run", "quickstart", *settings)
    assert (empty / "runs/quickstart/report.html").stat().st_size > 1000
