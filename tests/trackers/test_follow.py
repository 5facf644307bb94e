"""When a tracker gets what, and from what process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.cli import main
from fedtailor.errors import InputError
from fedtailor.trackers import follow
from fedtailor.trackers.follow import track
from tests.trackers.test_tensorboard import FINAL, scalars

Grow = Callable[[int], Path]


def test_following_ends_with_the_last_method(grow: Grow) -> None:
    run, looks = grow(2), iter([4, 8])
    track(run, "tensorboard", follow=True, wait=lambda seconds: not grow(next(looks)))
    for label in ("fedavg", "fedsdg"):
        steps = [step for step, _ in scalars(run, label)["train/loss"]]
        assert steps == list(range(1, 9))
        assert [step for step, _ in scalars(run, label)[FINAL]] == [8]


@pytest.mark.slow
def test_a_follower_takes_what_there_is_when_the_run_has_stopped(grow: Grow) -> None:
    run = grow(4)
    command = ["track", str(run), "--to", "tensorboard", "--follow", "--until-closed"]
    whole = [sys.executable, "-m", "fedtailor", *command]
    done = subprocess.run(whole, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "tensorboard: 8 rounds added\n"), done.stderr
    assert [step for step, _ in scalars(run, "fedavg")["train/loss"]] == [1, 2, 3, 4]
    assert FINAL not in scalars(run, "fedavg")


FILE = """
rounds = 2
data = {name = "digits", limit = 100}
split = {clients = 2}
model = {name = "lenet", width = 0.25, image_size = 16, pretrained = false}
local = {steps = 1}
[methods.local]
"""


@pytest.mark.slow
def test_a_run_is_followed_and_its_files_are_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    plain, followed = tmp_path / "plain", tmp_path / "followed"
    assert main(["run", str(file), "--out", str(plain)]) == 0
    capfd.readouterr()
    command = ["run", str(file), "--out", str(followed), "--track", "tensorboard", "--json"]
    assert main(command) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("{\n")
    assert "tensorboard: 2 rounds added" in printed.err
    assert [step for step, _ in scalars(followed, "local")["train/loss"]] == [1, 2]
    for name in ("history.jsonl", "clients.jsonl", "private.safetensors", "commit.json"):
        where = Path("methods/local/seed-0") / name
        if name != "commit.json":  # it has the length of timings.jsonl
            assert (plain / where).read_bytes() == (followed / where).read_bytes()


def test_what_is_not_there_is_refused(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grow(2)
    with pytest.raises(InputError, match="unknown tracker 'tensorbord'; did you mean 'tensorboar"):
        track(run, "tensorbord")
    (file := run.parent / "events").write_text("")
    with pytest.raises(
        InputError, match=r"--project .*events is a file; with tensorboard it must be"
    ):
        track(run, "tensorboard", str(file))
    monkeypatch.setattr(follow, "TRACKERS", ("no_such_tracker",))
    with pytest.raises(InputError, match="no_such_tracker is not installed; install it with pip"):
        track(run, "no_such_tracker")
