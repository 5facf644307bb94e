"""Class weights: each of a client's classes counts as much as another in its training loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

import fedtailor as ft
from fedtailor.flower import serve
from fedtailor.store.files import load_tensors
from tests.flower.grid import experiment, grid
from tests.flower.test_parity import QUICK
from tests.objectives.test_regression import backbone, numbers
from tests.small import digits, digits_backbone, digits_federation, same_bits

BALANCED = {"batch_size": 8, "class_weights": "balanced"}


def test_each_client_has_the_weights_of_its_own_training_rows() -> None:
    federation = digits_federation()
    for client in range(federation.num_clients):
        labels = federation.dataset.targets(federation.rows(client, "train"))
        own = np.unique(labels)
        weights = federation.class_weights(client).numpy()
        expected = compute_class_weight("balanced", classes=own, y=labels)
        np.testing.assert_allclose(weights[own], expected, rtol=1e-6)
        assert not np.delete(weights, own).any()


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ifca", "fedem")]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fedsdg", *_SLOW])
def test_an_executor_and_a_federation_give_the_numbers_of_one_process(
    label: str, tmp_path: Path
) -> None:
    chosen = experiment(label, {}, rounds=2, local=BALANCED)
    name = f"methods/{label}/seed-0/server.safetensors"
    near = ft.run(chosen, tmp_path / "near", data=digits(), backbone=digits_backbone()).path
    far = serve(
        grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far",
        backbone=digits_backbone(), timeouts=QUICK,
    )  # fmt: skip
    assert same_bits(load_tensors(near / name), load_tensors(far / name))
    plain = replace(chosen, local=ft.LocalConfig(batch_size=8))
    plain = replace(plain, engine=ft.EngineConfig("vectorised", clients_per_step=3))
    stacked = replace(plain, local=chosen.local)
    others = [
        ft.run(one, tmp_path / str(at), data=digits(), backbone=digits_backbone()).path
        for at, one in enumerate((stacked, plain))
    ]
    losses = [
        [json.loads(line)["train_loss"] for line in history.read_text().splitlines()]
        for history in (out / f"methods/{label}/seed-0/history.jsonl" for out in (near, *others))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] != pytest.approx(losses[0], rel=2e-3)


def test_rows_without_a_class_have_no_class_weights(tmp_path: Path) -> None:
    chosen = experiment("fedavg", {}, local=BALANCED, split={"clients": 3})
    with pytest.raises(ft.InputError, match="class_weights = 'balanced' needs one class a row"):
        ft.run(chosen, tmp_path / "run", data=numbers(), backbone=backbone())
