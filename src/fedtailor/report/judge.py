"""The verdict on runs: which method, by how much over which other one, and at what cost.

The method is chosen by validation data; the differences are those on test data. Runs are compared
where they divide the same data alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from .choice import Score, validation_score
from .differences import Difference, Results, by_client, comparable_entries, difference, results_of
from .majority import at_majority, majority_summary
from .names import MAX_NAMES, attack_name
from .read import Run, attack_of
from .records import Round
from .select import (
    Entry,
    Metric,
    by_round,
    higher_is_better,
    is_one_model,
    metric_of,
    select_by,
    select_round,
    summary,
)
from .untrained import ALONE, Untrained, unequal_turns, untrained_of
from .verdict import ClientLoss, Cost, Trained, Verdict

_SETTLED = "better", "trained unequally"


def verdicts(runs: Sequence[Run], metric: Metric | None = None) -> list[Verdict]:
    """Judge ``runs`` by ``metric``: one verdict for all that have the same clients.

    ``metric`` is that of the differences; None: the one by which the runs select their rounds.
    """
    shown = metric_of(runs) if metric is None else metric
    return [_Judge(members, shown).verdict() for members in comparable_entries(runs)]


def traffic(entry: Entry) -> tuple[float | None, float | None]:
    """Return the bytes down and up per client and round, over the committed rounds."""
    rounds = [record for trial in entry.trials for record in trial.history]
    visits = sum(record.num_trained for record in rounds)
    if not visits:
        return None, None
    down, up = sum(r.bytes_down for r in rounds), sum(r.bytes_up for r in rounds)
    return down / visits, up / visits


def seconds_of(entry: Entry) -> float:
    """Return the seconds of all rounds, mean over seeds."""
    return mean(sum(sum(t.seconds.values()) for t in trial.timings) for trial in entry.trials)


def cpu_seconds_of(entry: Entry) -> float | None:
    """Return the processor seconds of the clients' training, mean over seeds; None where they are
    not known."""
    timings = [timing for trial in entry.trials for timing in trial.timings if timing.round]
    known = [one.cpu_seconds for one in timings if one.cpu_seconds is not None]
    return sum(known) / len(entry.trials) if known and len(known) == len(timings) else None


def simulated_seconds(rounds: Sequence[Round]) -> float | None:
    """Return the simulated seconds of some rounds of a trial; None if time was not simulated."""
    known = [record.simulated_seconds for record in rounds if record.simulated_seconds is not None]
    return sum(known) if known and len(known) == len(rounds) else None


def simulated_seconds_of(entry: Entry) -> float | None:
    """Return the simulated seconds of all rounds, mean over seeds; None where time was not
    simulated."""
    of_trials = [simulated_seconds(trial.history) for trial in entry.trials]
    known = [seconds for seconds in of_trials if seconds is not None]
    return mean(known) if known and len(known) == len(of_trials) else None


def _last_is_best(entry: Entry) -> bool:
    """Whether every trial reports the last of several evaluated rounds, at a constant rate: it may
    have been too short."""
    experiment = entry.run.experiment
    if experiment.get("schedule", {}).get("name", "constant") != "constant":
        return False
    for trial in entry.trials:
        evaluated = by_round(trial, "personal", "validation")
        selected = select_round(trial, "personal", select_by(entry.run))
        if len(evaluated) < 2 or selected is None or selected.round != trial.commit.rounds:
            return False
    return True


@dataclass(frozen=True)
class _Judge:
    """The methods of runs with the same clients."""

    entries: Sequence[Entry]
    metric: Metric

    def verdict(self) -> Verdict:
        best = self._best(self._by_validation)
        alone = self._alone
        turns = unequal_turns(alone) if alone is not None else None
        against = self._against(alone) if alone is not None else {}
        baseline = self._baseline(best) if best else None
        ties = self._ties(best) if best else []
        ahead = [self._difference(entry, best) for entry in ties] if best else []
        return Verdict(
            runs=tuple(dict.fromkeys(str(entry.run.path) for entry in self.entries)),
            metric=self.metric,
            chosen_by=self._validation_metric,
            validation={label: score.value for label, score in self._by_validation.items()},
            best=best.label if best else None,
            is_alone=best is not None and best.method == ALONE,
            is_one_model=best is not None
            and all(is_one_model(trial, select_by(best.run)) for trial in best.trials),
            has_learned=self._has_learned(best) if best else None,
            not_learned=tuple(
                entry.label
                for entry in self.entries
                if entry is not best and self._has_learned(entry) is False
            ),
            last_is_best=tuple(e.label for e in self.entries if _last_is_best(e)),
            is_finished=all(t.commit.ended for entry in self.entries for t in entry.trials),
            methods=len(self.entries),
            ties=tuple(entry.label for entry in ties),
            baseline=self._difference(best, baseline) if best and baseline else None,
            ahead=tuple(d for d in ahead if d is not None and d.reading == "better"),
            alone=against.get(best.label) if best else None,
            against_alone=tuple(against.values()),
            unequal_alone=turns.words(alone.label) if alone and turns else None,
            untrained={entry.label: one for entry, one in self._untrained},
            worse_off=tuple(self._worse_off(best, alone)) if best and alone and not turns else (),
            at_majority=at_majority([e for e in self.entries if self._has_learned(e) is not False]),
            cost=self._cost(best) if best else None,
            left_out={
                entry.label: self._why_left_out(entry)
                for entry in self.entries
                if entry.label not in self._by_validation
            },
            best_model=_trained(best),
            alone_model=_trained(alone),
            attacks=self._attacks,
            empty_rounds=dict(self._empty_rounds()),
        )

    @property
    def _attacks(self) -> tuple[str, ...]:
        found = [attack_of(entry.run.experiment) for entry in self.entries]
        names = [attack_name(one).replace("\n", " ") for one in found if one.kind != "none"]
        return tuple(dict.fromkeys(names))

    def _empty_rounds(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for entry in self.entries:
            if entry.method == ALONE:
                continue  # a client's turn may be in another round
            rounds = [one for trial in entry.trials for one in trial.history]
            if empty := sum(not one.cohort for one in rounds):
                yield entry.label, (empty, len(rounds))

    @property
    def _untrained(self) -> Iterator[tuple[Entry, Untrained]]:
        for entry in self.entries:
            if (found := untrained_of(entry, self.metric)) is not None:
                yield entry, found

    def _of(self, label: str) -> Entry:
        return next(entry for entry in self.entries if entry.label == label)

    @cached_property
    def _seeds(self) -> list[int] | None:
        """The seeds of all runs; of unfinished ones those that all methods are through with, if
        there are any. None (each run's own) if they have none in common."""
        of_runs: list[set[int]] = [set(e.run.experiment["seeds"]) for e in self.entries]
        through = [{t.seed for t in entry.trials if t.commit.ended} for entry in self.entries]
        seeds = set.intersection(*of_runs)
        return sorted(seeds.intersection(*through) or seeds) or None

    @property
    def _validation_metric(self) -> Metric:
        metrics = {select_by(entry.run) for entry in self.entries}
        return metrics.pop() if len(metrics) == 1 else metric_of([e.run for e in self.entries])

    @cached_property
    def _by_validation(self) -> dict[str, Score]:
        metric = self._validation_metric
        found = {e.label: validation_score(e, metric, self._seeds) for e in self.entries}
        return {label: score for label, score in found.items() if score is not None}

    def _best(self, scores: Mapping[str, Score]) -> Entry | None:
        """The best one; the first of equals."""
        return next(iter(self._all_best(scores)), None)

    def _all_best(self, scores: Mapping[str, Score]) -> list[Entry]:
        if not scores:
            return []
        higher = higher_is_better(metric_of([entry.run for entry in self.entries]))
        top = (max if higher else min)(score.value for score in scores.values())
        return [self._of(label) for label, score in scores.items() if score.value == top]

    def _baseline(self, best: Entry) -> Entry | None:
        """The best of the other methods, or else of the same method with other settings. Of equals
        the one that is hardest to beat on test data."""
        scores = self._by_validation.items()
        others = {k: s for k, s in scores if k != best.label and self._results[k].is_fair}
        equal = self._all_best(
            {k: s for k, s in others.items() if self._of(k).method != best.method}
        ) or self._all_best(others)
        leads = [self._difference(best, other) for other in equal]
        values = [math.inf if lead is None else lead.value for lead in leads]
        return equal[values.index(min(values))] if equal else None

    def _ties(self, best: Entry) -> list[Entry]:
        """The methods that validation data can't tell from the best."""
        ours = results_of(best, self._validation_metric, "validation")
        others = [self._of(label) for label in self._by_validation if label != best.label]
        found = {
            other.label: difference(ours, results_of(other, self._validation_metric, "validation"))
            for other in others
        }
        return [
            other for other in others if (d := found[other.label]) and d.reading not in _SETTLED
        ]

    def _why_left_out(self, entry: Entry) -> str:
        seeds = [str(t.seed) for t in entry.trials if t.commit.diverged is not None]
        if seeds:
            return f"diverged with seed {', '.join(seeds)}"
        missing = {*(self._seeds or entry.run.experiment["seeds"])} - {t.seed for t in entry.trials}
        if missing:
            return f"lacks seed {', '.join(map(str, sorted(missing)))}"
        return "has no validation results"

    @property
    def _alone(self) -> Entry | None:
        candidates = [entry for entry in self.entries if entry.method == ALONE]
        by_validation = {
            entry.label: self._by_validation[entry.label]
            for entry in candidates
            if entry.label in self._by_validation
        }
        return self._best(by_validation) or next(iter(candidates), None)

    @cached_property
    def _results(self) -> dict[str, Results]:
        return {entry.label: results_of(entry, self.metric) for entry in self.entries}

    def _difference(self, ours: Entry, theirs: Entry) -> Difference | None:
        return difference(self._results[ours.label], self._results[theirs.label])

    def _against(self, alone: Entry) -> dict[str, Difference]:
        if not self._results[alone.label].is_fair:
            return {}
        found = {e.label: self._difference(e, alone) for e in self.entries if e is not alone}
        return {label: one for label, one in found.items() if one is not None}

    def _worse_off(self, best: Entry, alone: Entry) -> list[ClientLoss]:
        if best is alone:
            return []
        clients = by_client(self._results[best.label], self._results[alone.label])
        worst = sorted((value, *key) for key, value in clients.items() if value < 0)
        several = len({seed for _, seed in clients}) > 1
        return [
            ClientLoss(client, seed if several else None, value)
            for value, client, seed in worst[:MAX_NAMES]
        ]

    def _has_learned(self, entry: Entry) -> bool | None:
        """Whether its accuracy is above that of each client's most frequent class."""
        ahead = []
        for trial in entry.trials:
            selected = select_round(trial, "personal", select_by(entry.run))
            if selected is None or self.metric != "accuracy":
                continue
            majority = majority_summary(entry.run.partitions[trial.seed], selected.test)
            if majority is None:
                return None
            ahead.append(summary(selected.test, "accuracy").mean - majority.mean)
        return mean(ahead) > 0 if ahead else None

    def _cost(self, best: Entry) -> Cost:
        """What the best method costs, beside the cheapest of those that learned."""
        entries = [e for e in self.entries if e is best or self._has_learned(e) is not False]
        sums = {entry.label: traffic(entry) for entry in entries}
        sent = {
            k: down + up for k, (down, up) in sums.items() if down is not None and up is not None
        }
        some = {label: count for label, count in sent.items() if count}
        least = min(some, key=lambda label: some[label]) if some else None
        own = sent.get(best.label)
        machine = best.run.environment.get("machine")
        beside = [e for e in entries if e.run.environment.get("machine") == machine]
        cpu = {e.label: time for e in beside if (time := cpu_seconds_of(e))}
        fastest = min(cpu, key=lambda label: cpu[label]) if len(cpu) == len(beside) else None
        time = cpu.get(best.label)
        return Cost(
            bytes=own,
            times_fewest_bytes=own / some[least] if own and least else None,
            fewest_bytes=least,
            seconds=seconds_of(best),
            cpu_seconds=time,
            times_fewest_cpu_seconds=time / cpu[fastest] if time and fastest else None,
            fewest_cpu_seconds=fastest,
        )


def _trained(entry: Entry | None) -> Trained | None:
    return None if entry is None else Trained(str(entry.run.path), entry.trials[0].label)
