"""New clients at sites of their own join a run that has ended: the federation stays as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import MessageType

from ..engine.executors.work import Refusal
from ..errors import say
from ..inference.onboard import to_new_client
from ..params import add_prefix
from ..runs.experiment import Experiment
from ..runs.trained import open_trained
from ..store.committed import Count, commit_of, read_commit
from ..store.files import read_record, write_json
from ..store.format import FLOWER_FILE, trial_folder
from ..store.run_directory import locked
from ..task.backbone import Backbone
from .border import read_answers
from .codec import Limits, pack, words
from .messages import RoundRequest, WireRequest, digest
from .nodes import Nodes, Timeouts

_JOINED = "joined.json"  # beside it: the `ClientsOfRound` that have joined its models


@dataclass(frozen=True)
class FlowerRecord:
    """``run``: the name under which the sites keep their clients' states. ``models``: a
    `ClientsOfRound`, those that have kept their models of it. ``before``: the run's names before it
    was rolled back, the last one first; ``up_to``: the rounds that it went back to."""

    run: str
    models: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[str] = ()
    up_to: Sequence[Count] = ()


@dataclass(frozen=True)
class ClientsOfRound:
    """A round, and clients."""

    round: Count
    clients: Sequence[Count]


def has_ended(experiment: Experiment, out: Path) -> bool:
    """Whether no round of a run is left."""
    commits = (commit_of(folder) for _, _, folder in _trials(experiment, out))
    return all(commit and commit.has_ended(experiment.rounds) for commit in commits)


def _trials(experiment: Experiment, out: Path) -> Iterator[tuple[str, int, Path]]:
    for label in experiment.methods:
        for seed in experiment.seeds:
            yield label, seed, trial_folder(out, label, seed)


@dataclass(frozen=True)
class NovelClients:
    """``clients``, numbered from K on, that join the run in ``out``."""

    nodes: Nodes
    experiment: Experiment
    out: Path
    clients: Sequence[int]
    timeouts: Timeouts
    backbone: Backbone | None

    def join_all(self) -> bool:
        """Let every new client that has not joined yet fit its models; whether there was one."""
        if not self.clients:
            return False
        with locked(self.out):
            todo = [
                (label, seed, folder, missing)
                for label, seed, folder in _trials(self.experiment, self.out)
                if (missing := self._missing(folder))
            ]
            clients = {client for *_, missing in todo for client in missing}
            end = time.monotonic() + self.timeouts.start
            self.nodes.refresh()
            while not clients <= self.nodes.node_of_new.keys() and time.monotonic() < end:
                time.sleep(self.timeouts.poll)
                self.nodes.refresh()
            for label, seed, folder, missing in todo:
                self._join(label, seed, folder, missing)
        return bool(todo)

    def _missing(self, folder: Path) -> list[int]:
        """The clients that have not joined the reported round's models, if there are any."""
        commit = read_commit(folder)
        if not commit.round:
            return []
        joined = _read_joined(folder, commit.best_round)
        return [client for client in self.clients if client not in joined]

    def _join(self, label: str, seed: int, folder: Path, missing: Sequence[int]) -> None:
        title = f"{label}, seed {seed}"
        trained = open_trained(self.out, label, seed, backbone=self.backbone)
        by_node: dict[int, list[int]] = {}
        for client in missing:
            if client in self.nodes.node_of_new:
                by_node.setdefault(self.nodes.node_of_new[client], []).append(client)
            else:
                say(f"{title}: no node serves the new client {client}")
        run = read_record(FlowerRecord, folder / FLOWER_FILE).run
        part = digest(self.experiment), run, label, seed, trained.round
        messages, contents = {}, []
        for node, clients in by_node.items():
            requests = (WireRequest(client, 0, 0, at) for at, client in enumerate(clients))
            messages[node] = RoundRequest(*part, "join", tuple(requests))
            payloads = [
                add_prefix(received, "received/") | add_prefix(shared or {}, "global/")
                for received, shared in (to_new_client(trained, client) for client in clients)
            ]
            contents.append((node, pack(messages[node], payloads)))
        limit = self.timeouts.reply
        for node, content in self.nodes.ask(MessageType.TRAIN, contents, "join", limit):
            joined = []
            answers = read_answers(node, content, messages[node], by_node[node], Limits())
            for client, answer in answers.items():
                if isinstance(answer, Refusal):
                    say(f"{title}: without the new client {client}: {answer.reason}")
                else:
                    joined.append(client)
                    say(f"{title}: client {client} has joined; it keeps {words(answer[0].kept)}")
            if joined:
                everyone = sorted({*_read_joined(folder, trained.round), *joined})
                write_json(folder / _JOINED, asdict(ClientsOfRound(trained.round, everyone)))


def _read_joined(folder: Path, number: int) -> list[int]:
    """The clients that have joined the models of round ``number``. Those that joined before rounds
    were added join again if another round is reported now."""
    path = folder / _JOINED
    joined = read_record(ClientsOfRound, path) if path.exists() else ClientsOfRound(number, ())
    return list(joined.clients) if joined.round == number else []
