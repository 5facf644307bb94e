"""The nodes behind a Grid: who serves which client, and what they answer in time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from ..data.federation import Federation
from ..data.names import check_names
from ..data.table import Dataset, Images, Partition, Shares, Tokens
from ..errors import InputError, brief, say
from ..runs.base_model import difference
from ..runs.experiment import Experiment
from .border import read_info
from .codec import WireError, pack, words
from .messages import NodeInfo, NodeQuery, digest
from .patience import OutageError, PatientGrid

Seconds = Annotated[float, Gt(0), Le(1e8)]  # three years
Counts = list[int]  # of training, validation and test examples

_MOST_REASON = 1 << 12  # characters of an error of which the last line is read
# what Flower's own decoding ends in where a message is damaged
_UNREADABLE = (
    *(DecodeError, ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)
_MOST_NAMED = 20  # nodes that are refused
_FORM = ("num_clients", "task", "classes", "picture", "scale")  # what all nodes have in common
_PAUSE = 10.0  # seconds before a node that gave no good answer is asked again
_BRIEF = 10.0  # seconds for which an answer that does not come through holds up the others
_MOST_PULLS = 64  # at once


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds, and how much of a cohort it goes on with."""

    start: Seconds = 600.0  # until every client is there
    reply: Seconds = 3600.0  # for the answers to one round's orders
    query: Seconds = 120.0  # for a node that is new to say whom it serves
    least: Annotated[float, Gt(0), Le(1)] = 0.5  # of a cohort; with fewer replies the run stops
    poll: Annotated[float, Ge(0), Le(3600)] = 0.1  # between two looks
    outage: Seconds = 3600.0  # for Flower's SuperLink to answer again


class Nodes:
    """The nodes of a Grid, and ``node_of``: the node that serves a client."""

    def __init__(
        self,
        grid: Grid,
        timeouts: Timeouts,
        experiment: Experiment,
        sites: Mapping[int, range] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """``sites`` has the clients of each node whose key is known; None: keys are not known, and
        of several nodes that say they serve a client the first one does. ``names`` are what the
        clients are called, by number. ``model``, once it is set, is the `fingerprint` of the
        server's base model; nodes with another one are refused."""
        self._grid = PatientGrid(grid, timeouts.outage)
        self._pool = ThreadPoolExecutor(_MOST_PULLS, "pull")
        self._pulls: dict[str, Future[list[Message]]] = {}  # by the number of the message
        self._sites = sites
        self._names = names or ()
        self._timeouts = timeouts
        self._experiment = experiment
        self.model: Mapping[str, str] | None = None
        self._query = pack(NodeQuery(digest(experiment)))
        self.node_of: dict[int, int] = {}
        self.node_of_new: dict[int, int] = {}  # clients that join when the training is over
        self._known: dict[int, NodeInfo] = {}  # by node
        self._counted: dict[tuple[int, int], Counts] = {}  # by seed and client, for good
        self._refused: dict[int, tuple[float, str]] = {}  # by node: when, and why
        self._is_complete = False  # whether every client has a node
        self._form: dict[str, Any] | None = None  # of all nodes' data, once every client has one

    def close(self) -> None:
        """Wait for no answer any more."""
        self._grid.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(
        self, kind: str, contents: Iterable[tuple[int, RecordDict]], group: str, limit: float
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """By node: its answer, or in words why there is none in ``limit`` seconds. A message lives
        as long as it is waited for: an answer that is late never gets in."""
        waiting: dict[str, int] = {}
        for node, content in contents:
            number = self._grid.push(Message(content, node, kind, ttl=limit, group_id=group))
            if number:
                waiting[number] = node
            else:
                yield node, "the message could not be sent; the node may have left"
        end = time.monotonic() + limit
        while waiting:
            for number, answer in self._pull(list(waiting)):
                sender = waiting.pop(number, None)
                if sender is not None:
                    yield sender, answer
            if time.monotonic() > end:
                break
            if waiting:
                time.sleep(self._timeouts.poll)
        for number, node in waiting.items():
            self._pulls.pop(number, None)
            yield node, f"no reply in {limit:g} s"

    def _pull(self, numbers: Sequence[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """By the number of the message: an answer, or in words why it can't be read.

        Flower's own decoding may fail, and Flower's server forgets all messages of a pull before
        they are decoded. So each is pulled alone: those that can't be read take no other with them.
        Nor does a site that announces an answer and doesn't send it: its pull goes on beside.
        Raises InputError where Flower has ended the run."""
        for number in numbers:
            is_new = number not in self._pulls
            if is_new:
                self._pulls[number] = self._pool.submit(self._grid.pull, number)
            pull = self._pulls[number]
            if not wait([pull], _BRIEF if is_new else 0).done:
                continue
            del self._pulls[number]
            try:
                for reply in pull.result():
                    yield reply.metadata.reply_to_message_id, _content(reply)
            except OutageError as error:
                yield number, str(error)
            except InputError:
                raise
            except KeyError as error:
                yield number, words(f"Flower can't read its message: {error} of it is missing")
            except _UNREADABLE as error:
                yield number, words(f"Flower can't read its message: {error}")

    def wait_for_clients(self) -> None:
        """Wait until every client has a node; each thing that is missing is printed once. Raises
        InputError where some have none in time; nodes contradict each other."""
        end = time.monotonic() + self._timeouts.start
        printed: set[str] = set()
        while problems := self.refresh():
            for problem in problems:
                if problem not in printed:
                    say(f"waiting: {problem}")
            printed.update(problems)
            if self._is_complete:  # nodes that are refused hold up nobody else
                return
            if time.monotonic() > end:
                raise InputError("; ".join(problems))
            time.sleep(self._timeouts.poll)

    def refresh(self) -> list[str]:
        """See which nodes are there now; in words what is missing."""
        present, now = self._grid.node_ids(), time.monotonic()
        for gone in (self._known.keys() | self._refused.keys()) - present:
            self._known.pop(gone, None)
            self._refused.pop(gone, None)
        left = {node for node, (when, _) in self._refused.items() if now < when + _PAUSE}
        if self._sites is not None:
            for node in present - self._sites.keys():
                self._refuse(node, "its key is none of the sites'")
                left.add(node)
        new = [(node, self._query) for node in sorted(present - self._known.keys() - left)]
        limit = min(self._timeouts.start, self._timeouts.query)
        for node, content in self.ask(MessageType.QUERY, new, "census", limit):
            self._refused.pop(node, None)
            try:
                info = read_info(content, self._experiment)
                self._check(node, info)
                self._known[node] = info
            except InputError as error:
                self._refuse(node, str(error))
        self._refuse_other_models()
        self._refuse_outliers()
        infos = self.infos
        for node in infos.keys() & {node for node, _ in new}:
            self._counted.update(_counts(infos[node]))
        problems = [f"node {node}: {why}" for node, (_, why) in sorted(self._refused.items())]
        if more := problems[_MOST_NAMED:]:
            problems[_MOST_NAMED:] = [f"{len(more)} more nodes are refused"]
        self.node_of = {client: node for node, info in infos.items() for client in info.clients}
        self.node_of_new = {}
        for node, info in self._known.items():
            for client in info.new_clients:  # of several nodes the one that was there first
                self.node_of_new.setdefault(client, node)
        total = next((info.num_clients for info in infos.values()), 0)
        without_node = (client for client in range(total) if client not in self.node_of)
        missing = list(islice(without_node, 6))
        if missing or not total:
            called = [*self._names, *map(str, range(len(self._names), total))]
            listed = ", ".join(called[k] for k in missing[:5])
            listed += ", ..." if len(missing) > 5 else ""
            problems.append(f"no node serves clients {listed}" if missing else "there are no nodes")
        self._is_complete = bool(total) and not missing
        if self._is_complete and self._form is None:
            first = next(iter(infos.values()))
            self._form = {name: getattr(first, name) for name in _FORM}
        return problems

    @property
    def infos(self) -> dict[int, NodeInfo]:
        """By node: what it says of clients that take part."""
        return {node: info for node, info in self._known.items() if not info.new_clients}

    def _refuse(self, node: int, reason: str) -> None:
        self._refused[node] = time.monotonic(), reason
        self._known.pop(node, None)

    def _refuse_other_models(self) -> None:
        for node, info in [*self._known.items()] if self.model is not None else ():
            if (name := difference(self.model or {}, dict(info.model))) is not None:
                self._refuse(
                    node,
                    f"its base model is not the server's: {brief(name)} differs; give it the "
                    "server's files, or set model.revision",
                )

    def _refuse_outliers(self) -> None:
        """Refuse nodes whose data have another form than those of most nodes. Once every client has
        been there, the form of then holds."""
        forms = {node: {k: getattr(i, k) for k in _FORM} for node, i in self.infos.items()}
        usual = self._form or max(forms.values(), key=list(forms.values()).count, default={})
        for node, form in forms.items():
            if name := next((name for name in _FORM if form[name] != usual[name]), None):
                reason = f"its {name} is {form[name]!r}, other nodes' is {usual[name]!r}"
                self._refuse(node, reason)

    def _check(self, node: int, info: NodeInfo) -> None:
        """Raise WireError where a node contradicts its key, other nodes, or what was counted."""
        served = [*info.clients, *info.new_clients]
        if self._sites is not None and served != list(self._sites[node]):
            raise WireError(
                f"it says that it serves clients {served}; its key is for {list(self._sites[node])}"
            )
        for client in info.clients:
            for other, known in self.infos.items():
                if client in known.clients:
                    raise WireError(f"client {client} is served by node {other}, too")
        taken = {client for known in self._known.values() for client in known.new_clients}
        if twice := taken.intersection(info.new_clients):
            say(f"node {node}: new client {min(twice)} is served by another node, too")
        for place, now in _counts(info).items():
            if self._counted.get(place, now) != now:
                raise WireError(f"client {place[1]} no longer has the examples that it had")


def _content(reply: Message) -> RecordDict | str:
    if not reply.has_error():
        return reply.content
    lines = (reply.error.reason or "")[-_MOST_REASON:].strip().splitlines()
    return words(lines[-1] if lines else f"Flower's error {reply.error.code}")


def remote_federation(
    infos: Mapping[int, NodeInfo], seed: int, names: tuple[str, ...] | None = None
) -> Federation:
    """The clients of one seed: as many examples as they have, none of which is here. ``names`` are
    what the server calls them, by number."""
    counts, told, partitions = dict[int, Counts](), dict[int, Sequence[int]](), set[str]()
    for info in infos.values():
        counts |= {k: n for (at, k), n in _counts(info).items() if at == seed}
        for sizes in info.sizes:
            if sizes.seed == seed:
                partitions.add(sizes.partition)
                told |= zip(info.clients, sizes.labels, strict=False)  # none, or of each client
    first = next(iter(infos.values()))
    if sorted(counts) != list(range(first.num_clients)):
        raise WireError(f"some nodes know nothing of seed {seed}")
    train, validation, test = (
        _shares([counts[k][part] for k in sorted(counts)]) for part in (0, 1, 2)
    )
    if names is not None and len(names) != first.num_clients:
        raise InputError(f"{len(names)} names for {first.num_clients} clients: give one for each")
    digests = "over Flower: " + ", ".join(sorted({info.data for info in infos.values()}))
    if first.picture is None:
        inputs: Tokens | Images = Tokens(np.zeros(0, np.int64), np.zeros(1, np.int64))
    else:
        inputs = Images(np.zeros((0, *first.picture), np.uint8))
    labels = np.array([told[k] for k in sorted(told)]) if len(told) == len(counts) else None
    check_names("client", names or ())
    dataset = Dataset(inputs, 0, first.task, digests, classes=first.classes, scale=first.scale)
    partition = Partition(train, validation, test, ", ".join(sorted(partitions)), names=names)
    federation = Federation(dataset, partition, seed, remote=True, told_labels=labels)
    federation.check()
    return federation


def _counts(info: NodeInfo) -> dict[tuple[int, int], Counts]:
    return {
        (sizes.seed, client): counts
        for sizes in info.sizes
        for client, *counts in zip(
            info.clients, sizes.train, sizes.validation, sizes.test, strict=True
        )
    }


def _shares(sizes: Sequence[int]) -> Shares:
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    # numbers of rows that are elsewhere, and take no memory, whatever a client says of their number
    return Shares(np.broadcast_to(np.int64(0), offsets[-1:].tolist()), offsets)
