"""FedBABU: the head stays as drawn while the body is trained; clients fine-tune in the end.

FedBABU: Toward Enhanced Representation for Federated Image Classification. J. Oh, S. Kim, S. Yun.
ICLR 2022.

theta_ext: the body; theta_cls: the head, never changed in training.
    client k:   theta_ext,k <- theta_ext - eta grad_ext l_k(theta_ext, theta_cls)
    server:     theta_ext   <- sum_k (n_k / n) theta_ext,k
    in use:     the head, the body or both <- some more steps on the client's data, thrown away

Differs from the paper:
- The head is not sent: everybody has it from the start.
- The abstract fine-tunes the head, which is the default; the paper also compares body and both.
  ``finetune_passes`` counts passes over the client's data.
- n is the number of examples of the round's cohort.
- The frozen head is the one that the model comes with; the paper's is drawn at random, as that of
  a pretrained backbone for a new task is.
- Equation numbers are left out: only the paper's abstract could be read here. So it is not verified
  that its fine-tuning takes five epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..layers.parts import check_split, matching
from ..method import FineTuning, Server
from ..optim import ClientContext, LearningRate, Passes, train
from ..params import Batch, Params, split
from ..task.task import Task


@dataclass(frozen=True)
class FedBABU(FineTuning):
    """FedAvg of the body under a ``frozen`` head; what is trained is chosen as in FedAvg. Before a
    client uses it, it fine-tunes the part ``finetune_part``."""

    name: ClassVar[str] = "fedbabu"
    family: ClassVar[str] = "split"
    needs_only_mean: ClassVar[bool] = True

    frozen: tuple[str, ...] = ()  # patterns of module paths: the part theta_cls; (): the head
    finetune_part: Literal["head", "body", "all"] = "head"
    finetune_passes: Passes = 5
    finetune_lr: LearningRate = 1.0  # times the local learning rate

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        check_split(task, "frozen", self.frozen)

    def num_trained(self, task: Task) -> int:
        head = matching(task, self.frozen)
        return sum(task.state[name].numel() for name in task.trained if not head(name))

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        # the head is not in the state: a forward pass then takes it from the model as it began
        return split(task.state, matching(task, self.frozen))[1]

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        head = matching(task, self.frozen)
        rate = self.finetune_lr * self.optimiser.lr

        def lr(name: str) -> float | None:
            chosen = self.finetune_part == "all" or head(name) == (self.finetune_part == "head")
            return rate if chosen else None

        return train(task, {**task.state, **state}, batches, context, self.optimiser, lr=lr)[0]

    def global_state(self, task: Task, server: Server) -> Params | None:
        return {**task.state, **server}
