"""From an experiment to its parts: data, federation, model, task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from ..data import Data, DataConfig, load_data
from ..data import partition as divide
from ..data.altered import rotate_pictures, shuffle_labels
from ..data.example_cache import LastResults
from ..data.federation import Federation
from ..data.sources import objective_of_data, read_columns
from ..data.table import Dataset, Images, Tokens
from ..data.tokens import num_ids
from ..engine.checks import check, check_plan
from ..engine.config import EngineConfig, Plan
from ..engine.metrics import Metrics
from ..engine.prepare import with_least_batch
from ..errors import InputError, brief, listed, of_method, unknown
from ..layers.lora import has_lora
from ..method import Method
from ..models import ModelConfig, load_model, load_tokenizer
from ..models.inputs import ModuleInputs, TextInputs
from ..models.packages import BUILTIN
from ..models.pooled import Pooled
from ..models.source import faults_of_files
from ..objectives.objective import MetricFunction
from ..params import Batch
from ..task.backbone import Backbone, LoRAOptions
from ..task.packing import check_packing
from ..task.task import Task
from ..user_code import FROM_PYTHON, portable
from .experiment import Experiment
from .fields import as_written


@dataclass(frozen=True)
class Inputs:
    """What an experiment names, loaded: its data, a federation a seed, and its models."""

    experiment: Experiment
    dataset: Dataset
    federations: Mapping[int, Federation]  # by seed
    backbone: Callable[[int], Backbone]  # by seed; the last one is kept
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)  # given from Python
    asked: int | None = None  # the rounds before a budget has cut them

    @classmethod
    def load(
        cls, experiment: Experiment, data: Data | Dataset | None, backbone: Backbone | None
    ) -> Inputs:
        """Load what ``experiment`` names; ``data`` and a ``backbone`` stand in for its own."""
        experiment = named(experiment, data, backbone)
        dataset = dataset_of(experiment, data, backbone)
        public = public_of(experiment, dataset, backbone) if experiment.has_public else None
        last = LastResults()
        federations = {
            seed: replace(
                federation_of(experiment, dataset, seed), public=public, last_results=last
            )
            for seed in experiment.seeds
        }
        backbones = lru_cache(1)(partial(backbone_of, experiment, dataset, backbone))
        return cls(experiment, dataset, federations, backbones)

    def within_budget(self) -> Inputs:
        """The same with only as many rounds as ``privacy.stop`` allows with each seed."""
        experiment, plan = self.experiment, self.experiment.plan
        if not self.spends:
            return self
        rounds = min(map(plan.within_budget, self.federations.values()))
        return replace(self, experiment=replace(experiment, rounds=rounds), asked=plan.rounds)

    @property
    def spends(self) -> bool:
        """Whether there is noise, and a method that sends something."""
        methods = self.experiment.methods.values()
        return self.experiment.privacy.is_active and not all(one.trains_alone for one in methods)

    def task(self, method: Method, seed: int) -> Task:
        """The task of a method with a seed."""
        return task_of(self.experiment, method, self.backbone(seed), seed)

    def check(self) -> None:
        """Raise InputError where a method, the data and the model don't go together."""
        seed = self.experiment.seeds[0]
        federation = self.federations[seed]
        metrics = Metrics(self.experiment.evaluate, self.metrics)
        metrics.check(federation.dataset.objective, remote=federation.remote)
        held_out, share = federation.partition.test.sizes(), self.experiment.split.test
        most = federation.partition.train.sizes().max(initial=0)
        if not (federation.remote or held_out.any()) and share * most < 1:
            few = f"; {share:g} of a client's rows, at most {most:,}, is none" if share else ""
            raise InputError(
                "no client has a test row, so there would be no results; set split.test, the share "
                f"of each client's rows, such as 0.2{few}"
            )
        for method in self.experiment.methods.values():  # what needs no model goes first
            check_plan(method, federation, self.experiment.plan, device_of(self.experiment.engine))
        if self.spends:
            for one in self.federations.values():  # a client's records may differ by seed
                self.experiment.plan.account(one)
        check_named_clients(self.experiment, federation)
        objective = self.backbone(seed).objective
        if objective != federation.dataset.objective:
            raise InputError(
                f"the data are for {federation.dataset.task}, and the model is for "
                f"{objective.name}; give another model, or another data.task"
            )
        for dataset in (federation.dataset, federation.public):
            if dataset is not None:
                check_ids(dataset.inputs, self.backbone(seed))
        lora = self.backbone(seed).lora
        unused = lora != LoRAOptions()  # until a method has LoRA
        for label, method in self.experiment.methods.items():
            with of_method(label):
                task = self.task(method, seed)
                unused = unused and not has_lora(task.model)
                check(method, task, self.federations[seed], self.experiment.plan)
            if self.federations[seed].remote:
                continue  # the clients' sites check it
            two = self.dataset.batch(np.arange(min(2, len(self.dataset.inputs))))
            two = {name: value.to(task.device) for name, value in two.items()}
            self._check_own_model(task, two)
            if self.experiment.local.pack:
                check_packing(partial(task.logits, task.state), two, task.backbone.name)
            method.check_batch(task, two)
            with_least_batch(method, task, self.federations[seed], self.experiment.local.batch_size)
        if unused:
            given = [(f.name, getattr(lora, f.name)) for f in fields(lora)]
            changed = [(n, v) for n, v in given if v != getattr(LoRAOptions(), n)]
            raise InputError(
                f"{', '.join(f'model.lora.{n} = {as_written(v)}' for n, v in changed)} has no "
                "effect: no method adds LoRA; leave it out"
            )

    def _check_own_model(self, task: Task, batch: Batch) -> None:
        model = self.experiment.model
        name = portable(model.factory) if model.factory else str(model.name)
        if name in BUILTIN:
            return
        received = ", ".join(f"{key} {list(value.shape)}" for key, value in batch.items())
        fails = f"the model {name} fails on these data ({received})"
        with faults_of_files(fails), torch.no_grad():
            logits = task.logits(task.state, batch)
        objective, shape = task.backbone.objective, list(logits.shape)
        outputs = objective.num_outputs(self.dataset.num_classes)
        if outputs is None:
            with faults_of_files(fails):
                task.score(logits, batch)
            return
        tokens = batch["input_ids"].shape[1:] if objective.per_token else ()
        wanted = [len(next(iter(batch.values()))), *tokens, outputs]
        has_more = objective.has_classes and shape[-1:] > [outputs]  # than the data have classes
        if shape != wanted and not (has_more and shape[:-1] == wanted[:-1]):
            said = f"the model {name} gives logits {shape} for {received}"
            raise InputError(f"{said}; they must be {wanted}")


def check_ids(inputs: Tokens | Images, backbone: Backbone) -> None:
    """Raise InputError where the model's table of embeddings lacks a row for a token."""
    model: Any = backbone.model.encoder if isinstance(backbone.model, Pooled) else backbone.model
    as_they_are = isinstance(backbone.prepare, TextInputs | ModuleInputs)
    if not (isinstance(inputs, Tokens) and as_they_are and hasattr(model, "get_input_embeddings")):
        return
    rows = len(model.get_input_embeddings().weight)
    if inputs.values.max(initial=0) >= rows:
        of = backbone.tokenizer
        most = "" if of is None else f"the tokenizer has ids up to {num_ids(of) - 1}, "
        raise InputError(
            f"a text has a token that the model can't read: {most}the embedding table of "
            f"{backbone.name} has {rows} rows, for ids 0 to {rows - 1}; leave such tokens out of "
            "the texts, or give a model whose embeddings were resized for its tokenizer"
        )


def named(
    experiment: Experiment,
    data: Data | Dataset | None,
    backbone: Backbone | None,
    metrics: Iterable[str] = (),
) -> Experiment:
    """The experiment, with the names of the ``data`` and the ``backbone`` that stand in for its
    own, and of the ``metrics`` given from Python among its own."""
    names: dict[str, Any] = {}
    if isinstance(data, Data):
        names["data"] = data.config(experiment.data)
    elif isinstance(data, Dataset):
        names["data"] = DataConfig(name=FROM_PYTHON + data.digest)
    elif data is not None:
        raise InputError(
            f"data = {brief(data, 60)}: must be a Data, as from Data.from_pandas, or a Dataset"
        )
    if backbone is not None:
        names["model"] = ModelConfig(name=FROM_PYTHON + backbone.name)
    if isinstance(data, Dataset):
        objective = data.objective
    elif backbone is not None:
        objective = backbone.objective
    else:
        objective = objective_of_data(names.get("data", experiment.data))
    present = experiment.evaluate.metrics
    reported = [name for name in objective.reported if name not in present]
    given = [name for name in metrics if name not in present]
    every = (*reported, *present, *given)
    names["evaluate"] = replace(experiment.evaluate, metrics=every)
    is_named = all(getattr(experiment, section) == value for section, value in names.items())
    return experiment if is_named else replace(experiment, **names)


def dataset_of(
    experiment: Experiment, data: Data | Dataset | None, backbone: Backbone | None
) -> Dataset:
    """The examples of a `named` experiment, tokenised for its model or the ``backbone``."""
    if isinstance(data, Dataset):
        return data
    source = Data({}) if data is None else data
    if source.columns is None:  # a wrong file or column shows before the tokenizer is loaded
        source = replace(source, columns=read_columns(experiment.data))
    tokenizer = load_tokenizer(experiment.model) if backbone is None else backbone.tokenizer
    return source.load(experiment.data, tokenizer)


def federation_of(
    experiment: Experiment, dataset: Dataset, seed: int, only: range | None = None
) -> Federation:
    """The clients of one seed. With ``only``, ``dataset`` holds the examples of these clients
    alone."""
    split_seed = seed if experiment.split.seed is None else experiment.split.seed
    parts = divide(dataset, experiment.split, split_seed, only)
    dataset = rotate_pictures(dataset, parts, experiment.split.rotations)
    dataset = shuffle_labels(dataset, parts, experiment.split.shuffled, split_seed)
    federation = Federation(dataset, parts, seed)
    federation.check(only)
    return federation


def with_new_clients(experiment: Experiment, clients: range) -> Experiment:
    """The experiment for a place that has the data of ``clients`` alone, who join afterwards: their
    numbers begin at K."""
    split = experiment.split
    split = replace(split, scheme="natural", clients=clients.stop, rotations=1, shuffled=0.0)
    return replace(experiment, split=split)


def public_of(experiment: Experiment, dataset: Dataset, backbone: Backbone | None) -> Dataset:
    """The public examples: training rows, pictures at the size of the clients'. Raises InputError
    for texts beside images, or pictures with other channels."""
    tokenizer = load_tokenizer(experiment.model) if backbone is None else backbone.tokenizer
    public = load_data(replace(experiment.public, test_split=None), tokenizer)
    public_shape, shape = public.picture, dataset.picture
    if (public_shape and public_shape[0]) != (shape and shape[0]):
        raise InputError(
            f"public {experiment.public.name or experiment.public.path!r} holds "
            f"{_inputs(public)}, the clients' data {_inputs(dataset)}; they must be alike"
        )
    if isinstance(public.inputs, Images) and shape is not None and public_shape != shape:
        public = replace(public, inputs=public.inputs.resized(*shape[1:]))
    return public


def _inputs(dataset: Dataset) -> str:
    picture = dataset.picture
    return "texts" if picture is None else "pictures of " + " x ".join(map(str, picture))


def check_named_clients(experiment: Experiment, federation: Federation) -> None:
    """Raise InputError where settings by client name one that is not there, or leave one out."""
    names = federation.names or ()
    prompts = [name for one in experiment.data.templates for name in one.clients]
    metrics = experiment.evaluate.metric_of
    for where, some in (("data.templates", prompts), ("evaluate.by_client", metrics)):
        for name in some:
            if name not in names and not federation.remote:
                raise unknown("client", name, names, where=where)
    if metrics and (missing := [name for name in names if name not in metrics]):
        raise InputError(f"evaluate.by_client has no metric for {listed(missing)}; name one")


def backbone_of(
    experiment: Experiment, dataset: Dataset, backbone: Backbone | None, seed: int
) -> Backbone:
    """``backbone``, or the experiment's model for ``dataset`` if it is None."""
    if backbone is not None:
        return for_targets(backbone, dataset.scale)
    about = dataset.objective, dataset.num_classes, seed, dataset.modality
    return load_model(experiment.model, *about, picture=dataset.picture)


def for_targets(backbone: Backbone, scale: Sequence[float]) -> Backbone:
    """The backbone for targets of a ``scale``."""
    return replace(backbone, objective=backbone.objective.scaled(scale)) if scale else backbone


def task_of(
    experiment: Experiment | Plan,
    method: Method,
    backbone: Backbone,
    seed: int,
    device: torch.device | None = None,
) -> Task:
    """The task of a method, on the configured device if ``device`` is None."""
    engine = experiment.engine
    return Task(
        backbone,
        method.adapt,
        seed=seed,
        precision=engine.precision,
        device=device or device_of(engine),
        checkpointing=engine.checkpointing,
    )


def device_of(engine: EngineConfig) -> torch.device:
    """The configured device. Raises InputError where it is not there."""
    cuda = torch.cuda.is_available()
    device = engine.device
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device.startswith("cuda") and not cuda:
        raise InputError(f"engine.device = {device!r}: PyTorch sees no CUDA device here")
    number = torch.device(device).index or 0
    if cuda and device != "cpu" and number >= torch.cuda.device_count():
        seen = f"{torch.cuda.device_count()} CUDA devices here, cuda:0 and on"
        raise InputError(f"engine.device = {device!r}: PyTorch sees {seen}")
    return torch.device(device)


def task_again(
    experiment: Experiment,
    method: Method,
    data: Mapping[str, Any],
    seed: int,
    backbone: Backbone | None = None,
) -> Task:
    """The task of a method in a finished run, from its `data_manifest`, on the CPU."""
    if backbone is None:
        about = data["task"], len(data["classes"]), seed, data["modality"]
        backbone = load_model(experiment.model, *about, picture=data.get("picture"))
    backbone = for_targets(backbone, data.get("scale", ()))
    return task_of(experiment, method, backbone, seed, torch.device("cpu"))
