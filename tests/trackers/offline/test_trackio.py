"""Trackio's local database holds the run's numbers, each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.trackers.follow import track
from fedtailor.trackers.trial import trials
from tests.trackers.conftest import points_of

Grow = Callable[[int], Path]


def test_the_database_holds_every_point_once(grow: Grow, tmp_path: Path) -> None:
    run = grow(4)
    assert (track(run, "trackio", "mine"), track(run, "trackio", "mine")) == (8, 0)
    assert (track(grow(8), "trackio", "mine"), track(run, "trackio", "mine")) == (8, 0)
    import trackio

    part = trials(run)[1]
    points, name = points_of(part), f"{part.name}-{part.key}"
    (found,) = (one for one in trackio.Api().runs("mine") if one.name == name)
    assert found.config is not None
    assert found.config["split.clients"] == 6
    values = trackio.SQLiteStorage.get_logs("mine", name)
    for tag in {tag for values in points.values() for tag in values}:
        got = [(line["step"], line[tag]) for line in values if tag in line]
        assert got == [(number, of[tag]) for number, of in points.items() if tag in of]
    final = [line for line in values if "reported/state" in line]
    assert len(final) == 1
    assert {tag: final[0][tag] for tag in part.result()} == part.result()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackio reads its folder once, when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
