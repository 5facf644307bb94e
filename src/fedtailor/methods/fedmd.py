"""FedMD: clients learn from the mean of all clients' class scores on public examples.

FedMD: Heterogenous Federated Learning via Model Distillation. D. Li, J. Wang.
NeurIPS workshop on federated learning 2019 (arXiv 1910.03581).

Before the first round, client k trains its model f_k on the public examples, then on its own.
Round t, d_t a random part of the public examples (Algorithm 1):
    communicate:  client k sends f_k(x), x in d_t
    aggregate:    f~(x) = 1/c sum_k f_k(x)
    digest:       client k trains f_k towards f~ on d_t
    revisit:      client k trains f_k on its own examples

Models stay with their clients; what travels are scores, logits as in the paper. A round here begins
with the digest of the scores that the last cohort sent and ends with the scores on d_{t+1}: the
same order, in one exchange. In the first round nothing is digested.

Differs from the paper:
- The public part of the transfer learning is ``pretrain`` passes over the public examples with
  their labels, which must be the clients' own classes; by default there is none. The private part
  is the first round's training.
- The paper names no loss for the digest; the default here is the mean absolute error.
- All models have the same structure. With cohorts, f~ is the mean over the last one.
- Nothing is trained to convergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from .. import random
from ..errors import InputError
from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, Loss, Passes, train
from ..params import CACHED, Batch, Params, pick
from ..task.task import Task

_CONSENSUS = "public.consensus"  # f~, [m, classes]; [0, 0] before there is one
_DRAWN, _NEXT = "public.drawn", "public.next"  # keys of f~'s rows, and of those to score next
_TARGET = f"{CACHED}target"


@dataclass(frozen=True)
class FedMD(FineTuning):
    """FedMD; what is trained is chosen as in FedAvg.

    A round draws ``public_examples`` of the public ones (at most all), and a client takes them in
    batches of ``public_batch``.
    """

    name: ClassVar[str] = "fedmd"
    takes_parts: ClassVar[bool] = False
    family: ClassVar[str] = "mixture"
    released: ClassVar[str] = "its scores on public examples"
    needs_public: ClassVar[bool] = True
    changing_sizes: ClassVar[tuple[str, ...]] = (f"*{_CONSENSUS}",)

    public_examples: Annotated[int, Gt(0), Le(1_000_000_000)] = 5000
    public_batch: Annotated[int, Gt(0), Le(1_000_000)] = 256
    digest_epochs: Passes = 1
    digest_loss: Literal["l1", "mse", "kl"] = "l1"
    # passes over the labelled public examples, in round 1
    pretrain: Annotated[int, Ge(0), Le(10_000)] = 0

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.pretrain and cohort_size < num_clients:
            raise InputError(
                f"fedmd: pretrain = {self.pretrain} trains in the first round, in which "
                f"{cohort_size} of {num_clients} clients take part; allowed: 0, or all clients "
                f"in every round"
            )

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if not task.backbone.objective.has_classes:
            raise InputError(
                f"fedmd exchanges class scores of whole examples, which the task "
                f"{task.backbone.objective.name!r} does not have"
            )

    @property
    def needs_public_labels(self) -> bool:
        return self.pretrain > 0

    def is_private(self, task: Task, name: str) -> bool:
        return name in task.state

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        keys = {_DRAWN: random.fold_in(key, 0), _NEXT: random.fold_in(key, 1)}
        return {_CONSENSUS: torch.zeros(0, 0), **keys}

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        assert context.public is not None
        public, consensus = context.public, state[_CONSENSUS]
        f_k = pick(state, task.state)
        if self.pretrain and context.round == 1:
            pretraining = context.subkey(1)
            labelled = self._batches(_some(public, pretraining.key, None))
            f_k, _ = train(task, f_k, labelled * self.pretrain, pretraining, self.optimiser)
        if len(consensus):
            d_t = _some(public, state[_DRAWN], len(consensus))
            digest = self._batches({**d_t, _TARGET: consensus}) * self.digest_epochs
            towards = _towards(task, self.digest_loss)
            f_k, _ = train(task, f_k, digest, context.subkey(2), self.optimiser, loss=towards)
        f_k, loss = train(task, f_k, batches, context, self.optimiser)
        following = _some(public, state[_NEXT], self.public_examples)
        scores = [task.logits(f_k, batch) for batch in self._batches(following)]
        return {**f_k, "scores": torch.cat(scores)}, loss

    def _batches(self, examples: Batch) -> list[Batch]:
        parts = {name: torch.split(value, self.public_batch) for name, value in examples.items()}
        count = len(next(iter(parts.values())))
        return [{name: part[i] for name, part in parts.items()} for i in range(count)]

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        consensus = uploads["scores"].double().mean(0).float()
        return {
            _CONSENSUS: consensus,
            _DRAWN: server[_NEXT],
            _NEXT: random.fold_in(cohort.key, 0).to(server[_NEXT].device),
        }


def _some(public: Batch, key: Tensor, count: int | None) -> Batch:
    """``count`` of the public examples (None or too many: all), in the order that ``key`` draws."""
    size = len(next(iter(public.values())))
    rows = random.uniform(key, (size,)).argsort(stable=True)[:count]
    return {name: value.index_select(0, rows) for name, value in public.items()}


def _towards(task: Task, name: Literal["l1", "mse", "kl"]) -> Loss:
    """The digest's loss: how far a step's scores are from the target."""

    def loss(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
        scores, buffers = task.step_logits(state, batch, key)
        target = batch[_TARGET]
        if name == "l1":
            return F.l1_loss(scores, target), buffers
        if name == "mse":
            return F.mse_loss(scores, target), buffers
        log_p, log_q = torch.log_softmax(target, 1), torch.log_softmax(scores, 1)
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True), buffers

    return loss
