import dataclasses

import pytest
import torch
from torch import nn

from fedtailor import random
from fedtailor.objectives import OBJECTIVES
from fedtailor.objectives.objective import REFERENCE, Objective
from fedtailor.optim import ClientContext, Optimiser, train
from fedtailor.params import Batch, Params
from fedtailor.task.backbone import Backbone
from fedtailor.task.step import StepModule
from fedtailor.task.surgery import replace
from fedtailor.task.task import Task
from tests.small import digits_backbone

BATCH: Batch = {"pixel_values": torch.rand(6, 1, 8, 8), "labels": torch.arange(6)}


class Counter(StepModule):
    """Passes its input on and counts training steps."""

    state_buffers = ("steps",)
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step.training:
            self.record("steps", self.steps + 1)
        return x


def counting(backbone: Backbone) -> nn.Module:
    replace(backbone.model, "dropout", Counter())
    return backbone.model


def test_a_model_is_in_memory_once() -> None:
    backbone = digits_backbone()
    task = Task(backbone)
    for name, parameter in backbone.model.named_parameters():
        assert task.state[name].data_ptr() == parameter.data_ptr()


def test_state_buffers_travel_with_the_state_and_are_not_trained() -> None:
    task = Task(digits_backbone(), counting)
    assert "dropout.steps" in task.buffers
    assert "dropout.steps" not in task.trained
    trained, _ = train(task, task.state, [BATCH] * 3, ClientContext(random.key(0)), Optimiser())
    assert trained["dropout.steps"] == 3
    assert task.state["dropout.steps"] == 0
    empty = {**BATCH, "weight": torch.zeros(6)}
    same, _ = train(task, trained, [empty], ClientContext(random.key(0)), Optimiser())
    assert same["dropout.steps"] == 3


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_modules_share_stay_shared(tied: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if tied:
        model[1].weight = model[0].weight
    task = Task(Backbone(model, prepare=lambda batch: {"input": batch["x"]}))
    assert list(task.state) == ["0.weight", "1.weight"][: 2 - tied]
    batch, W = {"x": torch.rand(2, 3)}, torch.rand(3, 3)
    second = W if tied else model[1].weight
    expected = batch["x"] @ W.T @ second.T
    torch.testing.assert_close(task.logits({**task.state, "0.weight": W}, batch), expected)


@pytest.mark.parametrize("objective", OBJECTIVES.values())
def test_what_is_no_number_hits_nothing(objective: Objective) -> None:
    """Though argmax takes the first of logits that are not numbers for the largest."""
    task = Task(dataclasses.replace(digits_backbone(), objective=objective))
    tokens = (objective.sequences, 3) if objective.compares else (3,)
    logits = torch.zeros(2, *tokens, objective.num_outputs(4) or 4)
    logits[0] = torch.nan
    targets = objective.blank_targets(2, 3, 4)
    labels = {
        "labels": torch.zeros(2) if targets is None else torch.from_numpy(targets),
        "input_ids": torch.zeros(2, *tokens, dtype=torch.int64),
        "attention_mask": torch.ones(2, *tokens),
        REFERENCE: torch.tensor([[0.0, 0.0], [9.0, 0.0]]),  # the second row's choice is clear
    }
    scores = task.score(logits if objective.per_token else logits[:, 0], labels)
    hits = int(scores.count[1]) if objective.has_hits else 0
    assert scores.correct.tolist() == [0, hits]
    assert scores.loss.isnan().tolist() == [True, False]


def test_the_loss_is_the_mean_of_a_steps_scores_and_needs_no_labels_for_logits() -> None:
    task = Task(digits_backbone())
    weighted = {**BATCH, "weight": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    for batch in (BATCH, weighted):
        unlabelled = {name: value for name, value in batch.items() if name != "labels"}
        logits, buffers = task.step_logits(task.state, unlabelled, random.key(0))
        loss, same = task.loss(task.state, batch, random.key(0))
        assert buffers.keys() == same.keys() == task.buffers
        assert all(buffers[name].equal(same[name]) for name in same)
        scores = task.score(logits, batch)
        real = 6 if "weight" not in batch else 4
        torch.testing.assert_close(loss, scores.loss[:real].mean())
        assert loss.equal(scores.mean(batch.get("weight")))
        assert not logits.equal(task.logits(task.state, batch))
        assert not logits.equal(task.step_logits(task.state, unlabelled, random.key(1))[0])


def test_a_forward_pass_uses_what_through_gives() -> None:
    task = Task(digits_backbone(dropout=0.0))

    def without_head(state: Params, batch: Batch) -> Params:
        assert batch["labels"] is BATCH["labels"]
        return {**state, "head.weight": torch.zeros_like(state["head.weight"])}

    logits = task.logits(task.state, BATCH, reparametrise=without_head)
    torch.testing.assert_close(logits, task.state["head.bias"].expand(6, 10))
    loss, _ = task.loss(task.state, BATCH, random.key(0), reparametrise=without_head)
    plain, _ = task.loss(without_head(task.state, BATCH), BATCH, random.key(0))
    assert loss == plain


def test_the_model_at_its_start_is_at_hand_in_a_training_step() -> None:
    task = Task(digits_backbone(dropout=0.5))
    start = task.logits(task.state, BATCH)
    moved = {n: v + 0.1 if n in task.trained else v for n, v in task.state.items()}
    seen = []

    def look(state: Params, batch: Batch) -> Params:
        seen.append(task.pretrained_logits(batch))
        return state

    loss, buffers = task.loss(moved, BATCH, random.key(0), reparametrise=look)
    assert seen[0].equal(start)  # neither dropout nor the batch's statistics
    plain, plain_buffers = task.loss(moved, BATCH, random.key(0))
    assert loss == plain  # the step goes on as if nothing had been in between
    assert buffers.keys() == plain_buffers.keys() == task.buffers


def test_a_submodule_runs_with_the_states_tensors() -> None:
    task = Task(digits_backbone())
    x = torch.rand(3, 16)
    state = {"head.weight": torch.ones(10, 16), "head.bias": torch.zeros(10)}
    torch.testing.assert_close(task.module("head", state, x), x.sum(1, keepdim=True).expand(3, 10))


def test_what_is_cached_does_not_reach_the_model() -> None:
    task = Task(digits_backbone())
    cached = {**BATCH, "cached.features": torch.zeros(6, 3)}
    assert task.inputs(cached).keys() == {"pixel_values"}
    assert task.logits(task.state, cached).equal(task.logits(task.state, BATCH))


def test_what_a_method_adds_to_the_state_does_not_reach_the_model() -> None:
    task = Task(digits_backbone())
    more = {**task.state, "training": torch.ones(()), "budget.rank": torch.tensor(3)}
    assert task.logits(more, BATCH).equal(task.logits(task.state, BATCH))
    trained, _ = train(task, more, [BATCH], ClientContext(random.key(0)), Optimiser())
    assert trained.keys() == more.keys()
    assert trained["budget.rank"] == 3
