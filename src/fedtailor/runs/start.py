"""Going on from a finished run, with other data or other clients: `StartConfig` carried out.

The server's state and the private states of the clients that are in both federations are those of
the finished run's reported round. They are evaluated as round 0 of the new run, which may turn out
to be the best one. The new run keeps all that it needs: the old one may be removed once it has
begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import random
from ..data.federation import Federation
from ..engine.prepare import first_server
from ..engine.private_states import PrivateStates
from ..errors import InputError, listed, unknown
from ..method import Method, Server
from ..objectives import objective_of
from ..params import to_device
from ..store.bounds import shown
from ..store.committed import START_FILE, StartRecord, model_seed
from ..store.files import write_json
from ..store.format import dotted, has_commit, trial_folder
from ..task.task import Task
from ..user_code import origin_of
from .base_model import check_model
from .build import Inputs
from .experiment import Experiment
from .held_out import start_seed
from .manifest import data_manifest, open_run
from .trained import TrainedMethod, ended_commit, open_trained


@dataclass(frozen=True)
class Start:
    """What one method with one seed goes on from, and its task; ``clients`` has for each client its
    number in the old federation, -1 for a new one."""

    trained: TrainedMethod
    method: Method
    task: Task
    federation: Federation
    clients: Tensor  # int64 [K]

    def server(self) -> Server:
        """The old server's state, with the new federation's clients."""
        method, task, federation = self.method, self.task, self.federation
        fresh = first_server(method, task, federation)
        server = {**self.trained.server}
        old, new = self.clients[self.clients >= 0], (self.clients >= 0).nonzero()[:, 0]
        for name in rows_by_client(method, task, federation):
            rows = server[name][old].to(fresh[name])
            server[name] = fresh[name].index_copy(0, new.to(fresh[name].device), rows)
        server = method.change_clients(task, to_device(server, task.device), len(self.clients))
        return {name: server[name] for name in fresh}

    def stage(self, store: PrivateStates) -> None:
        """Stage in ``store``, as of round 0, what the clients of both federations have kept, and
        what new ones have been fitted to that joined after the old run's training."""
        store.begin(0)
        if not store.has_states:
            return
        like = self.method.init_client(self.task, 0, random.key(0))
        for client, old in enumerate(self.clients.tolist()):
            if old >= 0:
                store.stage(client, self.trained.committed_states.read(old))
            elif self.federation.names is not None:
                name = self.federation.names[client]
                store.stage(client, self.trained.onboarded_private(name, like))

    def describe(self, folder: Path) -> None:
        """Write into ``folder`` what the trial there goes on from."""
        trained = self.trained
        folder.mkdir(parents=True, exist_ok=True)
        content = StartRecord(
            run=str(trained.run),
            method=trained.label,
            seed=trained.seed,
            round=trained.round,
            model_seed=model_seed(trained.folder, trained.seed),
            clients=int((self.clients >= 0).sum()),
        )
        write_json(folder / START_FILE, asdict(content))


def open_start(inputs: Inputs, label: str, seed: int) -> Start:
    """Open what a method of the experiment goes on from with a seed; InputError where it can't."""
    experiment, federation = inputs.experiment, inputs.federations[seed]
    run, old_label, old_seed = _old_trial(experiment, label, seed)
    method = experiment.methods[label]
    number = model_seed(trial_folder(run, old_label, old_seed), old_seed)
    backbone = inputs.backbone(number)
    trained = open_trained(run, old_label, old_seed, backbone=backbone)
    _check_data(trained.data, data_manifest(federation), run)
    task = inputs.task(method, number)
    _check_shapes(trained, method, task, federation, label)
    _check_predictions(trained, method, inputs, number, label)
    clients = _matched(trained, method, task, federation)
    return Start(trained, method, task, federation, clients)


def _old_trial(experiment: Experiment, label: str, seed: int) -> tuple[Path, str, int]:
    """The finished run that a method goes on from with a seed, and its label and seed there."""
    config = experiment.start_from
    assert config.run is not None
    run = Path(config.run)
    old = open_run(run)
    check_model(old.model, run)
    old_label = config.method or label
    if old_label not in old.methods:
        raise unknown("method", old_label, old.methods, where=f"{run} (start_from)")
    old_seed = start_seed(config, old.seeds, seed)
    _check_model(old, old_label, experiment, label, run)
    ended_commit(run, old, old_label, old_seed)
    return run, old_label, old_seed


def check_old_trials(
    experiment: Experiment, out: Path, trials: Sequence[tuple[int, str]], *, anew: bool
) -> None:
    """The part of `check_starts` that needs neither data nor model."""
    run = experiment.start_from.run
    if run is not None and Path(run).resolve() == out.resolve():
        raise InputError(f"start_from and --out are both {run}; choose another --out")
    for seed, label in _not_begun(experiment, out, trials, anew=anew):
        _old_trial(experiment, label, seed)


def check_starts(
    inputs: Inputs, out: Path, trials: Sequence[tuple[int, str]], *, anew: bool
) -> None:
    """Raise InputError where one of the ``trials`` of ``out`` has nothing that it could go on from.
    Those that have begun need nothing, unless they begin ``anew``."""
    for seed, label in _not_begun(inputs.experiment, out, trials, anew=anew):
        open_start(inputs, label, seed)


def _not_begun(
    experiment: Experiment, out: Path, trials: Sequence[tuple[int, str]], *, anew: bool
) -> list[tuple[int, str]]:
    if experiment.start_from.run is None:
        return []
    return [(s, k) for s, k in trials if anew or not has_commit(trial_folder(out, k, s))]


def rows_by_client(method: Method, task: Task, federation: Federation) -> list[str]:
    """The tensors of the server's state that have a row for each client."""
    K, key = federation.num_clients, random.key(federation.seed, "server")
    some, more = (method.init_server(task, count, key) for count in (K, K + 1))
    return [name for name in some if some[name].shape != more[name].shape]


def origins(
    old_names: Sequence[str] | None, new_names: Sequence[str] | None, old: int, new: int
) -> Tensor | None:
    """The number that each of ``new`` clients had among the ``old`` ones, int64 ``[new]``: by name
    where clients have names, else the same one; -1 for a client that was not there. None if they
    can't be told, since only the clients of one side have names.

    >>> origins(("bonn", "kiel"), ("kiel", "lagos"), 2, 2)
    tensor([ 1, -1])
    >>> origins(None, None, 2, 3)
    tensor([ 0,  1, -1])
    """
    if old_names is not None and new_names is not None:
        numbers = {name: number for number, name in enumerate(old_names)}
        return torch.tensor([numbers.get(name, -1) for name in new_names])
    if old_names is not None or new_names is not None:
        return None
    return torch.where(torch.arange(new) < old, torch.arange(new), -1)


def _matched(trained: TrainedMethod, method: Method, task: Task, federation: Federation) -> Tensor:
    K, old_names = federation.num_clients, trained.data.get("names")
    clients = origins(old_names, federation.names, trained.data["clients"], K)
    is_known = clients is not None and bool((clients >= 0).any())
    if clients is not None and (is_known or set(trained.joined) & {*(federation.names or ())}):
        return clients
    if method.init_client(task, 0, random.key(0)) or rows_by_client(method, task, federation):
        if clients is not None:
            raise InputError(
                f"start_from: {trained.label} has states by client, and no client of {trained.run} "
                f"({listed(old_names or (), few=5)}) is one of the new data ("
                f"{listed(federation.names or (), few=5)}); spell them alike"
            )
        raise InputError(
            f"start_from: {trained.label} has states by client, and clients have names only in "
            f"{trained.run if old_names else 'the new data'}; give both names (data.client)"
        )
    return torch.full((K,), -1)


def _check_model(old: Experiment, old_label: str, new: Experiment, label: str, run: Path) -> None:
    a, b = (dotted(one.as_dict()["model"], "model.") for one in (old, new))
    if _same_factory(old, new, run):
        a["model.factory"] = b["model.factory"]  # a file may have been moved
    differing = [f"{k} is {shown(a[k])} in {run} and {shown(b[k])} now" for k in a if a[k] != b[k]]
    if differing:
        raise InputError(f"start_from: {'; '.join(differing)}: the model must be the same")
    before, after = _reference(old, old_label), _reference(new, label)
    if before != after:
        raise InputError(
            f"start_from: {old_label} is {before} in {run}, and methods.{label} is {after} now: a "
            "method goes on from its own states; start_from.method names one"
        )


def _same_factory(old: Experiment, new: Experiment, run: Path) -> bool:
    """Whether both have the same model of the user's own; InputError where its file changed."""
    if old.model.factory is None or new.model.factory is None:
        return False
    stored, file = origin_of(old.model.factory), origin_of(new.model.factory)
    if old.model.factory.rpartition(":")[2] != new.model.factory.rpartition(":")[2]:
        return False
    if stored.sha256 != file.sha256:
        copy = f" ({stored.path} is a copy)" if stored.path else ""
        raise InputError(
            f"start_from: model.factory's {file.path or file.reference} is not the file that {run} "
            f"was trained with: the model must be the same; restore it{copy}"
        )
    return True


def _reference(experiment: Experiment, label: str) -> str:
    """What names the method's class, also where the file of one of the user's own has changed."""
    own = experiment.origins.get(label)
    return experiment.methods[label].name if own is None else own.reference


def _check_data(old: Mapping[str, Any], new: Mapping[str, Any], run: Path) -> None:
    settings = objective_of(new["task"]).settings
    for key, way_out in (
        ("task", "data.task chooses it"),
        ("modality", "the data must be of one kind"),
        ("classes", "data.classes gives their names, in order"),
        ("scale", f"data.{' and data.'.join(settings)} give it"),
    ):
        if (a := old.get(key, [])) != (b := new.get(key, [])):
            both = f"{shown(a)} in {run} and {shown(b)} now"
            raise InputError(f"start_from: {key} is {both}; {way_out}")


def _check_shapes(
    trained: TrainedMethod, method: Method, task: Task, federation: Federation, label: str
) -> None:
    """Raise InputError unless the old states have the names and shapes of the method's own."""
    by_client, key = rows_by_client(method, task, federation), random.key(0)
    private = trained.method.init_client(trained.task, 0, key), method.init_client(task, 0, key)
    server = trained.server, first_server(method, task, federation)
    for states, rows in ((server, by_client), (private, [])):
        # without the clients' axis where there is a row for each
        a, b = (
            {n: list(v.shape[1:] if n in rows else v.shape) for n, v in state.items()}
            for state in states
        )
        for name in dict.fromkeys([*a, *b]):
            if a.get(name) != b.get(name):
                raise InputError(
                    f"start_from: {name} of {label} has the shape {a.get(name)} in {trained.run} "
                    f"and {b.get(name)} now{_changed(trained.method, method, label)}"
                )


def _check_predictions(
    trained: TrainedMethod, method: Method, inputs: Inputs, number: int, label: str
) -> None:
    """Raise InputError where the method's settings let the old states predict something else."""
    changed = _changed(trained.method, method, label)
    if not changed:
        return
    backbone, dataset = inputs.backbone(number), inputs.dataset
    batch = dataset.batch(torch.arange(min(2, len(dataset.inputs))).numpy())

    def logits(method: Method) -> Tensor:
        task = Task(backbone, method.adapt, seed=number)
        private = method.init_client(task, 0, random.key(number, "client", 0))
        state = {**method.send(task, trained.server, 0), **private}
        with torch.no_grad():
            return method.predict(task, state, batch)

    if not torch.allclose(logits(trained.method), logits(method)):
        raise InputError(f"start_from: the old model of {label} predicts something else{changed}")


def _changed(old: Method, new: Method, label: str) -> str:
    """The fields of a method that differ, but for how it is optimised; empty if there are none."""
    as_plain = (Experiment({label: method}).as_dict()["methods"][0] for method in (old, new))
    skip = ("optimiser", "robust")
    a, b = ({k: v for k, v in dotted(p).items() if k.split(".")[0] not in skip} for p in as_plain)
    differing = [k for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)]
    texts = [f"{label}.{k} was {shown(a.get(k))} and is {shown(b.get(k))}" for k in differing]
    return f" (methods.{', methods.'.join(texts)})" if texts else ""
