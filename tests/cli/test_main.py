"""The program itself: it starts at once, and says what is wrong in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedtailor.cli import main

HEAVY = {
    "torch", "numpy", "tabulate", "transformers", "datasets", "vl_convert", "optuna", "flwr",
    "tensorboard", "rich",
}  # fmt: skip
COMMANDS = (
    "new", "run", "compare", "report", "list", "describe", "layers", "tune", "export",
    "track", "watch", "doctor",
    "deploy", "deploy init", "deploy certs", "deploy server", "deploy client", "deploy run",
    "deploy status", "deploy export",
)  # fmt: skip


def loaded(*command_lines: str) -> set[str]:
    """The top-level modules that one process loads for all of ``command_lines``."""
    code = f"""
import contextlib, io, sys
from fedtailor.cli import main
for line in {command_lines!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line.split())
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_help_and_mistakes_load_nothing_that_takes_long() -> None:
    helps = [f"{command} --help" for command in COMMANDS]
    mistakes = ["lst", "--hepl", "list metods", "run small.toml --sett", "deploy x"]
    assert not loaded("--help", "--version", "list", *helps, *mistakes) & HEAVY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("list experiments", set()),
        ("list models", {"torch", "numpy", "tabulate"}),
        ("compare nowhere", {"numpy", "tabulate"}),
        ("watch nowhere --once", {"numpy", "tabulate"}),
    ],
)
def test_a_command_loads_what_it_needs(command: str, needs: set[str]) -> None:
    assert loaded(command) & HEAVY == needs


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fedtailor {command}".rstrip())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"fedtailor \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lst", "unknown command 'lst'; did you mean 'list'? allowed: advise, audit, check"),
        ("run", "required: EXPERIMENT.toml; see fedtailor run --help"),
        ("run small.toml --set", "argument --set: expected one argument; see fedtailor run --help"),
        ("report x --format svg", "arguments: --format svg; see fedtailor report --help"),
        ("list metods", "invalid choice: 'metods' (choose from 'experiments', 'methods', "),
        ("layers small.toml --epochs 0", "argument --epochs: '0': must be a whole number of at"),
        ("deploy x", "argument STEP: invalid choice: 'x'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: str, message: str) -> None:
    command = [sys.executable, "-m", "fedtailor", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fedtailor: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_lists_that_are_too_deep_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.toml").write_text("seeds = " + 9999 * "[")
    assert main(["run", str(tmp_path / "deep.toml")]) == 2
    assert (
        capsys.readouterr().err == "fedtailor: tables or lists stand too deep within one another\n"
    )


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "fedtailor", "list", "experiments"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
