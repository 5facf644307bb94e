"""What a pipe gets to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedtailor.store.run_directory import locked
from fedtailor.watch.follow import Follower
from fedtailor.watch.lines import changes

MakeRun = Callable[..., Path]


def test_a_line_for_each_change(make_run: MakeRun) -> None:
    out = make_run(done=3)
    follower = Follower(out)
    with locked(out):
        first = follower.look()
        assert not list(changes(first, follower.look()))
    log = out / "methods/fedsdg/seed-0/refused.jsonl"
    log.write_text('{"round": 4, "client": 2, "reason": "away"}\n')
    path = out / "methods/fedavg/seed-0/commit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": "the loss is nan"}))
    last = follower.look()
    (out / "report.html").write_text("")
    assert list(changes(None, first))[:2] == [
        f"letters: {out}",
        "fedavg, seed 0: round 3 of 8, training loss 1.500, validation accuracy 58.3 (best 58.3 "
        "after round 2), 2.0 s a round; 6 of 16 rounds, about 20 s left",
    ]
    assert list(changes(first, last)) == [
        "fedavg, seed 0: diverged after round 3 of 8: the loss is nan",
        "fedsdg, seed 0: round 4 without client 2: away",
        "fedsdg, seed 0: interrupted after round 3 of 8",
        "letters is interrupted: no process runs it, and rounds are left; fedsdg, seed 0: after "
        "round 3 of 8; 6 of 11 rounds",
    ]
    assert list(changes(last, follower.look())) == []
    assert list(changes(None, follower.look()))[-1] == f"report: {out / 'report.html'}"
