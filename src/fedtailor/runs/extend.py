"""What may change when an experiment goes on in a run directory: methods, seeds and more rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..engine.config import ScheduleConfig
from ..errors import InputError
from ..methods import METHODS
from ..methods.local import Local
from .committed import read_commit
from .experiment import Experiment
from .settings import flattened

T = TypeVar("T")

# settings of ``cohort`` that bound the norms of uploads; the rounds that are left may have others
BOUNDS = ("above_norm", "max_norm", "norm_factor", "norm_quantile")
_WAY_OUT = "choose another --out, or start anew with --overwrite"


def united(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``experiment.json`` after ``wanted`` has been run where ``present`` was: the
    methods and seeds of both.

    They stand in the order of ``wanted`` if it names all of them; else new ones come last.
    """
    old = {method["label"]: method for method in present["methods"]}
    new = {method["label"]: method for method in wanted["methods"]}
    return {
        **wanted,
        "name": present["name"],
        "seeds": _in_order(present["seeds"], wanted["seeds"]),
        "methods": [{**old, **new}[label] for label in _in_order([*old], [*new])],
    }


def _in_order(present: Sequence[T], wanted: Sequence[T]) -> list[T]:
    first, then = (wanted, present) if set(present) <= set(wanted) else (present, wanted)
    return list(dict.fromkeys([*first, *then]))


def check_extends(
    present: Mapping[str, Any], wanted: Mapping[str, Any], schedule: ScheduleConfig, out: Path
) -> None:
    """Check that the experiment ``wanted`` can go on where ``present`` was run, in ``out``.

    Both are contents of ``experiment.json``. Methods, seeds and rounds may be added. While there
    are rounds to run, the bound on the norms of uploads may change (`BOUNDS`).

    Raises:
        InputError: another key differs; there are fewer rounds; more rounds would change the
            learning rates of rounds that are done.
    """
    commits = [read_commit(path.parent) for path in out.glob("methods/*/seed-*/commit.json")]
    done = {(c.label, c.seed) for c in commits if c.finished and c.rounds >= wanted["rounds"]}
    contents = present, wanted
    if not done.issuperset(
        (method["label"], seed) for method in wanted["methods"] for seed in wanted["seeds"]
    ):
        contents = _without_bounds(present), _without_bounds(wanted)
    if differing := differences(*contents, f"in {out}", "now"):
        raise InputError(f"{'; '.join(differing)}: {_WAY_OUT}")
    before, after = present["rounds"], wanted["rounds"]
    if after < before:
        raise InputError(
            f"rounds is {before} in {out} and {after} now: rounds can only be added; {_WAY_OUT}"
        )
    for number in range(1, max((commit.round for commit in commits), default=0) + 1):
        old, new = schedule.factor(number, before), schedule.factor(number, after)
        if old != new:
            raise InputError(
                f"rounds is {before} in {out} and {after} now: under the {schedule.name} schedule "
                f"that would change the learning rates of rounds that are done; {_WAY_OUT}, or go "
                "on from its models with start_from"
            )


def bounds_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `BOUNDS`, of the content of an ``experiment.json``."""
    return {name: content["cohort"][name] for name in BOUNDS}


def changed_bounds(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each of `BOUNDS` that was another one in ``old``, which is empty before the first
    round.

    >>> changed_bounds({"max_norm": None, "norm_factor": 100.0}, {"max_norm": 2.0})
    ['cohort.max_norm is 2.0 from here on; it was none']
    """
    return [
        f"cohort.{name} is {shown(value)} from here on; it was {shown(old[name])}"
        for name, value in new.items()
        if name in old and old[name] != value
    ]


def _without_bounds(content: Mapping[str, Any]) -> dict[str, Any]:
    cohort = {k: v for k, v in content.get("cohort", {}).items() if k not in BOUNDS}
    return {**content, "cohort": cohort}


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], where_a: str, where_b: str
) -> list[str]:
    """The keys that differ between two contents of ``experiment.json``, each with both values.

    The format, the name, the number of rounds, methods and seeds of one of them alone, and what
    happens to clients that diverge don't count.

    >>> one = {"rounds": 1, "methods": [{"label": "fedavg", "name": "fedavg", "rank": 8}]}
    >>> other = {"rounds": 2, "methods": [{"label": "fedavg", "name": "fedavg", "rank": 4}]}
    >>> differences(one, other, "in runs/x", "now")
    ['methods.fedavg.rank is 8 in runs/x and 4 now']
    """
    labels = {m["label"] for m in a["methods"]} & {m["label"] for m in b["methods"]}
    flat_a, flat_b = (_defaults(c, labels) | _flat(c, labels) for c in (a, b))
    return [
        f"{key} is {shown(flat_a.get(key))} {where_a} and {shown(flat_b.get(key))} {where_b}"
        for key in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(key) != flat_b.get(key)
    ]


def _defaults(content: Mapping[str, Any], labels: set[str]) -> dict[str, Any]:
    """The defaults of all settings, keys dotted: those of an earlier version lack newer settings,
    whose defaults do what that version did."""
    known = {m["label"]: METHODS[m["name"]]() for m in content["methods"] if m["name"] in METHODS}
    plain = json.loads(json.dumps(Experiment(known or {"local": Local()}).as_dict()))
    return _flat(plain, labels)


def _flat(content: Mapping[str, Any], labels: set[str]) -> dict[str, Any]:
    """What has to be the same, keys dotted. A key without a value may be missing."""
    free = {"format", "name", "rounds", "seeds", "methods"}
    kept = {k: v for k, v in content.items() if k not in free}
    kept["engine"] = {k: v for k, v in kept.get("engine", {}).items() if k != "on_divergence"}
    methods = {m["label"]: m for m in content["methods"] if m["label"] in labels}
    return flattened({**kept, "methods": methods})


def shown(value: Any) -> str:
    """A value as an experiment file has it."""
    return "none" if value is None else json.dumps(value)
