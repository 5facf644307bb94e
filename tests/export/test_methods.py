"""Every method's exported model gives the logits of the run's, where nothing imports fedtailor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.export.folder import export_model
from fedtailor.methods import METHODS
from fedtailor.runs.experiment import parse
from fedtailor.runs.run import run
from fedtailor.runs.trained import open_trained
from tests.export.apart import logits_of

CONTENT = {
    "name": "all",
    "rounds": 1,
    "data": {"name": "digits", "limit": 120, "limit_test": 20},
    "public": {"name": "digits", "skip": 120, "limit": 20},
    "split": {"clients": 3, "min_examples": 5},
    "model": {"factory": f"{Path(__file__).parent / 'net.py'}:net", "targets": ["hidden"]},
    "local": {"batch_size": 8, "steps": 2},
    "engine": {"executor": "sequential"},
}
FIELDS = {"fedhft": {"clusters": 2, "warmup_rounds": 0}}


class Logits(NamedTuple):
    """``[b, classes]``: the run's, the export's, and those of the base model."""

    ours: Tensor
    exported: Tensor
    base: Tensor


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Logits]:
    """Of client 1's model, by method."""
    out = tmp_path_factory.mktemp("all")
    methods = {name: {"optimiser": {"lr": 0.1}, **FIELDS.get(name, {})} for name in METHODS}
    finished = run(parse({**CONTENT, "methods": methods}), out / "run")
    batches, ours, base = {}, {}, {}
    for name in METHODS:
        trained = open_trained(finished, name)
        state = trained.client_state(1)
        batch = trained.federation.dataset.batch(np.arange(7))
        folder = export_model(finished, name, out / name, client=1)
        with torch.no_grad():
            ours[name] = trained.method.predict(trained.task, state, batch)
            base[name] = trained.task.original.model.eval()(batch["pixel_values"])
        batches[folder] = batch
    exported = logits_of(batches, out)
    return {name: Logits(ours[name], exported[out / name], base[name]) for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_the_exported_model_has_the_logits_of_the_run(name: str, logits: dict[str, Logits]) -> None:
    ours, exported, base = logits[name]
    torch.testing.assert_close(exported, ours, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, base, atol=1e-3)
