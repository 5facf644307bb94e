"""A method that a run has trained, opened again: its states, for whoever uses its models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from .. import random
from ..data import Data
from ..data.federation import Federation
from ..data.names import client_number
from ..data.table import Dataset, Fingerprints, Indices
from ..engine.executors.work import ClientRequest
from ..engine.joining import fits_anything, join_requests
from ..engine.prepare import Works, as_trained, client_works
from ..errors import InputError, unknown
from ..method import Method, Server
from ..objectives.objective import Objective
from ..params import Params, aligned, pick
from ..store.committed import (
    Commit,
    CommittedStates,
    commit_of,
    model_seed,
    private_files,
    read_server,
)
from ..store.files import load_tensors
from ..store.format import FLOWER_FILE, check_there, trial_folder
from ..store.read import Trial, read
from ..store.selection import by_round
from ..store.trained_rows import check_trained_rows, read_trained_rows, trained_rows_file
from ..task.backbone import Backbone
from ..task.task import Task
from .base_model import check_model, pinned
from .build import Inputs, task_again
from .experiment import Experiment
from .held_out import leave_out, rows_trained_before
from .manifest import data_manifest, open_run, read_data_manifest, same_data

STATE_FILE = "state.safetensors"  # in the folder of a client that joined afterwards

Which = Literal["best", "last"]
_LEFT_OUT = ("min-examples", "not-drawn")  # omissions of whole clients


class Opened(Protocol):
    """A method with one seed whose models can be used: of a run, or of a site."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def data(self) -> Mapping[str, Any]: ...  # `runs.manifest.data_manifest`
    @property
    def task(self) -> Task: ...
    @property
    def method(self) -> Method: ...


@dataclass(frozen=True)
class TrainedMethod:
    """One method with one seed of a finished run, at its reported round or, with ``which`` "last",
    at its last one.

    ``data`` is `runs.manifest.data_manifest` of the run's data; ``server`` is the server's state
    after ``round``.
    """

    run: Path
    experiment: Experiment
    label: str
    seed: int
    data: Mapping[str, Any]
    task: Task
    commit: Commit
    server: Server
    which: Which = "best"
    dataset: Data | Dataset | None = None  # instead of what the experiment names
    backbone: Backbone | None = None

    @property
    def method(self) -> Method:
        """The method with its settings."""
        return self.experiment.methods[self.label]

    @property
    def folder(self) -> Path:
        """The trial's folder in the run directory."""
        return trial_folder(self.run, self.label, self.seed)

    @property
    def round(self) -> int:
        """The round whose states the clients' models have: the reported one, or the last one."""
        return self.commit.round if self.which == "last" else self.commit.best_round

    @property
    def global_round(self) -> int:
        """The round of the global model: its own best, or the last one."""
        return self.commit.round if self.which == "last" else self.commit.best_global_round

    @cached_property
    def federation(self) -> Federation:
        """The clients with their examples, which are loaded for this. Raises InputError where the
        data can't be loaded, or are not those of the run."""
        inputs = Inputs.load(self.experiment, self.dataset, self.backbone)
        inputs = leave_out(inputs, rows_trained_before(self.experiment, self.run))
        federation = inputs.federations[self.seed]
        if not same_data(data_manifest(federation), self.data):
            raise InputError(
                f"the data, their split or clients' names are not those of {self.run}; give its own"
            )
        return federation

    @cached_property
    def trained_rows(self) -> Fingerprints | None:
        """The rows that the models were trained on; None: not known, as where the file of their
        hashes was not passed on."""
        is_there = trained_rows_file(self.run, self.seed).exists()
        return read_trained_rows(self.run, self.seed) if is_there else None

    def num_trained_on(self, dataset: Dataset, rows: Indices) -> int:
        """How many ``rows`` of a data set were training rows, as far as is known."""
        if self.trained_rows is None:
            return 0
        return int(np.isin(dataset.fingerprints(rows), self.trained_rows).sum())

    @cached_property
    def committed_states(self) -> CommittedStates:
        """What the clients keep that have trained up to ``round``."""
        return CommittedStates(self.folder, self.round, self.commit)

    def number(self, client: str | int) -> int:
        """The number of a client of the federation, from its name or its number."""
        joined = [name for name in self.joined if name != client]
        try:
            return client_number(client, self.data["clients"], self.data.get("names"), joined)
        except InputError as error:
            omissions = self.data.get("omissions", ())
            left_out = [one["text"] for one in omissions if one["kind"] in _LEFT_OUT]
            if not left_out:
                raise
            raise InputError(
                f"{error}; fedtailor onboard makes a model for a client that the run has left out: "
                f"{'; '.join(left_out)}"
            ) from None

    def objective_of(self, client: str | int | None) -> Objective:
        """The kind of task, with what it tunes on a client's validation examples as in the round of
        the model; for the global model, and a client without such a value, the mean over clients,
        weighted by their validation examples."""
        objective = self.task.backbone.objective
        if objective.tunes is None:
            return objective
        round_ = self.global_round if client is None else self.round
        known: dict[int, tuple[float, int]] = {}
        for model in ("global", "novel", "personal"):
            evaluation = by_round(self._trial, model, "validation").get(round_)
            if evaluation is None or (model != "global" and client is None and known):
                continue
            values = evaluation.metrics[objective.tunes]
            each = zip(evaluation.clients, values, evaluation.num_examples, strict=True)
            known |= {k: (value, n) for k, value, n in each if value is not None}
        if client is not None and self.onboarded(client) is None:
            known = {k: v for k, v in known.items() if k == self.number(client)} or known
        if not known:
            return objective
        values, weights = zip(*known.values(), strict=True)
        return objective.tuned(float(np.average(values, weights=weights)))

    @cached_property
    def _trial(self) -> Trial:
        return read(self.run, only=(self.label, self.seed)).trials[0]

    def onboarded(self, client: str | int) -> Path | None:
        """The folder of a client that joined after the training; None: there is no such client."""
        name = str(client)
        return self.folder / "onboarded" / name if name in self.joined else None

    @property
    def joined(self) -> list[str]:
        """The clients that joined after the training, in the order of their names."""
        found = self.folder.glob(f"onboarded/[!.]*/{STATE_FILE}")
        return sorted(path.parent.name for path in found)

    def onboarded_private(self, client: str, like: Params) -> Params:
        """What a client keeps that joined after the training: tensors with the names and shapes of
        ``like``; empty if there is no such client."""
        if (folder := self.onboarded(client)) is None:
            return {}
        state = load_tensors(folder / STATE_FILE)
        fits = all(n in state and state[n].shape == v.shape for n, v in like.items())
        return pick(state, like) if fits else {}

    @property
    def has_global_model(self) -> bool:
        """Whether the method has one."""
        return self.method.global_state(self.task, self.server) is not None

    def global_state(self) -> Params:
        """The global model's tensors; InputError where the method has no global model."""
        server = self.server
        if self.global_round != self.round:
            server = read_server(self.folder, self.commit, self.global_round)
        state = self.method.global_state(self.task, server)
        if state is None:
            raise InputError(f"{self.label} has no global model; name a client with --client")
        return state

    def private_state(self, client: str | int) -> Params:
        """The tensors that a client keeps, of its last training up to ``round``, or its first
        ones."""
        number, method = self.number(client), self.method
        check_private_states(method, self.task, self.folder, self.commit)
        key = random.key(self.seed, "client", number)
        private = self.committed_states.read(number)
        return aligned(private or method.init_client(self.task, number, key))

    def client_state(self, client: str | int) -> Params:
        """The tensors that a client uses: what the server sends it and what it keeps; or those that
        a client has been fitted to that joined afterwards.

        What is worked out for an evaluation, by fine-tuning or for a novel client, is worked out
        again on the client's training data; it is the same up to the rounding of another executor
        or device."""
        if (onboarded := self.onboarded(client)) is not None:
            if self.which == "last":
                has_one = f"{client} joined after the training and has one model"
                raise InputError(f"which = 'last': {has_one}; allowed: 'best'")
            return aligned(load_tensors(onboarded / STATE_FILE))
        number, passes = self.number(client), self.method.finetune_passes
        private = self.private_state(number)
        if fits_anything(self.method, private) and self._is_novel(number):
            plan = self.experiment.plan
            (request,) = join_requests(
                self.federation, plan.local, [number], self.round, plan.evaluate.novel_passes,
                lambda client: private,
            )  # fmt: skip
            return self._works.join.state(self.server, request)
        received = self.method.send(self.task, self.server, number)
        if passes == 0:
            return {**aligned(received), **private}
        request = ClientRequest(number, self.round, private, "personalise", passes, 1.0, 0)
        return self._works.evaluate.used(received, request)

    def _is_novel(self, number: int) -> bool:
        novel = self.experiment.cohort.novel
        if novel == 0 or self.committed_states.read(number):
            return False
        return number in self.federation.novel(novel)

    @cached_property
    def _works(self) -> Works:
        context, plan = (self.method, self.task), self.experiment.plan
        federation = as_trained(*context, self.federation, plan)
        return client_works(*context, federation, plan)


def open_trained(
    run: Path | str,
    label: str | None,
    seed: int | None = None,
    *,
    which: Which = "best",
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
) -> TrainedMethod:
    """Open a method that a finished run has trained, by default with the experiment's first seed.
    ``label`` may be None in a run of one method; ``data`` and ``backbone`` are what the run was
    given from Python."""
    run = Path(run)
    experiment = open_run(run)
    if label is None and len(experiment.methods) > 1:
        methods = ", ".join(experiment.methods)
        raise InputError(f"{run} has several methods; name one with --method: {methods}")
    label = next(iter(experiment.methods)) if label is None else label
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods, where=str(run), kind="it has")
    seed = experiment.seeds[0] if seed is None else seed
    folder = trial_folder(run, label, seed)
    commit = ended_commit(run, experiment, label, seed)
    number = commit.round if which == "last" else commit.best_round
    server = read_server(folder, commit, number)
    manifest = read_data_manifest(run / "partitions" / f"seed-{seed}.json")
    rows = trained_rows_file(run, seed)
    if rows.exists():  # predictions don't need it: whoever passes a run on may leave it out
        check_trained_rows(rows, manifest.get("trained"))
    if backbone is None:
        experiment = replace(experiment, model=pinned(experiment.model, run))
        check_model(experiment.model, run)
    start = model_seed(folder, seed)
    task = task_again(experiment, experiment.methods[label], manifest, start, backbone)
    return TrainedMethod(
        run, experiment, label, seed, manifest, task, commit, server, which, data, backbone
    )


def ended_commit(run: Path, experiment: Experiment, label: str, seed: int) -> Commit:
    """The last commit of a trial of a run; InputError where it is unfinished, or has no model."""
    if seed not in experiment.seeds:
        allowed = ", ".join(map(str, experiment.seeds))
        raise InputError(f"no seed {seed} in {run}; allowed: {allowed}")
    folder = trial_folder(run, label, seed)
    commit = commit_of(folder)
    if commit is None or not commit.is_done:
        again = f"fedtailor run {shlex.quote(str(run))}"
        raise InputError(f"{label} with seed {seed} is not finished; {again} goes on")
    if not commit.has_model:
        raise InputError(f"{label} with seed {seed} has no model: {commit.diverged}")
    return commit


def check_private_states(method: Method, task: Task, folder: Path, commit: Commit) -> None:
    """Raise InputError where a file of the clients' private states is missing in ``folder``."""
    if method.init_client(task, 0, random.key(0)):
        if (folder / FLOWER_FILE).exists():
            raise InputError(
                f"{folder} has no client's part of the models; predict and export at its site"
            )
        check_there(*private_files(folder, commit))
