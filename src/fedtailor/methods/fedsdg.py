"""FedSDG: a shared and a private LoRA branch, mixed by a learnable gate in every transformer block.

FedSDG: Structure Decoupled Gating for Personalized Federated Finetuning. NODI Lab., Jilin
University. Preprint 2026.

Client k, block l, scaling s = lora_alpha / r:
    m_l = sigmoid(a_l)                                                            (3)
    y = W0 x + s B_g A_g x + m_l s B_p A_p x                                      (4)
    min  l(f(x), y) + lambda1 sum_l |m_l| + lambda2 ||theta_p||_2^2               (5)
    theta_g, theta_p, a <- gradient steps with rates eta_g, eta_p, eta_m          (6-8)
    up:  Delta_k = theta_g^k - theta_g                                            (9)
Server, Delta the mean of the Delta_k:
    alpha_k = max(0, <Delta_k, Delta> / (||Delta_k|| ||Delta|| + eps)),
    w_k = alpha_k / (sum_j alpha_j + eps)                                         (10)
    theta_g <- theta_g + sum_k w_k Delta_k                                        (11)

theta_g is the shared LoRA (A_g, B_g) and the task head, theta_p the private LoRA, of equal shape.

Differs from the paper:
- Equation 4 adds the private parameters to the shared ones. For the factors of LoRA that gives
  (B_g + m B_p)(A_g + m A_p), with products of shared and private factors: ``form="factor"``. The
  default ``form="branch"`` adds the two products B A, as the paper's text describes it.
- B_p starts at N(0, 0.01^2), not 0: with B_p = 0 a gate gets no gradient from the task, and Adam
  walks it down on the penalty alone. ``private_init="zero"`` restores 0. A starts at N(0, 1/r).
- The products of equation 10 are of the updates' own type, their sums over columns float64, so that
  cosines are exact to 1e-6. If the mean update is 0, nothing moves.
- ``gate`` can fix m, for comparison; 0 leaves the private branch out.
- ``aggregation`` has three rules that the paper doesn't: uniform, by examples, and leave-one-out
  alignment (each update against the mean of the others, a softmax over cosine / temperature).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from .. import random
from ..layers.lora import Alpha, Branch, LoRALayer, Rank, adapt_projections, branches, fuse
from ..layers.parts import require_blocks, require_head, train_head_and
from ..method import Cohort, Method, Server
from ..optim import ClientContext, LearningRate, Optimiser, train
from ..params import Batch, Params, add, flat, subtract
from ..stacked import products_with_mean, weighted_sum
from ..task.backbone import Backbone, LoRAOptions
from ..task.task import Task

Form = Literal["branch", "factor"]


class LowRank(nn.Module):
    """The factors A ``[r, d_in]`` and B ``[d_out, r]`` of one LoRA branch."""

    def __init__(self, d_in: int, d_out: int, rank: int, b_std: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, d_in) * rank**-0.5)
        self.B = nn.Parameter(torch.randn(d_out, rank) * b_std)


class GatedLoRALinear(LoRALayer):
    """A frozen linear layer with a shared and a gated private LoRA branch (equation 4).

    Args:
        base: the frozen layer, W0 ``[d_out, d_in]`` and its bias.
        rank, lora_alpha: of each branch.
        form: ``branch`` adds the branches' products, ``factor`` their factors.
        private_std: standard deviation of the private B at the start.
        options: of LoRA.
    """

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        lora_alpha: float,
        form: Form = "branch",
        private_std: float = 0.01,
        options: LoRAOptions | None = None,
    ) -> None:
        super().__init__(rank, lora_alpha, options)
        self.base = base.requires_grad_(False)
        self.shared = LowRank(base.in_features, base.out_features, rank, 0.0)
        self.private = LowRank(base.in_features, base.out_features, rank, private_std)
        self.form = form

    def forward(self, x: Tensor, gate_logit: Tensor) -> Tensor:
        """``x`` ``[..., d_in]`` and the block's gate logit (scalar) to ``[..., d_out]``."""
        m = torch.sigmoid(gate_logit)
        shared, private = (self.shared.A, self.shared.B), (self.private.A, self.private.B)
        terms = gated_branches(shared, private, m, self.form)
        y: Tensor = self.base(x) + branches(self.dropout(x), *terms, scaling=self.scaling)
        return y


def gated_branches(
    shared: tuple[Tensor, Tensor], private: tuple[Tensor, Tensor], m: Tensor, form: Form
) -> list[Branch]:
    """The terms of equation 4, from (A_g, B_g), (A_p, B_p) and m: two LoRA branches, or one for the
    form ``factor``."""
    if form == "factor":
        A, B = (g + m * p for g, p in zip(shared, private, strict=True))
        return [(A, B, 1.0)]
    return [(*shared, 1.0), (*private, m)]


def alignment_weights(updates: Tensor | Params, eps: float = 1e-8) -> Tensor:
    """Equation 10: the aggregation weight of every update, by its cosine with their mean.

    Args:
        updates: ``[M, P]``, one flat update a client; or tensors ``[M, ...]`` by name.
        eps: added to both denominators.

    Returns:
        float64 ``[M]``, non-negative; the sum is 1 up to eps, or 0 if the mean update is 0.

    >>> alignment_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])).round(decimals=3)
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    dots, norms, mean_norm = products_with_mean(updates)
    alpha = _alignment(dots, norms, mean_norm, eps)
    return alpha / (alpha.sum() + eps)


def _alignment(dots: Tensor, norms: Tensor, mean_norm: Tensor, eps: float) -> Tensor:
    return (dots / (norms * mean_norm + eps)).clamp(min=0)


def leave_one_out_weights(
    updates: Tensor | Params, temperature: float, eps: float = 1e-8
) -> Tensor:
    """A softmax over cosine / ``temperature`` of every update with the mean of the others.

    ``updates`` as in `alignment_weights`; returns float64 ``[M]`` that sums to 1. A zero update
    gets weight 0.
    """
    # differences of products: float32 would not do where one update is far larger
    dots, norms, mean_norm = products_with_mean(updates, torch.float64)
    M = len(dots)
    if M == 1:
        return torch.ones_like(dots)
    others_dot = (M * dots - norms**2) / (M - 1)
    others_norm = ((M * mean_norm) ** 2 - 2 * M * dots + norms**2).clamp(min=0).sqrt() / (M - 1)
    scores = others_dot / (norms * others_norm + eps) / temperature
    # a zero update gets no weight; where all are zero, none does
    return torch.softmax(scores.masked_fill(norms == 0, -torch.inf), 0).nan_to_num(0.0)


@dataclass(frozen=True)
class FedSDG(Method):
    """FedSDG: theta_g (LoRA and head) is shared, theta_p and the gates are private.

    ``lambda1`` weighs the gates, ``lambda2`` theta_p; ``optimiser.lr`` is eta_g, ``lr_private``
    eta_p (None: eta_g) and ``lr_gate`` eta_m. ``gate`` fixes m, for all clients and blocks.
    """

    name: ClassVar[str] = "fedsdg"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "weights from each update's direction"
    sends_updates: ClassVar[bool] = True

    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    form: Form = "branch"
    private_init: Literal["normal", "zero"] = "normal"
    private_head: bool = False
    lambda1: Annotated[float, Ge(0), Le(1e6)] = 1e-4
    lambda2: Annotated[float, Ge(0), Le(1e6)] = 1e-4
    optimiser: Optimiser = field(default=Optimiser("adam", lr=1e-3, clip=1.0), kw_only=True)
    lr_private: LearningRate | None = None
    lr_gate: LearningRate = 1e-2
    gate: Annotated[float, Ge(0), Le(1)] | None = None  # None: learned, from 1/2
    aggregation: Literal["alignment", "uniform", "examples", "leave-one-out"] = "alignment"
    temperature: Annotated[float, Gt(0), Le(1e6)] = 0.1  # of leave-one-out
    eps: Annotated[float, Gt(0), Le(1)] = 1e-8

    def adapt(self, backbone: Backbone) -> nn.Module:
        model, blocks = backbone.model, require_blocks(backbone)
        m = torch.full((len(blocks),), 0.5 if self.gate is None else self.gate)
        a = torch.logit(m).clamp(-200, 200)  # finite; their sigmoids are 0 and 1 all the same
        model.register_parameter("gate_logits", nn.Parameter(a))

        def adapted(base: nn.Linear, block: int) -> nn.Module:
            layer = GatedLoRALinear(
                base, self.rank, self.lora_alpha, self.form, self._private_std, backbone.lora
            )
            nn.init.zeros_(layer.private.B)  # each client draws its own; without, it is the base
            layer.register_forward_pre_hook(_gate_of(model, block))
            return layer

        adapt_projections(backbone, self.rank, adapted)
        return train_head_and(backbone, lambda n: n == "gate_logits" or _branch(n) is not None)

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.private_head:
            require_head(task, "fedsdg.private_head")

    @property
    def averages(self) -> bool:
        return self.aggregation in ("uniform", "examples")

    @property
    def weighs_by_mean(self) -> bool:
        return self.aggregation == "alignment"

    def own_weight(self, task: Task, upload: Params, mean: Params) -> Tensor:
        """alpha_k."""
        own, all_ = flat(upload).double(), flat(mean).double()
        return _alignment(own @ all_, own.norm(), all_.norm(), self.eps)

    def is_private(self, task: Task, name: str) -> bool:
        if name == "gate_logits" or _branch(name) == "private":
            return True
        return self.private_head and _branch(name) is None

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        private = {name: value for name, value in task.state.items() if self.is_private(task, name)}
        for index, name in enumerate(private):
            if _branch(name):
                std = self.rank**-0.5 if name.endswith(".A") else self._private_std
                drawn = random.normal(random.fold_in(key, index), tuple(private[name].shape), std)
                private[name] = drawn.to(private[name].device)
        return private

    @property
    def _private_std(self) -> float:
        return 0.01 if self.private_init == "normal" else 0.0

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def lr(name: str) -> float | None:
            if name == "gate_logits":
                return self.lr_gate if self.gate is None else None
            if self.lr_private is not None and self.is_private(task, name):
                return self.lr_private
            return self.optimiser.lr

        def penalty(state: Params) -> Tensor:
            m = torch.sigmoid(state["gate_logits"])
            theta_p = {
                n: v for n, v in state.items() if self.is_private(task, n) and n != "gate_logits"
            }
            return self.lambda1 * m.sum() + self.lambda2 * flat(theta_p).square().sum()

        return train(task, state, batches, context, self.optimiser, lr=lr, penalty=penalty)

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return subtract(trained, received)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        weights = cohort.limited(self._weights(uploads, cohort))
        return add(server, weighted_sum(uploads, weights))

    def _weights(self, uploads: Params, cohort: Cohort) -> Tensor:
        if self.aggregation == "examples":
            return cohort.shares
        if self.aggregation == "uniform":
            return cohort.uniform
        if self.aggregation == "alignment":
            return alignment_weights(uploads, self.eps)
        return leave_one_out_weights(uploads, self.temperature, self.eps)

    def client_weights(self, cohort: Cohort) -> Tensor:
        return cohort.shares if self.aggregation == "examples" else cohort.uniform

    def global_state(self, task: Task, server: Server) -> Params | None:
        if self.private_head:
            return None
        return {name: server.get(name, torch.zeros_like(v)) for name, v in task.state.items()}

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """The client's gates ``[L]``."""
        return {"gates": torch.sigmoid(state["gate_logits"])}

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        factors, scaling = {}, task.backbone.lora.scaling(self.rank, self.lora_alpha)
        for block, paths in enumerate(task.backbone.blocks):
            m = torch.sigmoid(state["gate_logits"][block])
            for path in paths:
                shared, private = (
                    (state[f"{path}.{branch}.A"], state[f"{path}.{branch}.B"])
                    for branch in ("shared", "private")
                )
                A, B, weight = fuse(*gated_branches(shared, private, m, self.form))
                factors[path] = (A, B * (scaling * weight))
        return factors


def _branch(name: str) -> str | None:
    """``shared`` or ``private`` for a LoRA factor's name, None for any other."""
    for branch in ("shared", "private"):
        if name.endswith((f".{branch}.A", f".{branch}.B")):
            return branch
    return None


def _gate_of(model: Any, block: int) -> Callable[[nn.Module, Any], Any]:
    """A hook that hands a layer its block's gate logit, as it stands in the current state."""
    return lambda layer, inputs: (*inputs, model.gate_logits[block])
