"""FLoRA: the exact sum of all clients' low-rank updates, by stacking; every round a fresh LoRA.

FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations. Z. Wang,
Z. Shen, Y. He, G. Sun, H. Wang, L. Lyu, A. Li. NeurIPS 2024.

    client k:  y = W x + s B_k A_k x, from B_k = 0 and A_k ~ N(0, 1 / r_k); gradient steps
    up:        B_k, A_k
    server:    B = [B_1, ..., B_c],  A = [p_1 A_1; ...; p_c A_c],  p_k = n_k / n
               W <- W + s B A  =  W + s sum_k p_k B_k A_k

Differs from the paper:
- This follows summaries of the paper.
- The server keeps W - W0, one dense matrix ``delta`` a projection, and sends it every round: d_in
  d_out numbers. In the paper it sends the round's stacked B and A, (r_1 + ... + r_c)(d_in + d_out)
  numbers, and every client adds their product to the model that it keeps; a client that misses a
  round needs that round's stack later. Here a client keeps nothing.
- s is one number, lora_alpha divided by the largest rank. By the draw of A_k, a first step moves
  the product equally far whatever the rank.
- The task head and its batch normalisation's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import random
from ..layers.lora import (
    A_SUFFIX,
    Alpha,
    Ranks,
    check_uploaded_rank,
    initial_factor,
    lora_names,
    max_rank,
    pack_rank,
    unpack_rank,
)
from ..layers.low_rank import side_by_side
from ..layers.parts import projections
from ..layers.per_client import entry_of
from ..layers.trainable import choose_trainable
from ..method import Cohort, Method, Server
from ..optim import ClientContext, Optimiser, train
from ..params import Batch, Params, pick
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.step import StepModule
from ..task.surgery import replace
from ..task.task import Task

_RANK = "budget.rank"  # a client's own
_DELTA = ".base_layer.delta"


class MergedLinear(StepModule):
    """A frozen linear layer whose weight is W0 + delta; ``delta`` ``[d_out, d_in]`` is a state
    buffer."""

    state_buffers = ("delta",)
    delta: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.register_buffer("delta", torch.zeros_like(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.delta, self.base.bias)


@dataclass(frozen=True)
class FLoRA(Method):
    """LoRA of rank r_k at client k: ``rank`` is one number for all clients, or several in turn."""

    name: ClassVar[str] = "flora"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "each client's factors, by its rank"

    rank: Ranks = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.1), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        model = choose_trainable(backbone, "lora", max_rank(self.rank), self.lora_alpha)
        for path in projections(backbone):
            layer: Any = model.get_submodule(path)
            replace(model, f"{path}.base_layer", MergedLinear(layer.base_layer))
        return model

    def _scaling(self, task: Task) -> float:
        return task.backbone.lora.scaling(max_rank(self.rank), self.lora_alpha)

    def is_private(self, task: Task, name: str) -> bool:
        return name == _RANK

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {_RANK: torch.tensor(entry_of(self.rank, client))}

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        fresh = {name for pair in lora_names(task.state) for name in pair}
        return {name: value for name, value in task.state.items() if name not in fresh}

    def global_state(self, task: Task, server: Server) -> Params | None:
        return {**task.state, **server}  # in the task's state B is 0

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        key, fresh = random.fold_in(context.key, -1), dict(state)
        for index, (name_A, name_B) in enumerate(lora_names(task.state)):
            A, B = task.state[name_A], task.state[name_B]
            fresh[name_A] = initial_factor(random.fold_in(key, index), A, state[_RANK])
            fresh[name_B] = torch.zeros_like(B)
        trained, loss = train(task, fresh, batches, context, self.optimiser)
        return {**trained, "rank": state[_RANK]}, loss

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return {name: value for name, value in trained.items() if not name.endswith(_DELTA)}

    def products(self, task: Task) -> Sequence[tuple[str, str]]:
        return lora_names(task.state)

    def pack(self, task: Task, upload: Params) -> Params:
        return pack_rank(upload)

    def unpack(self, task: Task, packed: Params) -> Params:
        return unpack_rank(packed, max_rank(self.rank))

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        check_uploaded_rank(upload, {entry_of(self.rank, client)})

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        new = weighted_sum(pick(uploads, filter(task.in_head, uploads)), cohort.shares)
        for name_A, name_B in lora_names(uploads):
            weights = self._scaling(task) * cohort.shares
            B, A = side_by_side(uploads[name_B], uploads[name_A], weights)
            name = name_A.removesuffix(A_SUFFIX) + _DELTA
            new[name] = (server[name].double() + B @ A).to(server[name].dtype)
        return new

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        """delta as a product of full rank, one factor of which is the identity."""
        factors = {}
        for name in (name for name in state if name.endswith(_DELTA)):
            delta = state[name]
            d_out, d_in = delta.shape
            one = torch.eye(min(d_out, d_in)).to(delta)
            factors[name.removesuffix(_DELTA)] = (delta, one) if d_out <= d_in else (one, delta)
        return factors
