"""What every method must do after a run: predict as it was evaluated, let a new client join, and
give a model that predicts the same where nothing imports fedtailor."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.table import Dataset, Images
from fedtailor.export.folder import export_model
from fedtailor.inference.model import PersonalModel, load_model
from fedtailor.inference.onboard import onboard
from fedtailor.methods import METHODS
from fedtailor.runs.experiment import parse
from fedtailor.runs.run import run
from tests.export.apart import logits_of
from tests.inference.conftest import NEW

pytestmark = pytest.mark.slow
CLIENT = 1
CONTENT = {
    "name": "all",
    "rounds": 2,
    "data": {"name": "digits", "limit": 150, "limit_test": 30},
    "public": {"name": "digits", "skip": 150, "limit": 20},
    "split": {"clients": 3, "min_examples": 5},
    "model": {"factory": f"{Path(__file__).parent / 'export/net.py'}:net", "targets": ["hidden"]},
    "local": {"batch_size": 16, "steps": 1},
    "engine": {"executor": "sequential"},
    "evaluate": {"batch_size": 5},
}
FIELDS = {"fedhft": {"clusters": 2, "warmup_rounds": 1}}


class Exported(NamedTuple):
    """A client's model and ``[b, classes]``: its logits, those of its export without fedtailor, and
    those of the base model."""

    model: PersonalModel
    ours: Tensor
    apart: Tensor
    base: Tensor


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    methods = {name: {"optimiser": {"lr": 0.1}, **FIELDS.get(name, {})} for name in METHODS}
    return run(parse({**CONTENT, "methods": methods}), tmp_path_factory.mktemp("runs") / "all")


@pytest.fixture(scope="module")
def exports(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Of the client's model, by method."""
    out = tmp_path_factory.mktemp("exports")
    models = {name: load_model(finished, name, CLIENT) for name in METHODS}
    batch = next(iter(models.values())).trained.federation.dataset.batch(np.arange(7))
    folders = {name: export_model(finished, name, out / name, client=CLIENT) for name in METHODS}
    apart = logits_of(dict.fromkeys(folders.values(), batch), out)
    exported = {}
    for name, model in models.items():
        with torch.no_grad():
            base = model.trained.task.original.model.eval()(batch["pixel_values"])
        exported[name] = Exported(model, model.logits(batch), apart[folders[name]], base)
    return exported


@pytest.mark.parametrize("name", METHODS)
def test_a_model_predicts_is_exported_and_a_new_client_joins(
    name: str, finished: Path, exports: dict[str, Exported], tmp_path: Path
) -> None:
    exported = exports[name]
    assert_predicts_as_evaluated(exported.model)
    torch.testing.assert_close(exported.apart, exported.ours, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(exported.ours, exported.base, atol=1e-4)
    assert_a_new_client_joins(name, finished, tmp_path / "run")


def assert_predicts_as_evaluated(model: PersonalModel) -> None:
    trained = model.trained
    data: Dataset = trained.federation.dataset
    rows = trained.federation.rows(CLIENT, "test")
    log = (trained.folder / "clients.jsonl").read_text().splitlines()
    (line,) = (
        line for line in map(json.loads, log)
        if (line["model"], line["split"], line["round"]) == ("personal", "test", trained.round)
    )  # fmt: skip
    assert data.labels is not None
    labels = [data.classes[label] for label in data.labels[rows]]
    assert isinstance(data.inputs, Images)
    inputs = np.array(data.inputs.values[rows])
    predictions = model.predict(inputs)
    hits = [p.label == label for p, label in zip(predictions, labels, strict=True)]
    assert np.mean(hits) == pytest.approx(line["accuracy"][CLIENT], abs=1e-9)
    right = [p.probabilities[label] for p, label in zip(predictions, labels, strict=True)]
    assert -np.log(right).mean() == pytest.approx(line["loss"][CLIENT], abs=1e-4)
    batch = Images(inputs).batch(np.arange(len(rows)))
    with torch.no_grad():
        assert model.module(batch).equal(model.logits(batch))


def assert_a_new_client_joins(name: str, finished: Path, out: Path) -> None:
    """The federation's files stay as they are."""
    others = shutil.ignore_patterns(*(label for label in METHODS if label != name))
    shutil.copytree(finished, out, ignore=others)
    before = digests(out)
    result = onboard(out, name, NEW, "lagos")
    assert digests(out) == before
    assert result.number == 3
    validation = {model: scores["validation"] for model, scores in result.scores.items()}
    best = max(s["accuracy"] or 0.0 for model, s in validation.items() if model != "majority")
    assert validation[result.kept]["accuracy"] == best

    model = load_model(out, name, "lagos")
    assert model.trained.onboarded("lagos") == model.trained.folder / "onboarded" / "lagos"
    predictions = model.predict(replace(NEW, digest="again"))
    assert len(predictions) == len(NEW.inputs)
    assert all(np.isfinite(p.probability) for p in predictions)
    batch = NEW.batch(np.arange(5))
    loss = F.cross_entropy(model.logits({"pixel_values": batch["pixel_values"]}), batch["labels"])
    assert loss.isfinite()


def digests(folder: Path) -> dict[str, str]:
    """Of every file but those of clients that have joined."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "onboarded" not in path.parts
    }
