"""One client's round: the place where private is cut from shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from .method import Method
from .optim import Context
from .params import Params, split
from .task import Batch, Task


def client_round(
    method: Method,
    task: Task,
    received: Params,
    private: Params,
    steps: Sequence[Batch],
    context: Context,
) -> tuple[Params, Params, Tensor]:
    """Train for one round: (what is sent up, the new private state, the mean loss)."""
    trained, loss = method.local(task, {**received, **private}, steps, context)
    kept, shared = split(trained, partial(method.is_private, task))
    return method.upload(task, received, shared), kept, loss
