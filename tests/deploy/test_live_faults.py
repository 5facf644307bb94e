"""Real processes and sockets: sites that fail, large states."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedtailor.deploy.folder import open_folder
from fedtailor.watch.follow import Follower
from tests.deploy.live import PICTURES, Recorder, live, until
from tests.small import same_bits

pytestmark = pytest.mark.long


def test_a_site_that_is_stopped_then_killed(tmp_path: Path) -> None:
    """Past the deadline, then while it trains; and what leaves the sites is recorded."""
    method = "lg-fedavg"
    with live(tmp_path, PICTURES.replace("steps = 1", "steps = 500"), ["a", "b"]) as made:
        port = open_folder(made.folder).port
        recorder = Recorder(port, tmp_path / "record")
        sites = tmp_path / "at-sites"
        shutil.copytree(made.folder, sites)
        text = (sites / "deploy.toml").read_text()
        (sites / "deploy.toml").write_text(text.replace(str(port), str(recorder.port)))
        text = (made.folder / "deploy.toml").read_text().replace("reply = 3600", "reply = 60")
        (made.folder / "deploy.toml").write_text(text)
        made.server("--insecure")
        recorder.start()
        rest = ("--data", "digits", "--set", "limit=16", "--insecure")
        made.deploy("client", "--site", "a", *rest, folder=sites)
        b = made.deploy("client", "--site", "b", *rest, "--set", "skip=16", folder=sites)
        follower = Follower(made.folder)
        assert follower.look().state == "waiting"
        run = made.deploy("run")

        def both_after(number: int) -> bool:
            done = made.round(method)  # a line of history is written before its round is committed
            cohorts = {line["round"]: line["cohort"] for line in made.lines("history", method)}
            return [0, 1] in [cohort for at, cohort in cohorts.items() if number < at <= done]

        until("round 1", lambda: made.round(method) == 1)
        b.process.send_signal(signal.SIGSTOP)
        until("round 2", lambda: made.round(method) == 2)
        watched = follower.look()
        assert watched.state == "running"
        assert watched.trials[0].lately[0].startswith("round 2 without client b: ")
        b.process.send_signal(signal.SIGCONT)
        until("b is in time", lambda: both_after(2))
        last, worked = made.round(method), b.cpu_seconds()
        until("b trains", lambda: b.cpu_seconds() > worked + 1)
        os.kill(b.child("supernode"), signal.SIGKILL)
        b.wait_for("flower-supernode was killed by signal 9; starting it again")
        assert made.round(method) == last
        until("b is back", lambda: both_after(last) or run.process.poll() is not None)
        run.process.terminate()
        assert run.code() == 130
        assert "interrupted; the same command goes on from here" in run.told
        until("the server app ends", lambda: follower.look().state == "interrupted")
        recorder.stop()
        history = {line["round"]: line["cohort"] for line in made.lines("history", method)}
        refused = {line["round"] for line in made.lines("refused", method) if line["client"] == 1}
        assert {number for number, cohort in history.items() if cohort == [0]} == refused
        assert [history[1], history[2], history[last]] == [[0, 1], [0], [0, 1]]
        assert history[last + 1] == [0]
        (kept,) = sites.rglob("client-1")
        rounds = {int(path.stem[6:]) for path in kept.iterdir()}
        assert all(history.get(number, [0, 1]) == [0, 1] for number in rounds)

        left = (tmp_path / "record").read_bytes()
        state = max(made.folder.rglob("round-*.safetensors"))  # the last one, beside the best one
        names = [name.removeprefix("server/") for name in load_file(state)]
        assert len(names) == 2
        assert all(name.encode() in left for name in names)
        for client in range(2):
            for path in sites.rglob(f"client-{client}/*"):
                for name, value in load_file(path).items():
                    assert name.encode() not in left
                    assert value.numpy().tobytes()[:256] not in left
    shutil.rmtree(tmp_path)


def test_private_states_of_300_mb_last(tmp_path: Path) -> None:
    """Three rounds with the wide network, all but whose head stays at the site."""
    text = PICTURES.replace("width = 1.0", "width = 6.0").replace("40", "3")
    text = text.replace('device = "cpu"', 'device = "cpu", cache_mb = 0')
    with live(tmp_path, text, ["a"]) as made:
        made.server("--insecure")
        made.deploy("client", "--site", "a", "--data", "digits", "--set", "limit=16", "--insecure")
        run = made.deploy("run")
        assert run.code() == 0, run.told[-3000:]
        assert [line["cohort"] for line in made.lines("history", "lg-fedavg")] == [[0]] * 3
        assert not made.lines("refused", "lg-fedavg")
        (folder,) = made.folder.rglob("client-0")
        kept = [load_file(folder / f"round-00000{number}.safetensors") for number in (2, 3)]
        for private in kept:
            assert sum(v.numel() * v.element_size() for v in private.values()) > 300e6
        assert not any(kept[0][name].equal(kept[1][name]) for name in kept[0])
        model = load_file(folder / "model.safetensors")
        assert same_bits({name: model[name] for name in kept[1]}, kept[1])
    shutil.rmtree(tmp_path)
