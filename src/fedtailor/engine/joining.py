"""How a client that never took part comes to a model of its own; the federation does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..data.config import LocalConfig
from ..data.federation import Federation
from ..errors import DivergedError
from ..method import Method
from ..params import Params, to_device
from .client import ClientEvaluation, ClientEvaluationResult, Training
from .executors.work import ClientInputs, ClientRequest, Refusal, client_requests


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
    on its held-out examples, with the ``metrics`` of each split."""

    state: Params
    sums: NDArray[np.float64]
    metrics: Sequence[Mapping[str, float | None]] = ()


def fits_anything(method: Method, private: Params) -> bool:
    """Whether a new client has anything to fit: a private state, a row at the server, or a model
    that is trained before use."""
    has_row = type(method).fit_row is not Method.fit_row
    return bool(private) or has_row or method.finetune_passes > 0


@dataclass(frozen=True)
class Joining:
    """The work of clients that have just joined: each fits to its own examples what a method keeps
    by client, its row, its private state, and what is trained before use. The model is evaluated
    and then dropped; the result is a `ClientEvaluationResult`. Requests are `join_requests`."""

    training: Training
    evaluation: ClientEvaluation

    def one(self, server: Params, item: ClientRequest) -> ClientEvaluationResult:
        return self.evaluation.scored(item.client, self.state(server, item), item.round)

    def state(self, server: Params, request: ClientRequest) -> Params:
        """What the client uses."""
        received = self.training.method.send_new(self.training.task, server, request.client)
        return self._fitted(request, self.training.inputs(received, request))[0]

    def candidates(
        self, received: Params, shared: Params | None, request: ClientRequest
    ) -> dict[str, Candidate]:
        """The models among which a client that has ``received`` what `Method.send_new` gives may
        choose: ``fitted``; ``guess``, which is without its examples: its first private state and
        what the server can say of a client of which it knows nothing; and ``global``, the
        ``shared`` one, if there is one. Raises DivergedError where the loss is not finite."""
        training, inputs = self.training, self.training.inputs(received, request)
        row = training.method.fit_row(training.task, inputs.received, [], inputs.context)
        states = {"guess": {**row, **inputs.private}}
        states["fitted"], refusal = self._fitted(request, inputs)
        if refusal is not None:
            raise DivergedError(f"{refusal.reason}; lower the learning rate or --passes")
        if shared is not None:
            states["global"] = shared
        names, found = self.evaluation.scoring.metrics.names, {}
        for name, state in states.items():
            scored = self.evaluation.scored(request.client, state)
            metrics = [dict(zip(names, one.values, strict=True)) for one in scored.metrics]
            found[name] = Candidate(state, scored.sums, metrics)
        return found

    def _fitted(
        self, request: ClientRequest, inputs: ClientInputs
    ) -> tuple[Params, Refusal | None]:
        """The state that a client uses, and why it can't be, if its numbers are not finite."""
        training, private, refusal = self.training, inputs.private, None
        method, passes = training.method, training.method.finetune_passes
        row = method.fit_row(training.task, inputs.received, inputs.batches, inputs.context)
        if private and inputs.batches:
            update = training.complete(request, replace(inputs, received=row))
            private, refusal = to_device(update.private, training.task.device), update.refusal
        if passes == 0:
            return {**row, **private}, refusal
        request = replace(request, private=private, purpose="personalise", passes=passes)
        return self.evaluation.used(row, request), refusal
