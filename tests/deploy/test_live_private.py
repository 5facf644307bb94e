"""Real processes and sockets: TLS, keys, masks and noise together, and a site that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from fedtailor.report.comparison import to_text
from fedtailor.report.table import table
from fedtailor.store.read import read
from tests.deploy.live import PICTURES, live, until

pytestmark = pytest.mark.long

EXPERIMENT = PICTURES.replace("steps = 1", "steps = 300").replace("rounds = 40", "rounds = 4")
EXPERIMENT = EXPERIMENT.replace("methods.lg-fedavg", "methods.fedper").replace(
    "every = 40", "every = 4"
)
PRIVATE = """
    privacy = {noise = 4.0, clip = 0.005, delta = 0.1}
    secure_aggregation = {threshold = 0.7}
"""


def test_a_site_that_is_killed_while_masks_are_on(tmp_path: Path) -> None:
    """The masks that it has agreed on are taken off by the others; the noise is for all four."""
    sites = ["a", "b", "c", "d"]
    with live(tmp_path, EXPERIMENT + PRIVATE, sites) as made:
        text = (made.folder / "deploy.toml").read_text().replace("reply = 3600", "reply = 90")
        (made.folder / "deploy.toml").write_text(text)
        assert made.deploy("certs").code() == 0
        made.server()
        clients = {
            site: made.deploy(
                "client", "--site", site, "--data", "digits", "--set", "limit=16",
                "--set", f"skip={16 * at}",
            )
            for at, site in enumerate(sites)
        }  # fmt: skip
        run, b = made.deploy("run"), clients["b"]
        until("round 1", lambda: made.round("fedper") == 1 or run.process.poll() is not None)

        def is_masked() -> bool:
            """Whether b has the secrets of round 2, and trains."""
            (kept,) = made.folder.rglob("masks-1.json")
            content = json.loads(json.loads(kept.read_text())["kept"])
            return bool(content["held"]) and len(content["held"]["shares"]) == 4

        until("b is masked", is_masked)
        worked = b.cpu_seconds()
        until("b trains", lambda: b.cpu_seconds() > worked + 1)
        os.kill(b.child("supernode"), signal.SIGKILL)
        assert run.code() == 0, run.told
        history = made.lines("history", "fedper")
        assert [0, 2, 3] in [line["cohort"] for line in history]
        assert [line["accountant"] for line in history] == ["exact Gaussian"] * 4
        said = f"epsilon {history[-1]['epsilon']:.4g} at delta 0.1 after 4 rounds"
        assert said in run.told
        assert all(said in one.told for one in clients.values())
        (secret,) = made.folder.rglob("secret.json")
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        shown = " ".join(to_text(table([read(made.folder / "run")])).split())
        assert f"epsilon {history[-1]['epsilon']:.4g} at delta 0.1 after round 4" in shown
    shutil.rmtree(tmp_path)
