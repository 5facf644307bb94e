"""Training on kept blocks alone against training with whole gradients."""

from functools import partial

import pytest
import torch

from fedtailor.layers.block_sparse.training import train_sparse
from fedtailor.layers.gating import gated_blocks
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.optim import ClientContext, Optimiser, train
from fedtailor.params import Batch, Params
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.pfedgate import pictures, start


def test_training_kept_blocks_is_training_with_whole_gradients() -> None:
    sgd = Optimiser("sgd", lr=0.3, weight_decay=0.1, clip=0.5)
    method = PFedGate(sparsity=0.2, optimiser=sgd, lr_gate=20.0)
    task, state = start(method)
    blocks = gated_blocks(task)
    state = {**state, "touched": torch.zeros(len(blocks.W), dtype=torch.bool)}
    weights = torch.tensor([[1.0, 1, 0, 0], [0.0, 0, 0, 0]])
    padded = [{**pictures(4, seed=7), "weight": weight} for weight in weights]
    batches = [pictures(seed=0), *padded, *(pictures(seed=n) for n in range(1, 6))]
    context = ClientContext(key(3), lr_scale=0.7, lr_slope=0.8)

    def sparse(batches: list[Batch]) -> tuple[Params, torch.Tensor]:
        gating = partial(method._gates, task)
        return train_sparse(task, blocks, state, batches, context, sgd, method.lr_gate, gating)

    got, loss = sparse(batches)
    expected, mean = train(
        task, state, batches, context, sgd,
        lr=lambda name: method.lr_gate if name.startswith("gate.") else sgd.lr,
        loss=partial(method._loss, task),
    )  # fmt: skip
    once, _ = sparse(batches[:1])
    assert got["touched"].sum() > once["touched"].sum()  # batches keep different blocks
    torch.testing.assert_close(loss, mean)
    for name in state:
        torch.testing.assert_close(got[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_without_a_real_batch_nothing_is_trained() -> None:
    method = PFedGate()
    task, state = start(method)
    state["touched"] = torch.zeros(len(gated_blocks(task).W), dtype=torch.bool)
    padding = {**pictures(4), "weight": torch.zeros(4)}
    trained, loss = train_sparse(
        task, gated_blocks(task), state, [padding], ClientContext(key(0)), method.optimiser, 0.1,
        partial(method._gates, task),
    )  # fmt: skip
    assert loss == 0
    assert trained.keys() == state.keys()
    assert all(trained[name].equal(value) for name, value in state.items())


def dropped_by(task: Task, trained: Params) -> list[int]:
    return [n for n, W in enumerate(gated_blocks(task).W) if W and not trained["touched"][n]]


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
        Optimiser("adam", lr=0.01),
        Optimiser("sgd", lr=0.1),
    ],
)
def test_only_kept_blocks_move(optimiser: Optimiser) -> None:
    method = PFedGate(sparsity=0.3, optimiser=optimiser, lr_gate=0.01)
    task, state = start(method)
    trained, _ = method.local(task, state, [pictures()] * 2, ClientContext(key(0)))
    untouched = dropped_by(task, trained)
    assert untouched
    for name, place in (gated_blocks(task).places[number] for number in untouched):
        assert trained[name].flatten()[place].equal(state[name].flatten()[place])
    assert any(not trained[name].equal(state[name]) for name in ("hidden.weight", "conv.weight"))


def test_the_dense_form_lets_dropped_blocks_learn_their_importance() -> None:
    moved = {}
    for form in ("kept", "dense"):
        method = PFedGate(
            sparsity=0.3, straight_through=form,  # type: ignore[arg-type]
            optimiser=Optimiser("sgd", lr=0.2),
        )  # fmt: skip
        task, state = start(method)
        trained, _ = method.local(task, state, [pictures()], ClientContext(key(0)))
        numbers = dropped_by(task, trained)
        change = (trained["gate.post.bias"] - state["gate.post.bias"])[35:]  # of importances
        moved[form] = change[numbers].abs().sum().item()
        moved[form + " weights"] = trained["hidden.weight"]
    assert moved["kept"] == 0
    assert moved["dense"] > 0
    torch.testing.assert_close(moved["kept weights"], moved["dense weights"])
