"""pFedMe: clients keep models near the shared one, which minimises their Moreau envelopes.

Personalized Federated Learning with Moreau Envelopes. C. T. Dinh, N. H. Tran, T. D. Nguyen.
NeurIPS 2020.

    client k:  F_k(w) = min_theta  f_k(theta) + lambda/2 ||theta - w||^2
A round of client k, from w_k = w_t, for each batch b:
    theta_k <- about argmin_theta  f(theta; b) + lambda/2 ||theta - w_k||^2, in K steps
    w_k <- w_k - eta lambda (w_k - theta_k)
    up: w_k
Server:
    w_{t+1} <- (1 - beta) w_t + beta mean of the w_k

lambda (w - theta) is the gradient of F_k. The personal model is theta_k of the last batch of the
client's last round; it is private. So are its running statistics of batch normalisation; w's are
those of passes at w_k, averaged without beta (beyond 1 it could make variances negative). The
training loss is f at w_k.

Differs from the paper:
- Only the cohort trains; in the paper all clients do, and the cohort is heard. The server weighs
  clients by their examples, as FedAvg here does.
- The K steps start at w_k for every batch. The paper leaves the start open.
- ``optimiser`` may be another than plain SGD: it takes lambda (w - theta) as the gradient.
- The inner rate is this library's: the paper tunes it.
- Equation numbers are left out: the paper's text could not be read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Gt, Le
from torch import Tensor

from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, Optimiser, proximal, train, with_gradient
from ..params import Batch, Params, add, add_prefix, pick, scale, split, strip_prefix, subtract
from ..stacked import weighted_sum
from ..task.task import Task

_PERSONAL = "own."  # theta_k stands in a client's state under this prefix


@dataclass(frozen=True)
class PFedMe(FineTuning):
    """pFedMe: w shared, theta_k private; ``lam`` is lambda, ``inner_steps`` K.

    ``optimiser.lr`` is eta, the rate of w; ``inner_optimiser`` takes the K steps of theta.
    """

    name: ClassVar[str] = "pfedme"
    takes_parts: ClassVar[bool] = False
    family: ClassVar[str] = "regularised"
    needs_only_mean: ClassVar[bool] = True

    lam: Annotated[float, Gt(0), Le(1e6)] = 15.0
    inner_steps: Annotated[int, Gt(0), Le(10_000)] = 5
    beta: Annotated[float, Gt(0), Le(1e6)] = 1.0
    optimiser: Optimiser = field(default=Optimiser("sgd", lr=0.005), kw_only=True)
    inner_optimiser: Optimiser = Optimiser("sgd", lr=0.01)

    def is_private(self, task: Task, name: str) -> bool:
        return name.startswith(_PERSONAL)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return add_prefix(task.state, _PERSONAL)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def envelope(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            detached = {name: value.detach() for name, value in state.items()}
            w, _ = split(detached, lambda name: name in task.trained)
            value, buffers = task.loss(detached, batch, key)
            theta, _ = train(
                task, {**strip_prefix(detached, _PERSONAL), **w}, [batch] * self.inner_steps,
                context._replace(key=key), self.inner_optimiser, penalty=proximal(w, self.lam),
            )  # fmt: skip
            gradient = scale(subtract(w, pick(theta, w)), self.lam)
            value = with_gradient(value, pick(state, w), gradient)
            return value, {**buffers, **add_prefix(theta, _PERSONAL)}

        return train(task, state, batches, context, self.optimiser, loss=envelope)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        mean = weighted_sum(uploads, cohort.shares)
        old, _ = split(server, lambda name: name in task.trained)
        new = pick(mean, old)
        return {**mean, **add(scale(old, 1 - self.beta), scale(new, self.beta))}

    def inference_params(self, task: Task, state: Params) -> Params:
        return strip_prefix(state, _PERSONAL) or state
