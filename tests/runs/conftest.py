"""A run that has ended, and one that was killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.engine.rounds import rounds
from fedtailor.runs.extend import bounds_of
from fedtailor.store.trial import TrialStore
from tests.small import digits, digits_backbone

EXPERIMENT = ft.Experiment(
    methods={"fedsdg": ft.FedSDG(rank=2)},
    rounds=2,
    split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
    local=ft.LocalConfig(steps=1),
    engine=ft.EngineConfig("sequential"),
)
FOLDER = Path("methods/fedsdg/seed-0")


def run(out: Path) -> Path:
    return ft.run(EXPERIMENT, out, data=digits(), backbone=digits_backbone()).path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """As it stands after a kill in the second round: the first is committed."""
    out = tmp_path / "unfinished"
    method = ft.FedSDG(rank=2)
    shutil.copytree(finished, out)
    shutil.rmtree(out / FOLDER)
    dataset = digits()
    federation = ft.Federation(dataset, partition(dataset, EXPERIMENT.split, 0))
    task = ft.Task(digits_backbone(), method.adapt)
    folder = TrialStore(out / FOLDER, 2)
    states = folder.open_states(method, task, federation)
    folder.restore(states)
    done = next(iter(rounds(method, task, federation, EXPERIMENT.plan, store=states)))
    folder.commit(done, bounds_of(EXPERIMENT.as_dict()))
    return out
