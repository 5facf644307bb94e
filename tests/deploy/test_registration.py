"""Which keys a real server lets in: they are registered, and removed for good."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedtailor.deploy.certificates import make
from fedtailor.deploy.folder import open_folder
from fedtailor.store.files import read_json
from tests.deploy.live import PICTURES, live

pytestmark = pytest.mark.long


def test_keys_are_removed_for_good_and_an_interrupted_registration_ends(tmp_path: Path) -> None:
    with live(tmp_path, PICTURES, ["a", "b"]) as made:
        config, whole = made.folder / "deploy.toml", (made.folder / "deploy.toml").read_text()
        experiment = made.folder / "experiment.toml"
        make(open_folder(made.folder))

        def served(text: str, clients: int) -> dict[str, Any]:
            config.write_text(text)
            changed = re.sub("clients = .*", f"clients = {clients}", experiment.read_text())
            experiment.write_text(changed)
            server = made.deploy("server")
            server.wait_for("ready at")
            server.process.terminate()
            server.process.wait(60)
            return read_json(registered)

        registered = made.folder / "server/registered.json"
        first = served(whole, 2)
        registered.unlink()  # as a kill before it was written leaves it
        assert served(whole, 2) == first
        without = whole.partition('\n[[sites]]\nname = "b"')[0]
        assert served(without, 1) == {"a": first["a"]}
        with pytest.raises(
            AssertionError, match="the key of site b was removed from the server, for good"
        ):
            served(whole, 2)
        for path in (made.folder / "keys").glob("b*"):
            path.unlink()
        make(open_folder(made.folder))
        last = served(whole, 2)
        assert last["a"] == first["a"]
        assert last["b"] != first["b"]
