"""pFedMoE: a shared and a private feature extractor, weighed example by example by a private gate.

pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous Personalized
Federated Learning. L. Yi, H. Yu, C. Ren, H. Zhang, G. Wang, X. Liu, X. Li. arXiv 2402.01350, 2024.

Client k; the shared expert G(theta), its own model's extractor F(omega) and head h(omega), its gate
H(phi):
    (a_G, a_F) = H(x; phi), positive and of sum 1
    R = a_G G(x; theta) + a_F F(x; omega_k),   y^ = h(R; omega_k)
    theta, omega_k, phi_k <- ... - eta grad l(y^, y), all three in every step
    up: theta_k
Server:
    theta <- sum_k (n_k / n) theta_k

The head is applied to each expert: a_G h(G(x)) + a_F h(F(x)), which is h(R) if h is linear. A model
that writes texts has none: each expert computes logits, and a token's are weighed by the text up to
it, so that no gate sees what is to be predicted.

Differs from the paper:
- This follows the paper's abstract and others' descriptions of it. Unverified is the gate, here one
  hidden layer and a softmax over the pooled picture, the mean of the tokens' embeddings before any
  training (of those so far, where the next one is predicted), or the vector that the model reads.
- All models have the same structure. G and F are two copies of one model below the head, and start
  from it; with LoRA they are two adapters of it, where every client draws F's. The paper's clients
  have different models, and G is smaller.
- A head of several layers mixes scores instead of features.
- That tokens are weighed one by one is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from .. import random
from ..errors import InputError
from ..layers.gate_input import GateInput, pooled
from ..layers.gating import gate_input
from ..layers.lora import without_lora
from ..method import FineTuning, Portable
from ..optim import ClientContext, LearningRate, train
from ..params import Batch, Params, add_prefix, strip_prefix
from ..task.backbone import Backbone, sequences
from ..task.surgery import replace
from ..task.task import Task

_OWN, _SHARED = "own.", "shared."


class Experts(nn.Module):
    """A client's own model, whose forward pass this runs, beside the shared expert and the gate.

    The shared expert is a copy of the model without the head; its tensors are put into the model
    for its turn.
    """

    def __init__(self, model: nn.Module, head: Sequence[str], gate: nn.Module, source: GateInput):
        super().__init__()
        self.own = model
        # frozen parameters are in memory once
        frozen: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.shared = copy.deepcopy(model, frozen)
        for path in head:
            replace(self.shared, path, nn.Identity())
        self.gate = gate
        self.source = changed(source, path=_OWN + source.path)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.own(*inputs, **named)


@dataclass(frozen=True)
class PFedMoE(FineTuning):
    """pFedMoE with two experts of the same structure.

    ``hidden`` is the gate's width, ``pool`` the side of the picture that it sees, ``lr_gate`` its
    learning rate (None: ``optimiser.lr``). ``trainable`` chooses all parameters, or LoRA and the
    head.
    """

    name: ClassVar[str] = "pfedmoe"
    family: ClassVar[str] = "mixture"
    needs_only_mean: ClassVar[bool] = True

    hidden: Annotated[int, Gt(0), Le(65_536)] = 64
    pool: Annotated[int, Gt(0), Le(256)] = 8
    lr_gate: LearningRate | None = None
    trainable: Literal["full", "lora"] = field(default="full", kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        if not backbone.head and not backbone.objective.writes:
            raise InputError(
                f"model {backbone.name!r} has no recognised task head, which pfedmoe's experts "
                f"share; name its modules in model.head"
            )
        source = GateInput.of(backbone.model, backbone.name, self.pool)
        model = super().adapt(backbone)
        gate = nn.Sequential(
            nn.Linear(source.channels * source.positions, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 2),
        )
        return Experts(model, backbone.head, gate, source)

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if not any(name.startswith(_SHARED) for name in task.trained):
            raise InputError(
                f"pfedmoe shares all but the task head, and layers = {list(self.layers)} trains "
                f"nothing else; allowed: patterns of layers below {', '.join(task.backbone.head)}"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return not name.startswith(_SHARED)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        private = {n: value for n, value in task.state.items() if self.is_private(task, n)}
        for index, name in enumerate(sorted(private)):
            if ".lora_A." in name:
                shape = tuple(private[name].shape)
                drawn = random.normal(random.fold_in(key, index), shape, std=self.rank**-0.5)
                private[name] = drawn.to(private[name])
        return private

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def loss(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            own, buffers = task.step_logits(state, batch, key)
            shared, others = task.step_logits(_shared(state), batch, random.fold_in(key, 1))
            scores = task.score(_mixed(_weights(task, state, batch), shared, own), batch)
            others = add_prefix(strip_prefix(others, _OWN), _SHARED)
            return scores.mean(batch.get("weight")), {**buffers, **others}

        def lr(name: str) -> float:
            return self.lr_gate if self.lr_gate and name.startswith("gate.") else self.optimiser.lr

        return train(task, state, batches, context, self.optimiser, lr=lr, loss=loss)

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        shared, own = task.logits(_shared(state), batch), task.logits(state, batch)
        return _mixed(_weights(task, state, batch), shared, own)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return {}  # the weights depend on the example: no single adapter does the same

    def portable(self, task: Task, state: Params) -> Portable:
        source: Any = task.model.source
        settings = asdict(changed(source, path=source.path.removeprefix(_OWN)))
        tensors = {
            **add_prefix(without_lora(task, _shared(state), _OWN), "shared/"),
            **add_prefix(without_lora(task, state, _OWN), "own/"),
            **add_prefix(strip_prefix(state, "gate."), "gate/"),
        }
        return Portable("experts", tensors, settings={"gate_input": settings})

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """The mean weight of the shared expert."""
        a = _weights(task, state, batch)[..., 0]
        real = batch["attention_mask"] if a.dim() > 1 else torch.ones_like(a)
        return {"shared": (a * real).sum() / real.sum().clamp(min=1)}


def _shared(state: Params) -> Params:
    """The state with the shared expert in place of the client's own, below the client's head."""
    return {**state, **add_prefix(strip_prefix(state, _SHARED), _OWN)}


def _weights(task: Task, state: Params, batch: Batch) -> Tensor:
    """(a_G, a_F), ``[b, 2]``, or ``[..., L, 2]`` where tokens are predicted from those before."""
    source: Any = task.model.source
    writes_on = task.backbone.objective.generates
    x, real = gate_input(task, source, sequences(batch) if writes_on else batch)
    scores: Tensor = task.module("gate", state, pooled(x, real, so_far=writes_on))
    shape = batch["input_ids"].shape if writes_on else x.shape[:1]
    return torch.softmax(scores, -1).view(*shape, 2)


def _mixed(a: Tensor, shared: Tensor, own: Tensor) -> Tensor:
    a = a.view(*a.shape[:-1], *[1] * (shared.dim() - a.dim()), 2)
    return a[..., :1] * shared + a[..., 1:] * own
