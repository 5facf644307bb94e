from typing import Any

import pytest

from fedtailor.objectives import OBJECTIVES
from fedtailor.runs import builtin
from fedtailor.runs.experiment import load, parse
from fedtailor.runs.unused import unused

SGD, ADAM = ({"name": name, "lr": 0.1} for name in ("sgd", "adam"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"split": {"scheme": "iid", "clients": 3, "alpha": 0.1}}, "split.alpha = 0.1"),
        ({"split": {"scheme": "shards", "clients": 3, "clusters": 2}}, "split.clusters = 2"),
        (
            {"split": {"scheme": "shards", "clients": 3, "cluster_sizes": [1, 2]}},
            "split.cluster_sizes = [1, 2] has",
        ),
        ({"data": {"path": "a.csv", "client": "ward"}}, "data.client = 'ward' does not say who"),
        ({"schedule": {"final": 0.1}}, "schedule.final = 0.1"),
        ({"schedule": {"name": "linear", "warmup_rounds": 2}}, "schedule.warmup_rounds = 2"),
        ({"engine": {"executor": "sequential", "processes": 2}}, "engine.processes = 2"),
        ({"engine": {"executor": "processes", "clients_per_step": 2}}, "engine.clients_per_step"),
        ({"local": {"steps": 2, "epochs": 3}}, "local.epochs = 3"),
        ({"cohort": {"size": 2, "fraction": 0.5}}, "cohort.fraction = 0.5"),
        ({"model": {"chat_template": "chatml"}}, "model.chat_template = 'chatml'"),
        ({"methods": {"fedavg": {"rank": 2}}}, "methods.fedavg.rank = 2"),
        ({"methods": {"fedavg": {"optimiser": {**SGD, "eps": 0.1}}}}, "optimiser.eps = 0.1"),
        ({"methods": {"ditto": {"optimiser": {**ADAM, "momentum": 0.1}}}}, "optimiser.momentum"),
    ],
)
def test_a_setting_that_another_leaves_out_is_said(settings: dict[str, Any], said: str) -> None:
    experiment = parse({"rounds": 2, "methods": {"local": {}}, **settings})
    (line,) = unused(experiment, list(experiment.methods), OBJECTIVES["classification"])
    assert said in line


def test_what_a_method_has_by_default_is_not_said() -> None:
    experiment = parse({"rounds": 2, "methods": {"fedmask": {"optimiser": {"name": "sgd"}}}})
    assert experiment.methods["fedmask"].optimiser.eps == 1e-5  # type: ignore[attr-defined]
    assert unused(experiment, ["fedmask"], OBJECTIVES["classification"]) == []


def test_no_built_in_experiment_has_one() -> None:
    for path in builtin.experiments().values():
        experiment = load(path)
        task = OBJECTIVES[experiment.data.task or "classification"]
        assert unused(experiment, list(experiment.methods), task) == []
