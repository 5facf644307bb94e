"""How a client that never took part comes to a model of its own; the federation does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..data.config import LocalConfig
from ..data.federation import Federation
from ..errors import DivergedError
from ..method import Method
from ..params import Params
from .client import ClientEvaluation, Training
from .executors.work import ClientInputs, ClientRequest, client_requests


def join_requests(
    federation: Federation,
    local: LocalConfig,
    clients: Sequence[int],
    round_: int,
    rounds: int,
    private: Callable[[int], Params | None],
) -> Iterator[ClientRequest]:
    """The requests to ``clients`` that train alone after round ``round_``, as long as in so many
    ``rounds``."""
    passes = rounds * local.passes
    sizes = {client: federation.num_steps(client, local, passes) for client in clients}
    return client_requests(clients, round_, "join", passes, sizes, private)


@dataclass(frozen=True)
class Candidate:
    """A model that a new client may use, and ``sums`` ``[split, 3]`` of loss, hits and predictions
    on its held-out examples."""

    state: Params
    sums: NDArray[np.float64]


def join(
    training: Training,
    evaluation: ClientEvaluation,
    received: Params,
    shared: Params | None,
    request: ClientRequest,
) -> dict[str, Candidate]:
    """Fit what a method keeps by client to a new client: its row, its private state, and what is
    trained before use.

    Args:
        training, evaluation: the method's work, on a federation with the new client's examples.
        received: what `Method.send_new` gives.
        shared: the global model, or None.
        request: one of `join_requests`.

    Returns:
        ``fitted``; ``guess``, which is without the client's examples: its first private state and
        what the server can say of a client of which it knows nothing; ``global``, if there is one.

    Raises:
        DivergedError: the loss is no longer finite.
    """
    inputs = training.inputs(received, request)
    row = training.method.fit_row(training.task, inputs.received, [], inputs.context)
    states = {"guess": {**row, **inputs.private}}
    states["fitted"] = _fitted(training, evaluation, request, inputs)
    if shared is not None:
        states["global"] = shared
    return {
        name: Candidate(state, evaluation.sums(request.client, state))
        for name, state in states.items()
    }


def fits_anything(method: Method, private: Params) -> bool:
    """Whether a new client has anything to fit: a private state, a row at the server, or a model
    that is trained before use."""
    has_row = type(method).fit_row is not Method.fit_row
    return bool(private) or has_row or method.finetune_passes > 0


def _fitted(
    training: Training, evaluation: ClientEvaluation, request: ClientRequest, inputs: ClientInputs
) -> Params:
    method, private = training.method, inputs.private
    row = method.fit_row(training.task, inputs.received, inputs.batches, inputs.context)
    if private:
        update = training.complete(request, replace(inputs, received=row))
        if update.refusal is not None:
            raise DivergedError(f"{update.refusal.reason}; lower the learning rate or --passes")
        private = update.private
    if method.finetune_passes == 0:
        return {**row, **private}
    passes = method.finetune_passes
    request = replace(request, private=private, purpose="personalise", passes=passes)
    inputs = evaluation.inputs(row, request)
    return evaluation.run(inputs.received, inputs.private, inputs.batches, inputs.context)
