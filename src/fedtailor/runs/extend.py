"""What may change when an experiment goes on in a run directory: methods, seeds and more rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from ..data.federation import num_turns
from ..errors import InputError
from ..methods import METHODS
from ..methods.local import Local
from ..store.bounds import BOUNDS, shown
from ..store.committed import Commit, read_commit
from ..store.format import dotted
from ..store.read import read_data_manifest, read_experiment
from .experiment import Experiment

T = TypeVar("T")

_WAY_OUT = "choose another --out, or start anew with --overwrite"


def united(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``experiment.json`` after ``wanted`` has been run where ``present`` was: the
    methods and seeds of both, in the order of ``wanted`` if it names all; else new ones come
    last."""
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
    present: Mapping[str, Any], wanted: Mapping[str, Any], experiment: Experiment, out: Path
) -> None:
    """Check that ``experiment``, whose content is ``wanted``, can go on in ``out``, where
    ``present`` was run. Methods, seeds and rounds may be added, if they change no round that is
    done, and the bound on the norms of uploads may be another one for the rounds that are left."""
    if differing := differences(present, wanted, f"in {out}", "now"):
        raise InputError(f"{'; '.join(differing)}: {_WAY_OUT}")
    before, after = present["rounds"], wanted["rounds"]
    rounds, privacy = f"rounds is {before} in {out} and {after} now", experiment.privacy
    if after != before and privacy.epsilon is not None and privacy.noise is None:
        of_noise = f"the noise is for privacy.epsilon = {privacy.epsilon} over {before} rounds"
        raise InputError(f"{rounds}: {of_noise}; {_WAY_OUT}")
    if after < before:
        raise InputError(f"{rounds}: rounds can only be added; {_WAY_OUT}")
    commits, schedule = _commits(out), experiment.schedule
    for number in range(1, max((commit.round for commit in commits), default=0) + 1):
        old, new = schedule.factor(number, before), schedule.factor(number, after)
        if old != new:
            raise InputError(
                f"{rounds}: under the {schedule.name} schedule that would change learning rates of "
                f"rounds that are done; {_WAY_OUT}, or go on from its models with start_from"
            )
    for commit in commits:
        _check_turns(commit, experiment, out)


def _check_turns(commit: Commit, experiment: Experiment, out: Path) -> None:
    """Raise InputError where clients would no longer train equally often over all rounds."""
    method, cohort = experiment.methods.get(commit.label or ""), experiment.cohort
    if method is None or not method.trains_alone or commit.seed not in experiment.seeds:
        return
    manifest = read_data_manifest(out / "partitions" / f"seed-{commit.seed}.json")
    clients = manifest["clients"] - cohort.novel
    if any(
        num_turns(number, commit.rounds, cohort.count(clients), clients)
        != num_turns(number, experiment.rounds, cohort.count(clients), clients)
        for number in range(1, commit.round + 1)
    ):
        raise InputError(
            f"{commit.label} has {commit.rounds} rounds in {out}, and {experiment.rounds} now: "
            "clients train equally often over all rounds, so more would change whose turn it was; "
            f"{_WAY_OUT}, leave it out (--set methods=...), or multiply the rounds where that "
            "multiplies a client's turns"
        )


def extended(
    present: Mapping[str, Any],
    wanted: Mapping[str, Any],
    out: Path,
    trials: Iterable[tuple[int, str]] | None = None,
) -> dict[str, Any]:
    """The content of ``experiment.json`` once ``trials`` of ``wanted``, pairs (seed, label), go on
    in ``out``; None: all of them. If they have no rounds left there, the bound on norms stays that
    of ``present``."""
    rounds = wanted["rounds"]
    done = {(c.seed, c.label) for c in _commits(out) if c.finished and c.rounds >= rounds}
    labels = [method["label"] for method in wanted["methods"]]
    content = united(present, wanted)
    if done.issuperset(product(wanted["seeds"], labels) if trials is None else trials):
        content["cohort"] = {**content["cohort"], **bounds_of(present)}
    return content


def _commits(out: Path) -> list[Commit]:
    return [read_commit(path.parent) for path in out.glob("methods/*/seed-*/commit.json")]


def bounds_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `BOUNDS`, of the content of an ``experiment.json``."""
    cohort = content.get("cohort", {})
    return {name: cohort[name] for name in BOUNDS if name in cohort}


def unused_bounds(wanted: Mapping[str, Any], out: Path) -> list[str]:
    """A line for each bound on norms of ``wanted`` that ``out`` has no rounds left for."""
    present = bounds_of(read_experiment(out))
    return [
        f"cohort.{name} = {shown(value)} changes nothing: it is for rounds that are left; it was "
        f"{shown(present[name])} in {out}"
        for name, value in bounds_of(wanted).items()
        if name in present and present[name] != value
    ]


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], where_a: str, where_b: str
) -> list[str]:
    """The keys that differ between two contents of ``experiment.json``, each with both values.

    The format, the name, the number of rounds, methods and seeds of one of them alone, what happens
    to clients that diverge, the bound on norms and ``privacy.stop`` don't count: ``history.jsonl``
    has the bounds.

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
    return _flat(Experiment(known or {"local": Local()}).as_dict(), labels)


def _flat(content: Mapping[str, Any], labels: set[str]) -> dict[str, Any]:
    """What has to be the same, keys dotted. A key without a value may be missing."""
    free = {"format", "name", "rounds", "seeds", "methods"}
    kept = {k: v for k, v in content.items() if k not in free}
    kept["engine"] = {k: v for k, v in kept.get("engine", {}).items() if k != "on_divergence"}
    kept["cohort"] = {k: v for k, v in kept.get("cohort", {}).items() if k not in BOUNDS}
    kept["privacy"] = {k: v for k, v in kept.get("privacy", {}).items() if k != "stop"}
    methods = {m["label"]: m for m in content["methods"] if m["label"] in labels}
    return dotted({**kept, "methods": methods})
