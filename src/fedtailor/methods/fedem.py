"""FedEM: every client's data are a mixture of M distributions, each with a model that all share.

Federated Multi-Task Learning under a Mixture of Distributions. O. Marfoq, G. Neglia, A. Bellet,
L. Kameni, R. Vidal. NeurIPS 2021.

Round k, client t, examples i of n_t, l the loss (Algorithm 1):
    E-step:  q_i(m) ~ pi_tm exp(-l(h_m(x_i), y_i)), which sums to 1 over the m             (9)
    M-step:  pi_tm <- 1/n_t sum_i q_i(m)                                                  (10)
             theta_tm <- theta_m - eta grad 1/b sum_i q_i(m) l(h_m(x_i), y_i), step by step
    up: all theta_tm
Server:
    theta_m <- sum_t (n_t / n) theta_tm
In use, client t:
    log sum_m pi_tm softmax(h_m(x))

Differs from the paper:
- q comes from the received models in evaluation mode, and pi averages it over the round's batches.
- For language models an example is a whole text: the loss in q is the sum over its tokens. The
  prediction mixes every token's distributions by pi alone.
- The first model is the one that every other method starts from, so that M = 1 is FedAvg. The
  others are drawn anew; pretrained models and LoRA are copied, with noise.
- A client that has never trained has equal weights pi; the paper first fits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from ..errors import InputError
from ..layers.lora import without_lora
from ..layers.starts import diverse_inits, starts_from_copies
from ..method import FineTuning, Portable, Server
from ..optim import ClientContext, Loss, train
from ..params import CACHED, Batch, Params, add_prefix, stack, strip_prefix
from ..task.task import Task

_BANK = "bank."
_PI = "own.pi"  # [M]
_Q = f"{CACHED}q"  # a batch's responsibilities [b, M] travel with it to the loss


@dataclass(frozen=True)
class FedEM(FineTuning):
    """FedEM with ``components`` (M) models; what is trained is chosen as in FedAvg.

    ``jitter``: the noise of copied models over a tensor's root mean square.
    """

    name: ClassVar[str] = "fedem"
    family: ClassVar[str] = "mixture"
    by_token: ClassVar[bool] = True
    needs_only_mean: ClassVar[bool] = True

    components: Annotated[int, Gt(0), Le(1000)] = 3
    jitter: Annotated[float, Ge(0), Le(1e6)] = 0.1

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.components > 1 and self.jitter == 0 and starts_from_copies(task):
            raise InputError(
                f"fedem: jitter = 0 makes {self.components} equal copies, which would all learn "
                "the same; allowed: a positive jitter, or components = 1"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name == _PI

    def num_trained(self, task: Task) -> int:
        return self.components * super().num_trained(task)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {_PI: torch.full((self.components,), 1 / self.components)}

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return add_prefix(diverse_inits(task, self.components, self.jitter, key), _BANK)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        models, pi = self._models(state), state[_PI]
        batches_with_q = [
            {**batch, _Q: responsibilities(task, models, pi, batch)} for batch in batches
        ]  # (9)
        trained, losses = [], []
        for m, theta in enumerate(models):
            theta_tm, loss = train(
                task, theta, batches_with_q, context.subkey(m) if m else context, self.optimiser,
                loss=_weighted(task, m),
            )  # fmt: skip
            trained.append(theta_tm)
            losses.append(loss)
        bank = add_prefix(stack(trained), _BANK)
        return {**bank, _PI: _mean(batches_with_q)}, torch.stack(losses).sum()

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        mixed: Tensor | None = None
        for theta, log_pi in zip(self._models(state), state[_PI].log(), strict=True):
            part = log_pi + torch.log_softmax(task.logits(theta, batch), -1)
            mixed = part if mixed is None else torch.logaddexp(mixed, part)
        assert mixed is not None
        return mixed

    def portable(self, task: Task, state: Params) -> Portable:
        tensors = {"/pi": state[_PI]}
        for m, theta in enumerate(self._models(state)):
            tensors |= add_prefix(without_lora(task, theta), f"{m}/")
        return Portable("mixture", tensors)

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        return {"weights": state[_PI]}

    def _models(self, state: Params) -> list[Params]:
        bank = strip_prefix(state, _BANK)
        return [{name: v[m] for name, v in bank.items()} for m in range(self.components)]


def responsibilities(task: Task, models: Sequence[Params], pi: Tensor, batch: Batch) -> Tensor:
    """Equation 9: q ``[b, M]`` of a batch's examples, from M models and weights pi ``[M]``."""
    with torch.no_grad():
        losses = [task.scores(theta, batch)[0].loss for theta in models]
    return torch.softmax(pi.log() - torch.stack(losses, 1), 1)


def _weighted(task: Task, m: int) -> Loss:
    """The training loss with every example's loss times q(m)."""

    def loss(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
        scores, buffers = task.scores(state, batch, key)
        weighted = replace(scores, loss=batch[_Q][:, m] * scores.loss)
        return weighted.mean(batch.get("weight")), buffers

    return loss


def _mean(batches: Sequence[Batch]) -> Tensor:
    """Equation 10: the mean of q over the real examples, ``[M]``."""
    weights = [batch.get("weight", torch.ones_like(batch[_Q][:, 0])) for batch in batches]
    total = torch.stack([w @ batch[_Q] for w, batch in zip(weights, batches, strict=True)]).sum(0)
    return total / torch.stack([w.sum() for w in weights]).sum().clamp(min=1)
