"""What the server asks, and what a client's side answers.

A *node* is a place that Flower knows; it serves one or several of the federation's clients.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..engine.metrics import MetricValues, metric_names
from ..runs.experiment import Experiment
from ..runs.extend import bounds_of
from ..uploads.secure.messages import Keys, Order, Texts

STEPS = ("keys", "share", "sign_list", "reveal")  # of secure aggregation, beside the training
Kind = Literal[
    "train", "personal", "global", "keep", "join", "keys", "share", "sign_list", "reveal", "reweigh"
]  # fmt: skip
Sums = tuple[tuple[float, float, float], tuple[float, float, float]]


def digest(experiment: Experiment, label: str | None = None) -> str:
    """What both sides must agree on: all but where data and metrics' files lie, how clients are
    run, and the bound on uploads, which is the server's alone. With the ``label`` of a method, what
    of it stays when rounds, seeds or other methods are added."""
    plain = experiment.as_dict()
    if label is not None:
        plain["methods"] = [method for method in plain["methods"] if method["label"] == label]
        for name in ("name", "rounds", "seeds"):
            del plain[name]
    for name in bounds_of(plain):
        del plain["cohort"][name]
    del plain["data"]
    plain["engine"] = {"precision": plain["engine"]["precision"]}
    plain["evaluate"]["metrics"] = list(metric_names(experiment.evaluate))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Exact:
    """A message, or a part of one, of which no field is unknown."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class NodeQuery(Exact):
    """Which clients does a node serve? ``experiment`` is its `digest`."""

    experiment: str


@dataclass(frozen=True)
class Sizes(Exact):
    """How many examples the node's ``clients`` have with one seed, in their order. ``partition``
    identifies the split. ``labels`` counts each client's examples by class, over all splits: empty
    where the site doesn't tell."""

    seed: int
    partition: str
    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class NodeInfo(Exact):
    """The answer to a `NodeQuery`: the node's ``clients`` of ``num_clients``, and what their data
    look like (``picture``: channels, height and width; None for texts; ``scale``: what their task
    is scaled by). ``model`` has hashes of the base model's files, by name."""

    clients: tuple[int, ...]
    num_clients: int
    task: str
    classes: tuple[str, ...]
    picture: tuple[int, ...] | None
    data: str
    sizes: tuple[Sizes, ...]
    new_clients: tuple[int, ...] = ()  # from K on: they join when the training is over
    model: tuple[tuple[str, str], ...] = ()
    scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class WireRequest(Exact):
    """A client, the round whose private state it starts from (``base``, the last one with it that
    counted; 0: none did), the round whose private state it must not lose (``best``, its last one up
    to the best round of the run so far), and the payload that it receives. ``order``: for the masks
    of its upload."""

    client: int
    base: int
    best: int
    payload: int
    order: Order | None = None


@dataclass(frozen=True)
class Masking(Exact):
    """What a message says of secure aggregation: which ``attempt`` at a round it is, a number that
    grows, and the ``clients`` that were drawn; with which keys they sign; and what `Side` takes in
    the step of this name."""

    attempt: int
    clients: tuple[int, ...]
    signers: Texts = ()
    keys: None = None
    share: tuple[Keys, ...] = ()
    sign_list: tuple[int, ...] = ()
    reveal: Texts = ()


@dataclass(frozen=True)
class MaskingReply(Exact):
    """A client's answer to a step of secure aggregation, what `Side` gives in the step of this
    name; and with its keys the one with which it signs. Or its account has no update left: all of
    its noise is ``spent``."""

    keys: Keys | None = None
    share: Texts = ()
    sign_list: str = ""
    reveal: Texts = ()
    signer: str = ""
    spent: bool = False


@dataclass(frozen=True)
class RoundRequest(Exact):
    """Train, or evaluate the personal models, or the one global model; or keep the personal models,
    those after ``round``, as the result of the run. ``before``: the names that the run had before
    it was rolled back, the last one first, each with the round that it went back to: states up to
    there still count. Or let new clients "join": fit what the method keeps by client to them, after
    ``round``. Their payloads have what they receive as ``received/NAME``, and the global model, if
    there is one, as ``global/NAME``. ``clip`` is the norm that updates may have, where it moves."""

    experiment: str
    run: str
    label: str
    seed: int
    round: int
    kind: Kind
    requests: tuple[WireRequest, ...]
    before: tuple[tuple[str, int], ...] = ()
    masking: Masking | None = None  # of secure aggregation, of which some kinds are steps
    clip: float | None = None


@dataclass(frozen=True)
class ClientReply(Exact):
    """What became of one client's turn: an ``error`` in words (``diverged``: it has trained to
    values that aren't finite); or the payload that it sends and the mean loss; or ``sums`` of loss,
    hits and predictions on validation and test examples, and the ``metrics`` of each of these
    splits, if the experiment has any; or, of a new client, the name of the model that it ``kept``:
    ``fitted``, ``guess`` or ``global``; or nothing, where a model is kept."""

    client: int
    error: str | None = None
    diverged: bool = False
    payload: int | None = None
    loss: float | None = None
    sums: Sums | None = None
    metrics: tuple[MetricValues, ...] = ()
    kept: str | None = None
    masking: MaskingReply | None = None


@dataclass(frozen=True)
class RoundReply(Exact):
    """The answer to a `RoundRequest`."""

    run: str
    round: int
    kind: Kind
    results: tuple[ClientReply, ...]
