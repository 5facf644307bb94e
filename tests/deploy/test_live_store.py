"""Flower's store fails, or too few sites answer: what is said, and that the run goes on.

A small file system of its own needs the rights to mount one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.deploy.live import PICTURES, Command, Live, live, until
from tests.small import same_bits

pytestmark = pytest.mark.long
TEXT = PICTURES.replace("40", "3").replace("lg-fedavg", "fedper")
FLOODING = "tests.deploy.flooding_site"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size at ``folder``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def site(made: Live, name: str, program: str = "fedtailor") -> Command:
    skip = 16 * "abc".index(name)
    more = f"--data digits --insecure --set limit=16 --set skip={skip}".split()
    return made.deploy("client", "--site", name, *more, program=program)


def whole(tmp_path: Path, sites: str) -> Path:
    """The run of these sites that nothing disturbs."""
    folder = tmp_path / "whole"
    folder.mkdir()
    with live(folder, TEXT, list(sites)) as made:
        made.server("--insecure")
        for name in sites:
            site(made, name)
        run = made.deploy("run")
        assert run.code() == 0, run.told[-3000:]
    return folder


def same_models(one: Path, other: Path, clients: int) -> None:
    for name in ("server", *(f"client-{client}/model" for client in range(clients))):
        found = [list(folder.rglob(f"{name}.safetensors")) for folder in (one, other)]
        (first,), (second,) = found
        assert same_bits(load_file(first), load_file(second)), name


def test_a_full_disk_is_named_and_waited_for(tmp_path: Path) -> None:
    """It is full before the first message; with room the run goes on, at the latest by the same
    command: Flower ends a run of which it heard nothing for a minute."""
    with live(tmp_path, TEXT, ["a", "b"]) as made, small_disk(made.folder / "server", "128m"):
        server = made.server("--insecure")
        for name in "ab":
            site(made, name)
        ballast, disk = made.folder / "server/ballast", os.statvfs(made.folder / "server")
        ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 3_000_000))
        run = made.deploy("run")
        full = 'HTTP 503 Service Unavailable {"detail":"Flower\'s store: database or disk is full'
        until("the server waits", lambda: full in run.told)
        assert "fedtailor: Flower's store fails, and who asks is told to ask again" in server.told
        assert run.process.poll() is None
        ballast.unlink()
        if run.code() != 0:
            assert "the same command goes on" in run.told
            run = made.deploy("run")
            assert run.code() == 0, run.told[-3000:]
        assert "Traceback" not in server.told + run.told
        assert run.told.count("waiting for") < 20
        made.end()
    same_models(tmp_path / "dir", whole(tmp_path, "ab"), 2)
    shutil.rmtree(tmp_path)


def test_a_superlink_killed_in_a_round_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The sites' programs stay, and find it again."""
    with live(tmp_path, TEXT, ["a", "b"]) as made:
        server = made.server("--insecure")
        for name in "ab":
            site(made, name)
        run = made.deploy("run")
        until("round 2", lambda: "round 1 of 3, 2 clients" in run.told)
        os.kill(server.child("superlink"), 9)
        assert (server.code(), run.code()) == (2, 2)
        assert "the same command starts it again" in server.told
        assert made.round("fedper") == 1
        assert "Traceback" not in server.told + run.told
        made.server("--insecure")
        run = made.deploy("run")
        assert run.code() == 0, run.told[-3000:]
        assert "goes on after round 1" in run.told
        assert "Traceback" not in run.told
    same_models(tmp_path / "dir", whole(tmp_path, "ab"), 2)
    shutil.rmtree(tmp_path)


def test_too_few_answers_end_a_run_in_one_line_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    """One of three sites floods, and all three are needed."""
    with live(tmp_path, TEXT, ["a", "b", "c"]) as made:
        path = made.folder / "deploy.toml"
        path.write_text(path.read_text().replace("least = 0.5", "least = 1.0"))
        server = made.server("--insecure")
        site(made, "a")
        site(made, "b")
        flooding = site(made, "c", FLOODING)
        run = made.deploy("run")
        assert run.code() == 2
        last = run.told.splitlines()[-1]
        assert last.startswith("fedtailor: round 1 of fedper: 2 of 3 clients sent a usable update")
        assert "3 are needed; the same command goes on" in last
        assert run.told.count("3 are needed") == 1
        assert "Traceback" not in server.told + run.told
        assert "Exit Code" not in run.told
        flooding.process.terminate()
        flooding.code()
        site(made, "c")
        run = made.deploy("run")
        assert run.code() == 0, run.told[-3000:]
    same_models(tmp_path / "dir", whole(tmp_path, "abc"), 3)
    shutil.rmtree(tmp_path)
