"""FedRep: every client first fits its own head to the shared body, then the body to that head.

Exploiting Shared Representations for Personalized Federated Learning. L. Collins, H. Hassani,
A. Mokhtari, S. Shakkottai. ICML 2021.

phi: the representation, shared; h_k: client k's head.                          (Algorithm 1)
    client k:  h_k   <- GRD(f_k(h_k, phi), h_k, alpha)      tau times, phi as received
               phi_k <- GRD(f_k(h_k, phi), phi, alpha)      once, h_k as it is now
    server:    phi   <- mean of the phi_k

Differs from the paper:
- The server weighs clients by their examples, as FedAvg does; the paper takes the plain mean.
- A pass over the client's data stands for one update: tau is ``head_passes``, and the body takes
  the passes of the round.
- All h_k start from the model's own head.
- In both trainings batch normalisation uses each batch's statistics and moves the running ones, of
  the part that stands still, too.
- Beyond its Algorithm 1 the paper's text could not be read here. So it is not verified how many
  passes its experiments take, and with which momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..layers.parts import check_split, matching
from ..method import FineTuning
from ..optim import ClientContext, LearningRate, Passes, batches_of_passes, train
from ..params import Batch, Params
from ..task.task import Task


@dataclass(frozen=True)
class FedRep(FineTuning):
    """Private heads (``private``, h), trained alone for ``head_passes`` (tau) before the body;
    what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedrep"
    family: ClassVar[str] = "split"
    needs_only_mean: ClassVar[bool] = True

    private: tuple[str, ...] | None = ()  # patterns of module paths; (): the head; None: nothing
    head_passes: Passes = 10  # over the client's data
    lr_private: LearningRate | None = None  # of the head; None: the optimiser's

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        check_split(task, "private", self.private)

    def is_private(self, task: Task, name: str) -> bool:
        return matching(task, self.private)(name)

    def steps_on_batch(self, passes: int) -> int:
        return 1 + math.ceil(self.head_passes / passes)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        head = matching(task, self.private)
        first = batches_of_passes(batches, context, self.head_passes)
        eta = self.optimiser.lr
        alpha = eta if self.lr_private is None else self.lr_private
        state, _ = train(
            task, state, first, context.subkey(1), self.optimiser,
            lr=lambda name: alpha if head(name) else None,
        )  # fmt: skip
        return train(
            task, state, batches, context, self.optimiser,
            lr=lambda name: None if head(name) else eta,
        )  # fmt: skip
