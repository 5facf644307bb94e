"""A method on a subject, and what several checks look at: its run, and a client's first round."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from .. import random
from ..engine.client import client_round
from ..engine.results import Round
from ..engine.rounds import rounds
from ..method import Method
from ..optim import ClientContext
from ..params import Batch, Params, clone
from ..store.client_states import FileStates
from ..store.trial import TrialStore
from ..task.task import Task
from .subjects import Subject


class CheckFailedError(AssertionError):
    """A method that does not do what every method must. The message says what."""


def require(condition: bool, message: str) -> None:
    """Raise CheckFailedError with ``message`` unless the condition holds."""
    if not condition:
        raise CheckFailedError(message)


def require_close(a: Params, b: Params, tolerance: float, what: str) -> None:
    """Raise CheckFailedError unless two states have the same tensors, up to ``tolerance`` (absolute
    and relative)."""
    require(a.keys() == b.keys(), f"{what}: other tensors, {sorted(a.keys() ^ b.keys())}")
    for name in a:
        same = a[name].shape == b[name].shape
        require(same, f"{what}: {name} is {list(a[name].shape)} and {list(b[name].shape)}")
        if not torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance, equal_nan=True):
            most = float((a[name].double() - b[name].double()).abs().max())
            require(False, f"{what}: {name} differs by {most:.2g}; allowed: {tolerance:g}")


@dataclass(frozen=True)
class ClientRound:
    """A client's first round: what it received, what it sends, what it keeps."""

    received: Params
    upload: Params
    private: Params


@dataclass(frozen=True)
class Run:
    """A run in the run directory ``path``."""

    path: Path
    first: Round
    last: Round
    states: FileStates


@dataclass(frozen=True)
class Case:
    """A method on a subject; ``folder`` is for its runs."""

    method: Method
    subject: Subject
    folder: Path
    _first_rounds: dict[int, ClientRound] = field(default_factory=dict, repr=False)

    def task(self) -> Task:
        """Return the method's task, new."""
        return Task(self.subject.backbone, self.method.adapt)

    @cached_property
    def whole(self) -> Run:
        """The undisturbed run; checks look at it and don't change it."""
        return self.run(self.folder / "whole")

    @cached_property
    def public(self) -> Batch:
        """The public examples."""
        public = self.subject.federation.public
        assert public is not None
        return public.batch(np.arange(public.num_train))

    def context(self, number: int) -> ClientContext:
        """Return what a client is told, with random numbers of its own."""
        return ClientContext(random.key(number), public=self.public)

    def batches(self, client: int) -> list[Batch]:
        """Return a client's batches of the first round."""
        return list(self.subject.federation.batches(client, 1, self.subject.plan.local))

    def first_round(self, client: int) -> ClientRound:
        """Return a client's first round; checks look at it and don't change it."""
        if client in self._first_rounds:
            return self._first_rounds[client]
        method, task = self.method, self.task()
        clients = self.subject.federation.num_clients
        received = method.send(task, method.init_server(task, clients, random.key(0)), client)
        private = method.init_client(task, client, random.key(client))
        before = clone(received), clone(private)
        upload, kept, _ = client_round(
            method, task, received, private, self.batches(client), self.context(client)
        )
        for state, old, what in ((received, before[0], "received"), (private, before[1], "kept")):
            for name in old:
                require(
                    state[name].equal(old[name]),
                    f"a client's round changes {name}, which it has {what}, in place; make new "
                    "tensors",
                )
        self._first_rounds[client] = ClientRound(received, upload, kept)
        return self._first_rounds[client]

    def run(self, path: Path, until: int | None = None) -> Run:
        """Begin a run in ``path``, or go on with it; where it stops after a round, its log is torn,
        too."""
        method, task = self.method, self.task()
        federation, plan = self.subject.federation, self.subject.plan
        store = TrialStore(path, plan.rounds)
        states = store.open_states(method, task, federation)
        server = store.restore(states)
        before, done = clone(task.state), []
        start = store.last.round + 1
        resumed = rounds(
            method,
            task,
            federation,
            plan,
            store=states,
            server=server,
            recent_norms=store.recent_norms(),
            clip=store.next_clip(),
            start=start,
        )
        for each in resumed:
            done.append(each)
            if each.number == until:  # a kill, before the states are in their places
                store.write(each)
                with (path / "history.jsonl").open("a") as log:
                    log.write('{"round": "torn')
                break
            store.commit(each)
        else:
            store.finish()
        for name, value in task.state.items():
            require(
                value.equal(before[name]), f"a run changes {name} of task.state in place; copy it"
            )
        return Run(path, done[0], done[-1], states)
