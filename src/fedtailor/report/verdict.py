"""The verdict on runs: which method is best, how clearly, and what to mind.

The method is chosen by validation data; the differences are those on test data. Runs are compared
where they divide the same data alike.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..store.format import FLOWER_FILE
from ..store.metrics import Metric, bare, is_percentage
from ..store.read import attack_of
from ..store.selection import by_round
from .differences import FEWEST, Difference, MethodResults, ahead_of
from .names import MAX_NAMES, NO_ATTACK, attack_name, client_name, in_prose
from .rows import Row
from .select import Choice, Entry, choose, not_begun, reported
from .text import option
from .untrained import ALONE, unequal_turns


@dataclass(frozen=True)
class Verdict:
    """The verdict on ``runs`` with the same clients: ``text`` says it in sentences, the most
    important first, and ``next_step`` is the command to go on with; empty if there is none.

    ``best`` has the best mean result in ``validation``, which is measured by ``chosen_by``;
    ``left_out`` says why a method could not be chosen. ``differences`` say how far ``best`` is
    ahead of each other method, the closest first, and ``against_alone`` how far each method is
    ahead of training without a federation. ``worse_off`` names the clients that lose most with
    ``best`` against training alone.
    """

    runs: Sequence[str]
    metric: Metric
    chosen_by: Metric
    validation: Mapping[str, float]
    best: str | None
    differences: Sequence[Difference]
    against_alone: Sequence[Difference]
    worse_off: Sequence[str]
    left_out: Mapping[str, str]
    text: Sequence[str]
    next_step: str


def verdict(entries: Sequence[Entry], rows: Sequence[Row], metric: Metric) -> Verdict:
    """Judge the methods of runs with the same clients, which have ``rows`` of the table."""
    choice = choose(entries)
    best = choice.best()
    alone = choice.best(ALONE) or next((one for one in entries if one.method == ALONE), None)
    unequal = unequal_turns(alone) if alone else None
    measure = None if unequal else alone
    results = MethodResults.of_all(entries, metric, choice.seeds)
    against_alone = ahead_of(measure.label, results) if measure else []
    differences = _ahead_of_all(best.label, results) if best else []
    worse_off = []
    if best and measure:
        worse_off = [*_worse_off(results[best.label], results[measure.label], metric)]
    poor = [row.label for row in rows if row.personal_model and row.personal_model.did_not_learn]
    text = [
        _best(choice, best, differences),
        *_losses(best, against_alone, worse_off, metric),
        *_warnings(entries, differences, poor),
        *_spent(rows),
        *(f"{label} {why}, so it can't be chosen." for label, why in choice.left_out.items()),
    ]
    if unequal or not alone:
        text.append(
            f"{unequal or 'Training alone (local) is missing'}, so who loses against it is unknown."
        )
    runs = [*dict.fromkeys(row.run for row in rows)]
    return Verdict(
        runs=runs,
        metric=metric,
        chosen_by=choice.metric,
        validation=choice.scores,
        best=best.label if best else None,
        differences=differences,
        against_alone=against_alone,
        worse_off=worse_off,
        left_out=choice.left_out,
        text=text,
        next_step=_command(entries, best, runs, is_poor=bool(best and best.label in poor)),
    )


def _ahead_of_all(best: str, results: Mapping[str, MethodResults]) -> list[Difference]:
    leads = (results[best].ahead(one) for name, one in results.items() if name != best)
    fair = [one for one in leads if one is not None and one.reading != "trained unequally"]
    return sorted(fair, key=lambda one: one.value)


def _best(choice: Choice, best: Entry | None, differences: Sequence[Difference]) -> str:
    """Say which method is best on validation data, and how clearly on test data."""
    if best is None:
        trials = [trial for entry in choice.entries for trial in entry.trials]
        evaluated = [one for trial in trials for one in trial.evaluations if any(one.num_examples)]
        if not any(one.model == "personal" for one in evaluated):
            return "No round has been evaluated yet, so none is named the best."
        return (
            "No method has validation results to choose it by (split.validation), so none is named "
            "the best."
        )
    unit = " %" if is_percentage(choice.metric) else ""
    value = f"{bare(choice.metric, choice.scores[best.label])}{unit}"
    said = [
        f"{words} {in_prose(names)}"
        for words, found in (
            ("clearly better than", ("better",)),
            ("clearly worse than", ("worse",)),
            ("not clearly different from", ("may be chance", "equal", "too few clients to tell")),
        )
        if (names := [one.over for one in differences if one.words in found])
    ]
    on_test = f"; on test data it is {', '.join(said)}" if said else ""
    tied = [k for k, v in choice.scores.items() if v == choice.scores[best.label]]
    tied.remove(best.label)
    as_good = f", as good as {in_prose(tied)}, by the order in the file" if tied else ""
    return f"{best.label} is best on validation data ({value}){as_good}{on_test}."


def _losses(
    best: Entry | None, leads: Sequence[Difference], worse_off: Sequence[str], metric: Metric
) -> Iterator[str]:
    """Name the clients and the methods that do worse than training alone."""
    for one in leads:
        if best is not None and one.method == best.label:
            names = f": {in_prose(worse_off, one.num_worse_off)}" if worse_off else ""
            yield (
                f"Worse off with {best.label} than alone: "
                f"{one.num_worse_off} of {one.num_clients} clients{names}."
            )
            if said := one.of_trained(metric):
                yield f"{said}."
    behind = [
        f"{one.method} ({bare(metric, one.value, signed=True)})"
        for one in leads[::-1]
        if one.reading == "worse"
    ]
    if behind:
        yield f"Clearly worse than training alone: {in_prose(behind)}."


def _worse_off(best: MethodResults, alone: MethodResults, metric: Metric) -> Iterator[str]:
    clients = best.by_client(alone)
    several = len({seed for _, seed in clients}) > 1
    worst = sorted((value, *key) for key, value in clients.items() if value < 0)
    for value, client, seed in worst[:MAX_NAMES]:
        name = client_name(client, seed if several else None)
        yield f"{name} ({bare(metric, value, signed=True)})"


def _warnings(
    entries: Sequence[Entry], differences: Sequence[Difference], poor: Sequence[str]
) -> Iterator[str]:
    """Say what a reader must not miss."""
    widest = max(differences, key=lambda one: one.num_clients, default=None)
    if widest is not None and widest.num_clients < FEWEST:
        yield f"{widest.num_clients} clients are too few to tell a difference from chance."
    elif widest is not None and widest.num_seeds < 5:
        seeds = "One seed: another one may turn the order."
        many = f"{widest.num_seeds} seeds say little of other seeds."
        yield seeds if widest.num_seeds == 1 else many
    attacks = dict.fromkeys(attack_name(attack_of(entry.run.experiment)) for entry in entries)
    if named := [name.replace("\n", " ") for name in attacks if name != NO_ATTACK]:
        yield (
            f"An attack was simulated ({'; '.join(named)}): the results are those of the "
            "clients that don't attack."
        )
    for entry in entries:
        rounds = [one for trial in entry.trials for one in trial.history]
        empty = sum(not one.cohort for one in rounds)
        if empty and entry.method != ALONE:  # a client's turn may be in another round
            yield (
                f"{entry.label} could not aggregate in {empty} of {len(rounds)} rounds (run.log "
                "says why)."
            )
    if not all(trial.commit.is_done for entry in entries for trial in entry.trials):
        yield "Training has not ended, so the order may change."
    elif any(not_begun(entry.run) for entry in entries):
        yield "Some methods or seeds have not begun, so the order may change."
    elif short := [entry.label for entry in entries if _last_is_best(entry)]:
        yield f"More rounds may change the order: the last one is the best of {in_prose(short)}."
    if poor:
        yield f"{in_prose(poor)} did not learn: no better than each client's most frequent class."


def _spent(rows: Sequence[Row]) -> Iterator[str]:
    """Say what differential privacy costs; the notes have delta and the accountant."""
    by: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.epsilon is not None:
            by[f"{row.epsilon:.4g}"].append(row.label)
    if by:
        each = "; ".join(f"{epsilon} with {in_prose(labels)}" for epsilon, labels in by.items())
        yield f"Of privacy the rounds have spent epsilon {each}."


def _last_is_best(entry: Entry) -> bool:
    """Whether every trial reports the last of several evaluated rounds, at a constant rate: it may
    have been too short. Not where noise is for so many rounds."""
    schedule, privacy = (entry.run.experiment.get(name, {}) for name in ("schedule", "privacy"))
    is_spent = privacy.get("epsilon") is not None and privacy.get("noise") is None
    if is_spent or schedule.get("name", "constant") != "constant":
        return False
    return len(reported(entry)) == len(entry.trials) and all(
        selected.round == trial.commit.rounds and len(by_round(trial, "personal", "validation")) > 1
        for trial, selected in reported(entry)
    )


def _command(
    entries: Sequence[Entry], best: Entry | None, runs: Sequence[str], *, is_poor: bool
) -> str:
    """The command that goes on with a run that has not ended, or with the deployment whose run it
    is, or else predicts with ``best``."""
    if not all(trial.commit.is_done for entry in entries for trial in entry.trials):
        run = entries[0].run.path
        is_deployed = (run.parent / "deploy.toml").is_file()
        words = ["deploy", "run", str(run.parent)] if is_deployed else ["run", str(run)]
        return shlex.join(["fedtailor", *words]) if len(runs) == 1 else ""
    if best is None or is_poor or any(not_begun(entry.run) for entry in entries):
        return ""
    if any(
        (one.folder / FLOWER_FILE).exists() and one.costs and one.costs.private
        for one in best.trials
    ):
        return ""  # the models are at the sites
    words = ["fedtailor", "predict", str(best.run.path)]
    words += option("--method", best.trials[0].label)
    return shlex.join([*words, "--client", "CLIENT", "--input", "FILE"])
