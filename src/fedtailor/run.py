"""From an experiment to a run directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from . import random
from .calibrate import Candidate, try_suffixes
from .data import DataConfig
from .data import load as load_data
from .data import partition as divide
from .data.table import Dataset, Images
from .engine import check, follow, new_store, rounds
from .errors import DivergedError, InputError, unknown
from .experiment import Experiment, parse
from .export import export_adapter
from .federation import Federation
from .history import RunFolder, locked, read_json, read_private
from .link import Link
from .method import Method
from .models import ModelConfig, load_tokenizer
from .models import load as load_model
from .profile import Trace
from .record import PACKAGES, check_same, describe, described
from .task import Backbone, Task

_MANY = 10_000  # clients; to evaluate them all takes far longer than a round


def run(
    experiment: Experiment,
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    backbone: Backbone | None = None,
    trace: Trace | None = None,
    link: Link | None = None,
) -> Path:
    """Run every method of ``experiment`` with every seed into the directory ``out``; returns it.

    What ``out`` already holds of the same experiment is kept: finished parts are not run again, an
    unfinished one goes on after its last committed round and ends as if it had never stopped. A
    method whose loss is no longer finite ends there with that seed, and the others go on.

    Args:
        experiment: what to run.
        out: the run directory.
        dataset: instead of what ``experiment.data`` names.
        backbone: instead of what ``experiment.model`` names, e.g. from `fedtailor.from_module`.
        trace: writes the profile of one round.
        link: the ranks that torchrun has started, from `fedtailor.joined`: all of them call this,
            and share the clients' work. Only the first one reads and writes ``out``.

    Raises:
        InputError: bad input, or a different run in ``out``.
        DivergedError: no method with any seed kept a finite loss.
    """
    out = Path(out)
    experiment = named(experiment, dataset, backbone)
    leads = link is None or link.leads
    if leads:
        check_same(experiment, out)
    if dataset is None:
        tokenizer = load_tokenizer(experiment.model) if backbone is None else backbone.tokenizer
        dataset = load_data(experiment.data, tokenizer)
    public = public_of(experiment, dataset, backbone) if experiment.has_public else None
    federations = {
        seed: replace(federation_of(experiment, dataset, seed), public=public)
        for seed in experiment.seeds
    }
    backbones = lru_cache(1)(partial(backbone_of, experiment, dataset, backbone))
    model = backbones(experiment.seeds[0])
    for method in experiment.methods.values():  # bad input shows before anything is written
        task = task_of(experiment, method, model, experiment.seeds[0])
        check(method, task, federations[experiment.seeds[0]], experiment.plan)
        two = dataset.batch(np.arange(min(2, len(dataset.inputs))))
        method.check_batch(task, {name: value.to(task.device) for name, value in two.items()})
    if link is not None:
        link.check_device(task.device)
        link.agree(_mark(experiment, federations, model))
    if link is not None and not leads:
        _follow(experiment, federations, backbones, link)
        return out
    evaluated = federations[experiment.seeds[0]].num_clients - experiment.cohort.novel
    if evaluated > _MANY and experiment.evaluate.clients is None:
        print(
            f"all {evaluated:,} clients are evaluated each time; evaluate.clients = 1000 takes a "
            f"fixed sample of them",
            file=sys.stderr,
        )
    ends: list[str | None] = []
    with locked(out):
        check_same(experiment, out)
        describe(experiment, federations, out)
        for seed, federation in federations.items():
            model = backbones(seed)
            for label, method in experiment.methods.items():
                folder = RunFolder(out / "methods" / label / f"seed-{seed}", experiment.rounds)
                if not folder.commit.ended:
                    task = task_of(experiment, method, model, seed)
                    title = f"{label}, seed {seed}"
                    if link is not None:
                        link.tell((seed, label))
                    try:
                        _run_method(
                            experiment, method, task, federation, folder, title, trace, link
                        )
                    except DivergedError as error:
                        folder.diverge(str(error))
                        if len(federations) * len(experiment.methods) > 1:
                            print(f"{title} ends here: {error}", file=sys.stderr)
                ends.append(folder.commit.diverged)
    if link is not None:
        link.tell(None)
    if all(ends):
        raise DivergedError(ends[0])
    return out


def _follow(
    experiment: Experiment,
    federations: Mapping[int, Federation],
    backbones: Callable[[int], Backbone],
    link: Link,
) -> None:
    """Do a share of what the first rank runs, until it has ended."""
    while (told := link.hear()) is not None:
        seed, label = told
        method = experiment.methods[label]
        task = task_of(experiment, method, backbones(seed), seed)
        follow(method, task, federations[seed], experiment.plan, link=link)


def _mark(
    experiment: Experiment, federations: Mapping[int, Federation], backbone: Backbone
) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    weights = blake2b()
    for value in backbone.model.state_dict().values():
        weights.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {
        "experiment": experiment.as_dict(),
        "data set or split": [described(federation) for federation in federations.values()],
        "model": weights.hexdigest(),
        "kind of device": "cuda" if torch.cuda.is_available() else "cpu",
        "package version": {name: version(name) for name in PACKAGES},
    }


def choose_layers(
    experiment: Experiment, label: str, epochs: int, patience: int
) -> Iterator[Candidate]:
    """Try how many of the model's upper layers to train, with the method at ``label`` and the data
    that the clients of the experiment's first seed hold for validation, pooled.

    Raises:
        InputError: no such method, or one without ``layers``; no validation data.
    """
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    seed, method = experiment.seeds[0], experiment.methods[label]
    tokenizer = load_tokenizer(experiment.model)
    dataset = load_data(experiment.data, tokenizer)
    federation = federation_of(experiment, dataset, seed)
    backbone = backbone_of(experiment, dataset, None, seed)
    rows = federation.partition.validation.rows
    if not len(rows):
        raise InputError("split.validation is 0: there are no examples to choose layers with")
    yield from try_suffixes(
        method,
        backbone,
        dataset,
        rows,
        replace(experiment.plan, rounds=epochs),
        seed=seed,
        patience=patience,
        task_of=lambda chosen: task_of(experiment, chosen, backbone, seed),
    )


def named(experiment: Experiment, dataset: Dataset | None, backbone: Backbone | None) -> Experiment:
    """The experiment, with the names of what is given instead of what it names."""
    if dataset is not None:
        experiment = replace(experiment, data=DataConfig(name=f"from Python: {dataset.digest}"))
    if backbone is not None:
        experiment = replace(experiment, model=ModelConfig(name=f"from Python: {backbone.name}"))
    return experiment


def federation_of(
    experiment: Experiment, dataset: Dataset, seed: int, own: range | None = None
) -> Federation:
    """The clients of one seed; ``own``: the data are those of these clients alone."""
    split_seed = seed if experiment.split.seed is None else experiment.split.seed
    federation = Federation(dataset, divide(dataset, experiment.split, split_seed, own), seed)
    federation.check(own)
    return federation


def public_of(experiment: Experiment, dataset: Dataset, backbone: Backbone | None) -> Dataset:
    """The public examples: training rows, pictures at the size of the clients'.

    Raises:
        InputError: texts beside images, or pictures with other channels.
    """
    tokenizer = load_tokenizer(experiment.model) if backbone is None else backbone.tokenizer
    public = load_data(replace(experiment.public, test_split=None), tokenizer)
    there, wanted = public.picture, dataset.picture
    if (there and there[0]) != (wanted and wanted[0]):
        raise InputError(
            f"public {experiment.public.name or experiment.public.path!r} holds "
            f"{_inputs(public)}, the clients' data {_inputs(dataset)}; they must be alike"
        )
    if isinstance(public.inputs, Images) and wanted is not None and there != wanted:
        public = replace(public, inputs=public.inputs.resized(*wanted[1:]))
    return public


def _inputs(dataset: Dataset) -> str:
    picture = dataset.picture
    return "texts" if picture is None else "pictures of " + " x ".join(map(str, picture))


def backbone_of(
    experiment: Experiment, dataset: Dataset, given: Backbone | None, seed: int
) -> Backbone:
    """The ``given`` model, or else the experiment's, for ``dataset``."""
    if given is not None:
        return given
    return load_model(
        experiment.model,
        dataset.task,
        dataset.num_classes,
        seed,
        dataset.modality,
        picture=dataset.picture,
    )


def task_of(experiment: Experiment, method: Method, backbone: Backbone, seed: int) -> Task:
    """The task of a method, on the configured device."""
    engine = experiment.engine
    cuda = torch.cuda.is_available()
    device = engine.device
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device.startswith("cuda") and not cuda:
        raise InputError(f"engine.device = {device!r}: PyTorch sees no CUDA device here")
    return Task(backbone, method.adapt, seed=seed, precision=engine.precision, device=device)


def _check_private(method: Method, task: Task, path: Path) -> None:
    if method.init_client(task, 0, random.key(0)) and not path.exists():
        raise InputError(f"{path} is missing: the clients' private states; restore it")


def _run_method(
    experiment: Experiment,
    method: Method,
    task: Task,
    federation: Federation,
    folder: RunFolder,
    title: str,
    trace: Trace | None,
    link: Link | None,
) -> None:
    path = folder.path / "private.safetensors"
    if folder.commit.round:
        _check_private(method, task, path)
    store = new_store(method, task, federation, path)
    server = folder.restore(store)
    done = folder.commit.round
    todo = rounds(
        method, task, federation, experiment.plan, store=store, server=server, start=done + 1,
        executor=folder.executor, link=link,
    )  # fmt: skip
    progress = tqdm(
        trace.follow(todo, title) if trace else todo,
        desc=title, total=experiment.rounds, initial=done, unit="round", disable=None,
    )  # fmt: skip
    if done:
        print(f"{title}: goes on after round {done} of {experiment.rounds}", file=sys.stderr)
    for round_ in progress:
        folder.write(round_, store)
        loss = f"{sum(round_.losses) / len(round_.losses):.3f}"
        progress.set_postfix(loss=loss)
        if progress.disable and round_.evaluations:  # no terminal: lines for a log
            rounds_ = f"round {round_.number} of {experiment.rounds}"
            print(f"{title}: {rounds_}, loss {loss}", file=sys.stderr)
    folder.finish()


def task_again(experiment: Experiment, method: Method, data: Mapping[str, Any], seed: int) -> Task:
    """The task of a method in a finished run; ``data`` as `described`."""
    backbone = load_model(
        experiment.model,
        data["task"],
        len(data["classes"]),
        seed,
        data["modality"],
        picture=data.get("picture"),
    )
    return Task(backbone, method.adapt, seed=seed)


def export(out: Path, label: str, seed: int | None, client: int | None, target: Path) -> Path:
    """Write the model of a finished run's client, or the global one, as a PEFT adapter.

    Raises:
        InputError: no such method, seed or client; an unfinished run; nothing to export.
    """
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory")
    experiment = parse(read_json(out / "experiment.json"))
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    method, seed = experiment.methods[label], experiment.seeds[0] if seed is None else seed
    if seed not in experiment.seeds:
        raise InputError(f"no seed {seed} in {out}; allowed: {experiment.seeds}")
    folder = out / "methods" / label / f"seed-{seed}"
    if not (folder / "server.safetensors").exists():
        raise InputError(f"{label} with seed {seed} is not finished; fedtailor run {out} goes on")
    data = read_json(out / "partitions" / f"seed-{seed}.json")
    if client is not None and method.personal_passes:
        raise InputError(
            f"{label} fine-tunes a client's model only when it is evaluated and keeps none; "
            f"leave out --client to export the global model"
        )
    if client is not None and not 0 <= client < data["clients"]:
        raise InputError(f"no client {client}; allowed: 0 to {data['clients'] - 1}")
    task = task_again(experiment, method, data, seed)
    server = load_file(folder / "server.safetensors")
    if client is None:
        state = method.global_state(task, server)
        if state is None:
            raise InputError(f"{label} has no global model; name a --client")
    else:
        path = folder / "private.safetensors"
        _check_private(method, task, path)
        private = read_private(path, client) if path.exists() else {}
        start = method.init_client(task, client, random.key(seed, "client", client))
        state = {**method.send(task, server, client), **(private or start)}
    return export_adapter(method, task, state, target)
