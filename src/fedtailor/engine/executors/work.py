"""What executors run: requests to clients, work on clients in three parts, and what comes back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch

from ...data.federation import pad_and_stack
from ...optim import ClientContext
from ...params import Batch, Params, moved, row
from ...torch_private import map_leaves
from ...uploads.secure.messages import Masks
from .captured import Arguments, Captured, Watched

# how PyTorch's messages begin about code that looks at values, or makes tensors of their number
_OF_VALUES = ("vmap: It looks like you're", "vmap: We do not support batching operators")


class Item(Protocol):
    """What some work is done with. Times are compared by ``size``."""

    @property
    def size(self) -> int: ...


AnyItem = TypeVar("AnyItem", bound=Item)


class Work(Protocol):
    """Something to be done with many items, each alone: in any order, in any process."""

    def one(self, server: Params, item: Any) -> Any:
        """The result for an item, given the server's state: plain values and tensors."""


@dataclass(frozen=True)
class Refusal:
    """A result that can't be used, and why. ``diverged``: the client trained to values that are
    not finite. ``told`` is what a server elsewhere hears, where that is not the reason. With
    ``lasts`` the same training ends the same."""

    reason: str
    diverged: bool = False
    told: str = ""
    lasts: bool = False


class Executor(Protocol):
    """What runs work: its name in a log, and how many processes it has at most."""

    @property
    def name(self) -> str | None: ...
    @property
    def processes(self) -> int:
        return 1

    @property
    def concurrency(self) -> int:
        """How many items are worked on at a time."""
        return 1

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        """(item, result of the work of that name), in any order. A result may be a `Refusal`, and
        an item may get none at all. Tensors of a result are valid until the next one is asked
        for."""

    def close(self) -> None:
        """End what was started."""
        return


Map = Callable[[str, Params, Iterable[Any]], Iterator[tuple[Any, Any]]]
"""The `Executor.map` of an executor."""


def counted(
    run: Map,
    on_result: Callable[[str, int], object],
    name: str,
    server: Params,
    items: Iterable[Any],
) -> Iterator[tuple[Any, Any]]:
    """As ``run``; calls ``on_result(name, done)`` after each result: how many items are done."""
    for done, result in enumerate(run(name, server, items), start=1):
        on_result(name, done)
        yield result


@dataclass(frozen=True)
class ClientRequest:
    """What the server asks of one client.

    ``private`` is the client's private state, None where it lies elsewhere. The client works on
    ``passes`` over its data, in batches drawn for ``purpose``, or on the first ``steps`` of these;
    ``size`` is how much work that is.
    """

    client: int
    round: int
    private: Params | None
    purpose: str
    passes: int
    lr_scale: float
    size: int
    steps: int | None = None  # None: all batches
    lr_slope: float = 0.0
    masks: Masks | None = None  # of its upload, where the server is to see sums alone
    clip: float | None = None  # of its update, where that differs from round to round


def client_requests(
    clients: Iterable[int],
    round_: int,
    purpose: str,
    passes: int,
    sizes: Mapping[int, int],
    private: Callable[[int], Params | None],
) -> Iterator[ClientRequest]:
    """The requests to ``clients`` in a round; ``private`` is read when a request is made."""
    for client in clients:
        yield ClientRequest(client, round_, private(client), purpose, passes, 1.0, sizes[client])


@dataclass(frozen=True)
class ClientInputs:
    """The arguments of a client function, and the ``seconds`` and ``cpu_seconds`` (of all cores)
    that it took to make them."""

    received: Params
    private: Params
    batches: list[Batch]
    context: ClientContext
    seconds: float
    cpu_seconds: float = 0.0


def looks_at_values(error: RuntimeError) -> bool:
    """Whether torch.func.vmap has refused code that looks at values."""
    return str(error).startswith(_OF_VALUES)


class ClientWork(ABC):
    """Work on clients in three parts: the one in the middle is a function of tensors."""

    @property
    def together(self) -> bool:
        """Whether there is anything to gain in `run` for several clients at once."""
        return True

    @property
    def device(self) -> torch.device:
        """Where `run` works."""
        return torch.device("cpu")

    @property
    def recordable(self) -> bool:
        """Whether `run` looks at no tensor's value."""
        return True

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an example, 0 if unknown, on a GPU, where batches are padded to one of
        a few shapes; else None."""
        return None

    @property
    def draws_ahead(self) -> bool:
        """Whether `draw` may run on another thread: it works nothing out."""
        return False

    def draw(self, request: ClientRequest) -> list[Batch] | None:
        """The client's batches, in memory, if `prepare` needs them."""
        return None

    @abstractmethod
    def prepare(
        self, server: Params, request: ClientRequest, drawn: list[Batch] | None = None
    ) -> ClientInputs:
        """What the client has and receives; ``drawn`` are what `draw` gives, if it was called."""

    def arguments(self, inputs: ClientInputs) -> Arguments:
        """What `run` takes, where it works."""
        batches = inputs.batches
        if self.most_tokens is not None:
            batches = [row(batch, 0) for batch in pad_and_stack([batches], self.most_tokens)]
        states = inputs.received, inputs.private, batches
        return *moved(states, self.device), inputs.context

    @abstractmethod
    def run(
        self, received: Params, private: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Any:
        """Pure; for one client, or under ``torch.func.vmap`` for several."""

    def watched(
        self, received: Params, private: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Any:
        """As `run`, which may look at the round's number."""
        return self.run(received, private, batches, Watched(*context))

    def to_host(self, outcome: Any) -> Any:
        """What `run` has returned, for one client or several, with what `finish` reads in memory:
        a GPU is waited for once."""
        return outcome

    @abstractmethod
    def finish(
        self, request: ClientRequest, inputs: ClientInputs, outcome: Any, cpu_seconds: float
    ) -> Any:
        """The result, from what `to_host` returned after ``cpu_seconds`` of all cores, those of
        `prepare` included."""

    def finish_all(
        self, chunk: Sequence[tuple[ClientRequest, ClientInputs]], outcomes: Any, seconds: float
    ) -> Iterator[tuple[ClientRequest, Any]]:
        """The result of each client of a ``chunk``, from what `to_host` returned for all, which
        took so many ``seconds`` of all cores for each."""
        for index, (request, inputs) in enumerate(chunk):
            outcome = map_leaves(itemgetter(index), outcomes)
            yield request, self.finish(request, inputs, outcome, inputs.cpu_seconds + seconds)

    def one(self, server: Params, item: ClientRequest) -> Any:
        """All three for one client."""
        return self.complete(item, self.prepare(server, item))

    def complete(
        self, request: ClientRequest, inputs: ClientInputs, captured: Captured | None = None
    ) -> Any:
        """The result, from what the client has and receives; ``captured`` may run it."""
        start, arguments = time.process_time(), self.arguments(inputs)
        if captured is None or not self.recordable:
            outcome = self.run(*arguments)
        else:
            outcome = captured(self.watched, arguments, id(self))
        outcome = self.to_host(outcome)
        cpu_seconds = inputs.cpu_seconds + time.process_time() - start
        return self.finish(request, inputs, outcome, cpu_seconds)
