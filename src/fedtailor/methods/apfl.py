"""APFL: every client predicts with a learned mixture of a private and the shared model.

Adaptive Personalized Federated Learning. Y. Deng, M. M. Kamani, M. Mahdavi. arXiv 2003.13461, 2020.

Client k, mixing weight a (the paper's alpha), each step on one batch:
    u   =  a v_k + (1 - a) w_k                                    (the paper writes v with a bar)
    w_k <- w_k - eta grad f(w_k)                                                  (Algorithm 1)
    v_k <- v_k - eta grad_v f(u),  grad_v f(u) = a grad f(u)                      (Algorithm 1)
and once a round, before the first step, with ``adaptive``:
    a   <- a - eta <v_k - w_k, grad f(u)>, kept within [0, 1]                     (section 4.2)
Server:
    w   <- mean of the w_k

The personal model is u with the client's v_k and the w that it last received. State buffers (batch
normalisation's running statistics): w's are averaged; v_k's are private, those of passes at u; in
use they are mixed as parameters are, so that a = 0 is FedAvg's model and a = 1 the local one. The
training loss is f(u).

Differs from the paper:
- The server weighs clients by their examples, as FedAvg here does.
- w_k and v_k share an optimiser; ``optimiser.clip`` bounds the norm of both gradients together.
- a starts at 0.5 for every client and moves only in rounds that the client takes part in.
- The paper's text could not be read here, only quotations from it: a's step, and that it takes the
  round's first batch, are this library's reading. Equation numbers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from ..method import FineTuning
from ..optim import ClientContext, LearningRate, scalar, train
from ..params import Batch, Params, add_prefix, pick, row, stack, strip_prefix, tree_map
from ..task.task import Task

_PERSONAL = "own."  # v_k stands in a client's state under this prefix
_MIX = "mix"  # and a beside it


@dataclass(frozen=True)
class APFL(FineTuning):
    """APFL: w shared, v_k and its weight private; ``mix`` is the paper's alpha, or its start.

    ``lr_mix`` (None: ``optimiser.lr``) is the rate of a.
    """

    name: ClassVar[str] = "apfl"
    family: ClassVar[str] = "mixture"
    needs_only_mean: ClassVar[bool] = True

    mix: Annotated[float, Ge(0), Le(1)] = 0.5
    adaptive: bool = True
    lr_mix: LearningRate | None = None

    def is_private(self, task: Task, name: str) -> bool:
        return name == _MIX or name.startswith(_PERSONAL)

    def num_trained(self, task: Task) -> int:
        return 2 * super().num_trained(task)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        mix = torch.tensor(self.mix, device=task.device)
        return {**add_prefix(task.state, _PERSONAL), _MIX: mix}

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        w, v = pick(state, task.state), strip_prefix(state, _PERSONAL)
        a = self._adapted(task, state, batches[0], context) if self.adaptive else state[_MIX]

        def both(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            w, v = row(state, 0), row(state, 1)
            f_w, buffers_w = task.loss(w, batch, key)
            fixed = {name: w[name].detach() for name in task.trained}
            f_u, buffers_v = task.loss({**v, **mixture(v, fixed, a)}, batch, key)
            return f_u + (f_w - f_w.detach()), stack([buffers_w, buffers_v])

        trained, loss = train(task, stack([w, v]), batches, context, self.optimiser, loss=both)
        return {**row(trained, 0), **add_prefix(row(trained, 1), _PERSONAL), _MIX: a}, loss

    def _adapted(self, task: Task, state: Params, batch: Batch, context: ClientContext) -> Tensor:
        """a after its step on one batch."""
        v, w = strip_prefix(state, _PERSONAL), pick(state, task.trained)

        def f(a: Tensor, batch: Batch) -> Tensor:
            return task.loss({**v, **mixture(v, w, a)}, batch, context.subkey(1).key)[0]

        rate = self.optimiser.lr if self.lr_mix is None else self.lr_mix
        a = state[_MIX]
        slope = torch.zeros_like(a)  # <v - w, grad f(u)>
        for part, share in task.parts(batch, context.micro_batch):
            slope = slope + torch.func.grad(f)(a, part) * share
        return (a - scalar(a, rate * context.lr_scale) * slope).clamp(0, 1)

    def inference_params(self, task: Task, state: Params) -> Params:
        if _MIX not in state:
            return state
        w = pick(state, task.state)
        return mixture(strip_prefix(state, _PERSONAL), w, state[_MIX])

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """The client's mixing weight."""
        return {_MIX: state[_MIX]}


def mixture(v: Params, w: Params, a: Tensor) -> Params:
    """u = a v + (1 - a) w for the names of ``w``; exactly w for a = 0 and v for a = 1.

    >>> mixture({"x": torch.ones(1)}, {"x": torch.zeros(1)}, torch.tensor(0.25))
    {'x': tensor([0.2500])}
    """
    return tree_map(lambda v, w: a * v + (1 - a) * w, pick(v, w), w)
