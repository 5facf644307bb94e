"""A federation of three real sites, one of which is hostile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.deploy.live import PICTURES, Live, live
from tests.flower.hostile import FLOOD, HOSTILE
from tests.small import same_bits

pytestmark = pytest.mark.long
HONEST = ["fedtailor", "fedtailor"]


def text(rounds: int) -> str:
    return PICTURES.replace("40", str(rounds)).replace("lg-fedavg", "fedper")


def run(made: Live, programs: list[str]) -> None:
    made.server("--insecure")
    for number, (site, program) in enumerate(zip("abc", programs, strict=False)):
        more = f"--data digits --insecure --set limit=16 --set skip={16 * number}".split()
        made.deploy("client", "--site", site, *more, program=program)
    done = made.deploy("run")
    assert done.code(3600.0) == 0, done.told[-3000:]  # more than 40 rounds on a busy machine


def against(program: str, rounds: int, tmp_path: Path) -> list[dict[str, Any]]:
    """What was refused where the third site runs this ``program``; the other two must end as if
    they were alone."""
    for name, programs in (("ours", [*HONEST, program]), ("alone", HONEST)):
        (tmp_path / name).mkdir()
        with live(tmp_path / name, text(rounds), ["a", "b", "c"][: len(programs)]) as made:
            run(made, programs)
            if name == "ours":
                refused, history = (made.lines(log, "fedper") for log in ("refused", "history"))
    assert [line["cohort"] for line in history] == [[0, 1]] * rounds
    for name in ("server", "client-0/model", "client-1/model"):
        found = [list((tmp_path / at).rglob(f"{name}.safetensors")) for at in ("ours", "alone")]
        (one,), (other,) = found
        assert same_bits(load_file(one), load_file(other)), name
    return refused


def test_the_honest_sites_end_with_the_bytes_that_they_have_alone(tmp_path: Path) -> None:
    """More than 40 hostile answers, one in each round: each is refused and named."""
    lines = against("tests.deploy.hostile_site", len(HOSTILE), tmp_path)
    refused = {line["round"]: line for line in lines}
    for number, (_, reason) in enumerate(HOSTILE, start=1):
        assert refused[number]["client"] == 2
        words = "parts; at most 4100 are stored" if reason == FLOOD else reason
        assert words in refused[number]["reason"]
    shutil.rmtree(tmp_path)


def test_a_site_that_floods_the_superlink_is_named_and_holds_up_nobody(tmp_path: Path) -> None:
    """50,000 records in each answer: stored, they would lock Flower's database for a minute."""
    refused = against("tests.deploy.flooding_site", 3, tmp_path)
    reason = "its message has 50007 parts; at most 4100 are stored"
    assert refused == [{"round": n, "client": 2, "reason": reason} for n in (1, 2, 3)]
    shutil.rmtree(tmp_path)
