"""One finished run of a few methods on the digits, and a new client's digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data.table import Dataset, Images, Indices
from fedtailor.methods import METHODS
from tests.small import digits, digits_backbone


def some_digits(rows: Indices) -> Dataset:
    """These rows alone."""
    whole = digits()
    assert whole.labels is not None
    return replace(
        whole, inputs=Images(whole.inputs.values[rows]), labels=whole.labels[rows],
        num_train=len(rows), digest=f"digits {rows[0]}",
    )  # fmt: skip


FEDERATION, NEW = some_digits(np.arange(150)), some_digits(np.arange(400, 450))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "all"
    names = ("ditto", "fedavg", "feddpa", "fedala", "pfedgate", "scaffold")
    experiment = ft.Experiment(
        methods={name: METHODS[name]() for name in names},
        rounds=2,
        split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
        local=ft.LocalConfig(batch_size=16, steps=1),
        public=ft.DataConfig(name="digits", limit=20, skip=1700),
        engine=ft.EngineConfig("sequential"),
        evaluate=ft.EvaluateConfig(batch_size=5),
    )
    ft.run(experiment, out, data=FEDERATION, backbone=digits_backbone())
    return out
