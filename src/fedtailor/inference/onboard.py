"""A new client of a finished run: only what the method keeps by client is fitted, to its data."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import random
from ..data import Data
from ..data.federation import Federation, Split
from ..data.natural_clients import columns_of_client
from ..data.sources import load_data, read_columns
from ..data.table import Dataset, Images
from ..data.tables import local_table
from ..engine.client import Training
from ..engine.executors.work import ClientRequest
from ..engine.joining import Candidate, fits_anything, join_requests
from ..engine.prepare import client_works
from ..engine.scoring import SPLITS
from ..errors import InputError, announce, brief, listed
from ..objectives import objective_of
from ..objectives.classification import UnknownLabelError
from ..params import Params, aligned
from ..runs.build import check_ids, federation_of, public_of, with_new_clients
from ..runs.held_out import without_trained
from ..runs.manifest import about
from ..runs.trained import STATE_FILE, TrainedMethod, Which, open_trained
from ..store.files import read_record, save_tensors, write_json
from ..store.metrics import bare, is_percentage
from ..store.run_directory import locked
from ..store.trained_rows import read_trained_before
from ..task.backbone import Backbone
from .choose import MODELS, CandidateScores, all_scores, choose, did_not_learn

RESULT_FILE = "result.json"
_ALL: tuple[Split, ...] = ("train", *SPLITS)
_NAME = re.compile(r"(?!\d+$)\w([\w .-]{,98}[\w.-])?")
_LONGEST = 240  # bytes of a name, which names a folder


@dataclass(frozen=True)
class Onboarded:
    """A client that has joined a finished run.

    ``number`` is its number, from K on; the server's state is that after ``round``. ``scores`` has,
    for ``majority`` (always its most frequent class), ``global``, ``guess`` (what the server can
    say before the client has fitted anything) and ``fitted``, on its ``validation`` and ``test``
    examples the ``accuracy``, the ``loss`` and the ``count`` of predictions, and the metric that
    chooses the task's round, if it has one. ``kept`` names the model that the client uses: the best
    on validation examples. ``note`` says what else there is to say.
    """

    client: str
    number: int
    method: str
    seed: int
    round: int
    passes: int
    num_examples: Mapping[str, int]
    scores: CandidateScores
    kept: str
    note: str
    data: str

    def __str__(self) -> str:
        from tabulate import tabulate

        counts = ", ".join(f"{count} {split}" for split, count in self.num_examples.items())
        of_splits = [one[split] for one in self.scores.values() for split in SPLITS]
        own = [name for name in of_splits[-1] if name not in ("accuracy", "loss", "count")]
        if not own and any(scores["accuracy"] is not None for scores in of_splits):
            own = ["accuracy"]
        metrics = [*own, "loss"]
        rows = [
            [MODELS.get(model, "always the most frequent class")]
            + [bare(metric, scores[split].get(metric)) for split in SPLITS for metric in metrics]
            for model, scores in self.scores.items()
        ]
        word = "" if metrics[0] == "accuracy" else f" {metrics[0]}"
        unit = " %" if is_percentage(metrics[0]) else ""
        heads = [one for split in SPLITS for one in (f"{split}{word}{unit}", *metrics[1:])]
        align = ["left", *["right"] * len(heads)]
        table = tabulate(rows, ["model", *heads], colalign=align, disable_numparse=True)
        title = f"{self.client} (client {self.number}) joins {self.method}, seed {self.seed}"
        return f"{title}: {counts} examples\n\n{table}\n\nkept: {MODELS[self.kept]}; {self.note}"


def onboard(
    run: Path | str,
    method: str | None,
    data: Path | str | Data | Dataset,
    client: str,
    seed: int | None = None,
    *,
    which: Which = "best",
    passes: int | None = None,
    overwrite: bool = False,
    backbone: Backbone | None = None,
) -> Onboarded:
    """Let a new client join a finished run, and keep its model there.

    The federation's own files don't change, and nothing of the client is sent. `load_model` and
    ``fedtailor predict`` find the client by its name.

    Args:
        run: the run directory.
        method: the method's label in the experiment; None: the run has one.
        data: the client's file, with the columns and classes of the run's data; or a `Data`, or
            a `Dataset` of its rows alone. Where a column says whose rows they are, this client's
            are taken.
        client: the client's new name.
        seed: None: the experiment's first.
        which: the client joins the models of the reported round, or of the last one.
        passes: how often it goes through a round's worth of local training; None:
            ``evaluate.novel_passes``.
        overwrite: replace a client that has joined before under this name.
        backbone: the model, if the run was given it from Python.

    Raises:
        InputError: there is no such run or method; the name is taken or can't be one; the data
            can't be used, such as a label that the run doesn't know.
    """
    trained = open_trained(run, method, seed, which=which, backbone=backbone)
    if passes is not None and passes < 1:
        raise InputError(f"passes = {passes}: must be 1 or more")
    _check_name(trained, client, overwrite)
    dataset = _dataset(trained, data, client)
    for omission in dataset.omissions:
        announce(omission.text)
    folder = trained.folder / "onboarded"
    place, old = folder / client, folder / f".{client}.old"
    with locked(folder):
        if old.exists() and not place.exists():  # a kill between the two renames below
            old.rename(place)
        number = _number(trained, folder, client)
        passes = passes or trained.experiment.evaluate.novel_passes or 1
        federation = _federation(trained, dataset, client, number, backbone)
        result, state = fit_new_client(trained, federation, client, number, passes)
        stage = folder / f".{client}.new"
        for left in (stage, old):  # of a run that was killed here
            shutil.rmtree(left, ignore_errors=True)
        stage.mkdir()
        save_tensors(stage / STATE_FILE, state)
        write_json(stage / RESULT_FILE, asdict(result))
        if place.exists():
            place.rename(old)
        stage.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    return result


def read_result(folder: Path) -> Onboarded:
    """What is known of a client that has joined, from its folder."""
    return read_record(Onboarded, folder / RESULT_FILE)


def _check_name(trained: TrainedMethod, client: str, overwrite: bool) -> None:
    if not _NAME.fullmatch(client):
        raise InputError(
            f"client name {client!r}: allowed are up to 100 letters, digits, ' ', '.', '-' and "
            "'_'; first a letter, a digit or '_', last no space; and not a number alone"
        )
    if (size := len(client.encode())) > _LONGEST:
        raise InputError(f"client name {client!r} has {size} bytes; allowed: {_LONGEST}")
    if not overwrite and (folder := trained.onboarded(client)) is not None:
        raise InputError(f"{folder} has joined already; --overwrite replaces it")
    try:
        number = trained.number(client)
    except InputError:
        return
    raise InputError(f"{client!r} is client {number} of the federation; choose another name")


def _number(trained: TrainedMethod, folder: Path, client: str) -> int:
    """The client's number: the one that it had, or the next one, from K on."""
    numbers = {
        path.parent.name: read_record(Onboarded, path).number
        for path in folder.glob(f"[!.]*/{RESULT_FILE}")
    }
    first: int = trained.data["clients"]
    return numbers.get(client, max(numbers.values(), default=first - 1) + 1)


def _kind(data: Mapping[str, Any]) -> dict[str, Any]:
    """What of a `data_manifest` must be the same for a new client."""
    return {
        **{what: data.get(what) for what in ("task", "modality", "classes", "scale")},
        "inputs": "pairs of texts" if data.get("pair") else "no pairs of texts",
        "channels": (data.get("picture") or [None])[0],
    }


def _dataset(trained: TrainedMethod, data: Path | str | Data | Dataset, client: str) -> Dataset:
    if isinstance(data, Dataset):
        if others := sorted({*(data.client_names or ())} - {client}):
            raise InputError(
                f"the data set has rows of {listed(others)}, too; give those of {client!r} alone, "
                "or make it with fedtailor.Data, of which they are taken"
            )
    else:
        data = _loaded(trained, data, client)
    check_ids(data.inputs, trained.task.backbone)
    kind, ours = _kind(about(data)), _kind(trained.data)
    for what, value in kind.items():
        if value != ours[what]:
            raise InputError(f"the new client has {what} {value!r}; the run has {ours[what]!r}")
    if isinstance(data.inputs, Images) and list(data.picture or ()) != trained.data["picture"]:
        data = replace(data, inputs=data.inputs.resized(*trained.data["picture"][1:]))
    return data


def _loaded(trained: TrainedMethod, data: Path | str | Data, client: str) -> Dataset:
    """The rows of ``client``; all, if no column says whose they are."""
    ours, task = trained.experiment.data, trained.data["task"]
    names = {one: getattr(ours, one) for one in ("text", "text_pair", "image", "label")}
    if not isinstance(data, Data | str | Path):
        raise InputError(f"data = {brief(data, 60)}: must be a file's name, a Data or a Dataset")
    source = data if isinstance(data, Data) else Data({"path": str(data), **names})
    scaled = "scale" in objective_of(task).settings
    config = replace(
        source.config(replace(ours, templates=())), task=task, limit=None, skip=0, limit_test=None,
        classes=tuple(trained.data["classes"]),
        scale=tuple(trained.data["scale"])[:2] if scaled else (),
    )  # fmt: skip
    column = config.client or None
    if column is None and ours.client is not None and config.path is not None:
        column = ours.client if ours.client in local_table(config.path).column_names else None
    config = replace(config, client=column, templates=ours.templates if column else ())
    columns = source.columns or read_columns(config)
    where = config.path or "the data"
    columns, others = columns_of_client(columns, client, where)
    try:
        dataset = load_data(config, trained.task.backbone.tokenizer, columns=columns)
    except UnknownLabelError as error:
        raise InputError(
            f"{error.in_words(where)}; correct these labels, or leave their rows out"
        ) from error
    # a new client need not have rows of every class
    own = (one for one in dataset.omissions if one.kind != "no-row-of-class")
    return replace(dataset, omissions=(*others, *own))


def _federation(
    trained: TrainedMethod, dataset: Dataset, client: str, number: int, backbone: Backbone | None
) -> Federation:
    """The new client alone, with its rows divided by the run's rules. None of those is held out
    that the models were trained on in a run that this one goes on from."""
    clients = range(number, number + 1)
    experiment = with_new_clients(trained.experiment, clients)
    federation = federation_of(experiment, dataset, trained.seed, clients)
    rows = np.concatenate([federation.rows(number, split) for split in SPLITS])
    if seen := trained.num_trained_on(dataset, rows):
        announce(
            f"{seen} of {len(rows)} held-out rows of {client} were training rows of "
            f"{trained.run}: their scores say little of new ones"
        )
    if (old := experiment.start_from.run) is not None:
        names = ("",) * number + (client,)
        named = replace(federation, partition=replace(federation.partition, names=names))
        before = read_trained_before(trained.run, trained.seed)
        federation = without_trained(named, before, old)
        for omission in federation.partition.omissions:
            if omission.kind in ("trained-before", "not-checked"):
                announce(omission.text)
    if not trained.method.needs_public:
        return federation
    return replace(federation, public=public_of(experiment, dataset, backbone))


def fit_new_client(
    trained: TrainedMethod, federation: Federation, client: str, number: int, passes: int
) -> tuple[Onboarded, Params]:
    """Fit the new client, alone in ``federation``; the result, and the state that it uses."""
    method, task, plan = trained.method, trained.task, trained.experiment.plan
    private = aligned(method.init_client(task, number, random.key(trained.seed, "client", number)))
    (request,) = join_requests(
        federation, plan.local, [number], trained.round, passes, lambda client: private
    )
    joining = client_works(method, task, federation, plan.in_clear).join  # it sends nothing
    candidates = joining.candidates(*to_new_client(trained, number), request)
    return decide(joining.training, request, candidates, client=client, label=trained.label)


def to_new_client(trained: TrainedMethod, number: int) -> tuple[Params, Params | None]:
    """What the server sends to a new client, and the global model, if there is one."""
    method, task, server = trained.method, trained.task, aligned(trained.server)
    shared = trained.global_state() if trained.has_global_model else None
    return method.send_new(task, server, number), shared


def decide(
    training: Training,
    request: ClientRequest,
    candidates: Mapping[str, Candidate],
    *,
    client: str,
    label: str,
) -> tuple[Onboarded, Params]:
    """Choose among the ``candidates`` of `engine.joining`, of the work ``training`` and its
    ``request``, for a ``client`` and a method by name; the result, and the state of the kept one.
    """
    federation, number = training.federation, request.client
    assert request.private is not None
    fits = fits_anything(training.method, request.private)
    if not fits and "global" in candidates:
        candidates = {"global": candidates["global"]}
    by_loss = training.task.backbone.objective.selects != "accuracy"
    kept, note = choose(
        candidates, federation.num_rows(number, "validation"),
        fits=fits, label=label, by_loss=by_loss, private=bool(request.private),
    )  # fmt: skip
    scores = all_scores(federation, number, candidates)
    if did_not_learn(scores, kept):
        note += "; on its test examples it is no better than the most frequent class"
    result = Onboarded(
        client=client,
        number=number,
        method=label,
        seed=federation.seed,
        round=request.round,
        passes=request.passes,
        num_examples={split: federation.num_rows(number, split) for split in _ALL},
        scores=scores,
        kept=kept,
        note=note,
        data=federation.dataset.digest,
    )
    return result, candidates[kept].state
