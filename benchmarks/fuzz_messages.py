"""Mutated messages between the server and the sites, of a small federation in this process."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedtailor.engine.config import EvaluateConfig
from fedtailor.engine.executors.work import ClientRequest
from fedtailor.engine.metrics import Metrics
from fedtailor.engine.prepare import blank_upload, upload_chain
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.flower import codec, messages
from fedtailor.flower.client import Site
from fedtailor.flower.executor import GridExecutor, RemoteStates
from fedtailor.flower.nodes import Nodes, Timeouts, remote_federation
from fedtailor.flower.schema import UploadSchema
from fedtailor.methods import METHODS
from fedtailor.params import Params, add_prefix, decode, encode, not_finite
from fedtailor.random import key
from fedtailor.runs.build import backbone_of, dataset_of, public_of, task_of
from fedtailor.runs.experiment import Experiment

from .mutations import Attempt, Change, RefusedError, cut, flipped, read, small_experiment, swapped

CLIENTS = 3
# the node, the kind of message, and what is made of the answer
Spoil = tuple[int, str, Callable[[RecordDict], RecordDict]]

_ANY = codec.Limits(1 << 30, 1 << 30, 1 << 30)
_RUN = 32 * "a"
_VALUES = (0.0, -1.0, 1e20, -1e38, float("nan"), float("inf"))


def wire(folder: Path) -> Attempt:
    """Unpack mutated messages; the checksum of most of them is right."""
    tensors = {"w": torch.randn(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    metrics = (messages.MetricValues((0.5, None)),) * 2
    results = (
        messages.ClientReply(0, payload=0, loss=0.5),
        messages.ClientReply(1, sums=((1.5, 3, 4), (2.5, 1, 4)), metrics=metrics),
        messages.ClientReply(2, error="no data", diverged=True),
    )
    content = codec.pack(messages.RoundReply("r", 3, "train", results), [tensors])
    limits = codec.Limits(1 << 16, 4, 1 << 16)

    def attempt(rng: random.Random) -> Change:
        changed, change = _changed(rng, content)
        read(lambda: codec.unpack(changed, messages.RoundReply, limits))
        return change

    return attempt


def answers(folder: Path, names: Sequence[str] = ()) -> Attempt:
    """Let one of three sites answer with a mutated message, in a round with its evaluations or when
    the server asks whom it serves. The run goes on, and what counts is finite."""
    servers = _servers(names, folder)

    def attempt(rng: random.Random) -> Change:
        kind = rng.choice(["query", "train", "train", "train", "personal", "global"])
        server, changes = rng.choice(servers), list[Change]()

        def change(content: RecordDict) -> RecordDict:
            changed, one = _changed(rng, content)
            changes.append(one)
            return changed

        node = rng.randrange(CLIENTS)
        server.nodes.forget(None if kind != "query" else (node, kind, change))
        refused = bool(server.nodes.refresh())
        if kind == "query" and not refused:
            remote_federation(server.nodes.infos, 0)
        if kind != "query":
            server.nodes.change = node, kind, change
            refused = server.trains()
        if refused or not changes:
            raise RefusedError
        return replace(changes[0], place=f"{kind} {changes[0].place}")

    return attempt


def requests(folder: Path, names: Sequence[str] = ()) -> Attempt:
    """Let a site work on a mutated message of the server. It says what is wrong in words, and a
    client that is refused keeps its states."""
    asked = [one for server in _servers(names, folder) for one in server.asked()]

    def attempt(rng: random.Random) -> Change:
        kind, content, work = rng.choice(asked)
        changed, change = _changed(rng, content)
        read(lambda: work(changed))
        return replace(change, place=f"{kind} {change.place}")

    return attempt


def _servers(names: Sequence[str], folder: Path) -> list[_Server]:
    """One a method; the network has no normalisation layers, which fedbn needs."""
    names = names or [name for name in METHODS if name != "fedbn"]
    return [_Server(name, folder / name) for name in names]


def _changed(rng: random.Random, content: RecordDict) -> tuple[RecordDict, Change]:
    """A message with a change of its head, its tensors or their names. Its checksum is right but in
    one of ten."""
    about, arrays = content["about"], content["payloads"]
    assert isinstance(about, ConfigRecord)
    assert isinstance(arrays, ArrayRecord)
    kind, head, names = (str(about[name]) for name in codec._TEXTS[:3])
    data = [array.data for array in arrays.values()]
    at = rng.randrange(len(data)) if data else 0
    way = rng.choice(
        ["head", "head", "text", "names", "bytes", "tensors", "tensors"][: None if data else 3]
    )
    if way == "head":
        value, change = swapped(rng, json.loads(head))
        head = json.dumps(value)
    elif way == "text":
        raw, change = rng.choice([flipped, cut])(rng, head.encode())
        head = raw.decode("utf-8", "surrogateescape" if rng.random() < 0.1 else "replace")
    elif way == "names":
        value, change = swapped(rng, json.loads(names))
        names = json.dumps(value)
    elif way == "bytes":
        data[at], change = rng.choice([flipped, cut])(rng, data[at])
    else:
        order = json.loads(names)[at]
        tensors, change = _other_tensors(rng, {name: decode(data[at])[name] for name in order})
        listed = json.loads(names)
        listed[at], names = list(tensors), ""
        data[at], names = encode(tensors), json.dumps(listed)
    texts = [kind, head, names]
    try:
        texts.append(codec._checksum(texts, data) if rng.random() < 0.9 else "0")
    except UnicodeEncodeError:
        texts.append("0")
    now: Any = {"schema": codec.SCHEMA, **dict(zip(codec._TEXTS, texts, strict=True))}
    parts = {str(k): Array("uint8", (len(one),), "safetensors", one) for k, one in enumerate(data)}
    packed = RecordDict({"about": ConfigRecord(now), "payloads": ArrayRecord(parts)})
    return packed, replace(change, place=f"{way} {change.place}")


def _other_tensors(rng: random.Random, tensors: Params) -> tuple[Params, Change]:
    """Tensors of which one has other values, another type, shape or name, or is not there."""
    if not tensors:
        return {"more": torch.zeros(2)}, Change("more")
    name = rng.choice(sorted(tensors))
    value, way = tensors[name], rng.randrange(8)
    if way == 0:
        return {n: v for n, v in tensors.items() if n != name}, Change("one less")
    if way == 1:
        return {**tensors, f"{name}.": value.clone()}, Change("one more")
    if way == 2:
        return {n if n != name else f"{n}\x1b[2J": v for n, v in tensors.items()}, Change("name")
    if way == 3:
        dtype = rng.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8])
        return {**tensors, name: value.to(dtype)}, Change("type")
    if way == 4:
        shape = rng.choice([(-1,), (*value.shape, 1), (1, *value.shape)])
        return {**tensors, name: value.reshape(shape)}, Change("shape")
    if way == 5 and value.dim():
        axis = rng.randrange(value.dim())
        size = rng.choice([0, 1, value.shape[axis] + 1])
        more = value.index_select(axis, torch.arange(size) % max(1, value.shape[axis]))
        return {**tensors, name: more}, Change("size")
    if not value.is_floating_point():
        return {**tensors, name: torch.full_like(value, rng.choice([0, 1, 255]))}, Change("values")
    if way == 6:
        return {n: 1e6 * v for n, v in tensors.items()}, Change("values")
    return {**tensors, name: torch.full_like(value, rng.choice(_VALUES))}, Change("values")


class _Nodes(Nodes):
    """The nodes of ``sites``, one a client, without a network between. An answer is computed once,
    and ``change`` is made to that of one node to one kind of message."""

    def __init__(self, sites: Sequence[Site], experiment: Experiment) -> None:
        """They are asked nothing yet."""
        super().__init__(cast(Any, self), Timeouts(), experiment)
        self.sites = sites
        self.change: Spoil | None = None
        self.sent: dict[str, tuple[int, RecordDict]] = {}  # the last message of a kind
        self._answers: dict[tuple[int, str], RecordDict] = {}

    def get_node_ids(self) -> Sequence[int]:
        """Return the nodes, as a Grid does."""
        return range(len(self.sites))

    def ask(
        self, kind: str, contents: Iterable[tuple[int, RecordDict]], group: str, limit: float
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Ask each node; yields their answers."""
        for node, content in contents:
            if kind != "query":
                kind = codec.unpack(content, messages.RoundRequest, _ANY)[0].kind
            self.sent[kind] = node, content
            if (node, kind) not in self._answers:
                site = self.sites[node]
                work = site.node_info if kind == "query" else site.work
                self._answers[node, kind] = work(content, _config(node))
            answer = self._answers[node, kind]
            if self.change is not None and self.change[:2] == (node, kind):
                answer = self.change[2](answer)
            yield node, answer

    def forget(self, change: Spoil | None) -> None:
        """Know nothing of the nodes, and make another ``change`` to their answers."""
        super().__init__(cast(Any, self), Timeouts(), self._experiment)
        self.change = change


class _Server:
    """The server of a small federation with one method, and its sites."""

    def __init__(self, name: str, folder: Path) -> None:
        """Let every site answer once."""
        small = small_experiment({name: METHODS[name]()})
        public = replace(small.data, skip=150, limit=20) if name == "fedmd" else small.public
        evaluate = EvaluateConfig(every=1, metrics=("macro_f1",), confusion=True)
        self.experiment = replace(small, rounds=7, evaluate=evaluate, public=public)
        self.folder, self.method = folder, self.experiment.methods[name]
        sites = [Site(self.experiment, folder / "sites") for _ in range(CLIENTS)]
        self.nodes = _Nodes(sites, self.experiment)
        self.nodes.refresh()
        federation = remote_federation(self.nodes.infos, 0)
        dataset = federation.dataset
        if self.experiment.has_public:
            own = public_of(self.experiment, dataset, None)
            federation = replace(federation, public=own)
        backbone = backbone_of(self.experiment, dataset, None, 0)
        self.federation = federation
        self.task = task_of(self.experiment, self.method, backbone, 0)
        self.first = self.method.init_client(self.task, 0, key(0, "client", 0))
        context = self.method, self.task, federation
        self.chain = upload_chain(*context, self.experiment.plan)
        self.schema = UploadSchema.of(*blank_upload(*context, self.chain))
        digest = messages.digest(self.experiment)
        self.blank = messages.RoundRequest(digest, _RUN, name, 0, 0, "train", ())
        self.trains()

    def trains(self) -> bool:
        """Run a round with its evaluations; whether an answer was refused, or an upload left out.
        Two of three sites are honest, so nothing ends the run."""
        refused = self.folder / "refused.jsonl"
        refused.unlink(missing_ok=True)
        done = next(self._rounds())
        if (name := not_finite(done.server)) is not None or len(done.cohort.clients) < 2:
            raise AssertionError(f"{name} is not finite, or {done.cohort.clients} are left")
        for one in done.evaluations:
            json.dumps((one.loss, one.accuracy, *one.metrics.values()), allow_nan=False)
        return refused.exists() or bool(done.notes)

    def asked(self) -> list[tuple[str, RecordDict, Callable[[RecordDict], None]]]:
        """Return what sites are asked, by its kind, and the work of the site that is asked."""
        todo = self._rounds()
        server = next(todo).server
        with contextlib.suppress(InputError):  # the sites answer as in the first round
            next(todo)
        requests = [ClientRequest(0, 1, None, "personalise", 0, 1.0, 0)]
        list(self._executor().map("keep", server, requests))
        kept = {path: path.read_bytes() for path in self.folder.rglob("client-*/*")}
        work, sites = partial(_work, self.folder, kept), self.nodes.sites
        asked = [
            (kind, content, partial(work, sites[node], _config(node)))
            for kind, (node, content) in self.nodes.sent.items()
        ]
        dataset = dataset_of(self.experiment, None, None)
        new = range(CLIENTS, CLIENTS + 1)
        site = Site(self.experiment, self.folder / "sites", clients=new, data=dataset)
        received = add_prefix(self.method.send_new(self.task, server, CLIENTS), "received/")
        shared = add_prefix(self.method.global_state(self.task, server) or {}, "global/")
        part = self.blank.experiment, _RUN, self.blank.label, 0
        requests = (messages.WireRequest(CLIENTS, 0, 0, 0),)
        head = messages.RoundRequest(*part, 1, "join", requests)
        content = codec.pack(head, [{**received, **shared}])
        return [*asked, ("join", content, partial(work, site, {}))]

    def _rounds(self) -> Iterator[Round]:
        executor = self._executor()
        return rounds(
            self.method, self.task, self.federation, self.experiment.plan, store=executor.states,
            make_executor=lambda works: executor, quorum=0.5,
        )  # fmt: skip

    def _executor(self) -> GridExecutor:
        return GridExecutor(
            self.method, self.task, self.federation, self.chain,
            RemoteStates(bool(self.first)), self.first, self.schema, self.nodes, Timeouts(),
            self.blank, self.folder, Metrics(self.experiment.evaluate),
        )  # fmt: skip


def _config(node: int) -> dict[str, Any]:
    """What tells a node which clients it serves."""
    return {"partition-id": node, "num-partitions": CLIENTS}


def _work(
    folder: Path, kept: Mapping[Path, bytes], site: Site, config: Mapping[str, Any],
    content: RecordDict,
) -> None:  # fmt: skip
    """Let a site do what it is asked. The files that it had are there again afterwards.

    Raises:
        InputError: what it says is wrong.
    """
    about = content.get("about")
    if isinstance(about, ConfigRecord) and about.get("kind") == messages.NodeQuery.__name__:
        site.node_info(content, config)
        return
    try:
        answer = site.work(content, config)
        results = codec.unpack(answer, messages.RoundReply, _ANY)[0].results
        errors = {result.client: result.error for result in results if result.error is not None}
        for error in errors.values():
            if "prints more" in error:
                raise AssertionError(error)
        now = {path: path.read_bytes() for path in folder.rglob("client-*/*")}
        if errors and len(errors) == len(results):
            if now != kept:
                raise AssertionError(f"files were changed, and yet: {errors}")
            raise InputError(min(errors.values()))
    finally:
        for path in folder.rglob("client-*/*"):
            if path not in kept:
                path.unlink()
        for path, before in kept.items():
            path.write_bytes(before)
