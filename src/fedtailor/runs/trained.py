"""A method that a run has trained, opened again: its states, for whoever uses its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from .. import random
from ..data.federation import Federation
from ..data.table import Dataset
from ..errors import InputError, unknown
from ..method import Method, Server
from ..params import Params
from ..task.backbone import Backbone
from ..task.task import Task
from .build import Inputs, named, task_again
from .directory import read_json, read_private
from .experiment import Experiment
from .manifest import open_run, with_stored_factory

PRIVATE_FILE = "private.safetensors"


@dataclass(frozen=True)
class TrainedMethod:
    """One method with one seed of a finished run, at its reported round.

    ``data`` is `runs.manifest.data_manifest` of the run's data.
    """

    run: Path
    experiment: Experiment
    label: str
    seed: int
    data: Mapping[str, Any]
    task: Task
    server: Server
    dataset: Dataset | None = None  # instead of what the experiment names
    backbone: Backbone | None = None

    @property
    def method(self) -> Method:
        """The method with its settings."""
        return self.experiment.methods[self.label]

    @property
    def folder(self) -> Path:
        """The part of the run directory that belongs to the method and the seed."""
        return self.run / "methods" / self.label / f"seed-{self.seed}"

    @cached_property
    def federation(self) -> Federation:
        """The clients with their examples, which are loaded for this.

        Raises:
            InputError: the data can't be loaded.
        """
        experiment = named(self.experiment, self.dataset, self.backbone)
        inputs = Inputs.load(experiment, self.dataset, self.backbone)
        return inputs.federations[self.seed]

    def number(self, client: str | int) -> int:
        """The number of a client, from its name or its number.

        Raises:
            InputError: there is no such client.
        """
        try:
            number = int(client)
        except ValueError:
            number = -1
        if not 0 <= number < self.data["clients"]:
            raise InputError(f"no client {client}; allowed: 0 to {self.data['clients'] - 1}")
        return number

    def global_state(self) -> Params:
        """The global model's tensors.

        Raises:
            InputError: the method has no global model.
        """
        state = self.method.global_state(self.task, self.server)
        if state is None:
            raise InputError(f"{self.label} has no global model; name a --client")
        return state

    def client_state(self, client: str | int) -> Params:
        """The tensors that a client uses: what the server sends it and what it keeps.

        Raises:
            InputError: there is no such client; a file is missing.
        """
        number, method = self.number(client), self.method
        if method.finetune_passes:
            raise InputError(
                f"{self.label} fine-tunes a client's model only when it is evaluated and keeps "
                f"none; leave out --client to use the global model"
            )
        path = self.folder / PRIVATE_FILE
        check_private_states(method, self.task, path)
        private = read_private(path, number) if path.exists() else {}
        if not private:
            key = random.key(self.seed, "client", number)
            private = method.init_client(self.task, number, key)
        return {**method.send(self.task, self.server, number), **private}


def open_trained(
    run: Path | str,
    label: str,
    seed: int | None = None,
    *,
    dataset: Dataset | None = None,
    backbone: Backbone | None = None,
) -> TrainedMethod:
    """Open a method that a finished run has trained.

    Args:
        run: the run directory.
        label: the method's label in the experiment.
        seed: None: the experiment's first.
        dataset: the data, if the run was given them from Python.
        backbone: the model, if the run was given it from Python.

    Raises:
        InputError: no run, or no such method or seed in it; the run is unfinished.
    """
    run = Path(run)
    experiment = with_stored_factory(open_run(run), run)
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    seed = experiment.seeds[0] if seed is None else seed
    if seed not in experiment.seeds:
        raise InputError(f"no seed {seed} in {run}; allowed: {experiment.seeds}")
    path = run / "methods" / label / f"seed-{seed}" / "server.safetensors"
    if not path.exists():
        raise InputError(f"{label} with seed {seed} is not finished; fedtailor run {run} goes on")
    data = read_json(run / "partitions" / f"seed-{seed}.json")
    task = task_again(experiment, experiment.methods[label], data, seed, backbone)
    return TrainedMethod(
        run, experiment, label, seed, data, task, load_file(path), dataset, backbone
    )


def check_private_states(method: Method, task: Task, path: Path) -> None:
    """Raise InputError if the method has private states, and ``path`` holds none."""
    if method.init_client(task, 0, random.key(0)) and not path.exists():
        raise InputError(f"{path} is missing: the clients' private states; restore it")
