"""Gating layers: what they see of a batch, and pFedGate's normalisation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.errors import InputError
from fedtailor.layers.block_sparse.blocks import Blocks
from fedtailor.layers.gate_input import GateInput
from fedtailor.layers.gating import (
    GatingLayer,
    Moments,
    SwitchableNorm,
    batch_mean,
    gate_examples,
)
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.optim import ClientContext
from fedtailor.random import key
from fedtailor.task.backbone import Backbone
from fedtailor.task.step import StepContext, bind
from fedtailor.task.task import Task
from tests.golden import linear_backbone
from tests.pfedgate import pictures, set_gates, start

RNG = np.random.default_rng(0)


def test_switchable_normalisation() -> None:
    x, p, q = RNG.normal(size=(4, 3, 6)), [0.2, -1.0, 0.5], [1.0, 0.3, -0.4]
    norm, moments = SwitchableNorm(3), Moments(3)
    bind(nn.ModuleList([moments]), step := StepContext())
    for parameter, values in (
        (norm.mean_weight, p), (norm.var_weight, q),
        (norm.weight, [1.0, 2.0, 3.0]), (norm.bias, [0.1, 0.2, 0.3]),
    ):  # fmt: skip
        parameter.data[1] = torch.tensor(values)  # of the second path
    mixed = [np.exp(w) / np.exp(w).sum() for w in (np.array(p), np.array(q))]
    found = [
        [stat(x, axis=axes, keepdims=True) for axes in (2, (1, 2), (0, 2))]
        for stat in (np.mean, np.var)
    ]
    mean, var = (
        sum(w * m for w, m in zip(ws, ms, strict=True)) for ws, ms in zip(mixed, found, strict=True)
    )
    scale, shift = (np.array(v)[:, None] for v in ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]))
    expected = (x - mean) / np.sqrt(var + 1e-5) * scale + shift
    padded = torch.tensor(np.concatenate([x, np.full((4, 3, 2), 9.0)], 2)).float()
    padded = torch.cat([padded, torch.full((2, 3, 8), -5.0)])
    real = torch.zeros(6, 8)
    real[:4, :6] = 1
    with step.passing(training=True) as new:
        by, plus = norm(*moments(padded, real, real[:, 0]))
    got = padded * by[1, :, :, None] + plus[1, :, :, None]
    np.testing.assert_allclose(got[:4, :, :6].detach(), expected, atol=1e-4)
    np.testing.assert_allclose(new["0.running_mean"], 0.1 * x.mean((0, 2)), atol=1e-5)
    np.testing.assert_allclose(new["0.running_var"], 0.9 + 0.1 * x.var((0, 2)), atol=1e-5)
    x32 = torch.tensor(x).float()
    again = moments(x32, None, torch.ones(4))
    masked = moments(x32, torch.ones(4, 6), torch.ones(4))
    for a, b in zip([*again[0], *again[1]], [*masked[0], *masked[1]], strict=True):
        torch.testing.assert_close(a, b)
    assert again[0][2].equal(moments.running_mean)  # outside training


@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_normalised_inputs_are_multiplied(positions: int, bias: bool) -> None:
    source, blocks = GateInput("pictures", "", 3, positions), Blocks(("a",), ((2, 2, 3, 1),))
    layer = GatingLayer(source, blocks, post_norm=not bias)
    x, scale, shift = (
        torch.tensor(RNG.normal(size=size)).float()
        for size in ((6, 3, positions), (2, 6, 3), (2, 6, 3))
    )
    expected = [
        layer.linear((x * scale[path, :, :, None] + shift[path, :, :, None]).flatten(1))
        for path in (0, 1)
    ]
    found = layer._normalised(x, scale, shift)
    torch.testing.assert_close(found, torch.cat([expected[0][:, :4], expected[1][:, 4:]], 1))


def test_each_part_of_the_gating_layer_can_be_left_out() -> None:
    for option, missing in (("pre_norm", "norm"), ("post_norm", "post")):
        task, _ = start(PFedGate(**{option: False}))  # type: ignore[arg-type]
        names = [name for name in task.trained if name.startswith("gate.")]
        assert names
        assert not any(f".{missing}." in name for name in names)
    wide = torch.full((35,), 9.0)
    for sigmoid, expected in ((True, 2 / (1 + np.exp(-9.0))), (False, 2 * (0.5 + 9.0 / 4))):
        method = PFedGate(sparsity=1.0, sigmoid=sigmoid)
        task, state = start(method)
        set_gates(state, wide)
        shown = method.client_diagnostics(task, state, pictures())["gates"]
        kept = shown[shown != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, expected))


def test_gates_start_at_half_their_largest_value() -> None:
    for gate_max in (1.0, 2.0):
        task, state = start(PFedGate(sparsity=1.0, gate_max=gate_max))
        batch = pictures(40)
        x, real, weight = gate_examples(task, state, batch)
        both, _ = task.module_step("gate", state, batch, x, real, weight)
        M, _ = batch_mean(both, weight)  # by the batch's own statistics
        assert M.mean().item() == pytest.approx(gate_max / 2, abs=0.05)


def test_pictures_are_averaged_to_the_pool() -> None:
    for pool in (2, 8):
        task, state = start(PFedGate(pool=pool))
        assert state["gate.linear.weight"].shape == (70, pool * pool)
        PFedGate(pool=pool).predict(task, state, pictures())


@pytest.mark.slow
def test_gates_by_client_are_the_mean_over_its_training_examples() -> None:
    method = PFedGate(evaluation="client", lr_gate=2.0)
    task, state = start(method)
    batches = [pictures(6, seed=1), {**pictures(4, seed=2), "weight": torch.tensor([1.0, 1, 0, 0])}]
    state, _ = method.local(task, state, batches, ClientContext(key(0)))
    x = torch.cat([batches[0]["pixel_values"], batches[1]["pixel_values"][:2]])
    expected, _ = PFedGate()._inference_gates(
        task, state, {"pixel_values": x, "labels": torch.zeros(8)}
    )
    used, _ = method._inference_gates(task, state, pictures(3))
    torch.testing.assert_close(used, expected)
    assert not method.client_diagnostics(task, state, pictures(3))["gates"].equal(
        PFedGate().client_diagnostics(task, state, pictures(3))["gates"]
    )


def test_one_set_of_gates_a_client() -> None:
    method = PFedGate(adaptation="client", evaluation="client", lr_gate=2.0)
    task, state = start(method)
    padded = {**pictures(4, seed=2), "weight": torch.tensor([1.0, 1, 0, 0])}
    batches = [pictures(6, seed=1), padded]
    trained, _ = method.local(task, state, batches, ClientContext(key(0)))
    x = torch.cat([batches[0]["pixel_values"], padded["pixel_values"][:2]])
    pooled = nn.functional.adaptive_avg_pool2d(x, 28).mean(0).flatten(1)
    torch.testing.assert_close(trained["gate.features"], pooled)
    assert not trained["gate.post.bias"].equal(state["gate.post.bias"])
    shown = [method.client_diagnostics(task, trained, pictures(3, seed=s))["gates"] for s in (4, 5)]
    assert shown[0].equal(shown[1])


def test_models_and_batches_that_cannot_be_gated_are_refused() -> None:
    method = PFedGate()
    with pytest.raises(InputError, match=r"can't tell what .* reads"):
        Task(Backbone(nn.ReLU()), method.adapt)
    model = linear_backbone(np.zeros((2, 3), dtype=np.float32)).model
    model.gate = nn.Linear(1, 1)
    with pytest.raises(InputError, match="has a 'gate' of its own"):
        Task(Backbone(model), method.adapt)
    task, state = start(method)
    with pytest.raises(InputError, match=r"the gating layer reads pictures .* has x \(5, 3\)"):
        method.predict(task, state, {"x": torch.zeros(5, 3)})
    with pytest.raises(InputError, match="with 1 channels and 784 positions"):
        method.predict(task, state, {"pixel_values": torch.zeros(2, 3, 8, 8)})
