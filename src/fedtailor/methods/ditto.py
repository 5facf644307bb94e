"""Ditto: a shared model trained as in FedAvg, and beside it a private one that is held near it.

Ditto: Fair and Robust Federated Learning Through Personalization. T. Li, S. Hu, A. Beirami,
V. Smith. ICML 2021.

    client k:  min_v  h_k(v; w*) = F_k(v) + lambda/2 ||v - w*||^2,
               w* the solution of the global problem
A round of client k, from the received w_t:
    w_k <- w_k - eta grad F_k(w_k), from w_k = w_t
    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w_t)), from the last round's v_k
    up: w_k - w_t
Server:
    w_{t+1} <- w_t + mean of the w_k - w_t

The personal model is v_k. State buffers (batch normalisation's running statistics) are two, too:
v_k's own, and w's, which are averaged. The training loss is that of v_k.

Differs from the paper:
- The server weighs clients by their examples, as FedAvg here does.
- lambda is the same for all clients; the paper also picks it for each on validation data. The
  default 1 is ours: the paper tunes it.
- Equation numbers are left out: the paper's text could not be read here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from torch import Tensor

from ..method import FineTuning
from ..optim import ClientContext, LearningRate, Passes, batches_of_passes, proximal, train
from ..params import Batch, Params, add_prefix, flat, pick, strip_prefix, subtract
from ..task.task import Task

_PERSONAL = "own."  # v_k stands in a client's state under this prefix


@dataclass(frozen=True)
class Ditto(FineTuning):
    """Ditto: w shared, v_k private; ``lam`` is lambda.

    ``private_passes`` and ``lr_private`` are for v_k: its passes over the client's data in a round
    (None: the round's), and its rate (None: the optimiser's).
    """

    name: ClassVar[str] = "ditto"
    family: ClassVar[str] = "regularised"
    needs_only_mean: ClassVar[bool] = True

    lam: Annotated[float, Ge(0), Le(1e6)] = 1.0
    private_passes: Passes | None = None
    lr_private: LearningRate | None = None

    def is_private(self, task: Task, name: str) -> bool:
        return name.startswith(_PERSONAL)

    def num_trained(self, task: Task) -> int:
        return 2 * super().num_trained(task)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return add_prefix(task.state, _PERSONAL)

    def steps_on_batch(self, passes: int) -> int:
        return 1 + math.ceil((self.private_passes or passes) / passes)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        received = pick(state, task.state)
        w, _ = train(task, received, batches, context, self.optimiser)
        w_t = pick(received, task.trained)
        rate = self.optimiser.lr if self.lr_private is None else self.lr_private
        v_k = strip_prefix(state, _PERSONAL)
        again = batches_of_passes(batches, context, self.private_passes or context.passes)
        v, loss = train(
            task, v_k, again, context.subkey(1), self.optimiser,
            lr=lambda name: rate, penalty=proximal(w_t, self.lam),
        )  # fmt: skip
        return {**w, **add_prefix(v, _PERSONAL)}, loss

    def inference_params(self, task: Task, state: Params) -> Params:
        return strip_prefix(state, _PERSONAL) or state

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """``distance``: the Euclidean distance of v_k from w over what is trained."""
        v, w = pick(strip_prefix(state, _PERSONAL), task.trained), pick(state, task.trained)
        return {"distance": flat(subtract(v, w)).norm()}
