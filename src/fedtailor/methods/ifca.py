"""IFCA: the server keeps C models, and every client trains the one that suits its data best.

An Efficient Framework for Clustered Federated Learning. A. Ghosh, J. Chung, D. Yin,
K. Ramchandran. NeurIPS 2020.

Round t, client i of the cohort, F_i its training loss (Algorithm 1):
    j^ = argmin_j F_i(theta_j),   s_i = one-hot(j^)
    theta_i <- theta_j^ - gamma grad F_i(theta_i), step by step;   up: theta_i, s_i
Server:
    model averaging:     theta_j <- sum_i s_ij theta_i / sum_i s_ij
    gradient averaging:  theta_j <- theta_j - gamma / m sum_i s_ij g_i

A model that nobody chose stays as it is.

Differs from the paper:
- Clients weigh by their examples, so that C = 1 is FedAvg.
- Gradient averaging takes the change of a client's whole local training for -gamma g_i, which it is
  where that is one step over all the client's examples.
- F_i is the mean over the round's batches, in evaluation mode. Among models of equal loss a client
  draws one (LoRA without a head starts from C models that give the same scores).
- The first of the C models is the one that every other method starts from. The others are drawn
  anew; pretrained models and LoRA are copied, with noise. The paper starts several times and keeps
  the best run, or trains one model for some rounds first.
- In use a client has the model it chose last; until it takes part for the first time, the first
  one. The paper chooses anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from .. import random
from ..errors import InputError
from ..layers.starts import diverse_inits, starts_from_copies
from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, train
from ..params import Batch, Params, add, add_prefix, row, stack, strip_prefix, subtract
from ..stacked import weighted_sum
from ..task.batch_norm import check_variances
from ..task.task import Task

_BANK = "bank."
_CHOICE = "own.choice"  # j^, int64; what is sent up is its one-hot form


@dataclass(frozen=True)
class IFCA(FineTuning):
    """IFCA with ``clusters`` (C) models; what is trained is chosen as in FedAvg.

    ``jitter``: the noise of copied models over a tensor's root mean square.
    """

    name: ClassVar[str] = "ifca"
    family: ClassVar[str] = "cluster"
    released: ClassVar[str] = "the model that a client chose"
    beside_update: ClassVar[tuple[str, ...]] = ("clusters",)

    clusters: Annotated[int, Gt(0), Le(1000)] = 2
    averaging: Literal["models", "gradients"] = "models"
    jitter: Annotated[float, Ge(0), Le(1e6)] = 0.1

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.clusters > num_clients:
            raise InputError(
                f"ifca: clusters = {self.clusters}; allowed: 1 to the {num_clients} clients"
            )

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.clusters > 1 and self.jitter == 0 and starts_from_copies(task):
            raise InputError(
                f"ifca: jitter = 0 makes {self.clusters} equal copies, of which no client prefers "
                "one; allowed: a positive jitter, or clusters = 1"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name == _CHOICE

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {_CHOICE: torch.zeros((), dtype=torch.int64)}

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return add_prefix(diverse_inits(task, self.clusters, self.jitter, key), _BANK)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        losses = self._losses(task, state, batches)  # F_i, [C]
        lots = random.uniform(context.subkey(1).key, (self.clusters,))
        choice = torch.where(losses == losses.min(), lots, -1.0).argmax()  # j^
        theta = _chosen(state, choice)
        trained, loss = train(task, theta, batches, context, self.optimiser)
        sent = trained if self.averaging == "models" else subtract(trained, theta)
        s = (torch.arange(self.clusters, device=choice.device) == choice).float()
        return {**sent, "clusters": s, _CHOICE: choice}, loss

    def _losses(self, task: Task, state: Params, batches: Sequence[Batch]) -> Tensor:
        """F_i of every model, ``[C]``: the mean over the real examples of ``batches``."""
        models = [_model(state, j) for j in range(self.clusters)]
        totals: list[Tensor] = [torch.zeros((), device=task.device)] * self.clusters
        count = torch.zeros((), device=task.device)
        for batch in batches:
            with torch.no_grad():
                scores = [task.scores(model, batch)[0] for model in models]
            weight = batch.get("weight", torch.ones_like(scores[0].loss))
            totals = [t + (s.loss * weight).sum() for t, s in zip(totals, scores, strict=True)]
            count = count + (scores[0].count * weight).sum()
        return torch.stack(totals) / count.clamp(min=1e-9)

    def unchanged(self, task: Task, server: Server, upload: Params) -> Params:
        moved = self.averaging == "gradients"
        theta = {} if moved else _chosen(server, upload["clusters"].argmax())
        return super().unchanged(task, theta, upload)

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        s = upload["clusters"]
        if not ((s == 0) | (s == 1)).all() or s.sum() != 1:
            raise InputError(f"clusters = {s.tolist()}; allowed: 1 for one model, 0 for all others")
        moved = self.averaging == "gradients"
        check_variances(upload, _chosen(received, s.argmax()) if moved else {})

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        sent = {name: value for name, value in uploads.items() if name != "clusters"}
        weights = cohort.shares[:, None] * uploads["clusters"].double().cpu()  # p_i s_ij, [c, C]
        models = []
        for j, share in enumerate(weights.sum(0)):
            theta = _model(server, j)
            if self.averaging == "gradients":
                theta = add(theta, weighted_sum(sent, weights[:, j]))
            elif share > 0:
                theta = weighted_sum(sent, weights[:, j] / share)
            models.append(theta)
        return add_prefix(stack(models), _BANK)

    def inference_params(self, task: Task, state: Params) -> Params:
        return _chosen(state, state[_CHOICE])

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        return {"cluster": state[_CHOICE]}


def _model(state: Params, j: int) -> Params:
    return row(strip_prefix(state, _BANK), j)


def _chosen(state: Params, choice: Tensor) -> Params:
    """theta_j of a ``choice`` j that may differ by client under vmap."""
    return {n: v.index_select(0, choice[None])[0] for n, v in strip_prefix(state, _BANK).items()}
