"""FedHFT: a mixture of clustered LoRA adapters, fed by masked low-rank updates.

FedHFT: Efficient Federated Finetuning with Heterogeneous Edge Clients. F. Ilhan, S. F. Tekin,
T. Huang, G. Liu, R. Kompella, G. Eisenhauer, Y. C. Lin, C. Pu, L. Liu. arXiv 2510.14054, 2025.

The server holds C adapters (B_c, A_c) and heads, and K clients' assignments p_kc, at first 1 / C.
Client k, round t, s = lora_alpha / r:
    theta_k <- theta + sum_c p_kc B_c A_c                                         (4)
    train a fresh LoRA, B_k = 0 and A_k random, and the head: Delta_k = s B_k A_k
    I_k[i] = sum_j <s B_k[i, :], A_k[:, j]>^2                                     (6)
    mask_k[i] = 0 for the floor(rho_k d_out) rows of least I_k, else 1            (7)
    up: the rows of s B_k where mask_k is 1, A_k, mask_k, the change of the head
Server:
    after the warm-up: p_k <- Gaussian mixture over PCA of all Delta_k of the round    (9)
    Delta_c[i] = sum_k w_kci Delta_k[i] / sum_k w_kci,  w_kci = p_kc n_k mask_k[i]
    B_c A_c <- SVD_r(B_c A_c + Delta_c)                                           (8)
    head_c <- head_c + sum_k p_kc n_k Delta head_k / sum_k p_kc n_k

A client that joins afterwards receives all adapters and heads and finds its p by gradient steps on
its loss under (4), from p_c = 1 / C.

Differs from the paper:
- This follows a summary of the paper; some of the points below may be the paper's own choice.
- The mixture travels and acts as its factors, [p_kc B_c] and [A_c], of rank at most C r. The head
  travels as the mixture sum_c p_kc head_c.
- A_k is drawn from N(0, 1 / r_k), and s is one number for all ranks, so that a first step moves the
  product equally far whatever the rank. Components beyond a client's own rank stay zero.
- A_k is the same draw for all clients of a round (``start="common"``), by a key that they receive.
  With one draw a client (``"own"``), the updates of similar clients have hardly any inner product,
  since r << d_in, and their mean has a rank that the recompression must cut.
- PCA is that of the Gram matrix of the updates. With ``updates="total"`` an update includes the
  received mixture; with ``"round"`` it is Delta_k alone, which no longer tells groups of clients
  apart once their adapters fit. At the first clustering both are equal.
- The Gaussians have diagonal covariances. EM starts from the last assignments, so that clusters
  keep their numbers; in a cohort of clients that have none, from how alike updates are to the
  clusters' models. Clients outside the cohort keep their assignments. A cluster to which no
  client of the cohort belongs is left out of the round. A round with fewer uploads than clusters
  keeps all assignments: so few don't determine a mixture.
- A row that nobody sent is not updated. Of equally important rows the first are masked.
- The SVD goes through the factors, randomised or exact, and never forms d_out x d_in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt, MinLen
from torch import Tensor, nn

from .. import random
from ..errors import InputError
from ..layers.clustering import likeness, mixture_assignments
from ..layers.lora import (
    Alpha,
    LoRALayer,
    Ranks,
    adapt_projections,
    branches,
    check_components,
    fuse,
    initial_factor,
    max_rank,
    pack_rows,
    unpack_rows,
)
from ..layers.low_rank import product_gram, recompress, with_updates
from ..layers.masks import drop_least
from ..layers.mixing import fit_logits
from ..layers.parts import projections, train_head_and
from ..layers.per_client import entry_of
from ..method import Cohort, Method, Server
from ..optim import ClientContext, Optimiser, train
from ..params import Batch, Params, pick
from ..stacked import ratio
from ..task.backbone import Backbone, LoRAOptions
from ..task.step import StepModule
from ..task.task import Task

Ratio = Annotated[float, Ge(0), Lt(1)]

_RANK, _RATIO = "budget.rank", "budget.mask_ratio"  # a client's own


def row_importance(B: Tensor, A: Tensor) -> Tensor:
    """Equation 6: the squared norm of every row of B A, ``[d_out]``; B A is never formed.

    >>> row_importance(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [25.0, 100.0]
    """
    return ((B @ (A @ A.mT)) * B).sum(-1)


def row_weights(w: Tensor, kept: Tensor, total: Tensor) -> Tensor:
    """The weights of equation 8 in cluster c, w_kci / sum_k w_kci ``[c, d_out]``, or 0 where the
    sum is 0: from p_kc n_k ``[c]``, mask_k ``[c, d_out]`` and the sum ``[d_out]``."""
    return ratio(w[:, None] * kept, total)


class MixtureLoRALinear(LoRALayer, StepModule):
    """A frozen linear layer with the received mixture, in state buffers, and a fresh LoRA, which is
    trained: y = W0 x + B_mix A_mix x + s B A x (equation 4)."""

    state_buffers = ("A_mix", "B_mix")

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        lora_alpha: float,
        clusters: int,
        options: LoRAOptions | None = None,
    ) -> None:
        super().__init__(rank, lora_alpha, options)
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) * rank**-0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.A_mix = nn.Buffer(torch.zeros(clusters * rank, base.in_features))
        self.B_mix = nn.Buffer(torch.zeros(base.out_features, clusters * rank))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., d_in]`` to ``[..., d_out]``."""
        mixture, fresh = (self.A_mix, self.B_mix, 1.0), (self.A, self.scaling * self.B, 1.0)
        y: Tensor = self.base(x) + branches(self.dropout(x), mixture, fresh)
        return y


@dataclass(frozen=True)
class FedHFT(Method):
    """FedHFT: C adapters on the server, soft assignments, masked updates from every client.

    ``clusters`` is C, ``warmup_rounds`` T_w. ``rank`` r_k and ``mask_ratio`` rho_k are one number
    for all clients, or several in turn; the server's r is the largest r_k.
    """

    name: ClassVar[str] = "fedhft"
    family: ClassVar[str] = "cluster"
    released: ClassVar[str] = "the cluster of each client"
    sends_updates: ClassVar[bool] = True

    clusters: Annotated[int, Gt(0), Le(1000)] = 3
    rank: Ranks = 8
    lora_alpha: Alpha = 16.0
    mask_ratio: Ratio | Annotated[tuple[Ratio, ...], MinLen(1)] = 0.5
    warmup_rounds: Annotated[int, Ge(0), Le(1_000_000)] = 5
    start: Literal["common", "own"] = "common"  # of A: one draw a round, or one a client
    updates: Literal["total", "round"] = "total"  # what tells clients apart
    components: Annotated[int, Gt(0), Le(1000)] | None = None  # principal components; None: C
    reg_covar: Annotated[float, Gt(0), Le(1e6)] = 1e-2  # a component's mean variance: 1
    exact_svd: bool = False
    finetune_passes: Annotated[int, Ge(0), Le(10_000)] = 0  # over the client's data, before use
    optimiser: Optimiser = field(default=Optimiser("adam", lr=1e-3, clip=1.0), kw_only=True)

    def _scaling(self, task: Task) -> float:
        return task.backbone.lora.scaling(max_rank(self.rank), self.lora_alpha)

    def adapt(self, backbone: Backbone) -> nn.Module:
        rank, alpha, C = max_rank(self.rank), self.lora_alpha, self.clusters
        adapt_projections(
            backbone, rank, lambda base, _: MixtureLoRALinear(base, rank, alpha, C, backbone.lora)
        )
        factors = {f"{path}.{factor}" for path in projections(backbone) for factor in "AB"}
        return train_head_and(backbone, lambda name: name in factors)

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        members = self.robust.let_through(cohort_size)
        if self.clusters > members:
            raise InputError(
                f"fedhft.clusters is {self.clusters}, more than the {members} clients that "
                f"report in a round of the warm-up; allowed: 1 to {members}, or a larger cohort"
            )
        if self.clusters > 1 and self.warmup_rounds >= rounds:
            raise InputError(
                f"fedhft.warmup_rounds is {self.warmup_rounds} and rounds is {rounds}: the "
                f"clients would never be clustered; allowed: 0 to {rounds - 1}, or clusters = 1"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name in (_RANK, _RATIO)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {
            _RANK: torch.tensor(entry_of(self.rank, client)),
            _RATIO: torch.tensor(entry_of(self.mask_ratio, client), dtype=torch.float64),
        }

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        C, device = self.clusters, task.device
        server = {"assignments": torch.full((num_clients, C), 1 / C, device=device)}
        server["start"] = random.fold_in(key, -1).to(device)
        for index, path in enumerate(projections(task.backbone)):
            A, B = task.state[f"{path}.A"], task.state[f"{path}.B"]
            drawn = random.normal(random.fold_in(key, index), (C, *A.shape), len(A) ** -0.5)
            server[f"{path}.A"], server[f"{path}.B"] = drawn.to(device), B.new_zeros(C, *B.shape)
            server[f"{path}.sent"] = B.new_zeros(C, len(B))
        heads = _head(task, task.state)
        return server | {n: v.expand(C, *v.shape).clone() for n, v in heads.items()}

    def send(self, task: Task, server: Server, client: int) -> Params:
        return _mixture(task, server, server["assignments"][client])

    def send_new(self, task: Task, server: Server, client: int) -> Params:
        mine = _head(task, server).keys() | {"start"}
        mine |= {f"{path}.{factor}" for path in projections(task.backbone) for factor in "AB"}
        return {name: value for name, value in server.items() if name in mine}

    def fit_row(
        self, task: Task, received: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        def loss(p: Tensor, batch: Batch, key: Tensor) -> Tensor:
            return task.loss(_mixture(task, received, p), batch, key)[0]

        z = fit_logits(torch.zeros(self.clusters, device=task.device), batches, context, loss)
        return _mixture(task, received, torch.softmax(z, 0))

    def global_state(self, task: Task, server: Server) -> Params | None:
        return _mixture(task, server, server["assignments"].mean(0))

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        fresh = self._fresh(task, state, context)
        trained, loss = train(task, fresh, batches, context, self.optimiser)
        for path in projections(task.backbone):
            importance = row_importance(trained[f"{path}.B"], trained[f"{path}.A"])
            trained[f"{path}.kept"] = drop_least(importance, state[_RATIO])
        return trained, loss

    def _fresh(self, task: Task, state: Params, context: ClientContext) -> Params:
        """``state`` with a fresh LoRA of the client's own rank, B = 0."""
        key = state["start"] if self.start == "common" else random.fold_in(context.key, -1)
        fresh = {}
        for index, path in enumerate(projections(task.backbone)):
            A, B = task.state[f"{path}.A"], task.state[f"{path}.B"]
            fresh[f"{path}.A"] = initial_factor(random.fold_in(key, index), A, state[_RANK])
            fresh[f"{path}.B"] = torch.zeros_like(B)
        return {**state, **fresh}

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        sent = {n: trained[n] - received[n] for n in _head(task, task.state)}
        for path in projections(task.backbone):
            kept = trained[f"{path}.kept"]  # [d_out]
            sent[f"{path}.A"], sent[f"{path}.kept"] = trained[f"{path}.A"], kept
            sent[f"{path}.B"] = self._scaling(task) * trained[f"{path}.B"] * kept[:, None]
        return sent

    def products(self, task: Task) -> Sequence[tuple[str, str]]:
        return [(f"{path}.A", f"{path}.B") for path in projections(task.backbone)]

    def pack(self, task: Task, upload: Params) -> Params:
        return pack_rows(upload)

    def unpack(self, task: Task, packed: Params) -> Params:
        return unpack_rows(packed, task.state)

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        rank, rho = entry_of(self.rank, client), entry_of(self.mask_ratio, client)
        for path in projections(task.backbone):
            A, B, kept = (upload[f"{path}.{part}"] for part in ("A", "B", "kept"))
            sent, allowed = int(kept.sum()), int(drop_least(torch.zeros(len(kept)), rho).sum())
            if sent != allowed:
                raise InputError(
                    f"{path}.kept keeps {sent} of {len(kept)} rows; with the client's mask_ratio "
                    f"{rho} it must keep {allowed}"
                )
            if B[~kept].any():
                raise InputError(f"{path}.B holds values in rows that {path}.kept masks")
            check_components(A, B, rank, path)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        members = list(cohort.clients)
        p = server["assignments"].clone()  # [K, C]
        if self.clusters > 1 and cohort.round > self.warmup_rounds:
            p[members] = self._assign(task, server, uploads, cohort).to(p.dtype)
        w = (p[members].double() * cohort.shares.to(p.device)[:, None]).T  # p_kc n_k / n, [C, c]
        new = {"assignments": p, "start": random.fold_in(cohort.key, -1)}
        for index, path in enumerate(projections(task.backbone)):
            A, B, kept = (uploads[f"{path}.{part}"] for part in ("A", "B", "kept"))
            totals = w @ kept.double()  # sum_k w_kci, [C, d_out]
            new[f"{path}.sent"] = ratio(totals, w.sum(1, keepdim=True)).to(B.dtype)
            adapters = []
            for c in range(self.clusters):
                weights = row_weights(w[c], kept, totals[c]).to(B.dtype)
                adapter = server[f"{path}.B"][c], server[f"{path}.A"][c]
                factors = with_updates(*adapter, B, A, weights)
                key = random.fold_in(random.fold_in(cohort.key, index), c)
                adapters.append(recompress(*factors, max_rank(self.rank), self.exact_svd, key))
            new[f"{path}.B"], new[f"{path}.A"] = map(torch.stack, zip(*adapters, strict=True))
        share = ratio(w, w.sum(1, keepdim=True))
        for name, value in _head(task, server).items():
            moved = torch.tensordot(share, uploads[name].double(), 1)
            new[name] = value + moved.to(value.dtype)
            if name.endswith("running_var"):  # a step from a mixture may overshoot
                new[name] = new[name].clamp(min=0)
        return new

    def _assign(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Tensor:
        """Equation 9: the cohort's new assignments, ``[c, C]``."""
        p = server["assignments"][list(cohort.clients)].double()  # [c, C]
        grams = []
        for path in projections(task.backbone):
            Bs, As = (torch.cat([server[f"{path}.{f}"], uploads[f"{path}.{f}"]]) for f in "BA")
            grams.append(product_gram(Bs, As))  # [C + c, C + c]
        of_all = torch.stack(grams).sum(0)
        received = p if self.updates == "total" else torch.zeros_like(p)
        combine = torch.cat([received, torch.eye(len(p)).to(p)], 1)  # [c, C + c]
        gram = combine @ of_all @ combine.T
        start = p
        if p.eq(p[0, 0]).all() and server["assignments"].ne(server["assignments"][0, 0]).any():
            start = likeness(of_all, self.clusters)  # a cohort of newcomers: clusters are there
        components, seed = self.components or self.clusters, int(cohort.key) % 2**32
        return mixture_assignments(gram, start, components, self.reg_covar, seed)

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        return train(task, self._fresh(task, state, context), batches, context, self.optimiser)[0]

    def server_diagnostics(self, task: Task, server: Server, clients: Sequence[int]) -> Params:
        sent = {f"sent.{path}": server[f"{path}.sent"] for path in projections(task.backbone)}
        return {"assignments": server["assignments"][list(clients)], **sent}

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        factors = {}
        for path in projections(task.backbone):
            terms = [(state[f"{path}.A_mix"], state[f"{path}.B_mix"], 1.0)]
            if f"{path}.B" in state:  # trained for this client alone
                terms.append((state[f"{path}.A"], state[f"{path}.B"], self._scaling(task)))
            A, B, weight = fuse(*terms)
            factors[path] = (A, B * weight)
        return factors


def _head(task: Task, tensors: Params) -> Params:
    return pick(tensors, filter(task.in_head, tensors))


def _mixture(task: Task, server: Server, p: Tensor) -> Params:
    """The mixture of a client with assignments ``p`` ``[C]``, for equation 4."""
    mixed = {"start": server["start"]}
    mixed |= {n: torch.tensordot(p, value, 1) for n, value in _head(task, server).items()}
    for path in projections(task.backbone):
        A, B = server[f"{path}.A"], server[f"{path}.B"]  # [C, r, d_in], [C, d_out, r]
        mixed[f"{path}.A_mix"] = A.flatten(0, 1)
        mixed[f"{path}.B_mix"] = (p[:, None, None] * B).movedim(0, 1).flatten(1)
    return mixed
