"""The clients' side: orders in, reports out; data and private states stay in this place."""

from __future__ import annotations

import hmac
import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from ..data import Data, Dataset
from ..data.federation import Federation
from ..engine.metrics import Metrics
from ..engine.prepare import as_trained, client_works, first_server, first_states, weighing
from ..errors import DivergedError, InputError, announce, unknown
from ..objectives.objective import MetricFunction
from ..params import Params, to_device
from ..runs.base_model import fingerprint
from ..runs.build import (
    backbone_of,
    check_ids,
    dataset_of,
    federation_of,
    named,
    public_of,
    task_of,
    with_new_clients,
)
from ..runs.experiment import Experiment
from ..runs.manifest import data_manifest
from ..store.committed import MOST_ROLL_BACKS
from ..store.files import write_json
from ..store.secret import secret_of
from ..task.backbone import Backbone
from .codec import FAULTS, Limits, named_payload, pack, unpack
from .masking import SiteMasks, signer
from .messages import (
    STEPS,
    ClientReply,
    NodeInfo,
    NodeQuery,
    RoundReply,
    RoundRequest,
    Sizes,
    WireRequest,
    digest,
)
from .session import Session
from .states import States

_MOST_RECEIVED = 1 << 34  # bytes of a message from the server
_REFUSED = 100  # the code of an error that says in words why nothing was done


def client_app(
    experiment: Experiment,
    folder: Path | str,
    *,
    clients: range | None = None,
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    tell_labels: bool = False,
) -> ClientApp:
    """What Flower runs at a node.

    Args:
        experiment: the same as the server's, but for where the data are.
        folder: where private states are kept.
        clients: the node serves these, and the data are theirs alone. None: the data are those of
            all clients; the node serves those whose number, divided by its ``num-partitions``,
            leaves ``partition-id``, or all without these keys in its configuration.
        data: instead of what ``experiment.data`` names.
        backbone: instead of what ``experiment.model`` names.
        metrics: functions for names in ``experiment.evaluate.metrics``.
        tell_labels: tell the server how many examples of each class each client has, which
            `fedtailor advise` makes use of. Otherwise it hears how many examples there are.
    """
    site = Site(experiment, Path(folder), clients, data, backbone, metrics, tell_labels)
    app = ClientApp()

    @app.query()
    def count(message: Message, context: Context) -> Message:
        return _answer(message, lambda: site.node_info(message.content, context.node_config))

    @app.train()
    @app.evaluate()
    def work(message: Message, context: Context) -> Message:
        return _answer(message, lambda: site.work(message.content, context.node_config))

    return app


def _answer(message: Message, content: Callable[[], RecordDict]) -> Message:
    try:
        return Message(content(), reply_to=message)
    except InputError as error:
        return Message(Error(_REFUSED, str(error)), reply_to=message)


@dataclass(eq=False)
class Site:
    """A place with data: what its clients do, loaded when first asked for and kept. The fields are
    the arguments of `client_app`."""

    experiment: Experiment
    folder: Path
    clients: range | None = None
    data: Data | Dataset | None = None
    backbone: Backbone | None = None
    metrics: Mapping[str, MetricFunction] | None = None
    tell_labels: bool = False

    def __post_init__(self) -> None:
        """Name what was given from Python in the experiment."""
        self.experiment = named(self.experiment, self.data, self.backbone)
        self._federations: dict[int, Federation] = {}
        self._session: Session | None = None

    def load(self) -> None:
        """Read the data and share them out, which the first `node_info` does otherwise. Raises
        InputError where they can't be used; the message may show what stands in them."""
        for seed in self.experiment.seeds:
            self._federation(seed)
        for omission in self._federation(self.experiment.seeds[0]).omissions:
            announce(omission.text)
        if self.experiment.secure_aggregation.is_active and not self._are_new:
            announce(f"the clients here sign with {signer(self.folder)}")

    @property
    def names(self) -> Sequence[str]:
        """What the column of clients here calls the clients of this place; none without one."""
        names = self._federation(self.experiment.seeds[0]).names or ()
        own = self.clients
        return names if own is None else names[own.start : own.stop]

    def node_info(self, content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
        """The answer to a `NodeQuery`; InputError where nothing can be answered."""
        question, _ = unpack(content, NodeQuery, Limits())
        self._check(question.experiment)
        self._load(self.experiment.seeds)
        dataset, seeds = self._dataset, self.experiment.seeds
        Metrics(self.experiment.evaluate, self.metrics or {}).check(dataset.objective)
        served = self._served(node)
        clients, new = ((), served) if self._are_new else (served, ())
        shape = dataset.picture
        node_info = NodeInfo(
            clients=tuple(clients),
            num_clients=self._federation(seeds[0]).num_clients,
            new_clients=tuple(new),
            task=dataset.task,
            classes=tuple(dataset.classes),
            picture=None if shape is None else tuple(map(int, shape)),
            data=self._keyed(dataset.digest),
            sizes=tuple(self._sizes(seed, clients) for seed in seeds),
            model=tuple(self._model.items()),
            scale=dataset.scale,
        )
        return pack(node_info)

    def work(self, content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
        """The answer to a `RoundRequest`; InputError where none of its clients can do it."""
        served = self._served(node)
        message, payloads = unpack(content, RoundRequest, partial(self._limits, served))
        folder = self._folder(message)
        session = None if message.kind in STEPS else self._opened(message)
        before = [
            (_trial_folder(self.folder / name, message.label, message.seed), up_to)
            for name, up_to in message.before
        ]
        if message.kind in ("keep", "join"):
            path = folder / f"data-{served.start}.json"  # other nodes may write to this folder
            write_json(path, data_manifest(self._federation(message.seed)))
            path.replace(folder / "data.json")
        results: list[ClientReply] = []
        sent: list[Params] = []
        for request in message.requests:
            upload: Params | None = None
            try:
                self._check_request(message, request, served)
                payload = named_payload(payloads, request.payload, "request")
                states = States(folder, before)
                masks = self._masks(message, request, folder, session)
                if session is None:
                    result = ClientReply(request.client, masking=masks)
                elif message.kind == "reweigh":
                    result, upload = session.reweighed(request.client, payload, states, masks)
                else:
                    with session.checked(message.kind, request.client, payload) as received:
                        result, upload = session.answer(message, request, received, states, masks)
            except (InputError, *FAULTS) as error:
                gone = isinstance(error, DivergedError)
                result = ClientReply(request.client, error=_told(error), diverged=gone)
            if upload is not None:
                result = replace(result, payload=len(sent))
                sent.append(upload)
            results.append(result)
        return pack(RoundReply(message.run, message.round, message.kind, tuple(results)), sent)

    def _masks(
        self, message: RoundRequest, request: WireRequest, folder: Path, session: Session | None
    ) -> Any:
        """What a client answers in a step of secure aggregation, or the masks of what it sends;
        None where it masks nothing."""
        experiment, weigh = self.experiment, None
        if session is not None:
            training, is_active = session.works.train, experiment.secure_aggregation.is_active
            sends = message.kind in ("train", "reweigh")
            if training.method.trains_alone or not is_active or not sends:
                return None
            weigh = weighing(training.method, training.federation, session.plan)
        most = experiment.rounds if experiment.privacy.by_clients else math.inf
        cohort = experiment.plan.cohort_size(self._federation(message.seed))
        two_passes = experiment.methods[message.label].weighs_by_mean
        secure, home = experiment.secure_aggregation, self.folder
        sides = SiteMasks(secure, home, folder, weigh, most, cohort, two_passes)
        return sides.step(message, request.client, request.order)

    def _limits(self, served: Collection[int], message: RoundRequest) -> Limits:
        """What a message to the clients ``served`` here may have, if it is of this experiment."""
        self._check_trial(message)
        asked = [request.client for request in message.requests]
        if len(set(asked)) < len(asked):
            raise InputError("a client is asked twice in one message")
        here = {*asked} & {*served}
        return Limits(payloads=len(here), bytes=_MOST_RECEIVED)

    def _check_trial(self, message: RoundRequest) -> None:
        self._check(message.experiment)
        if not 0 < message.round <= self.experiment.rounds:
            raise InputError(
                f"the server asks for round {message.round}; this experiment has rounds 1 to "
                f"{self.experiment.rounds}"
            )
        experiment = self.experiment
        if message.label not in experiment.methods:
            raise unknown("method", message.label, experiment.methods)
        if message.seed not in experiment.seeds:
            allowed = ", ".join(map(str, experiment.seeds))
            raise InputError(f"no seed {message.seed} here; allowed: {allowed}")
        if len(message.before) > MOST_ROLL_BACKS:
            raise InputError(
                f"the message lists {len(message.before)} earlier names of the run; allowed: at "
                f"most {MOST_ROLL_BACKS}"
            )
        for name in (message.run, *(name for name, _ in message.before)):
            if not re.fullmatch("[0-9a-f]{32}", name):
                raise InputError(f"a run's name has 32 hexadecimal digits; got {name!r}")
        self._load([message.seed])

    def _check_request(
        self, message: RoundRequest, request: WireRequest, served: Collection[int]
    ) -> None:
        if request.client not in served:
            raise InputError(f"client {request.client} is not served here")
        if message.kind == "join" and not self._are_new:
            raise InputError(f"client {request.client} is no new client of this place")
        last = message.round - 1 if message.kind == "train" else message.round
        if not 0 <= request.best <= request.base <= last:
            raise InputError(
                f"a request for round {message.round} that starts from round {request.base}, with "
                f"round {request.best} as the best one, is out of order"
            )

    @property
    def _are_new(self) -> bool:
        """Whether the clients here join when the training is over: their numbers begin at K."""
        total = self.experiment.split.clients
        return self.clients is not None and total is not None and self.clients.start >= total

    def _load(self, seeds: Iterable[int]) -> None:
        """What is wrong with the data may show what stands in them: it is said here alone."""
        try:
            for seed in seeds:
                self._federation(seed)
        except FAULTS as error:
            announce(error if isinstance(error, InputError) else repr(error))
            raise InputError("the data at this node can't be used; it prints why") from None

    def _check(self, experiment: str) -> None:
        if experiment != digest(self.experiment):
            raise InputError(
                "the server's experiment is not the one at this node; give both the same file"
            )

    def _served(self, node: Mapping[str, Any]) -> range:
        if self.clients is not None:
            return self.clients
        first, step = node.get("partition-id", 0), node.get("num-partitions", 1)
        if not isinstance(first, int) or not isinstance(step, int) or not 0 <= first < step:
            raise InputError(
                f"partition-id = {first!r}, num-partitions = {step!r}: must be whole numbers, the "
                "first smaller than the second"
            )
        return range(first, self._federation(self.experiment.seeds[0]).num_clients, step)

    def _sizes(self, seed: int, clients: Sequence[int]) -> Sizes:
        split = self._federation(seed).partition
        train, validation, test = (
            tuple(int(n) for n in part.sizes()[list(clients)])
            for part in (split.train, split.validation, split.test)
        )
        dataset, labels = self._dataset, list[list[int]]()
        if self.tell_labels and dataset.class_numbers is not None:
            counts = split.counts(dataset.class_numbers, dataset.num_classes, slice(None))
            labels = counts[list(clients)].tolist()
        told = tuple(map(tuple, labels))
        return Sizes(seed, self._keyed(split.digest), train, validation, test, told)

    def _keyed(self, digest: str) -> str:
        """What the server hears of a hash of the data. Under privacy of records it is keyed: who
        knows all of them but one could try out what that one is. The key stays at this place, so
        that equal data have equal hashes there."""
        if not self.experiment.privacy.of_records:
            return digest
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = bytes.fromhex(secret_of(self.folder))
        return hmac.new(key, digest.encode(), "sha256").hexdigest()

    @cached_property
    def _dataset(self) -> Dataset:
        return dataset_of(self.experiment, self.data, self.backbone)

    @cached_property
    def _model(self) -> dict[str, str]:
        """The `fingerprint` of the base model, which is fetched from the hub if need be."""
        config = self.experiment.model
        if (found := fingerprint(config)) is None:
            backbone_of(self.experiment, self._dataset, None, self.experiment.seeds[0])
            found = fingerprint(config)
        return found or {}

    @cached_property
    def _public(self) -> Dataset | None:
        if not self.experiment.has_public:
            return None
        return public_of(self.experiment, self._dataset, self.backbone)

    def _federation(self, seed: int) -> Federation:
        if seed not in self._federations:
            experiment = self.experiment
            if self.clients is not None and self._are_new:
                experiment = with_new_clients(experiment, self.clients)
            federation = federation_of(experiment, self._dataset, seed, self.clients)
            self._federations[seed] = replace(federation, public=self._public)
        return self._federations[seed]

    def _opened(self, message: RoundRequest) -> Session:
        """The method with the seed of a message, in its run."""
        trial = message.run, message.label, message.seed
        if self._session is None or self._session.trial != trial:
            self._session = None  # before the next model is loaded
            self._session = self._new_session(*trial)
        return self._session

    def _folder(self, message: RoundRequest) -> Path:
        """The folder of a trial's states, which is made."""
        home = self.folder / message.run
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = _trial_folder(home, message.label, message.seed)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _new_session(self, run: str, label: str, seed: int) -> Session:
        experiment, dataset, plan = self.experiment, self._dataset, self.experiment.plan
        method, federation = experiment.methods[label], self._federation(seed)
        if self._are_new:  # they send nothing
            plan = plan.in_clear
        if plan.privacy.of_records:
            federation = replace(
                federation, secret=secret_of(_trial_folder(self.folder / run, label, seed))
            )
        # what work says of a client may reach the server, and the names of clients must not
        federation = replace(federation, partition=replace(federation.partition, names=None))
        backbone = backbone_of(experiment, dataset, self.backbone, seed)
        check_ids(dataset.inputs, backbone)
        task = task_of(experiment, method, backbone, seed)
        two = dataset.batch(np.arange(min(2, len(dataset.inputs))))
        method.check_batch(task, to_device(two, task.device))
        first = first_states(method, task, federation)
        federation = as_trained(method, task, federation, plan)
        words = plan.privacy_words(federation)
        if words and not method.trains_alone:
            announce(f"{label}, seed {seed}: {words}")
        works = client_works(method, task, federation, plan, self.metrics)
        server = to_device(first_server(method, task, federation), task.device)
        rows = dataset.digest, dataset.scale, federation.partition.digest
        basis = repr((digest(experiment, label), rows))
        return Session((run, label, seed), first, server, works, plan, basis)


def _told(error: Exception) -> str:
    """What the server hears of an error. Others than ours may show the data: they stay here."""
    if isinstance(error, InputError):
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}; the node prints more"


def _trial_folder(home: Path, label: str, seed: int) -> Path:
    return home / label / f"seed-{seed}"
