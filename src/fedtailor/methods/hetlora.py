"""HetLoRA: clients' LoRAs have different ranks, are padded with zeros, and weigh by their norms.

Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models. Y. J. Cho, L. Liu,
Z. Xu, A. Fahrezi, G. Joshi. EMNLP 2024.

Client k, of rank r_k, with q_k = floor(gamma r_k), s = lora_alpha / r, r the largest rank:
    received:  B_k = B[:, :r_k],  A_k = A[:r_k]                                   (truncation)
    min  F_k(W0 + s B_k A_k) + lam ||B_k[:, q_k:]|| ||A_k[q_k:]||                 (self-pruning)
    where that product of norms has become less than it was: r_k <- q_k
    up:        B_k[:, :r_k], A_k[:r_k]
Server, S_k = ||B_k A_k||_F, each factor padded with zeros to rank r:
    B <- sum_k S_k B_k / sum_j S_j,   A <- sum_k S_k A_k / sum_j S_j

Differs from the paper:
- This follows summaries of the paper; the defaults of gamma and lam are this library's.
- A model has several projections. A client has one rank for all of them, and its pruning looks at
  the sum of their products of norms; S_k is each projection's own. A rank never falls below 1. If
  every S_k is 0, the weights are n_k / n.
- A component that no client of the round had keeps its values. The plain sum would make it zero in
  both factors, and it could never be trained again.
- s is one number for all ranks, so that a truncated product means the same to all clients; the
  norms are those without s.
- The task head and its batch normalisation's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from ..layers.lora import (
    Alpha,
    Ranks,
    check_uploaded_rank,
    lora_names,
    max_rank,
    pack_rank,
    pad_rank,
    truncate_rank,
    unpack_rank,
)
from ..layers.low_rank import product_norm
from ..layers.per_client import entry_of
from ..layers.trainable import choose_trainable
from ..method import Cohort, Method, Server
from ..optim import ClientContext, Optimiser, train
from ..params import Batch, Params, pick
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.task import Task


@dataclass(frozen=True)
class HetLoRA(Method):
    """LoRA of rank r_k at client k: ``rank``, at the start, is one number for all clients, or
    several in turn. ``gamma`` is the part of a rank that pruning leaves (1: no pruning), ``lam``
    the weight of the term that pushes the rest towards zero."""

    name: ClassVar[str] = "hetlora"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "each client's factors, by its rank"
    changing_sizes: ClassVar[tuple[str, ...]] = ("*.lora_A.*", "*.lora_B.*")

    gamma: Annotated[float, Gt(0), Le(1)] = 0.99
    lam: Annotated[float, Ge(0), Le(1e6)] = 5e-3
    rank: Ranks = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", max_rank(self.rank), self.lora_alpha)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        ranks = [entry_of(self.rank, client) for client in range(num_clients)]
        return {**task.state, "ranks": torch.tensor(ranks, device=task.device)}

    def send(self, task: Task, server: Server, client: int) -> Params:
        return truncate_rank(pick(server, task.state), int(server["ranks"][client]))

    def send_new(self, task: Task, server: Server, client: int) -> Params:
        return truncate_rank(pick(server, task.state), entry_of(self.rank, client))

    def global_state(self, task: Task, server: Server) -> Params | None:
        return pick(server, task.state)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        pairs = lora_names(state)
        r = len(state[pairs[0][0]])
        q = self._pruned(r)

        def tail(state: Params) -> Tensor:
            norms = [state[B][:, q:].norm() * state[A][q:].norm() for A, B in pairs]
            return torch.stack(norms).sum()

        trained, loss = train(
            task, state, batches, context, self.optimiser, penalty=lambda s: self.lam * tail(s)
        )
        trained["rank"] = torch.where(tail(trained) < tail(state), q, r)
        return trained, loss

    def _pruned(self, r: int) -> int:
        """q_k."""
        return max(1, floor(self.gamma * r + 1e-6))  # 0.29 * 100 is just below 29

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        """The trained tensors, zero in components that were pruned or that the client never had."""
        upload = pad_rank(trained, max_rank(self.rank))
        kept = torch.arange(max_rank(self.rank), device=trained["rank"].device) < trained["rank"]
        for name_A, name_B in lora_names(upload):
            upload[name_A] = torch.where(kept[:, None], upload[name_A], 0.0)
            upload[name_B] = torch.where(kept, upload[name_B], 0.0)
        return upload

    def unchanged(self, task: Task, server: Server, upload: Params) -> Params:
        whole = super().unchanged(task, server, upload)
        return pad_rank(truncate_rank(whole, int(upload["rank"])), max_rank(self.rank))

    def pack(self, task: Task, upload: Params) -> Params:
        return pack_rank(upload)

    def unpack(self, task: Task, packed: Params) -> Params:
        return unpack_rank(packed, max_rank(self.rank))

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        r = len(received[lora_names(received)[0][0]])
        check_uploaded_rank(upload, {self._pruned(r), r})

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        ranks = server["ranks"].clone()
        ranks[list(cohort.clients)] = uploads["rank"].to(ranks)
        averaged = pick(uploads, filter(task.in_head, uploads))
        new = {**weighted_sum(averaged, cohort.shares), "ranks": ranks}
        sent = torch.arange(max_rank(self.rank), device=ranks.device) < uploads["rank"].max()  # [r]
        for name_A, name_B in lora_names(server):
            S = cohort.limited(product_norm(uploads[name_B], uploads[name_A]))  # [c]
            weights = torch.where(S.sum() > 0, S / S.sum(), cohort.shares.to(S))
            mean = weighted_sum(pick(uploads, (name_A, name_B)), weights)
            new[name_A] = torch.where(sent[:, None], mean[name_A], server[name_A])
            new[name_B] = torch.where(sent, mean[name_B], server[name_B])
        return new

    def server_diagnostics(self, task: Task, server: Server, clients: Sequence[int]) -> Params:
        return {"ranks": server["ranks"][list(clients)]}
