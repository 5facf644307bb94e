"""``fedtailor run``: from an experiment file to a run directory, in real processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fedtailor.cli import main
from fedtailor.store.run_directory import locked
from tests.cli.conftest import EXPERIMENT
from tests.forked import contents
from tests.interrupts import interruptible


@pytest.mark.slow
def test_a_run_ends_with_a_table_and_a_report(
    file: Path,
    finished: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("fedtailor.runs.run.Inputs")  # finished: neither data nor model are loaded
    assert main(["run", str(file), "--out", str(finished)]) == 0
    printed = capfd.readouterr()
    assert "fedsdg" in printed.out
    assert "local" in printed.out
    assert f"report: {finished / 'report.html'}" in printed.out
    assert printed.err == f"{finished} is finished: nothing is left to run\n"
    assert (finished / "report.html").stat().st_size > 10_000
    history = finished / "methods/fedsdg/seed-0/history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert main(["run", str(file), "--out", str(finished), "--set", "cohort.max_norm=3"]) == 0
    assert capfd.readouterr().err.splitlines()[1:] == [
        "cohort.max_norm = 3.0 changes nothing: it is for rounds that are left; it was none in "
        f"{finished}"
    ]
    assert lines[0]["bytes_up"] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(file: Path, finished: Path, tmp_path: Path) -> None:
    assert main(["run", str(file), "--out", str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(finished)


@pytest.mark.slow
def test_a_run_directory_can_be_given_instead_of_the_file(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(finished)]) == 0
    assert "fedsdg" in capfd.readouterr().out
    assert main(["run", str(finished), "--out", "elsewhere"]) == 2
    assert "is a run directory: it goes on there, without --out" in capfd.readouterr().err


def fails(arguments: list[str], message: str, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main([*arguments, "--out", str(out)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("fedtailor: ")
    assert printed.err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rouns=3", "unknown key 'rouns'; did you mean 'rounds'?"),
        ("methods.fedsdg.gat=3", "unknown key 'gat' in methods.fedsdg"),
        ("methods.x.name=fedsdgg", "unknown method 'fedsdgg'; did you mean 'fedsdg'"),
        ("model.name=lenett", "unknown model 'lenett'; did you mean 'lenet'"),
        ("model.targets=[]", "has no recognised transformer blocks"),
        ("data.name=digit", "'digit'; did you mean 'digits'?"),
        ("data.path=mine.csv", "data.path is mine.csv, and data.name is digits"),
        ("split.test=0", "no client has a test row, so there would be no results; set split.test"),
        ("split.alpha=0", "split.alpha"),
        ("split.alpha=-1", "split.alpha"),
        ("split.clients=900", "900"),
        ("methods.fedsdg.rank=500", "rank 500 is larger than the layer"),
        ("engine.device=cuda", "no CUDA device"),
    ],
)
def test_bad_input(
    file: Path, tmp_path: Path, setting: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fails(["run", str(file), "--set", setting], message, tmp_path / "out", capfd)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], [], "data.csv"),
        (["text,label", "a,0", "b,1"], ["data.label=topic"], "topic"),
        (["text,label", "a,0", "b,1"], [], "it needs a model with a tokenizer"),
    ],
)
def test_bad_files(
    file: Path,
    tmp_path: Path,
    rows: list[str],
    settings: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if rows:
        (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    experiment = tmp_path / "bad.toml"
    text = EXPERIMENT.replace('name = "digits"', f'path = "{tmp_path / "data.csv"}"')
    experiment.write_text(text)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    fails(["run", str(experiment), *flags], message, tmp_path / "out", capfd)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_profile_is_a_trace_and_a_table_of_phases(
    executor: str, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = ("rounds=2", 'methods=["local"]', f"engine.executor={executor}")
    arguments = [text for setting in settings for text in ("--set", setting)]
    command = ["run", str(file), "--out", str(out), *arguments, "--profile"]
    assert main(command) == 0
    printed = capfd.readouterr().out
    assert "local, seed 0, round 2 of this command" in printed
    for phase in ("data", "forward", "backward", "optimiser", "state", "aggregate", "evaluate"):
        assert re.search(rf"^{phase} +[0-9.]+ +[0-9.]+%$", printed, re.MULTILINE), phase
    with gzip.open(out / "trace.json.gz") as trace:
        names = {event["name"] for event in json.load(trace)["traceEvents"] if "name" in event}
    assert {"fedtailor: round", "fedtailor: forward", "aten::addmm"} <= names
    assert main(command) == 2
    assert "finished: no round is left to profile" in capfd.readouterr().err


@pytest.mark.slow
def test_a_different_run_in_the_way_is_left_alone(
    file: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    settings = ["--set", "local.steps=4", "--set", "data.limit=none"]
    assert main(["run", str(file), "--out", str(finished), *settings]) == 2
    assert capfd.readouterr().err == (
        f"fedtailor: data.limit is 200 in {finished} and none now; local.steps is 2 in {finished} "
        "and 4 now: choose another --out, or start anew with --overwrite\n"
    )
    assert contents(finished) == before


@pytest.mark.slow
def test_a_run_directory_goes_on_with_more_rounds_and_methods(file: Path, tmp_path: Path) -> None:
    a, b, local = tmp_path / "a", tmp_path / "b", ["--set", "methods=local"]
    assert main(["run", str(file), "--out", str(a), *local, "--set", "rounds=1"]) == 0
    assert main(["run", str(a), "--set", "rounds=2"]) == 0
    assert main(["run", str(file), "--out", str(a), "--set", "rounds=2"]) == 0
    assert main(["run", str(file), "--out", str(b), "--set", "rounds=2"]) == 0
    assert contents(a) == contents(b)


@pytest.mark.slow
def test_overwrite_removes_the_old_run_and_nothing_else(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    short = ["run", str(file), "--set", "rounds=1", "--out", str(out), "--overwrite"]
    assert main([*short, "--set", "methods=local"]) == 0  # nothing is there yet
    before = contents(out)
    changed = [*short, "--set", "methods=fedsdg", "--set", "local.steps=1"]
    assert main([*changed, "--dry-run"]) == 0
    assert main([*changed, "--set", "split.clients=900"]) == 2  # bad input removes nothing
    assert contents(out) == before
    (out / "mine.txt").write_text("mine")
    capfd.readouterr()
    assert main(changed) == 2
    assert f"{out} holds mine.txt beside the run" in capfd.readouterr().err
    assert contents(out).keys() == before.keys() | {"mine.txt"}
    (out / "mine.txt").unlink()
    assert main(changed) == 0
    assert [path.name for path in (out / "methods").iterdir()] == ["fedsdg"]
    assert main(["run", str(file), "--out", str(file.parent), "--overwrite"]) == 2
    assert f"{file.parent} is not a run directory" in capfd.readouterr().err
    assert file.exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_told_with_client_and_round(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["optimiser.lr=1e6", "optimiser.name=sgd", "optimiser.clip=none", "trainable=full"]
    flags = [flag for setting in settings for flag in ("--set", f"methods.local.{setting}")]
    out = tmp_path / "nan"
    command = ["run", str(file), *flags, "--set", "methods=local", "--out", str(out)]
    assert main(command) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "the loss of client" in error
    assert "in round" in error
    assert error in (out / "run.log").read_text().replace("local, seed 0 ends here", "fedtailor")
    assert main(command) == 2  # it goes on after the last good round, and says the same
    assert capfd.readouterr().err.splitlines()[-1] == error


@pytest.mark.slow
def test_of_several_methods_one_that_diverges_is_shown_and_the_others_go_on(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = ["methods.local.optimiser.lr=1e6", "methods.local.optimiser.clip=none"]
    settings += ["methods.local.optimiser.weight_decay=1e6"]
    settings += ["methods.local.optimiser.name=sgd", "methods.local.trainable=full", "rounds=1"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["run", str(file), *flags, "--out", str(out)]) == 0
    printed = capfd.readouterr()
    assert printed.err.count("local, seed 0 ends here: ") == 1
    assert re.search(r"^local \(diverged in round 1\) +- ", printed.out, re.MULTILINE)
    assert "Diverged: local, seed 0: " in printed.out
    assert "Unfinished" not in printed.out
    assert re.search(r"^fedsdg +[0-9.]+ ", printed.out, re.MULTILINE)
    assert "diverged in round 1" in (out / "report.html").read_text()
    before = contents(out)
    assert main(["run", str(out)]) == 0
    assert contents(out).keys() == before.keys()
    assert capfd.readouterr().out == printed.out


@pytest.mark.slow
def test_a_terminal_shows_rounds_loss_and_time_left(file: Path, tmp_path: Path) -> None:
    import pty

    command = [sys.executable, "-m", "fedtailor", "run", str(file), "--out", str(tmp_path / "o")]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = subprocess.Popen(
        [*command, "--set", "methods=local"], stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    assert "3/3" in text
    assert re.search(r"\d\d:\d\d<\d\d:\d\d", text)  # elapsed<left
    assert re.search(r"loss=\d\.\d\d\d", text)


@pytest.mark.slow
def test_without_a_terminal_a_log_gets_the_same_lines(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedtailor", "run", str(file), "--out", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "small: rounds 3, seeds 0; 6 rounds in all: fedsdg, local"
    assert [line.split(": ")[0] for line in lines[-2:]] == ["fedsdg, seed 0", "local, seed 0"]
    logged = (tmp_path / "o/run.log").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in logged] == lines
    commit = tmp_path / "o/methods/local/seed-0/commit.json"
    assert json.loads(commit.read_text())["finished"]


def test_a_second_process_is_kept_out(
    finished: Path, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked(finished):  # a lock is an open file's: a second one of this process fares alike
        assert main(["run", str(file), "--out", str(finished)]) == 2
    assert "another process is writing" in capfd.readouterr().err


def test_a_file_in_the_way_of_the_run_directory_is_told(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(file), "--out", str(file / "x")]) == 2
    said = f"fedtailor: {file} is a file; the output must be a directory\n"
    assert capfd.readouterr().err == said


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedtailor", "run", str(file), "--out", str(out)]
    command += ["--set", "methods=local", "--set", "rounds=100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with interruptible(), subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        history = out / "methods/local/seed-0/history.jsonl"
        while not history.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            printed, error = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, printed) == (130, "")
    last = error.splitlines()[-1]
    assert last == "fedtailor: interrupted; the same command goes on from here"


@pytest.mark.slow
def test_a_dry_run_says_what_would_run_and_writes_nothing(
    file: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", str(file), "--out", str(out), "--dry-run"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("small: rounds 3, seeds 0; 6 rounds in all: fedsdg, local\n")
    assert re.search(r"^  fedsdg +\d+ +\d+ +\d+ +[0-9.]+ k?B ", printed.out, re.MULTILINE)
    assert "  time      about " in printed.out
    assert not out.exists()
    before = contents(finished)
    command = ["run", str(file), "--out", str(finished), "--dry-run", "--json"]
    for flags, labels in (([], []), (["--overwrite"], ["fedsdg", "local"])):
        assert main([*command, *flags]) == 0
        summary = json.loads(capfd.readouterr().out)
        assert [one["label"] for one in summary["methods"]] == labels
    assert summary["clients"] == 4
    assert summary["train"].keys() == {"least", "median", "most"}
    assert contents(finished) == before
