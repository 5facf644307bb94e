"""FlexLoRA: the server averages the products B_k A_k, and clients get the mean's SVD as factors.

Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources.
J. Bai, D. Chen, B. Qian, L. Yao, Y. Li. NeurIPS 2024.

    client k:  W0 + s B A, with B ``[d_out, r_k]`` and A ``[r_k, d_in]``; gradient steps
    up:        B_k, A_k
    server:    W = sum_k p_k B_k A_k,  p_k = n_k / n
               U, S, V = SVD(W);  client k gets  B = U[:, :r_k] S[:r_k],  A = V[:r_k]

Differs from the paper:
- This follows summaries of the paper; unverified is which factor gets S.
- W is never formed: its SVD is worked out from the factors, in float64. The server keeps the first
  r values and vectors, r the largest rank. The largest entry of every row of A is positive.
- A is sqrt(d_in / r) V, and B is U S over the same number, so that the rows of A stay as long as at
  the start. With rows of length 1 the same learning rate would move the product d_in / r times
  less.
- s is one number, lora_alpha divided by the largest rank, so that a product means the same to all
  clients.
- Before the first round A is N(0, 1/r) and B = 0; a client gets the first r_k rows.
- The task head and its batch normalisation's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

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
from ..layers.low_rank import product_svd, side_by_side
from ..layers.per_client import entry_of
from ..layers.trainable import choose_trainable
from ..method import Cohort, Method, Server
from ..optim import Optimiser
from ..params import Params, pick
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.task import Task


@dataclass(frozen=True)
class FlexLoRA(Method):
    """LoRA of rank r_k at client k: ``rank`` is one number for all clients, or several in turn."""

    name: ClassVar[str] = "flexlora"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "each client's factors, by its rank"

    rank: Ranks = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", max_rank(self.rank), self.lora_alpha)

    def send(self, task: Task, server: Server, client: int) -> Params:
        rank = entry_of(self.rank, client)
        return server if rank == max_rank(self.rank) else truncate_rank(server, rank)

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        A = trained[lora_names(trained)[0][0]]
        rank = A.new_full((), len(A), dtype=torch.int64)
        return {**pad_rank(trained, max_rank(self.rank)), "rank": rank}

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
        check_uploaded_rank(upload, {entry_of(self.rank, client)})

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        new = weighted_sum(pick(uploads, filter(task.in_head, uploads)), cohort.shares)
        for name_A, name_B in lora_names(server):
            B, A = side_by_side(uploads[name_B], uploads[name_A], cohort.shares)
            U, S, V = product_svd(B, A, max_rank(self.rank))
            dtype, length = server[name_A].dtype, (A.shape[1] / len(V)) ** 0.5
            new[name_A], new[name_B] = (length * V).to(dtype), (U * S / length).to(dtype)
        return new
