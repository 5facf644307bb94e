"""Real processes and sockets: a new site joins a deployment that has ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedtailor.deploy.certificates import make
from fedtailor.deploy.folder import open_folder
from tests.deploy.live import PICTURES, live

pytestmark = pytest.mark.long


def test_a_new_site_joins_without_the_others(tmp_path: Path) -> None:
    text = PICTURES.replace("40", "2").replace("global_model = false", "novel_passes = 2")
    with live(tmp_path, text, ["a", "b"]) as made:
        make(open_folder(made.folder))
        made.server()
        rest = ("--data", "digits", "--set", "limit=16")
        sites = [
            made.deploy("client", "--site", name, *rest, "--set", f"skip={16 * number}")
            for number, name in enumerate("ab")
        ]
        assert made.deploy("run").code() == 0
        for site in sites:
            site.process.terminate()
            site.code()
        finished = (made.folder / "run/methods/lg-fedavg/seed-0/server.safetensors").read_bytes()

        added = made.deploy("add-site", "--name", "lagos")
        assert added.code() == 0
        assert "site lagos: clients 2" in added.told
        assert "site lagos is let in\n" in added.told
        place = tmp_path / "lagos"  # it gets what the command names, and nothing else
        for name in ("deploy.toml", "experiment.toml", "certs/ca.crt", "keys/lagos"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made.folder / name, place / name)
        lagos = made.deploy(
            "client", "--site", "lagos", *rest, "--set", "skip=32", folder=place
        )  # fmt: skip
        run = made.deploy("run")
        assert run.code() == 0, run.told[-2000:]
        assert "client 2 has joined; it keeps" in run.told
        lagos.wait_for(
            "client-2 (client 2) joins lg-fedavg, seed 0: 12 train, 1 validation, 3 test"
        )
        assert made.lines("history", "lg-fedavg")[-1]["cohort"] == [0, 1]
        server = made.folder / "run/methods/lg-fedavg/seed-0/server.safetensors"
        assert server.read_bytes() == finished
        (model,) = place.rglob("client-2/model.safetensors")
        assert load_file(model)
        assert json.loads((model.parent / "result.json").read_text())["passes"] == 2
        given = ("--site", "lagos", "--out", str(tmp_path / "model"))
        export = made.deploy("export", *given, folder=place)
        assert export.code() == 0, export.told[-2000:]
        assert (tmp_path / "model/use.py").is_file()
        again = made.deploy("add-site", "--name", "lagos")
        assert again.code() == 2
        assert "site lagos is there already; choose another name" in again.told
