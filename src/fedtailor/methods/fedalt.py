"""FedALT: every client keeps training its own LoRA beside the frozen mean of all others' LoRAs.

FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA. J. Bian,
L. Wang, L. Zhang, J. Xu. AAAI 2026 (arXiv 2503.11880).

Client k, in every adapted layer, s = lora_alpha / rank:
    (w_L, w_R) = softmax(G x)                                          the mixer, a token at a time
    y = W0 x + w_L s B_L A_L x + w_R s B_R A_R x
    A_L, B_L, G, head <- gradient steps; A_R, B_R stay as they are
    up: the individual LoRA (A_L, B_L) and the head; G is never sent
Server, from the last individual LoRA of every client:
    A_R^k = 1 / (K - 1) sum_{j != k} A_L^j,   B_R^k = 1 / (K - 1) sum_{j != k} B_L^j

No client trains on from a mean. With ``mixing="fixed"`` w_L = weight and w_R = 1 - weight.

A client that joins afterwards receives the mean of all LoRAs as both of its own, and trains its
individual one, its head and its mixer as any client would.

Differs from the paper:
- This follows the paper's abstract and others' descriptions of it. The mixer's form, and that A and
  B are averaged each by itself, agree with a detailed account of the paper. The mixer's start (here
  G = 0, equal weights) is not verified.
- The paper's language models have no head; here a head goes with the individual LoRA.
- The mean is over those other clients that have trained; before any has, A_R = B_R = 0.
- A client that has never trained gets the mean over all that have, for both LoRAs and the head.
- The server keeps every client's individual LoRA, and sends it back together with the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.lora import Alpha, LoRALayer, Rank, adapt_projections, base_params, branches, fuse
from ..layers.parts import projections, train_head_and
from ..method import Cohort, Method, Portable, Server
from ..optim import ClientContext, LearningRate, Optimiser, train
from ..params import Batch, Params, add_prefix, constant, pick, strip_prefix
from ..stacked import weighted_sum
from ..task.backbone import Backbone, LoRAOptions
from ..task.step import StepModule
from ..task.task import Task

_BANK, _SUM = "bank.", "sum."
_INDIVIDUAL, _REST = (".individual_A", ".individual_B"), (".rest_A", ".rest_B")
_MIXER = ".mixer"


class MixedLoRALinear(LoRALayer, StepModule):
    """A frozen linear layer with an individual LoRA, trained, and the rest of the world's, frozen.

    Args:
        base: the frozen layer, W0 ``[d_out, d_in]`` and its bias.
        rank, lora_alpha, options: of each LoRA.
        weight: w_L; None: a mixer G ``[2, d_in]`` gives (w_L, w_R).
    """

    state_buffers = ("rest_A", "rest_B")

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        lora_alpha: float,
        weight: float | None,
        options: LoRAOptions | None = None,
    ) -> None:
        super().__init__(rank, lora_alpha, options)
        d_in, d_out = base.in_features, base.out_features
        self.base = base.requires_grad_(False)
        self.individual_A = nn.Parameter(torch.randn(rank, d_in) * rank**-0.5)
        self.individual_B = nn.Parameter(torch.zeros(d_out, rank))
        self.rest_A = nn.Buffer(torch.zeros(rank, d_in))
        self.rest_B = nn.Buffer(torch.zeros(d_out, rank))
        self.mixer = nn.Parameter(torch.zeros(2, d_in)) if weight is None else None
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., d_in]`` to ``[..., d_out]``."""
        w = self._weights(x)
        individual = self.individual_A, self.individual_B, w[..., :1]
        rest = self.rest_A, self.rest_B, w[..., 1:]
        update = branches(self.dropout(x), individual, rest, scaling=self.scaling)
        y: Tensor = self.base(x) + update
        return y

    def _weights(self, x: Tensor) -> Tensor:
        """(w_L, w_R), ``[..., 2]`` or, if they are fixed, ``[2]``."""
        if self.mixer is not None:
            return torch.softmax(F.linear(x, self.mixer), -1)
        assert self.weight is not None
        return constant((self.weight, 1 - self.weight), x.dtype, x.device)


@dataclass(frozen=True)
class FedALT(Method):
    """FedALT: two LoRAs a layer, and a private mixer of them.

    ``optimiser.lr`` is the learning rate of the individual LoRA and the head, ``lr_gate`` that of
    the mixer (None: the same).
    """

    name: ClassVar[str] = "fedalt"
    family: ClassVar[str] = "adapter"
    released: ClassVar[str] = "each client's adapter by itself"

    mixing: Literal["adaptive", "fixed"] = "adaptive"
    weight: Annotated[float, Ge(0), Le(1)] = 0.5  # w_L, with mixing = "fixed"
    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)
    lr_gate: LearningRate | None = None

    def adapt(self, backbone: Backbone) -> nn.Module:
        rank, alpha = self.rank, self.lora_alpha
        weight = self.weight if self.mixing == "fixed" else None
        adapt_projections(
            backbone,
            rank,
            lambda base, _: MixedLoRALinear(base, rank, alpha, weight, backbone.lora),
        )
        return train_head_and(backbone, lambda n: n.endswith((*_INDIVIDUAL, _MIXER)))

    def is_private(self, task: Task, name: str) -> bool:
        return name.endswith(_MIXER)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        sent = {n: v for n, v in task.state.items() if not n.endswith((*_REST, _MIXER))}
        bank = {n: v.new_zeros((num_clients, *v.shape)) for n, v in sent.items()}
        sums = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in sent.items()}
        seen = torch.zeros(num_clients, dtype=torch.float64, device=task.device)
        return {**add_prefix(bank, _BANK), **add_prefix(sums, _SUM), "seen": seen}

    def change_clients(self, task: Task, server: Server, num_clients: int) -> Server:
        bank = strip_prefix(server, _BANK)
        sums = {_SUM + n: v.double() for n, v in bank.items()}
        return {**server, **weighted_sum(sums, server["seen"])}

    def send(self, task: Task, server: Server, client: int) -> Params:
        received = _mean(task, server)
        seen, total = server["seen"][client], server["seen"].sum()
        for name, summed in strip_prefix(server, _SUM).items():
            last = server[_BANK + name][client]
            received[name] = torch.where(seen > 0, last, received[name])
            if name.endswith(_INDIVIDUAL):
                others = (summed - seen * last) / (total - seen).clamp(min=1)
                received[_rest(name)] = others.to(last.dtype)
        return received

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def lr(name: str) -> float:
            return self.lr_gate if self.lr_gate and name.endswith(_MIXER) else self.optimiser.lr

        return train(task, state, batches, context, self.optimiser, lr=lr)

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return {name: value for name, value in trained.items() if not name.endswith(_REST)}

    def unchanged(self, task: Task, server: Server, upload: Params) -> Params:
        return super().unchanged(task, _mean(task, server), upload)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        rows = torch.tensor(cohort.clients, device=server["seen"].device)
        new = {"seen": server["seen"].index_fill(0, rows, 1.0)}
        for name, value in uploads.items():
            bank = server[_BANK + name].index_copy(0, rows, value)  # [K, ...]
            new[_BANK + name] = bank
            new |= weighted_sum({_SUM + name: bank.double()}, new["seen"])
        return new

    def send_new(self, task: Task, server: Server, client: int) -> Params:
        mean = _mean(task, server)
        rest = {_rest(name): value for name, value in mean.items() if name.endswith(_INDIVIDUAL)}
        return {**mean, **rest}

    def fit_row(
        self, task: Task, received: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        if not batches:
            return received
        trained, _ = self.local(task, {**task.state, **received}, batches, context.subkey(1))
        return pick(trained, received)

    def global_state(self, task: Task, server: Server) -> Params | None:
        return {**task.state, **self.send_new(task, server, 0)}

    def _scaling(self, task: Task) -> float:
        return task.backbone.lora.scaling(self.rank, self.lora_alpha)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        if self.mixing == "adaptive":
            return {}  # the weights depend on the input: no single adapter does the same
        s, factors = self._scaling(task), {}
        for path in projections(task.backbone):
            individual, rest = (
                (state[f"{path}.{which}_A"], state[f"{path}.{which}_B"])
                for which in ("individual", "rest")
            )
            A, B, weight = fuse((*individual, s * self.weight), (*rest, s * (1 - self.weight)))
            factors[path] = (A, B * weight)
        return factors

    def portable(self, task: Task, state: Params) -> Portable:
        if self.mixing == "fixed":
            return super().portable(task, state)
        tensors = base_params(task, state)
        for path in projections(task.backbone):
            for leaf in ("individual_A", "individual_B", "rest_A", "rest_B", "mixer"):
                tensors[f"{path}/{leaf}"] = state[f"{path}.{leaf}"]
        return Portable("lora_by_token", tensors, settings={"scaling": self._scaling(task)})


def _mean(task: Task, server: Server) -> Params:
    """The mean over all clients that have trained; before any has, the task's own tensors."""
    total = server["seen"].sum()
    means = {n: v / total.clamp(min=1) for n, v in strip_prefix(server, _SUM).items()}
    start = task.state
    return {n: torch.where(total > 0, v.to(start[n]), start[n]) for n, v in means.items()}


def _rest(name: str) -> str:
    """The other LoRA's name, from the individual LoRA's."""
    path, _, factor = name.rpartition(".individual_")
    return f"{path}.rest_{factor}"
