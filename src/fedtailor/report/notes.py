"""The caption and the footnotes of a comparison: what a reader must know before comparing rows."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..store.bounds import BOUNDS, shown
from ..store.metrics import Metric, higher_is_better
from ..store.read import Run
from ..store.records import KNOWN_NOISE
from ..store.selection import select_by
from .names import privacy_name
from .select import goes_on, not_begun

NOT_LEARNED = "did not learn"  # a method whose mean is not above that of the majority class
_BUDGETS = ("rounds", "local", "cohort")
_SETTINGS = ("data", "split", "model", "privacy", "secure_aggregation", "faults")


def _count(counts: Collection[int], noun: str) -> str:
    """Return text such as ``1 client``, ``6 clients`` or ``5 to 6 clients``."""
    low, high = min(counts), max(counts)
    number = str(low) if low == high else f"{low} to {high}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def caption(
    runs: Sequence[Run], metric: Metric, *, by_validation: bool, has_majority: bool = False
) -> tuple[str, ...]:
    """Describe the results: the models, data and rounds, the clients and seeds, and each column."""
    clients = [partition.clients for run in runs for partition in run.partitions.values()]
    seeds = [len({trial.seed for trial in run.trials}) for run in runs]
    best = " or ".join(
        f"{'highest' if higher_is_better(chosen_by) else 'lowest'} mean validation {chosen_by}"
        for chosen_by in dict.fromkeys(map(select_by, runs))
    )
    selected = (
        f"the one with the {best} over clients (of equal ones the earliest; each seed has its own)"
        if by_validation
        else "the last evaluated one for runs without validation data, and otherwise the one with "
        f"the {best}"
    )
    counts = f"{_count(clients, 'client')} and {_count(seeds, 'seed')}"
    shown = "" if metric in ("accuracy", "loss") else f" The measure is {metric}."
    novel = max(run.experiment.get("cohort", {}).get("novel", 0) for run in runs)
    is_lm = runs[0].objective.learns_texts
    splits = {one.split for run in runs for trial in run.trials for one in trial.evaluations}
    lines = {
        f"Results of {counts}: each client's own model on the client's own test data.{shown}": True,
        f"round: {selected}.": True,
        "global: the result of the one model that all share, on the same data, at a round that is "
        "selected in the same way (its round).": True,
        f"weighted: the mean over {runs[0].objective.counted}. std: the standard deviation over "
        "clients. decile: the client at the worst tenth. worst: the worst client.": True,
        "validation: the mean on the clients' validation data, by which the verdict "
        "chooses.": "validation" in splits,
        "Methods are in the order of test results; a star marks the best of each column.": True,
        "±: the sample standard deviation over seeds.": max(seeds) > 1,
        "loss: nats per token. ppl: the perplexity, exp(mean loss).": is_lm,
        f"novel: {novel} client{'s' * (novel > 1)} that took no part in any round; each fits its "
        "own model for a short time, and shares nothing.": novel,
        "before: the models that the method went on from, on the same examples; where they did "
        "best on validation data, the reported round is 0: these very models.": any(
            map(goes_on, runs)
        ),
        "majority class: always the most frequent class of the client's own training examples. A "
        f"method whose mean is not above it is marked: {NOT_LEARNED}.": has_majority,
    }
    return tuple(line for line, is_told in lines.items() if is_told)


def _differences(runs: Sequence[Run], name: str) -> list[str]:
    """Text such as ``local.epochs 1 (a), 2 (b)`` for each field that differs between runs."""
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


def _partitions(runs: Sequence[Run]) -> Iterator[str]:
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    for run in runs:
        for seed, partition in run.partitions.items():
            digests[seed][str(run.path)] = partition.digest
    for seed, by_path in digests.items():
        if len(set(by_path.values())) > 1:
            each = ", ".join(f"{digest[:12]} ({path})" for path, digest in by_path.items())
            yield f"Not comparable: the partitions of seed {seed} differ: {each}"
    if any(set(run.partitions) != set(runs[0].partitions) for run in runs):
        seeds = ", ".join(f"{sorted(run.partitions)} ({run.path})" for run in runs)
        yield f"Different seeds: {seeds}"


def _bounds(run: Run) -> Iterator[str]:
    for name in BOUNDS:
        trials: dict[str, list[str]] = defaultdict(list)  # by the values in turn
        for trial in run.trials:
            values = (line.bounds[name] for line in trial.history if name in line.bounds)
            if turns := ", then ".join(dict.fromkeys(map(shown, values))):
                trials[turns].append(f"{trial.label}, seed {trial.seed}")
        if len(trials) > 1 or any(", then " in turns for turns in trials):
            each = "; ".join(f"{turns} ({'; '.join(of)})" for turns, of in trials.items())
            yield f"Different bounds on updates in {run.path}: cohort.{name} was {each}"


def _privacy(run: Run) -> Iterator[str]:
    """What methods have spent of privacy by their last rounds; the same is said once."""
    spent: dict[str, dict[str, None]] = defaultdict(dict)
    clips: dict[str, list[float]] = defaultdict(list)  # at the end, where they move
    privacy = run.experiment.get("privacy", {})
    neighbours = privacy.get("neighbours", "replace")
    by_clients = privacy.get("noise_by") == "clients" or privacy.get("level") == "record"
    known = ("; the clients add the noise" if by_clients else "") + (
        "" if privacy.get("secret", True) else f"; {KNOWN_NOISE}"
    )
    for trial in run.trials:
        if trial.history and (words := privacy_name(last := trial.history[-1], neighbours)):
            spent[words][trial.label] = None
            clips[words] += [] if last.next_clip is None else [last.next_clip]
    seeds = {trial.seed for trial in run.trials}
    for words, labels in spent.items():
        each = "each method and seed: " if len(labels) > 1 or len(seeds) > 1 else ""
        moved = " to ".join(dict.fromkeys(f"{one(clips[words] or [0]):.3g}" for one in (min, max)))
        clip = f"; updates are clipped to {moved} now" if clips[words] else ""
        yield (
            f"Differential privacy in {run.path}: {', '.join(labels)}: {each}{words}{clip}; scores "
            f"and choices by validation data are not covered{known}"
        )


def _of_run(run: Run) -> Iterator[str]:
    """How far the trials are, and what they did."""
    trials = [(f"{one.label}, seed {one.seed}", one, one.commit) for one in run.trials]
    for title, one, commit in trials:
        if one.progress and commit.diverged is None:
            state = "Stopped" if commit.stopped else "Unfinished"
            yield f"{state}: {title}: {one.progress} ({run.path})"
    for title, _, commit in trials:
        if commit.diverged is not None:
            yield f"Diverged: {title}: {commit.diverged} ({run.path})"
    for title, _, commit in trials:
        if commit.rolled_back:
            back = ", then ".join(map(str, commit.rolled_back))
            best = "its best round until then"
            yield f"Rolled back: {title}, from round {back} to {best} ({run.path})"
    yield from _privacy(run)
    if run.experiment.get("secure_aggregation", {}).get("threshold") is not None:
        yield f"Secure aggregation in {run.path}: the server saw sums of updates alone"
    yield from _bounds(run)
    rounds = run.experiment["rounds"]
    for title, _, commit in trials:
        if commit.finished and commit.rounds < rounds:
            command = f"fedtailor run {shlex.quote(str(run.path))}"
            yield (
                f"Different rounds: {title} has {commit.rounds} of {rounds}; {command} adds the "
                "others"
            )
    for label, seeds in not_begun(run).items():
        yield f"Not begun in {run.path}: {label}, seed {', '.join(map(str, seeds))}"


def _omissions(run: Run, *, short: bool) -> list[str]:
    """Return what the data and their division leave out; with the seed where seeds differ."""
    seeds_of: dict[str, list[str]] = defaultdict(list)
    for seed, partition in run.partitions.items():
        for omission in partition.omissions:
            brief = omission.get("short") if short else ""
            text = f"{brief}; see the report" if brief else omission["text"]
            seeds_of[text].append(str(seed))
    return [
        text if len(seeds) == len(run.partitions) else f"{text} (seed {', '.join(seeds)})"
        for text, seeds in seeds_of.items()
    ]


def footnotes(
    runs: Sequence[Run], without_examples: Sequence[int], *, short: bool = False
) -> list[str]:
    """Return notes on what differs between runs, on unfinished trials, and on what is left out;
    ``without_examples``: by method the clients without test examples."""
    notes = [*_partitions(runs)]
    for names, kind in ((_BUDGETS, "budgets"), (_SETTINGS, "settings")):
        differences = [text for name in names for text in _differences(runs, name)]
        notes += [f"Different {kind}: {'; '.join(differences)}"] if differences else []
    notes += [note for run in runs for note in _of_run(run)]
    omissions = [f"Data: {text}" for run in runs for text in _omissions(run, short=short)]
    notes += dict.fromkeys(omissions)
    if any(without_examples) and not any("without a test row" in text for text in omissions):
        clients = _count([count for count in without_examples if count], "client")
        notes.append(f"Left out because they have no test examples: {clients}")
    return notes
