"""The verdict on runs: which method, by how much over which other one, and at what cost.

The method is chosen by validation data; the differences are those on test data. Runs are compared
where they divide the same data alike.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..store.metrics import Metric, higher_is_better, is_percentage
from ..store.read import attack_of
from ..store.selection import by_round, metric_of, select_by
from ..units import seconds_text, si
from .differences import FEWEST, Difference, MethodResults
from .names import MAX_NAMES, attack_name, client_name, in_prose, privacy_name
from .numbers import bare
from .rows import Row
from .select import Entry, is_one_model, reported, validation_score
from .text import option
from .untrained import ALONE, unequal_turns


class NextStep(NamedTuple):
    """A sentence that says what to do, and the command that does it; empty if there is none."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on ``runs`` with the same clients: ``text`` says it in sentences, the most
    important first, and ``steps`` say what to do now.

    ``best`` has the best mean result in ``validation``, which is measured by ``chosen_by``; its
    lead over ``ties`` may be chance. ``baseline`` is how far it is ahead of the next one that is
    another method, and ``alone`` how far of training without a federation, of which
    ``against_alone`` has every method. ``worse_off`` names the clients that lose most with ``best``
    against training alone. ``left_out`` says why a method could not be chosen.
    """

    runs: Sequence[str]
    metric: Metric
    chosen_by: Metric
    validation: Mapping[str, float]
    best: str | None
    ties: Sequence[str]
    baseline: Difference | None
    alone: Difference | None
    against_alone: Sequence[Difference]
    worse_off: Sequence[str]
    left_out: Mapping[str, str]
    text: Sequence[str]
    steps: Sequence[NextStep]

    @property
    def next_step(self) -> str:
        """The steps in one line."""
        return " ".join(f"{one.text} {one.command}".strip() for one in self.steps)


def verdict(entries: Sequence[Entry], rows: Sequence[Row], metric: Metric) -> Verdict:
    """Judge the methods of runs with the same clients, which have ``rows`` of the table."""
    judge = _Judge(entries, rows, metric)
    return Verdict(
        runs=judge.runs,
        metric=metric,
        chosen_by=judge.chosen_by,
        validation=judge.validation,
        best=None if judge.best is None else judge.best.label,
        ties=tuple(judge.ties),
        baseline=judge.baseline,
        alone=judge.alone,
        against_alone=tuple(judge.against_alone.values()),
        worse_off=tuple(judge.worse_off),
        left_out=judge.left_out,
        text=tuple(judge.sentences()),
        steps=tuple(judge.steps()),
    )


class _Judge:
    def __init__(self, entries: Sequence[Entry], rows: Sequence[Row], metric: Metric) -> None:
        self.entries, self.metric = entries, metric
        self.rows = {row.label: row for row in rows}
        self.runs = [*dict.fromkeys(row.run for row in rows)]
        self.is_finished = all(t.commit.ended for entry in entries for t in entry.trials)
        self.attacks = dict.fromkeys(_attacks(entries))
        self.empty_rounds = dict(_empty_rounds(entries))
        self.chosen_by = metric_of([entry.run for entry in entries])
        seeds = _common_seeds(entries)
        scores = {entry.label: validation_score(entry, self.chosen_by, seeds) for entry in entries}
        self.validation = {label: one.value for label, one in scores.items() if one is not None}
        self.left_out = {
            e.label: _why_left_out(e, seeds) for e in entries if e.label not in self.validation
        }
        chosen = [entry for entry in entries if entry.label in self.validation]
        self.best = best = max(chosen, key=self._rank, default=None)  # the first of equals
        all_alone = [entry for entry in entries if entry.method == ALONE]
        self.local = local = max(all_alone, key=self._rank, default=None)
        self.unequal = None if local is None else unequal_turns(local)
        results = {entry.label: MethodResults.of(entry, metric) for entry in entries}
        fair = results[local.label] if local and not self.unequal else None
        leads = [one.ahead(fair) for one in results.values() if fair and one is not fair]
        self.against_alone = {lead.method: lead for lead in leads if lead is not None}
        self.alone: Difference | None = None
        self.baseline: Difference | None = None
        self.ties, self.worse_off, self.has_learned = list[str](), list[str](), True
        if best is not None:
            self.alone = self.against_alone.get(best.label)
            self.baseline = self._baseline(best, chosen, results)
            self.ties = [*_ties(best, chosen, self.chosen_by)]
            self.worse_off = [*_worse_off(results[best.label], fair, metric)] if fair else []
            self.has_learned = best.label not in self._not_learned()
        self.is_alone = best is not None and best.method == ALONE
        self.is_one_model = best is not None and all(
            is_one_model(trial, select_by(best.run)) for trial in best.trials
        )

    def _rank(self, entry: Entry) -> float:
        """Its validation result; higher is better."""
        sign = 1 if higher_is_better(self.chosen_by) else -1
        return sign * self.validation.get(entry.label, -sign * math.inf)

    def _not_learned(self) -> list[str]:
        found = ((label, row.personal_model) for label, row in self.rows.items())
        return [label for label, one in found if one is not None and one.did_not_learn]

    def _baseline(
        self, best: Entry, chosen: Sequence[Entry], results: Mapping[str, MethodResults]
    ) -> Difference | None:
        """The difference from the best of the other methods, or else from the same method with
        other settings; of equals from the one that is hardest to beat on test data."""
        others = [one for one in chosen if one is not best and results[one.label].is_fair]

        def rank(entry: Entry) -> tuple[bool, float]:
            return entry.method == best.method, -self._rank(entry)

        first = min(map(rank, others), default=None)
        ours = results[best.label]
        leads = [ours.ahead(results[one.label]) for one in others if rank(one) == first]
        known = [lead for lead in leads if lead is not None]
        return min(known, key=lambda lead: lead.value, default=None)

    @property
    def _compared(self) -> list[Difference]:
        """How the best method stands to training alone, and to the next best one."""
        found = {one.over: one for one in (self.alone, self.baseline) if one is not None}
        return [*found.values()]

    def sentences(self) -> Iterator[str]:
        if self.best is None:
            yield "No method has validation results to choose it by, so none is named the best."
        else:
            yield self._choice(self.best.label)
            yield from self._circumstances(self.best.label)
            yield from self._differences(self.best.label)
            yield from self._losses(self.best.label)
            yield from self._cost(self.best.label)
        if self.left_out:
            reasons = "; ".join(f"{label} {why}" for label, why in self.left_out.items())
            yield f"Not in the choice: {reasons}."

    def _choice(self, best: str) -> str:
        """Say which method is best on validation data, and from which ones it can't be told."""
        if len(self.entries) == 1:
            return f"{best} is the only method, so there is nothing to compare it with."
        unit = " %" if is_percentage(self.chosen_by) else ""
        values = {name: f"{bare(self.chosen_by, x)}{unit}" for name, x in self.validation.items()}
        so_far = "" if self.is_finished else "So far, "
        name = f"{'training' if so_far else 'Training'} alone ({best})" if self.is_alone else best
        chosen, poor = self.validation[best], self._not_learned() if self.has_learned else ()
        ties = sorted(self.ties, key=lambda tie: abs(self.validation[tie] - chosen))
        near = [f"{tie} ({values[tie]})" for tie in ties if tie not in poor]
        open_ = f"; these data alone can't tell it from {in_prose(near)}" if near else ""
        return f"{so_far}{name} is best on validation data ({values[best]}){open_}."

    def _circumstances(self, best: str) -> Iterator[str]:
        if self.attacks:
            yield (
                f"An attack was simulated ({'; '.join(self.attacks)}): the results are those of "
                "the clients that don't attack."
            )
        trials = self.best.trials if self.best is not None else ()
        for spent in dict.fromkeys(privacy_name(t.history[-1]) for t in trials if t.history):
            if spent:
                yield (
                    f"{best} is differentially private: {spent}. The choice of a method and a "
                    "round by validation data is outside of that."
                )
        for label, (empty, rounds) in self.empty_rounds.items():
            yield (
                f"{label} could not aggregate in {empty} of {rounds} rounds, in which the server's "
                "state stayed as it was (run.log says why)."
            )
        if self.is_one_model:
            yield f"With {best} all clients use one model; no part of it is fitted to one client."
        if not self.has_learned:
            yield (
                f"{best} did not learn: its accuracy is not above that of each client's most "
                "frequent class."
            )

    def _differences(self, best: str) -> Iterator[str]:
        for place, one in enumerate(self._compared):
            name = f"{one.over}, the next best on validation data"
            if self.alone is not None and one.over == self.alone.over:
                name = "training alone"
            yield f"{'Its' if place else 'On test data its'} {one.sentence(self.metric, name)}"
        if self.unequal is not None:
            yield f"{self.unequal}; so it is not compared."
        for label in self.rows:
            untrained = self.rows[label].untrained
            if untrained and label in (best, *(one.over for one in self._compared)):
                yield f"{label}: {untrained.words(self.metric)}."

    def _losses(self, best: str) -> Iterator[str]:
        """Name the clients and the methods that do worse than training alone, or did not learn."""
        if (lead := self.alone) is not None:
            worse = lead.num_worse_off
            names = f": {in_prose(self.worse_off, worse)}" if worse else ""
            yield (
                f"With {best} {worse or 'none'} of {lead.num_clients} clients "
                f"{'do' if worse > 1 else 'does'} worse than alone{names}."
            )
        elif not self.is_alone and len(self.entries) > 1 and self.unequal is None:
            yield (
                "Training alone (local) is not among the methods, so who loses against it is "
                "unknown."
            )
        leads = sorted(self.against_alone.values(), key=lambda one: one.value)
        behind = [
            f"{one.method} ({bare(self.metric, one.value, signed=True)})"
            for one in leads
            if one.reading == "worse" and one.method != best
        ]
        if behind:
            yield f"Worse than training alone: {in_prose(behind)}."
        poor = [label for label in self._not_learned() if label != best]
        if poor and self.is_finished:
            yield f"{in_prose(poor)} did not learn: before you give up, {self._to_try()}."

    def _to_try(self) -> str:
        if any(2 * empty >= rounds for empty, rounds in self.empty_rounds.values()):
            return "see why so many rounds came to nothing"
        if self.attacks:
            return (
                "try a robust rule, or another one ([methods.NAME.robust]), and a run without "
                "attack"
            )
        return "try more rounds and other learning rates (fedtailor tune searches for them)"

    def _cost(self, best: str) -> Iterator[str]:
        """Say what it costs, and what the intervals cover."""
        row = self.rows[best]
        if row.bytes_down is not None and row.bytes_up is not None:
            sent = row.bytes_down + row.bytes_up
            what = f"and receives {si(sent, 'B')} per client and round" if sent else "nothing"
            time = f"took {seconds_text(row.seconds)} s"
            if row.cpu_seconds is not None:
                time = f"its training took {seconds_text(row.cpu_seconds)} s of processor time"
            yield f"{best} sends {what}, and {time}."
        widest = max(self._compared, key=lambda one: one.num_clients, default=None)
        if widest is not None and widest.num_clients >= FEWEST:
            seeds = widest.num_seeds
            of = f" over {seeds} seeds{', which say little of other seeds' if seeds < 5 else ''}"
            if seeds == 1:
                of = " of one seed; with another seed it may turn out otherwise"
            yield f"The intervals cover {widest.num_clients} clients{of}."

    def steps(self) -> Iterator[NextStep]:
        if not self.is_finished:
            run = shlex.quote(self.runs[0]) if len(self.runs) == 1 else "RUN"
            said = "A run is not finished. If nothing runs it, this goes on with it:"
            yield NextStep(said, f"fedtailor run {run}")
            return
        short = [entry.label for entry in self.entries if _last_is_best(entry)]
        if short and self.best is not None:
            yield NextStep(
                f"The best round of {in_prose(short)} is the last one, so more rounds may "
                "change the order: set rounds higher, and give another --out."
            )
        lead = self.baseline if self.is_alone else self.alone
        if self.best is None:
            yield NextStep(
                f"Give clients validation data on which {self.chosen_by} is defined "
                "(split.validation), so that a method can be chosen."
            )
        elif not self.has_learned:
            yield NextStep(f"Before you draw a conclusion, {self._to_try()}.")
        elif self.unequal is not None:
            yield NextStep(
                "Run training alone again, in another --out, where every client trains equally "
                "often, and compare the two runs (fedtailor compare)."
            )
        elif lead is None and not self.is_alone:
            yield NextStep(
                "Add training alone to the experiment ([methods.local]) and run it again: it says "
                "whether training together pays."
            )
        elif lead is None:
            yield NextStep(
                "Add a federated method to the experiment, and run it again, to compare it."
            )
        elif lead.reading == "may be chance":
            yield from self._more_data(self.best, lead)
        elif lead.reading == "worse":
            yield NextStep(
                f"Validation and test data disagree on {self.best.label}, so don't rely on it yet: "
                "give clients more validation data (split.validation), or try other settings "
                "(fedtailor tune)."
            )
        elif self.is_alone:
            yield NextStep("Train alone, as far as these data go:", _predict(self.best))
        else:
            yield self._take("Take", self.best)

    def _take(self, verb: str, best: Entry) -> NextStep:
        of_all = ", one model for all" if self.is_one_model else ""
        command = _predict(best, is_one_model=self.is_one_model)
        return NextStep(f"{verb} {best.label}{of_all}:", command)

    def _more_data(self, best: Entry, lead: Difference) -> Iterator[NextStep]:
        better = "training together" if self.is_alone else best.label
        narrower = "More test examples narrow the interval, and so do more seeds:"
        if not lead.has_interval:
            narrower = "With so few clients, look at the result of each one, and try more seeds:"
        seeds = ",".join(map(str, range(max(3, lead.num_seeds + 2))))
        yield NextStep(
            f"Whether {better} is better than training alone is open. {narrower}",
            f"fedtailor run {shlex.quote(str(best.run.path))} --set 'seeds=[{seeds}]'",
        )
        if self.local is not None and self.local.label in self.ties:  # on validation data, too
            said = f"Until then take {self.local.label}, which trains each client alone:"
            yield NextStep(said, _predict(self.local))
        else:
            yield self._take("Until then take", best)


def _predict(entry: Entry, *, is_one_model: bool = False) -> str:
    words = ["fedtailor", "predict", str(entry.run.path)]
    words += option("--method", entry.trials[0].label)
    words += [] if is_one_model else ["--client", "CLIENT"]
    return shlex.join([*words, "--input", "FILE"])


def _common_seeds(entries: Sequence[Entry]) -> list[int] | None:
    """The seeds that all methods are through with, or all runs have; None if none is common."""
    of_runs: list[set[int]] = [set(e.run.experiment["seeds"]) for e in entries]
    through = [{t.seed for t in entry.trials if t.commit.ended} for entry in entries]
    seeds = set.intersection(*of_runs)
    return sorted(seeds.intersection(*through) or seeds) or None


def _ties(best: Entry, chosen: Sequence[Entry], metric: Metric) -> Iterator[str]:
    ours = MethodResults.of(best, metric, "validation")
    for other in chosen:
        lead = ours.ahead(MethodResults.of(other, metric, "validation"))
        if other is not best and lead and lead.reading not in ("better", "trained unequally"):
            yield other.label


def _worse_off(best: MethodResults, alone: MethodResults, metric: Metric) -> Iterator[str]:
    clients = best.by_client(alone)
    several = len({seed for _, seed in clients}) > 1
    worst = sorted((value, *key) for key, value in clients.items() if value < 0)
    for value, client, seed in worst[:MAX_NAMES]:
        name = client_name(client, seed if several else None)
        yield f"{name} ({bare(metric, value, signed=True)})"


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
