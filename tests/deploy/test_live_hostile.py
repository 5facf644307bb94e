"""A federation of three real sites, one of which is hostile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.deploy.live import PICTURES, Live, live
from tests.flower.hostile import HOSTILE
from tests.small import same_bits

pytestmark = pytest.mark.long
TEXT = PICTURES.replace("40", str(len(HOSTILE))).replace("lg-fedavg", "fedper")


def run(made: Live, programs: list[str]) -> None:
    made.server("--insecure")
    for number, (site, program) in enumerate(zip("abc", programs, strict=False)):
        more = f"--data digits --insecure --set limit=16 --set skip={16 * number}".split()
        made.deploy("client", "--site", site, *more, program=program)
    done = made.deploy("run")
    assert done.code(3600.0) == 0, done.told[-3000:]  # more than 40 rounds on a busy machine


def test_the_honest_sites_end_with_the_bytes_that_they_have_alone(tmp_path: Path) -> None:
    """More than 40 hostile answers, one in each round: each is refused and named."""
    ours, alone = tmp_path / "ours", tmp_path / "alone"
    ours.mkdir()
    alone.mkdir()
    with live(ours, TEXT, ["a", "b", "c"]) as made:
        run(made, ["fedtailor", "fedtailor", "tests.deploy.hostile_site"])
        refused = {line["round"]: line for line in made.lines("refused", "fedper")}
        history = made.lines("history", "fedper")
    with live(alone, TEXT, ["a", "b"]) as made:
        run(made, ["fedtailor", "fedtailor"])
    assert [line["cohort"] for line in history] == [[0, 1]] * len(HOSTILE)
    for number, (_, reason) in enumerate(HOSTILE, start=1):
        assert refused[number]["client"] == 2
        assert reason in refused[number]["reason"]
    for name in ("server", "client-0/model", "client-1/model"):
        (one,), (other,) = (folder.rglob(f"{name}.safetensors") for folder in (ours, alone))
        assert same_bits(load_file(one), load_file(other)), name
    shutil.rmtree(tmp_path)
