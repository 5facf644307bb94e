"""What methods learn of each client, by round: maps of clients by blocks, models or clusters, and
dots where it is one number for each client."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...store.read import Trial
from ...store.records import Counts
from ..differences import division_of
from ..select import Entry
from .content import ClientGroup, Groups, Json

_MAX_CELLS = 240_000  # of all pictures of a page
_MAX_COLUMNS = 96
_REACH = 0.02  # of gates, which lie between 0 and 1 and begin at 0.5; closer ones look alike
_LEVELS = 65_534  # of the values; one more stands for a missing one

Floats = NDArray[np.float64]
Snapshot = tuple[int, NDArray[Any], Floats]  # round, clients [n], values [n, columns]


@dataclass(frozen=True)
class Picture:
    """A tensor ``[n, columns]`` or ``[n]`` of a method's diagnostics, and what a reader must know.

    ``column`` says what a column is; it is empty for one number a client. ``neutral`` is the value
    at which nothing is learned yet, in the middle of the colours; None: the colours go from low to
    high values.
    """

    tensor: str
    title: str
    value: str
    caption: str
    column: str = ""
    neutral: float | None = None
    drops: bool = False  # 0 means that the block is left out
    reach: float = 0.0  # least distance of both ends of the colours from ``neutral``


PICTURES: Mapping[str, Picture] = {
    "fedsdg": Picture(
        "client/gates",
        "How much of its own each client uses",
        "gate",
        "Every client has a private adapter beside the shared one in each block of the model, and "
        "a gate between 0 and 1 that says how much of the private one is used. 0: the block uses "
        "the shared model alone; 1: the private adapter counts in full. All gates start at 0.5. "
        "Columns of one colour are blocks that clients treat alike; rows of one colour are clients "
        "that want much (or little) of their own.",
        column="block of the model",
        neutral=0.5,
        reach=_REACH,
    ),
    "pfedgate": Picture(
        "client/gates",
        "Which blocks of parameters each client keeps",
        "gate",
        "A gating layer looks at a client's examples and gives each block of the model's "
        "parameters a gate. Blocks with gate 0 (grey) are left out of this client's model, so it "
        "is smaller; others are multiplied by their gate. Clients whose rows look alike use "
        "the same part of the model.",
        column="block of parameters",
        drops=True,
    ),
    "fedmerge": Picture(
        "server/weights",
        "How each client's model is merged from the server's models",
        "weight",
        "The server trains several models, and merges one for each client: their mean with these "
        "weights, which sum to 1 in each row. At the start all are equal. Clients with the same "
        "strong columns share models; rows whose cells are all alike have learned no preference.",
        column="model on the server",
    ),
    "fedhft": Picture(
        "server/assignments",
        "Which cluster each client belongs to",
        "share",
        "The server keeps one adapter for each cluster, and estimates how far each client belongs "
        "to each of them: shares that sum to 1 in each row. Clients that are strong in the same "
        "column train the same adapter. During the warm-up all shares are equal.",
        column="cluster",
    ),
    "fedem": Picture(
        "client/weights",
        "How each client mixes the shared models",
        "weight",
        "Clients share several models, and each one predicts with its own mixture of them: weights "
        "that sum to 1 in each row, equal at the start.",
        column="model",
    ),
    "fedsq": Picture(
        "client/agreement",
        "How well the fixed masks still fit",
        "units in agreement",
        "The pretrained model fixes which units of each activation are on (its masks), while the "
        "weights go on training. The value is the share of units that the trained weights would "
        "switch in the same way by themselves: 1 means that the fixed masks still fit.",
        column="activation, from the input up",
    ),
    "apfl": Picture(
        "client/mix",
        "How much of its own model each client uses",
        "weight of the client's own model",
        "Each client has a model of its own beside the shared one, and predicts with a mixture of "
        "both. The weight says how much its own model counts: 0 is the shared model alone, 1 its "
        "own model alone. All weights start at one value, the setting mix.",
    ),
    "ditto": Picture(
        "client/distance",
        "How far each client's model is from the shared one",
        "distance",
        "Each client trains a model of its own, and a penalty holds it near the shared one. The "
        "distance (Euclidean, over all trained parameters) is 0 where both are equal. Clients far "
        "up differ most from what the others have in common. The axis may start above 0.",
    ),
    "hetlora": Picture(
        "server/ranks",
        "The rank of each client's adapter",
        "rank",
        "Clients train adapters of different sizes. The rank is the size of a client's adapter: a "
        "higher one can learn more, and costs more bytes. A client whose last components hardly "
        "grow drops them, so that its rank falls.",
    ),
    "ifca": Picture(
        "client/cluster",
        "Which of the shared models each client uses",
        "number of the model",
        "The server keeps several models. In each round a client takes the one with the lowest "
        "loss on its examples, and trains that one. Clients at the same height share a model.",
    ),
    "pfedmoe": Picture(
        "client/shared",
        "How much of the shared expert each client uses",
        "weight of the shared expert",
        "Each client has an expert of its own beside the shared one, and a small gate that weighs "
        "both for every example. The value is the mean weight of the shared expert on the client's "
        "validation examples: 0 is the client's own expert alone, 1 the shared one alone.",
    ),
}


def pictures(entries: Sequence[Entry], of: Groups) -> list[Json]:
    """Return a picture for each method and seed that has one, with the rounds that fit."""
    found = [
        (position, entry, trial, steps)
        for position, entry in enumerate(entries)
        if entry.method in PICTURES
        for trial in entry.trials
        if (steps := [*_steps(trial, PICTURES[entry.method].tensor)])
    ]
    budget = _MAX_CELLS // max(len(found), 1)
    contents = []
    for position, entry, trial, steps in found:
        group = of[division_of(entry.run, trial.seed)]
        picture = _content(PICTURES[entry.method], steps, group, budget)
        if picture is not None:
            contents.append({"method": position, "group": group.number, **picture})
    return contents


def _steps(trial: Trial, name: str) -> Iterator[Snapshot]:
    clients = "clients" if name.startswith("client/") else "server_clients"
    for when, found in trial.diagnostics():
        if name in found and clients in found and found[name].ndim in (1, 2):
            values = found[name].astype(np.float64)
            yield when, found[clients], values.reshape(len(values), -1)


def _content(
    picture: Picture, steps: Sequence[Snapshot], group: ClientGroup, budget: int
) -> Json | None:
    known = np.unique(np.concatenate([clients for _, clients, _ in steps])).tolist()
    numbers = [client for client in known if client in group.place]
    columns = steps[-1][2].shape[1]
    shown = np.unique(np.linspace(0, columns - 1, min(columns, _MAX_COLUMNS)).round().astype(int))
    if not numbers or not columns:
        return None
    fit = max(2, budget // (len(numbers) * len(shown)))
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), fit)).round().astype(int))
    x = np.full((len(kept), len(numbers), len(shown)), np.nan)
    for place, step in enumerate(kept):
        _, clients, values = steps[step]
        is_shown = np.isin(clients, numbers)
        x[place, np.searchsorted(numbers, clients[is_shown])] = values[is_shown][:, shown]
    is_dots = not picture.column
    order = _order(x[-1], numbers, None if is_dots else group.partition.clusters)
    low, high = _domain(x, picture)
    least, most = _ends(x) or (0.0, 1.0)
    return {
        "title": picture.title,
        "caption": picture.caption,
        "column": picture.column,
        "valueName": picture.value,
        "drops": picture.drops,
        "isWhole": bool((x[~np.isnan(x)] % 1 == 0).all()),
        "hasTruth": group.partition.clusters is not None,
        "neutral": picture.neutral,
        "isFlat": bool(np.nanmax(x) - np.nanmin(x) < 1e-6) if not np.isnan(x).all() else True,
        "domain": [low, high],
        # the range of all values in all rounds, which is never empty
        "reach": [least, most] if most > least else [least - 0.5, most + 0.5],
        "lastReach": _ends(x[-1]),
        "rounds": [steps[step][0] for step in kept],
        "columns": shown.tolist(),
        "clients": [group.place[numbers[place]] for place in order],
        **_packed(x[:, order]),
    }


def _order(last: Floats, numbers: Sequence[int], clusters: Counts | None) -> list[int]:
    """The clients by their true clusters, or else by their strongest columns."""
    if clusters is not None:
        return sorted(range(len(numbers)), key=lambda k: (clusters[numbers[k]], numbers[k]))
    filled = np.nan_to_num(last, nan=-1.0)
    order: list[int] = np.lexsort((-filled.max(axis=1), filled.argmax(axis=1))).tolist()
    return order


def _domain(x: Floats, picture: Picture) -> tuple[float, float]:
    """The range of colours: that of all values in the last round but the outermost ones, which
    would make all others look alike. With a neutral value it lies in the middle, and both ends are
    so far from it that small differences stay pale."""
    last = x[-1]
    values = last[~np.isnan(last) & ((last != 0) if picture.drops else True)]
    ends = np.percentile(values, (2, 98)) if len(values) else values
    if (neutral := picture.neutral) is not None:
        most = max(picture.reach, float(np.abs(ends - neutral).max(initial=0)))
        return neutral - most, neutral + most
    low, high = map(float, ends) if len(ends) else (0.0, 1.0)
    return (low, high) if high - low > 1e-6 else (low - 1e-6, high + 1e-6)


def _ends(x: Floats) -> list[float]:
    known = x[~np.isnan(x)]
    return [float(known.min()), float(known.max())] if len(known) else []


def _packed(x: Floats) -> Json:
    """Values as 16-bit integers between the lowest and the highest, in base64."""
    low, high = _ends(x) or (0.0, 1.0)
    step = (high - low) / _LEVELS or 1.0
    codes = np.where(np.isnan(x), _LEVELS + 1, np.round((np.nan_to_num(x) - low) / step))
    data = base64.b64encode(codes.astype("<u2").tobytes()).decode()
    return {"low": low, "step": step, "data": data}
