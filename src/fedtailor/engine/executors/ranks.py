"""Clients' work on several ranks: the first one hands items out, and does its own share.

A rank that has finished an item gets the next one, so ranks may differ in speed. Up to twice as
many items as a rank works on at a time are there, so that it needn't wait for the network. Only the
first rank has the run directory: a client's private tensors travel with its request, and back with
the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from queue import Queue
from threading import Lock, Thread
from typing import Any, Generic

from ...params import Params, same_tensors
from .process_group import ProcessGroup, Transfer
from .work import AnyItem, Executor

# what comes from a rank: an item with its result; what went wrong; None: it has no more
Results = Queue[tuple[AnyItem, Any] | BaseException | None]


class RankExecutor:
    """An executor on the first rank: ``inner`` runs its own share, `follow` the others'."""

    name = "ranks"

    def __init__(self, group: ProcessGroup, inner: Executor) -> None:
        self._group, self._inner = group, inner
        self._server: Params | None = None
        self._in_use = False

    @property
    def processes(self) -> int:
        return self._group.size * self._inner.processes

    @property
    def concurrency(self) -> int:
        return self._group.size * self._inner.concurrency

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        """(item, result of work ``name``), in the order in which they get ready."""
        self._in_use = True
        known = self._server is not None and same_tensors(self._server, server)
        self._group.broadcast((name, None if known else server))
        self._server = server
        queue, share = _SharedQueue(items), self._inner.concurrency
        first_items = list(islice(queue, share))
        feeders = [_RankFeeder(self._group, rank, queue) for rank in self._group.others]
        for feeder in feeders:  # something for everybody, before anybody has more
            feeder.give(share)
        # no more than this waits here: memory must not grow with the cohort
        results: Results[AnyItem] = Queue(2 * len(feeders))
        for feeder in feeders:
            Thread(target=feeder.run, args=(2 * share, results), daemon=True).start()
        busy = len(feeders)
        own = self._inner.map(name, server, chain(first_items, queue))
        while (mine := next(own, None)) is not None or busy:
            if mine is not None:
                yield mine
            while busy and (mine is None or not results.empty()):
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    busy -= 1
                else:
                    yield result
        self._in_use = False

    def close(self) -> None:
        """Have the others stop, unless they are in the middle: they end when this process does."""
        self._inner.close()
        if not self._in_use:
            self._group.broadcast(None)


def follow(group: ProcessGroup, inner: Executor) -> None:
    """On any other rank: have ``inner`` run what `RankExecutor` hands out, until that is closed."""
    server: Params = {}
    try:
        while (message := group.receive()) is not None:
            name, new_server = message
            server = server if new_server is None else new_server
            numbers: dict[int, int] = {}
            for item, result in inner.map(name, server, _received_items(group, numbers)):
                group.send_to(0, (numbers.pop(id(item)), result)).wait()
    finally:
        inner.close()


def _received_items(group: ProcessGroup, numbers: dict[int, int]) -> Iterator[Any]:
    """Items as they come; ``numbers`` gets theirs, by identity."""
    for number in count():
        if (item := group.receive_from(0)) is None:
            return
        numbers[id(item)] = number
        yield item


class _SharedQueue(Generic[AnyItem]):
    """Items that several threads take from."""

    def __init__(self, items: Iterable[AnyItem]) -> None:
        self._items, self._lock = iter(items), Lock()

    def __iter__(self) -> Iterator[AnyItem]:
        return self

    def __next__(self) -> AnyItem:
        with self._lock:
            return next(self._items)


class _RankFeeder(Generic[AnyItem]):
    """Sends one rank its items, and receives its results."""

    def __init__(self, group: ProcessGroup, rank: int, queue: _SharedQueue[AnyItem]) -> None:
        self._group, self._rank, self._shared = group, rank, queue
        self._assigned: dict[int, AnyItem] = {}  # what the rank has, by number
        self._count = 0
        self._transfers: deque[Transfer] = deque()  # of items that may not have arrived
        self._done = False  # the rank knows that there are no more

    def give(self, most: int) -> None:
        """Have the rank hold ``most`` items, or all that are left."""
        while not self._done and len(self._assigned) < most:
            item = next(self._shared, None)
            self._transfers.append(self._group.send_to(self._rank, item))
            if item is None:
                self._done = True
            else:
                self._assigned[self._count] = item
                self._count += 1

    def run(self, most: int, results: Results[AnyItem]) -> None:
        """Go on like that until all is done; put the ``results`` there."""
        try:
            self.give(most)
            while self._assigned:
                number, result = self._group.receive_from(self._rank)
                self._transfers.popleft().wait()  # the oldest: items arrive in order
                results.put((self._assigned.pop(number), result))
                self.give(most)
            for transfer in self._transfers:
                transfer.wait()
            results.put(None)
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            results.put(error)
