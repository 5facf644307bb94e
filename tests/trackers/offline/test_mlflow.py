"""MLflow's own client finds the run's numbers in a local store, each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from fedtailor.trackers.follow import track
from fedtailor.trackers.trial import trials
from tests.trackers.conftest import points_of

Grow = Callable[[int], Path]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy in MLflow


def test_a_store_holds_every_point_once(
    grow: Grow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'store.db'}")
    run = grow(4)
    assert (track(run, "mlflow", "mine"), track(run, "mlflow", "mine")) == (8, 0)
    assert _found("fedsdg").info.status == "RUNNING"
    assert (track(grow(8), "mlflow", "mine"), track(run, "mlflow", "mine")) == (8, 0)
    client, found, part = MlflowClient(), _found("fedsdg"), trials(run)[1]
    assert found.info.status == "FINISHED"
    assert found.data.params["split.clients"] == "6"
    assert found.data.tags["reported/state"] == "finished"
    points = points_of(part)
    for name in {name for values in points.values() for name in values}:
        history = client.get_metric_history(found.info.run_id, name)
        got = sorted((point.step, point.value) for point in history)
        assert got == [
            (number, values[name]) for number, values in points.items() if name in values
        ]
    for name, value in part.result().items():
        if not isinstance(value, str):
            assert found.data.metrics[name] == value
            assert len(client.get_metric_history(found.info.run_id, name)) == 1


def _found(label: str) -> Run:
    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'mine'")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.method = '{label}'")
    return run
