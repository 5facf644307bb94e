"""What a reader must know before comparing rows, in words."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from .read import Run
from .select import Metric

_BUDGETS = ("rounds", "local", "cohort")
_SETTINGS = ("data", "split", "model")


def _range(values: Iterable[int]) -> str:
    low, high = min(found := list(values)), max(found)
    return str(low) if low == high else f"{low} to {high}"


def _count(values: Iterable[int], noun: str) -> str:
    shown = _range(values)
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def caption(runs: Sequence[Run], metric: Metric, *, by_validation: bool) -> str:
    """Which model, which split, which round, how many clients and seeds; lines of 110 columns."""
    partitions = [partition for run in runs for partition in run.partitions.values()]
    seeds = [len({trial.seed for trial in run.trials}) for run in runs]
    best = "highest" if metric == "accuracy" else "lowest"
    chosen = (
        f"at the round with the {best} mean validation {metric} over clients (the earliest of "
        "equals; each seed chooses its own)"
        if by_validation
        else "at the last evaluated round where there is no validation data, else chosen on it"
    )
    spread = " ± is the sample standard deviation over seeds." if max(seeds) > 1 else ""
    perplexity = " ppl (perplexity) is exp(mean loss)." if metric == "loss" else ""
    novel = max(run.experiment.get("cohort", {}).get("novel", 0) for run in runs)
    apart = (
        f" novel: {novel} clients that took no part, each with its own private part after a short "
        "training that nobody else sees."
        if novel
        else ""
    )
    text = (
        f"Personal model of each client on its own test split, {chosen}; the global model on the "
        "same data, at the round chosen for it in the same way. "
        f"{_count((p.clients for p in partitions), 'client')}, {_count(seeds, 'seed')}.{spread} "
        f"std, decile (from the worst up) and worst are over clients.{perplexity}{apart}"
    )
    return textwrap.fill(text, 110)


def _differences(runs: Sequence[Run], name: str) -> list[str]:
    """``local.epochs 1 (a), 2 (b)`` for every field of a section that is not the same in all."""
    sections: list[Any] = [run.experiment.get(name) for run in runs]
    if all(isinstance(section, dict) for section in sections):
        keys = dict.fromkeys(key for section in sections for key in section)
        columns = {f"{name}.{key}": [section.get(key) for section in sections] for key in keys}
    else:
        columns = {name: sections}
    return [
        f"{key} " + ", ".join(f"{json.dumps(v)} ({r.path})" for v, r in zip(vs, runs, strict=True))
        for key, vs in columns.items()
        if any(value != vs[0] for value in vs)
    ]


def _partitions(runs: Sequence[Run]) -> list[str]:
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    for run in runs:
        for seed, partition in run.partitions.items():
            digests[seed][str(run.path)] = partition.digest
    notes = [
        f"Not comparable: the partitions of seed {seed} differ: "
        + ", ".join(f"{digest[:12]} ({path})" for path, digest in found.items())
        for seed, found in digests.items()
        if len(set(found.values())) > 1
    ]
    if any(set(run.partitions) != set(runs[0].partitions) for run in runs):
        shown = ", ".join(f"{sorted(run.partitions)} ({run.path})" for run in runs)
        notes.append(f"Different seeds: {shown}")
    return notes


def _not_begun(run: Run) -> list[str]:
    begun = {(trial.label, trial.seed) for trial in run.trials}
    absent: dict[str, list[str]] = defaultdict(list)
    for method in run.experiment["methods"]:
        for seed in run.experiment["seeds"]:
            if (method["label"], seed) not in begun:
                absent[method["label"]].append(str(seed))
    return [
        f"Not begun in {run.path}: {label}, seed {', '.join(seeds)}"
        for label, seeds in absent.items()
    ]


def footnotes(runs: Sequence[Run], without_examples: Sequence[int]) -> list[str]:
    """Differing partitions, budgets and settings; what is unfinished; clients left out."""
    notes = _partitions(runs)
    for names, kind in ((_BUDGETS, "budgets"), (_SETTINGS, "settings")):
        found = [text for name in names for text in _differences(runs, name)]
        notes += [f"Different {kind}: {'; '.join(found)}"] if found else []
    for run in runs:
        notes += [
            f"Unfinished: {trial.label}, seed {trial.seed}: {trial.progress} ({run.path})"
            for trial in run.trials
            if trial.progress and trial.commit.diverged is None
        ]
        notes += [
            f"Diverged: {trial.label}, seed {trial.seed}: {trial.commit.diverged}"
            for trial in run.trials
            if trial.commit.diverged is not None
        ]
        notes += _not_begun(run)
    if any(without_examples):
        shown = _count((count for count in without_examples if count), "client")
        notes.append(f"Left out for want of test examples: {shown}")
    return notes
