"""FedDPA by hand: both adapters of two clients in NumPy, and the mixture that each predicts by."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.engine.config import EngineConfig
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.feddpa import FedDPA, representation
from fedtailor.objectives import OBJECTIVES
from fedtailor.objectives.objective import Objective
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import PACKED, Params
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from fedtailor.task.packing import places
from fedtailor.task.task import Task
from tests import kinds
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax_gradient
from tests.small import last_round, same_bits

F64 = NDArray[np.float64]
W0 = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
A_NAME, B_NAME = (f"linear.lora_{f}.default.weight" for f in "AB")
S = 2.0  # alpha / r


def make(**options: object) -> tuple[FedDPA, Task, Params]:
    """A method, its task, and a server that has a global adapter already."""
    chosen = {"rank": 1, "lora_alpha": 2.0, "optimiser": Optimiser("sgd", lr=0.5), **options}
    method = FedDPA(**chosen)  # type: ignore[arg-type]
    task = Task(linear_backbone(W0), method.adapt)
    return method, task, {**task.state, B_NAME: torch.tensor([[0.2], [-0.1]])}


def adapter(state: Params, prefix: str = "") -> tuple[F64, F64]:
    return tuple(state[prefix + name].double().numpy() for name in (A_NAME, B_NAME))  # type: ignore[return-value]


def descend(A: F64, B: F64, client: int, eta: float, batches: int = 3) -> tuple[F64, F64]:
    for _ in range(batches):
        g = softmax_gradient(W0 + S * B @ A, X[client], Y[client])
        A, B = A - eta * S * B.T @ g, B - eta * S * g @ A.T
    return A, B


def unit(x: F64) -> F64:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def mixture(shared: tuple[F64, F64], own: tuple[F64, F64], x: F64, w: F64) -> F64:
    products = [S * B @ A for A, B in (shared, own)]
    return np.stack(
        [(W0 + (1 - w_i) * products[0] + w_i * products[1]) @ x_i for x_i, w_i in zip(x, w)]  # noqa: B905
    )


NEW = np.array([[0.5, 1.5], [2.0, -1.0], [-1.0, -1.0]])


def test_two_rounds_of_form_t() -> None:
    method, task, server = make(lr_private=0.3, lam=0.8)
    private = [method.init_client(task, k, key(k)) for k in (0, 1)]
    start = adapter(server)
    own, expected = [start, start], start  # the local adapters start from the first global one
    for number in (1, 2):
        pairs = [descend(*expected, k, 0.5) for k in (0, 1)]
        expected = tuple(0.25 * a + 0.75 * b for a, b in zip(*pairs, strict=True))  # type: ignore[assignment]
        own = [descend(*own[k], k, 0.3) for k in (0, 1)]
        server, private = one_round(method, task, server, private, number=number)
    assert server.keys() == task.state.keys()
    for got, want in zip(adapter(server), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    for k in (0, 1):
        for got, want in zip(adapter(private[k], "own."), own[k], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
        cosines = unit(NEW) @ unit(X[k]).T  # [new, n_k]
        w = np.clip(0.8 * cosines.mean(1), 0, None)
        assert w.min() == 0 < w.max()
        logits = method.predict(
            task, {**server, **private[k]}, {"x": torch.tensor(NEW, dtype=torch.float32)}
        )
        np.testing.assert_allclose(logits, mixture(expected, own[k], NEW, w), atol=1e-6)


@pytest.mark.parametrize("weighting", ["instance", "fixed"])
def test_form_f_fine_tunes_the_global_adapter(weighting: Literal["instance", "fixed"]) -> None:
    method, task, server = make(form="F", weighting=weighting, local_passes=2, lam=0.6)
    assert method.finetune_passes == 2
    assert make()[0].finetune_passes == 0
    assert method.init_client(task, 1, key(1)) == {}
    batches = [batch_of(1)] * 4
    state = method.finetune(task, server, batches, ClientContext(key(0)))
    own = descend(*adapter(server), 1, 0.5, batches=4)
    w = 0.6 * np.ones(3)
    if weighting == "instance":
        w = np.clip(0.6 * (unit(NEW) @ unit(X[1]).T).mean(1), 0, None)
    logits = method.predict(task, state, {"x": torch.tensor(NEW, dtype=torch.float32)})
    np.testing.assert_allclose(logits, mixture(adapter(server), own, NEW, w), atol=1e-6)
    assert same_bits({n: state[n] for n in server}, server)


@pytest.mark.slow
def test_the_global_adapter_is_fedavgs_and_alone_without_a_weight() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.5)
    theirs, _ = last_round(FedAvg(trainable="lora", optimiser=sgd))
    for form in ("T", "F"):
        ours, _ = last_round(FedDPA(form=form, lam=0.0, optimiser=sgd))  # type: ignore[arg-type]
        assert same_bits(ours.server, theirs.server)
        for a, b in zip(ours.evaluations, theirs.evaluations, strict=True):
            assert a.loss == pytest.approx(b.loss, abs=1e-5)
    mixed, _ = last_round(FedDPA(lam=1.0, optimiser=sgd))
    assert mixed.evaluations[0].loss != pytest.approx(theirs.evaluations[0].loss, abs=1e-3)


@pytest.mark.parametrize("weighting", ["instance", "fixed"])
def test_a_client_that_has_not_trained_uses_the_global_adapter(
    weighting: Literal["instance", "fixed"],
) -> None:
    method, task, server = make(weighting=weighting)
    state = {**server, **method.init_client(task, 0, key(0))}
    logits = method.predict(task, state, batch_of(1))
    torch.testing.assert_close(logits, task.logits(server, batch_of(1)))


def test_a_fixed_weight_is_one_adapter_of_twice_the_rank() -> None:
    method, task, server = make(weighting="fixed", lam=0.25)
    private = [method.init_client(task, k, key(k)) for k in (0, 1)]
    server, private = one_round(method, task, server, private)
    A, B = method.lora(task, {**server, **private[1]})["linear"]
    assert A.shape == (2, 2)
    logits = method.predict(task, {**server, **private[1]}, batch_of(1))
    want = torch.tensor(X[1]).float() @ (torch.tensor(W0) + B @ A).T
    torch.testing.assert_close(logits, want, atol=1e-6, rtol=1e-5)
    assert method.lora(task, server)["linear"][0].shape == (1, 2)
    assert make()[0].lora(task, {**server, **private[1]}) == {}


class Language(nn.Module):
    """Logits of the next token from one token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.linear = nn.Linear(3, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.linear(self.embed(input_ids))


@pytest.mark.parametrize("objective", OBJECTIVES.values())
def test_padding_tokens_are_no_part_of_a_representation(objective: Objective) -> None:
    model = Language()
    only = "input_ids"
    backbone = Backbone(model, objective, lambda batch: {only: batch[only]}, blocks=(("linear",),))
    task = Task(backbone, FedDPA(rank=1).adapt)
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    batch = {only: torch.tensor([[1, 2, 3, 0], [4, 5, 6, 1]]), "attention_mask": mask}
    embedded = model.embed.weight.detach().double().numpy()[batch[only].numpy()]
    if objective.generates:
        want = unit(np.stack([embedded[0, 2], embedded[1, 3]]))
    else:
        want = unit(np.stack([embedded[0, :3].mean(0), embedded[1].mean(0)]))
    np.testing.assert_allclose(representation(task, batch), want, atol=1e-6)


def test_representations_that_are_kept_are_those_of_the_batches() -> None:
    kept, store = last_round(FedDPA(), sizes=(9, 5))
    fresh, other = last_round(FedDPA(), sizes=(9, 5), engine=EngineConfig(cache_mb=0))
    torch.testing.assert_close(store.read(0), other.read(0))
    for a, b in zip(kept.evaluations, fresh.evaluations, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
    anchor = store.read(0)["own.anchor"]
    assert anchor.shape == (16,)  # what the head reads
    assert 0 < anchor.norm() < 1


def test_texts_that_share_a_row_have_representations_of_their_own() -> None:
    task = Task(kinds.backbone("causal-lm"), FedDPA(rank=1).adapt)
    batch = kinds.data("causal-lm").batch(np.arange(12))
    at = places(batch["attention_mask"].sum(1).long().numpy())
    assert at.shape[1] < 12
    alone = representation(task, batch)
    torch.testing.assert_close(representation(task, {**batch, PACKED: at}), alone)


def test_a_weight_above_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.feddpa\.lam = 1\.5.*less than or equal to 1"):
        parse({"methods": {"feddpa": {"lam": 1.5}}})
