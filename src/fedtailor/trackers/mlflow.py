"""MLflow: a run for each method and seed, in the store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from .follow import Tracker
from .trial import TrackedTrial, Values

ERRORS = (MlflowException,)

_KEY = "fedtailor.key"  # the tag by which a run is found again
_ROUND = "round"  # the metric that says which rounds are there
_LONGEST = 500  # characters of a parameter's value


class MLflow(Tracker):
    """A tracker. One batch holds all values of a round, so a round is there or it is not."""

    def __init__(self, run: Path, project: str | None) -> None:
        self._client = MlflowClient()
        self._project = project
        self._run, self._key = "", ""

    def begin(self, trial: TrackedTrial) -> int:
        client, name = self._client, self._project or str(trial.experiment["name"])
        self._key = trial.key
        experiment = client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else client.create_experiment(name)
        found = client.search_runs([where], f"tags.`{_KEY}` = '{trial.key}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            rounds = client.get_metric_history(self._run, _ROUND)
            return max((point.step for point in rounds), default=0)
        tags = {_KEY: trial.key, "method": trial.label, "seed": str(trial.seed)}
        self._run = client.create_run(where, run_name=trial.name, tags=tags).info.run_id
        config = trial.config().items()
        client.log_batch(self._run, params=[Param(n, str(v)[:_LONGEST]) for n, v in config])
        return 0

    def log(self, number: int, values: Values) -> None:
        now = int(1000 * time.time())
        points = {**values, _ROUND: float(number)}.items()
        metrics = [Metric(name, value, now, number) for name, value in points]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        if result is not None:
            now, number = int(1000 * time.time()), trial.commit.round
            metrics = [
                Metric(name, value, now, number)
                for name, value in result.items()
                if not isinstance(value, str)
            ]
            tags = [RunTag(name, v) for name, v in result.items() if isinstance(v, str)]
            self._client.log_batch(self._run, metrics=metrics, tags=tags)
        if trial.was_rolled_back(self._key):  # and goes on as another run
            self._client.set_terminated(self._run, "KILLED")
        elif trial.has_ended:
            status = "FAILED" if trial.commit.diverged else "FINISHED"
            self._client.set_terminated(self._run, status)
