"""What a follower sees of real runs, at every moment of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.store.committed import read_commit
from fedtailor.store.read import read
from fedtailor.store.run_directory import locked
from fedtailor.watch.follow import Follower
from fedtailor.watch.state import RunState
from tests.watch.conftest import run

MakeRun = Callable[..., Path]


def states(state: RunState) -> list[tuple[str, int, str]]:
    return [(trial.method, trial.round, trial.state) for trial in state.trials]


@pytest.mark.slow
def test_a_run_is_seen_round_by_round(tmp_path: Path) -> None:
    out, seen = tmp_path / "run", []
    followers: list[Follower] = []

    def on_round(done: ft.CommittedRound) -> None:
        if not followers:
            followers.append(Follower(out))
        seen.append(followers[0].look())
        assert seen[-1].trials == Follower(out).look().trials  # bit by bit, and as a whole
        mine = next(trial for trial in seen[-1].trials if trial.method == done.label)
        assert mine.latest is not None
        assert (mine.latest.round, mine.latest.value) == (done.number, done.score())

    run(out, on_round=on_round)
    assert [states(state) for state in seen] == [
        [("fedsdg", 1, "running"), ("local", 0, "waiting")],
        [("fedsdg", 2, "running"), ("local", 0, "waiting")],
        [("fedsdg", 3, "running"), ("local", 0, "waiting")],
        [("fedsdg", 3, "finished"), ("local", 1, "running")],
        [("fedsdg", 3, "finished"), ("local", 2, "running")],
        [("fedsdg", 3, "finished"), ("local", 3, "running")],
    ]
    assert seen[1].note == "runs fedsdg, seed 0, round 3 of 3"
    assert [state.round for state in seen] == [1, 2, 3, 4, 5, 6]
    assert all(state.rounds == 6 and state.seconds_left is not None for state in seen)
    last = followers[0].look()
    assert (last.state, last.seconds_left) == ("finished", None)
    assert followers[0].is_last(last)
    trials = {trial.label: trial for trial in read(out).trials}
    for seen_trial in last.trials:
        trial = trials[seen_trial.method]
        best = read_commit(trial.folder).best
        assert seen_trial.best is not None
        found = (seen_trial.best.round, seen_trial.best.value)
        assert found == tuple(vars(best["personal"]).values())
        assert seen_trial.bytes == sum(line.bytes_down + line.bytes_up for line in trial.history)
        assert seen_trial.seconds == pytest.approx(
            sum(sum(timing.seconds.values()) for timing in trial.timings)
        )
        losses = tuple((line.round, line.train_loss) for line in trial.history)
        assert seen_trial.losses == losses
    assert last.log[-1].endswith((out / "run.log").read_text().splitlines()[-1])


def test_no_line_of_the_log_tells_another_time_left_than_the_state(make_run: MakeRun) -> None:
    out, line = make_run(done=3), "local, seed 0: round 3 of 8, loss 1.204"
    (out / "run.log").write_text(f"{line}; 37 % of the run, about 4 min left\n")
    assert Follower(out).look().log == (line,)


@pytest.mark.slow
def test_more_rounds_are_waited_for_while_a_process_writes(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    follower, seen = Follower(out), []
    assert follower.look().state == "finished"
    run(out, rounds=4, on_round=lambda done: seen.append(states(follower.look())))
    assert seen == [
        [("fedsdg", 4, "running"), ("local", 3, "waiting")],
        [("fedsdg", 4, "finished"), ("local", 4, "running")],
    ]
    assert states(follower.look()) == [("fedsdg", 4, "finished"), ("local", 4, "finished")]


@pytest.mark.slow
def test_a_run_that_takes_the_directory_over_is_followed(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    follower, seen = Follower(out), []
    assert follower.look().round == 6
    run(out, rounds=1, overwrite=True, on_round=lambda done: seen.append(follower.look().round))
    assert seen == [1, 2]
    assert follower.look().rounds == 2


@pytest.mark.slow
def test_a_callback_stops_a_method(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out, on_round=lambda done: ft.STOP if done.label == "fedsdg" else None)
    state = Follower(out).look()
    assert states(state) == [("fedsdg", 1, "stopped"), ("local", 3, "finished")]
    assert (state.state, state.round, state.rounds) == ("stopped", 4, 4)
    assert state.note.startswith("was stopped by a callback, or rolled back; ")
    assert state.note.endswith("; fedsdg, seed 0: after round 1 of 3")


def test_where_nobody_writes_a_run_is_interrupted(make_run: MakeRun) -> None:
    out = make_run(done=3)  # each log has the beginning of a line that was not committed
    follower = Follower(out)
    state = follower.look()
    assert (state.state, state.round, state.rounds) == ("interrupted", 6, 16)
    assert follower.is_last(state)
    assert state.note == (
        "is interrupted: no process runs it, and rounds are left; fedavg, seed 0: after round 3 "
        "of 8; fedsdg, seed 0: after round 3 of 8"
    )
    assert all(trial.latest and trial.latest.round == 2 for trial in state.trials)
    with locked(out):
        assert follower.look().state == "running"
    assert follower.look().state == "interrupted"


def test_a_method_that_diverged_says_why(make_run: MakeRun) -> None:
    out = make_run(done=3)
    for label in ("fedavg", "fedsdg"):
        path = out / f"methods/{label}/seed-0/commit.json"
        content = json.loads(path.read_text()) | {"diverged": f"{label} in round 4: \x1b[2J"}
        path.write_text(json.dumps(content))
    state = Follower(out).look()
    assert state.state == "diverged"
    assert [trial.reason for trial in state.trials] == [
        "fedavg in round 4: ?[2J",
        "fedsdg in round 4: ?[2J",
    ]


@pytest.mark.parametrize(("fields", "best"), [({"is_lm": True}, 4), ({"select": "auc"}, 0)])
def test_scores_are_of_the_metric_that_selects(
    make_run: MakeRun, fields: dict[str, object], best: int
) -> None:
    state = Follower(make_run(with_auc=True, **fields)).look()
    assert state.metric == ("loss" if "is_lm" in fields else "auc")
    trial = state.trials[0]
    assert trial.best is not None
    assert trial.best.round == best
    values = dict(trial.curve)
    assert trial.best.value == (max if state.metric == "auc" else min)(values.values())


def test_a_deployment_is_waited_for_and_its_refusals_are_named(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = tmp_path / "news"
    folder.mkdir()
    (folder / "deploy.toml").write_text("")
    follower = Follower(folder)
    state = follower.look()
    assert (state.state, state.trials) == ("waiting", ())
    out = make_run("news/run", done=3, methods=("fedavg",))
    path = out / "partitions/seed-0.json"
    names = [f"site-{k}" for k in range(6)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"names": names}))
    log = out / "methods/fedavg/seed-0/refused.jsonl"
    lines = [
        {"round": 2, "client": 1, "reason": "no node serves it"},
        {"round": 2, "client": 1, "reason": "no node serves it"},  # again, after a kill
        {"round": 3, "client": 4, "reason": "\x1b[31mbad"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    log.write_text(text[:-10])
    trial = follower.look().trials[0]
    assert (trial.refused, trial.lately[-1]) == (
        1,
        "round 2 without client site-1: no node serves it",
    )
    log.write_text(text)
    state = follower.look()
    assert state.trials[0].refused == 2
    assert state.trials[0].lately[-1] == "round 3 without client site-4: ?[31mbad"
    assert state.state == "interrupted"
    assert not follower.is_last(state)  # the server may start again


def test_a_damaged_file_is_told_once_it_stays_so(make_run: MakeRun) -> None:
    out = make_run(done=3)
    follower = Follower(out)
    follower.look()
    (out / "methods/fedavg/seed-0/commit.json").write_text("{")
    assert follower.look().state == "waiting"
    with pytest.raises(InputError, match=r"commit\.json is not valid JSON"):
        follower.look()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no experiment\.json"):
        Follower(tmp_path)
    with locked(tmp_path):  # a run that has just begun
        state = Follower(tmp_path).look()
    assert (state.state, state.note) == ("waiting", "has not begun: nothing is written yet")
