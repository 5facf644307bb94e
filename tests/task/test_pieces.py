"""The loss of a language model in pieces: that of whole logits, and its derivatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn import functional as F

from fedtailor import random
from fedtailor.models import ModelConfig
from fedtailor.models import load_model as load
from fedtailor.params import Params
from fedtailor.task import pieces
from fedtailor.task.task import Precision, Task
from tests.models.small import CAUSAL, DECODERS, ROTARY, save, texts

WHOLE = {"gemma2"}  # a cap follows the output layer


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_tasks_loss_is_that_of_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: Precision
) -> None:
    monkeypatch.setattr(pieces, "_CELLS", 7 * 60)  # pieces of seven tokens
    folder = save(tmp_path, {**DECODERS, **ROTARY}[name], CAUSAL)
    task = Task(load(ModelConfig(str(folder)), "causal-lm", 0, seed=0), precision=precision)
    key, batches = random.key(0), texts(clients=2)
    del batches["labels"]
    seen: list[torch.Size] = []
    task.model.get_submodule("lm_head").register_forward_hook(lambda *a: seen.append(a[2].shape))

    def whole(state: Params, batch: Any) -> Tensor:
        logits, _ = task.step_logits(state, batch, key)
        return task.score(logits, batch).mean()

    def in_pieces(state: Params, batch: Any) -> Tensor:
        return task.loss(state, batch, key)[0]

    def together(loss: Any) -> tuple[Params, Tensor]:
        found: tuple[Params, Tensor] = vmap(grad_and_value(loss), in_dims=(None, 0))(
            task.state, batches
        )
        return found

    (gradients, losses), (expected, as_expected) = together(in_pieces), together(whole)
    assert seen[0][-1] == 2
    assert (len(seen) == 3) == (name in WHOLE)  # a second pass for the logits
    close = {"atol": 1e-5, "rtol": 1e-5} if precision == "fp32" else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(losses, as_expected, **close)
    for tensor, value in expected.items():
        torch.testing.assert_close(gradients[tensor], value, **close)


@pytest.mark.parametrize("clients", [0, 2])
def test_scores_without_a_key_are_those_of_logits(tmp_path: Path, clients: int) -> None:
    folder = save(tmp_path, DECODERS["gpt2"], CAUSAL)
    task = Task(load(ModelConfig(str(folder)), "causal-lm", 0, seed=0))
    batch = texts(clients=max(clients, 1))
    if clients == 0:
        batch = {name: value[0] for name, value in batch.items()}

    def in_pieces(batch: Any) -> tuple[Tensor, ...]:
        scores, buffers = task.scores(task.state, batch)
        assert buffers == {}
        return scores.loss, scores.correct, scores.count

    def whole(batch: Any) -> tuple[Tensor, ...]:
        scores = task.score(task.logits(task.state, batch), batch)
        return scores.loss, scores.correct, scores.count

    with torch.no_grad():
        found, expected = (vmap(f)(batch) if clients else f(batch) for f in (in_pieces, whole))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_every_input_are_right(monkeypatch: pytest.MonkeyPatch, twice: bool) -> None:
    monkeypatch.setattr(pieces, "_CELLS", 4 * 11)
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 9, 5, generator=drawn)
    weight, bias = torch.randn(11, 5, generator=drawn), torch.randn(11, generator=drawn)
    targets = torch.randint(0, 11, (2, 9), generator=drawn)
    targets[:, -2:] = -100

    def whole(targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias)
        return F.cross_entropy(logits, targets, reduction="none").sin().sum()

    def in_pieces(targets: Tensor, *layer: Tensor) -> Tensor:
        loss: Tensor = pieces._Scored.apply(*layer, targets, True)[0]  # type: ignore[no-untyped-call]
        return loss.sin().sum()

    def derivative(loss: Any) -> Any:
        def first(*inputs: Tensor) -> Tensor:
            return sum((g.cos().sum() for g in grad(loss, (1, 2, 3))(*inputs)), torch.zeros(()))

        outer = grad(first if twice else loss, (1, 2, 3))
        return vmap(outer, in_dims=(0, 0, None, None))(targets, inputs, weight, bias)

    for found, expected in zip(derivative(in_pieces), derivative(whole), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
