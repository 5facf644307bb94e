import dataclasses

import pytest
import torch
from torch import nn

from fedtailor import random
from fedtailor.errors import InputError
from fedtailor.layers.trainable import choose_trainable
from fedtailor.task.batch_norm import FunctionalBatchNorm, use_functional_batch_norm
from fedtailor.task.step import StepContext, bind
from fedtailor.task.task import Task
from tests.small import digits_backbone


@pytest.mark.parametrize("wrong", [{"track_running_stats": False}, {"momentum": None}])
def test_batch_norm_that_padding_would_change_is_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match="must have track_running_stats=True and a momentum"):
        use_functional_batch_norm(nn.Sequential(nn.BatchNorm1d(2, **wrong)), "train")


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_equals_torchs_and_ignores_padding(affine: bool) -> None:
    reference = nn.BatchNorm2d(3, affine=affine)
    if affine:
        nn.init.normal_(reference.weight)
    step = StepContext()
    ours = FunctionalBatchNorm(reference, trained=True)
    assert bind(nn.ModuleDict({"bn": ours}), step) == ["bn.running_mean", "bn.running_var"]
    before = reference.running_mean.clone()
    x = torch.randn(5, 3, 4, 4)
    with step.passing(training=True) as stats:
        y = ours(x)
    assert reference.running_mean.equal(before)
    expected = reference.train()(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(stats["bn.running_mean"], reference.running_mean)
    torch.testing.assert_close(stats["bn.running_var"], reference.running_var)
    ours.running_mean, ours.running_var = before, torch.ones(3)
    padded = torch.cat([x, torch.full((3, 3, 4, 4), 9.0)])
    weight = torch.tensor([1.0] * 5 + [0.0] * 3)
    with step.passing(training=True, weight=weight) as with_padding:
        torch.testing.assert_close(ours(padded)[:5], expected)
    torch.testing.assert_close(with_padding["bn.running_var"], stats["bn.running_var"])


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    task = Task(digits_backbone(), lambda b: choose_trainable(b, "head", 1, 1.0))
    assert task.buffers == frozenset()
    assert sorted(task.state) == ["head.bias", "head.weight"]
    full = Task(digits_backbone())
    assert full.buffers == {"norm.running_mean", "norm.running_var"}


def test_frozen_statistics_are_used_and_kept_in_training() -> None:
    backbone = dataclasses.replace(digits_backbone(dropout=0.0), batch_norm="frozen")
    task = Task(backbone)
    assert task.buffers == frozenset()
    assert {"norm.weight", "norm.bias"} <= task.trained
    batch = {"pixel_values": torch.rand(5, 1, 8, 8), "labels": torch.arange(5)}
    trained, buffers = task.loss(task.state, batch, random.key(0))
    assert not buffers
    scores = task.score(task.logits(task.state, batch), batch)
    torch.testing.assert_close(trained, scores.loss.mean())
