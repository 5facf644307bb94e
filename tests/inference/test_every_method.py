"""What every method must do after a run: predict as it was evaluated, and let a new client join."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedtailor.data.table import Images
from fedtailor.inference.model import load_model
from fedtailor.inference.onboard import onboard
from fedtailor.methods import METHODS
from tests.inference.conftest import FEDERATION, NEW
from tests.small import digits_backbone


@pytest.mark.parametrize("name", METHODS)
def test_predictions_are_those_of_the_evaluation(name: str, finished: Path) -> None:
    client = 1
    model = load_model(finished, name, client, data=FEDERATION, backbone=digits_backbone())
    rows = model.trained.federation.rows(client, "test")
    log = (model.trained.folder / "clients.jsonl").read_text().splitlines()
    (line,) = (
        line for line in map(json.loads, log)
        if (line["model"], line["split"], line["round"])
        == ("personal", "test", model.trained.round)
    )  # fmt: skip
    labels = [FEDERATION.classes[label] for label in np.asarray(FEDERATION.labels)[rows]]
    inputs = FEDERATION.inputs.values[rows]
    predictions = model.predict(inputs)
    hits = [p.label == label for p, label in zip(predictions, labels, strict=True)]
    assert np.mean(hits) == pytest.approx(line["accuracy"][client], abs=1e-9)
    right = [p.probabilities[label] for p, label in zip(predictions, labels, strict=True)]
    assert -np.log(right).mean() == pytest.approx(line["loss"][client], abs=1e-4)
    batch = Images(inputs).batch(np.arange(len(rows)))
    with torch.no_grad():
        assert model.module(batch).equal(model.logits(batch))


def digests(run: Path) -> dict[str, str]:
    """Of every file but those of clients that have joined."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file() and "onboarded" not in path.parts
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_new_client_joins_and_the_federation_stays(
    name: str, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    others = shutil.ignore_patterns(*(label for label in METHODS if label != name))
    shutil.copytree(finished, run, ignore=others)
    before = digests(run)
    result = onboard(run, name, NEW, "lagos", backbone=digits_backbone())
    assert digests(run) == before
    assert result.number == 3
    assert result.kept in result.scores
    validation = {model: scores["validation"] for model, scores in result.scores.items()}
    best = max(s["accuracy"] or 0.0 for model, s in validation.items() if model != "majority")
    assert validation[result.kept]["accuracy"] == best

    model = load_model(run, name, "lagos", backbone=digits_backbone())
    assert model.trained.onboarded("lagos") == model.trained.folder / "onboarded" / "lagos"
    predictions = model.predict(replace(NEW, digest="again"))
    assert len(predictions) == len(NEW.inputs)
    assert all(np.isfinite(p.probability) for p in predictions)
    batch = NEW.batch(np.arange(5))
    loss = F.cross_entropy(model.logits({"pixel_values": batch["pixel_values"]}), batch["labels"])
    assert loss.isfinite()
