"""Run the fast tests with the lowest and with the newest versions of all dependencies.

Each gets an environment of its own below ``--envs``. What was installed there is written to
``requirements/lowest.txt`` and ``requirements/newest.txt`` once its tests have passed. The lowest
versions are the lower bounds in ``pyproject.toml``. They are tested without Flower, which needs
newer versions of some of them. pip takes PyTorch from a folder of CPU builds that
``PIP_FIND_LINKS`` names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("fedtailor[", "flwr-datasets", "mypy", "ruff", "setuptools", "types-")  # of `test`
PARTITIONERS = "flwr-datasets==0.6.1"  # without what it needs: it holds datasets below 5
OF_PARTITIONERS = ("matplotlib>=3.7.5,<4", "seaborn>=0.13,<1")
EXTRAS = {"lowest": "figures,privacy,rouge,tune", "newest": "figures,flower,privacy,rouge,tune"}
FLOWER = (  # what needs it, beside tests that import it
    "src/fedtailor/flower", "src/fedtailor/deploy", "tests/flower", "tests/deploy",
    "tests/cli/test_deploy.py", "tests/benchmarks/test_fuzz.py", "tests/docs/test_blocks.py",
)  # fmt: skip
IMPORTS_FLOWER = re.compile(
    r"^\s*(from|import) (flwr|(fedtailor|tests)\.(flower|deploy))\b", re.MULTILINE
)


def project() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The project of ``pyproject.toml``, and its extras."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content, content["optional-dependencies"]


def needed(extras: str) -> list[str]:
    """What ``pyproject.toml`` asks for, with the extras ``a,b``."""
    content, optional = project()
    return content["dependencies"] + [line for name in extras.split(",") for line in optional[name]]


def of_tests() -> list[str]:
    """What the tests ask for beside that."""
    asked = [line for line in project()[1]["test"] if not line.startswith(LEFT_OUT)]
    return [*asked, *OF_PARTITIONERS]


def lower_bounds() -> list[str]:
    """The lower bounds of all dependencies and of these extras, as ``name==version``."""
    return [re.sub(r">=([\d.]+).*", r"==\1", line) for line in needed(EXTRAS["lowest"])]


def with_flower() -> list[str]:
    """The files that need Flower."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = [file for file in tests if IMPORTS_FLOWER.search(file.read_text())]
    return [*FLOWER, *(str(file.relative_to(ROOT)) for file in found)]


def install(kind: str, folder: Path) -> Path:
    """Make the environment, unless it is there with all that is asked for; its Python."""
    python, whole = folder / "bin" / "python", folder / "installed"
    versions = lower_bounds() if kind == "lowest" else []
    packages = [f"{ROOT}[{EXTRAS[kind]}]", *of_tests(), *versions]
    data = ROOT / "requirements/data.txt"
    asked = "\n".join([*packages, *needed(EXTRAS[kind]), PARTITIONERS, data.read_text()])
    if whole.exists() and whole.read_text() == asked:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-e", *packages], check=True)
    subprocess.run([*pip, "--no-deps", PARTITIONERS, "-r", data], check=True)
    whole.write_text(asked)
    return python


def passes(kind: str, python: Path, paths: list[str]) -> bool:
    """Whether the fast tests pass in the environment."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow and not long"]
    if kind == "lowest":
        command += [f"--ignore={path}" for path in with_flower()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *paths], cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def freeze(kind: str, python: Path) -> None:
    """Write what is installed to ``requirements/KIND.txt``."""
    command = [python, "-m", "pip", "freeze", "--exclude-editable"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # a CPU build has +cpu, another one packages of its own
    versions = re.sub(r"\+\w+$|^(cuda|nvidia|triton).*\n", "", done.stdout, flags=re.MULTILINE)
    head = f"# The {kind} versions that `make test-versions` tests.\n"
    (ROOT / f"requirements/{kind}.txt").write_text(head + versions)


def main() -> int:
    """Test the kinds that are asked for; the exit code: 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(EXTRAS), help="lowest, newest")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--tests", nargs="*", default=[], help="default: all")
    options = parser.parse_args()
    failed = []
    for kind in options.kinds:
        python = install(kind, options.envs / kind)
        if not passes(kind, python, options.tests):
            failed.append(kind)
        elif not options.tests:
            freeze(kind, python)
    print("failed: " + ", ".join(failed) if failed else "passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
