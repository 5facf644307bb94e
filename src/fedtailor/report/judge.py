"""The verdict on runs: which method, by how much over which other one, and at what cost.

The method is chosen by validation data; the differences are those on test data. Runs are compared
where they divide the same data alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from .choice import validation_score
from .costs import cpu_seconds_of, seconds_of, traffic
from .differences import Difference, Results, by_client, comparable_entries, difference, results_of
from .majority import majority_summary
from .names import MAX_NAMES, attack_name, client_name
from .numbers import bare
from .read import Run, attack_of
from .select import (
    Entry,
    Metric,
    by_round,
    higher_is_better,
    is_one_model,
    metric_of,
    reported,
    select_by,
    summary,
)
from .untrained import ALONE, unequal_turns, untrained_of
from .verdict import Trained, Verdict

_SETTLED = "better", "trained unequally"


def verdicts(runs: Sequence[Run], metric: Metric | None = None) -> list[Verdict]:
    """Judge ``runs`` by ``metric``: one verdict for all that have the same clients.

    ``metric`` is that of the differences; None: the one by which the runs select their rounds.
    """
    shown = metric_of(runs) if metric is None else metric
    return [_verdict(entries, shown) for entries in comparable_entries(runs)]


def _verdict(entries: Sequence[Entry], metric: Metric) -> Verdict:
    """Judge the methods of runs with the same clients."""
    selects = {select_by(entry.run) for entry in entries}
    chosen_by = selects.pop() if len(selects) == 1 else metric_of([e.run for e in entries])
    sign = 1 if higher_is_better(chosen_by) else -1
    seeds = _common_seeds(entries)
    scores = {e.label: validation_score(e, chosen_by, seeds) for e in entries}
    values = {label: score.value for label, score in scores.items() if score is not None}
    chosen = [entry for entry in entries if entry.label in values]
    best = max(chosen, key=lambda e: sign * values[e.label], default=None)  # the first of equals
    all_alone = [entry for entry in entries if entry.method == ALONE]
    alone = max(all_alone, key=lambda e: sign * values.get(e.label, -sign * math.inf), default=None)
    results = {entry.label: results_of(entry, metric) for entry in entries}
    turns = unequal_turns(alone) if alone is not None else None
    against = {}
    if alone is not None and turns is None:
        against = {e.label: difference(results[e.label], results[alone.label])
                   for e in entries if e is not alone}  # fmt: skip
    learned = {entry.label: _has_learned(entry, metric) for entry in entries}
    return Verdict(
        runs=tuple(dict.fromkeys(str(entry.run.path) for entry in entries)),
        metric=metric,
        chosen_by=chosen_by,
        validation=values,
        best=best.label if best else None,
        is_alone=best is not None and best.method == ALONE,
        is_one_model=best is not None
        and all(is_one_model(trial, select_by(best.run)) for trial in best.trials),
        has_learned=learned[best.label] if best else None,
        not_learned=tuple(e.label for e in entries if e is not best and learned[e.label] is False),
        last_is_best=tuple(e.label for e in entries if _last_is_best(e)),
        is_finished=all(t.commit.ended for entry in entries for t in entry.trials),
        methods=len(entries),
        ties=tuple(_ties(best, chosen, chosen_by)) if best else (),
        baseline=_baseline(best, chosen, results, {k: sign * v for k, v in values.items()})
        if best
        else None,
        alone=against.get(best.label) if best else None,
        against_alone=tuple(one for one in against.values() if one is not None),
        unequal_alone=turns,
        untrained={e.label: one for e in entries if (one := untrained_of(e, metric)) is not None},
        worse_off=_worse_off(results[best.label], results[alone.label], metric)
        if best and alone and not turns
        else (),
        bytes=_bytes(best) if best else None,
        seconds=seconds_of(best) if best else None,
        cpu_seconds=cpu_seconds_of(best) if best else None,
        left_out={e.label: _why_left_out(e, seeds) for e in entries if e.label not in values},
        best_model=_trained(best),
        alone_model=_trained(alone),
        attacks=tuple(dict.fromkeys(_attacks(entries))),
        empty_rounds=dict(_empty_rounds(entries)),
    )


def _trained(entry: Entry | None) -> Trained | None:
    return None if entry is None else Trained(str(entry.run.path), entry.trials[0].label)


def _bytes(entry: Entry) -> float | None:
    down, up = traffic(entry)
    return None if down is None or up is None else down + up


def _common_seeds(entries: Sequence[Entry]) -> list[int] | None:
    """The seeds of all runs; of unfinished ones those that all methods are through with, if there
    are any. None (each run's own) if they have none in common."""
    of_runs: list[set[int]] = [set(e.run.experiment["seeds"]) for e in entries]
    through = [{t.seed for t in entry.trials if t.commit.ended} for entry in entries]
    seeds = set.intersection(*of_runs)
    return sorted(seeds.intersection(*through) or seeds) or None


def _baseline(
    best: Entry,
    chosen: Sequence[Entry],
    results: Mapping[str, Results],
    scores: Mapping[str, float],
) -> Difference | None:
    """The difference from the best of the other methods, or else from the same method with other
    settings; of equals from the one that is hardest to beat on test data."""
    others = [e for e in chosen if e is not best and results[e.label].is_fair]

    def rank(entry: Entry) -> tuple[bool, float]:
        return entry.method == best.method, -scores[entry.label]

    first = min(map(rank, others), default=None)
    leads = [difference(results[best.label], results[e.label]) for e in others if rank(e) == first]
    return min((one for one in leads if one is not None), key=lambda one: one.value, default=None)


def _ties(best: Entry, chosen: Sequence[Entry], metric: Metric) -> Iterator[str]:
    """The methods that validation data can't tell from the best."""
    ours = results_of(best, metric, "validation")
    for other in chosen:
        if other is not best:
            lead = difference(ours, results_of(other, metric, "validation"))
            if lead is not None and lead.reading not in _SETTLED:
                yield other.label


def _worse_off(best: Results, alone: Results, metric: Metric) -> tuple[str, ...]:
    """The clients that lose most against training alone, each with its difference."""
    clients = by_client(best, alone)
    several = len({seed for _, seed in clients}) > 1
    worst = sorted((value, *key) for key, value in clients.items() if value < 0)
    return tuple(
        f"{client_name(client, seed if several else None)} ({bare(metric, value, signed=True)})"
        for value, client, seed in worst[:MAX_NAMES]
    )


def _has_learned(entry: Entry, metric: Metric) -> bool | None:
    """Whether its accuracy is above that of each client's most frequent class."""
    ahead = []
    for trial, selected in reported(entry):
        majority = majority_summary(entry.run.partitions[trial.seed], selected.test)
        if majority is None or metric != "accuracy":
            return None
        ahead.append(summary(selected.test, "accuracy").mean - majority.mean)
    return mean(ahead) > 0 if ahead else None


def _last_is_best(entry: Entry) -> bool:
    """Whether every trial reports the last of several evaluated rounds, at a constant rate: it may
    have been too short."""
    if entry.run.experiment.get("schedule", {}).get("name", "constant") != "constant":
        return False
    return len(reported(entry)) == len(entry.trials) and all(
        selected.round == trial.commit.rounds and len(by_round(trial, "personal", "validation")) > 1
        for trial, selected in reported(entry)
    )


def _why_left_out(entry: Entry, seeds: Sequence[int] | None) -> str:
    if diverged := [str(t.seed) for t in entry.trials if t.commit.diverged is not None]:
        return f"diverged with seed {', '.join(diverged)}"
    if missing := {*(seeds or entry.run.experiment["seeds"])} - {t.seed for t in entry.trials}:
        return f"lacks seed {', '.join(map(str, sorted(missing)))}"
    return "has no validation results"


def _attacks(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        attack = attack_of(entry.run.experiment)
        if attack.kind != "none":
            yield attack_name(attack).replace("\n", " ")


def _empty_rounds(entries: Sequence[Entry]) -> Iterator[tuple[str, tuple[int, int]]]:
    """How many rounds came to nothing, of how many."""
    for entry in entries:
        rounds = [one for trial in entry.trials for one in trial.history]
        empty = sum(not one.cohort for one in rounds)
        if empty and entry.method != ALONE:  # a client's turn may be in another round
            yield entry.label, (empty, len(rounds))
