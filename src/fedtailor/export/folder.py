"""A model of a finished run as a folder that works without this library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data import Data, DataConfig, Dataset
from ..errors import InputError, naming
from ..inference.onboard import RESULT_FILE, read_result
from ..layers.lora import base_params, with_lora
from ..layers.submodel import pad_to_full
from ..method import Method, Portable
from ..models.packages import BUILTIN
from ..objectives.objective import Objective
from ..params import Params
from ..runs.experiment import Experiment
from ..runs.trained import TrainedMethod, Which, open_trained
from ..task.backbone import Backbone
from ..task.task import Task
from ..temporary_folder import temporary_folder
from .card import card, licence
from .code import write_code
from .network import HEAD_FILE, WEIGHTS, Network, write_adapter, write_tensors
from .scores import ModelScores, SplitScore

ABOUT = "export.json"
_LONGEST = 255  # bytes of a name in a folder
_CODED = re.compile(r"^\.|[/\0]|%(?=[0-9A-F]{2})")


@dataclass(frozen=True)
class ClientModel:
    """A client's model, or the global one (``client`` None), and where it comes from.

    ``data`` is `runs.manifest.data_manifest` of the run's data; ``results`` are the model's;
    ``joined`` is `Onboarded.kept` of a client that joined afterwards; ``is_shared``: all clients
    have this very model.
    """

    experiment: Experiment
    label: str
    seed: int
    data: dict[str, Any]
    task: Task
    state: Params
    client: str | None = None
    results: list[SplitScore] = field(default_factory=list)
    joined: str | None = None
    is_shared: bool = False
    objective: Objective | None = None  # with what it tunes for the client; None: the task's

    @property
    def method(self) -> Method:
        return self.experiment.methods[self.label]

    @property
    def network(self) -> Network:
        """The base model, with weights that are not rounded."""
        base = self.task.original
        return Network(base.exact() if base.exact else base, self.experiment.model, self.data)


def export_model(
    run: Path | str,
    method: str | None,
    out: Path | str,
    *,
    client: str | int | None = None,
    seed: int | None = None,
    which: Which = "best",
    merge: bool = False,
    all_clients: bool = False,
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
) -> Path:
    """Write a model of a finished run into the folder ``out``, for use without this library.

    Args:
        run: the run directory.
        method: the method's label in the experiment; None: the run has one.
        out: a new folder, or an empty one.
        client: whose model; None: the global one.
        seed: None: the experiment's first.
        which: the state of the reported round, or of the last one.
        merge: write one full model: an adapter is added to the weights, and a sub-model becomes as
            large as the base.
        all_clients: write a folder for each client into ``out``, also for those that joined
            afterwards (``which`` "best"); what they share is there once.
        data: the data, if the run was given them from Python.
        backbone: the model, if the run was given it from Python.

    Returns:
        ``out``.

    Raises:
        InputError: no such method, seed or client; an unfinished run; a model that can't be merged;
            the last state of a client that joined afterwards; ``out`` holds something.
    """
    trained = open_trained(run, method, seed, which=which, data=data, backbone=backbone)
    scores = ModelScores.read(trained)
    if all_clients and client is not None:
        raise InputError(f"client {client} and all clients; name one, or take all")
    return export_trained(scores, out, all_clients_of(trained) if all_clients else client, merge)


def all_clients_of(trained: TrainedMethod) -> list[str | int]:
    """The names, or else the numbers, of all clients that have a model, the joined ones last."""
    names = [*(trained.data.get("names") or range(trained.data["clients"]))]
    return names + (trained.joined if trained.which == "best" else [])


def export_trained(
    scores: ModelScores, out: Path | str, client: str | int | list[str | int] | None, merge: bool
) -> Path:
    """`export_model` of an opened method; of a list of clients, each gets a folder in ``out``."""
    with new_folder(Path(out)) as stage:
        if not isinstance(client, list):
            write_model(_client_model(scores, client), stage, merge)
            return Path(out)
        folders = {name: _folder_name(str(name)) for name in client}
        base = "base"
        while base in folders.values():
            base += "_"
        for name, folder in folders.items():
            (stage / folder).mkdir()
            write_model(_client_model(scores, name), stage / folder, merge, base=stage / base)
    return Path(out)


def _client_model(scores: ModelScores, client: str | int | None) -> ClientModel:
    trained = scores.trained
    joined = None if client is None else trained.onboarded(client)
    if joined is not None and trained.which == "last":
        raise InputError(
            f"client {client} joined after the training and has one model; leave out --which last"
        )
    state = trained.global_state() if client is None else trained.client_state(client)
    return ClientModel(
        trained.experiment,
        trained.label,
        trained.seed,
        dict(trained.data),
        trained.task,
        state,
        None if client is None else str(client),
        scores.of(client),
        None if joined is None else read_result(joined).kept,
        is_shared=client is not None and joined is None and _is_shared(trained, state),
        objective=trained.objective_of(client),
    )


def _is_shared(trained: TrainedMethod, state: Params) -> bool:
    method, task = trained.method, trained.task
    shared = method.global_state(task, trained.server)
    if shared is None or method.finetune_passes or shared.keys() != state.keys():
        return False
    return all(torch.equal(shared[name], state[name]) for name in state)


def kept_by_joined(folder: Path) -> str | None:
    """`Onboarded.kept` of the client whose model is in ``folder``; None: it did not join a run."""
    return read_result(folder).kept if (folder / RESULT_FILE).is_file() else None


def _folder_name(client: str) -> str:
    """A client's name as that of a folder: no two clients have the same.

    >>> _folder_name("Zürich 1"), _folder_name("a/b"), _folder_name("a%2Fb"), _folder_name("..")
    ('Zürich 1', 'a%2Fb', 'a%252Fb', '%2E.')
    >>> _folder_name("ward " * 60)[190:]
    'ward ward -b68b80b5'
    """
    coded = _CODED.sub(lambda match: f"%{ord(match[0]):02X}", client)
    if len(coded.encode()) <= _LONGEST:
        return coded
    short = coded.encode()[:200].decode(errors="ignore")
    return f"{short}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"


def write_model(
    model: ClientModel, out: Path, merge: bool = False, base: Path | None = None
) -> None:
    """Write a model into the folder ``out``, which is there and empty. The base model is written
    into ``base``, a folder beside or inside ``out``, if it is not there; None: into ``out``. Raises
    InputError where the model can't be merged, or has no plain description."""
    network, portable = model.network, _portable(model)
    if merge:
        portable = _merged(model, portable)
    own, tensors = network.tensors, dict(portable.tensors)
    is_plain = portable.form == "plain"
    if is_plain and (base is None or merge):
        tensors = {**own, **tensors}
    complete = network.stored <= tensors.keys()
    is_smaller = any(value.shape != own.get(name, value).shape for name, value in tensors.items())
    fits = is_plain and complete and not is_smaller
    if fits and network.is_transformer:
        files = _write_transformer(network, tensors, out)
    else:
        files = _write_parts(model, portable, tensors, out, base or out / "base", complete)
    _write_rest(model, portable, out, files)


def _portable(model: ClientModel) -> Portable:
    """What the method says of the model; InputError where that is nothing and it needs more."""
    method, task = model.method, model.task
    portable = method.portable(task, model.state)
    if type(method).portable is Method.portable:
        added = set()
        if portable.form == "plain":
            names = (name for name in task.trained if ".lora_" not in name)
            added = {name for name in names if not base_params(task, {name: task.state[name]})}
        if added or type(method).predict is not Method.predict:
            what = f"layers of its own ({min(added)})" if added else "a predict of its own"
            raise InputError(
                f"{method.name} can't be exported: it has {what}, and does not override "
                "portable(), which returns the tensors and settings that predict; add it to "
                "its class"
            )
    return portable


def _write_parts(
    model: ClientModel, portable: Portable, tensors: Params, out: Path, base: Path, complete: bool
) -> dict[str, Any]:
    """The base model, and what the client has beside it: an adapter, or tensors."""
    network = model.network
    head = {name: value for name, value in network.tensors.items() if model.task.in_head(name)}
    tensors = {**head, **tensors}  # a new head is not in the pretrained weights
    source = _write_base(network, out, base, weights=not complete)
    file = WEIGHTS
    if portable.form == "adapter":
        write_adapter(network, portable.lora, portable.magnitudes, out, source)
        file = HEAD_FILE
    if tensors:
        write_tensors(out / file, tensors)
    return {"network": network.about(source, not complete), "tensors": file if tensors else None}


def _merged(model: ClientModel, portable: Portable) -> Portable:
    """The same as other values of the base model's tensors."""
    if portable.form not in ("plain", "adapter"):
        raise InputError(
            f"{model.method.name} needs more than one set of weights, which no merged model has; "
            f"leave out --merge"
        )
    tensors = dict(portable.tensors)
    all_names = dict(model.network.model.named_parameters(remove_duplicate=False))
    own = {**model.network.tensors, **{name: value.detach() for name, value in all_names.items()}}
    for path, (A, B) in portable.lora.items():
        name = f"{path}.weight"  # of a tied head, too, which then has weights of its own
        m = portable.magnitudes.get(path)
        tensors[name] = with_lora(tensors.get(name, own[name]), A, B, m)
    return Portable("plain", pad_to_full(tensors, own))


def _write_transformer(network: Network, tensors: Params, out: Path) -> dict[str, Any]:
    """The full model for ``from_pretrained``, or its encoder and head."""
    if network.pooling != "mean":  # `from_pretrained` can load its head, too
        network.write(tensors, out, weights=True, whole=True)
        if network.data["modality"] == "image":
            network.write_image_processor(out)
        return {"network": network.about(".", True, whole=True), "tensors": None}
    network.write(tensors, out / "encoder", weights=True)
    head = {n: v for n, v in tensors.items() if not n.startswith("encoder.")}
    write_tensors(out / HEAD_FILE, head)
    return {"network": network.about("encoder", True), "tensors": HEAD_FILE}


def _write_base(network: Network, out: Path, base: Path, *, weights: bool) -> str | None:
    """The base model, unless it has a name; where it is, seen from ``out``."""
    if network.name is not None and weights:
        return network.name
    if not base.exists():
        network.write(network.tensors, base, weights)
    if not base.exists():
        return None
    return "base" if base.parent == out else f"../{base.name}"


def _prompts(
    data: DataConfig, client: str | None, chat: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The columns of conversations as the run read them, and the client's template."""
    context = {"context": [data.text_pair]} if data.text_pair else {}
    template = next((one for one in data.templates if client in one.clients), None)
    if template is None:
        return {"chat": {**chat, **context}}
    words = {"template": template.prompt}
    return {"chat": {**chat, **context, **words}, "columns": template.columns}


def _write_rest(model: ClientModel, portable: Portable, out: Path, files: dict[str, Any]) -> None:
    """What every export has: its description, tokenizer, code and card."""
    experiment, network, data = model.experiment, model.network, model.data
    builtin = None if network.is_own else BUILTIN.get(experiment.model.name)
    text, column = data["modality"] == "text", experiment.data.text
    about: dict[str, Any] = {
        "form": portable.form,
        "settings": _settings(network, portable),
        "method": model.method.name,
        "label": model.label,
        "client": model.client,
        "clients": data["clients"],
        "seed": model.seed,
        "task": data["task"],
        "modality": data["modality"],
        "picture": data.get("picture"),
        "id2label": {str(number): label for number, label in enumerate(data["classes"])},
        **(model.objective or network.backbone.objective).described(),
        "columns": [column] if column else network.backbone.objective.input_names,
        **({"pair": data["pair"]} if data.get("pair") else {}),
        "max_length": experiment.data.max_length if text else None,
        "pooling": network.pooling or ("native" if text and network.is_transformer else None),
        "batch_size": experiment.evaluate.batch_size,
        "batch_order": "by length",
        "base": {
            "name": network.name or network.backbone.name,
            "licence": builtin.licence if builtin else licence(network.name),
            "get": builtin.get if builtin is not None else None,
        },
        "ends": sorted(network.backbone.ends) if network.backbone.objective.writes else [],
        "inputs": network.inputs(),
        **files,
    }
    if "chat" in about:
        about |= _prompts(experiment.data, model.client, about["chat"])
    (out / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    if network.backbone.tokenizer is not None:
        network.backbone.tokenizer.save_pretrained(str(out))
    write_code(network, portable.form, out)
    text = card(experiment, about, model.results, model.joined, is_shared=model.is_shared)
    (out / "README.md").write_text(text)


def _settings(network: Network, portable: Portable) -> dict[str, Any]:
    if portable.form == "adapter":
        ranks = {len(A) for A, _ in portable.lora.values()}
        plain = len(ranks) == 1 and not portable.magnitudes
        return {
            "adapted": network.backbone.encoder_prefix.removesuffix("."),
            "rank": max(ranks) if plain else None,  # of plain LoRA, one for all layers
        }
    return dict(portable.settings)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder whose content goes to ``out`` when all is written."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the output must be a directory")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} holds something already; choose a new --out, or an empty folder")
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{out.name}-export-", out.parent) as unfinished:
        stage = unfinished / "new"
        stage.mkdir()
        with naming(out):
            yield stage
        if not out.exists():
            stage.rename(out)
            return
        for path in stage.iterdir():  # the folder stays: a shell may stand in it
            path.rename(out / path.name)
