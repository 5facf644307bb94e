"""A verdict on runs as data, and in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .differences import FEWEST, Difference, too_few
from .majority import AtMajority
from .names import at_majority_names, client_name, listed
from .numbers import amount, bare, seconds_text, si
from .select import Metric, is_percentage
from .text import option
from .untrained import Untrained

# times another method's cost, before it is worth saying; the same work varies in time
_MORE_BYTES, _MORE_SECONDS = 1.05, 1.2


@dataclass(frozen=True)
class Cost:
    """What the best method costs, and how many times that of the method that costs least.

    ``bytes`` are those of a client and round, down and up, beside the fewest that are not 0.
    ``cpu_seconds`` are those of all clients' training, over all cores, beside methods on the same
    machine; None where they are not known. ``seconds`` are those of the whole training on the
    clock, which depend on how many clients train at once. Seconds are means over seeds.
    """

    bytes: float | None
    times_fewest_bytes: float | None
    fewest_bytes: str | None
    seconds: float
    cpu_seconds: float | None
    times_fewest_cpu_seconds: float | None
    fewest_cpu_seconds: str | None


@dataclass(frozen=True)
class ClientLoss:
    """How much worse a client does than alone; below 0. ``seed`` is None where a client of that
    name is the same one with every seed."""

    client: str
    seed: int | None
    value: float


@dataclass(frozen=True)
class Trained:
    """Where a method's models are: the run, and the method's label in it."""

    run: str
    method: str


class Step(NamedTuple):
    """A sentence that says what to do, and the command that does it; empty if there is none."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on runs with the same clients, as data; `sentences` puts it in words.

    ``best`` has the best mean result in ``validation``, which is measured by ``chosen_by``; its
    lead over ``ties`` may be chance, of which those ``ahead`` are better on test data. ``baseline``
    is the next one that is another method, and ``alone`` is training without a federation.
    ``against_alone`` has every other method. ``worse_off`` has the clients that lose most with
    ``best`` against training alone. ``at_majority`` has by method the clients for which it is no
    better than their most frequent class. ``left_out`` says why a method could not be chosen.
    """

    runs: tuple[str, ...]
    metric: Metric
    chosen_by: Metric
    validation: Mapping[str, float]
    best: str | None
    is_alone: bool  # the best method is training alone
    is_one_model: bool  # with the best method all clients have the same model
    has_learned: bool | None  # whether `best` is above each client's most frequent class
    not_learned: tuple[str, ...]  # the other methods that are not
    last_is_best: tuple[str, ...]  # methods that might have got better with more rounds
    is_finished: bool
    methods: int
    ties: tuple[str, ...]
    ahead: tuple[Difference, ...]
    baseline: Difference | None
    alone: Difference | None
    against_alone: tuple[Difference, ...]
    worse_off: tuple[ClientLoss, ...]
    at_majority: Mapping[str, tuple[AtMajority, ...]]
    cost: Cost | None
    left_out: Mapping[str, str]
    best_model: Trained | None
    alone_model: Trained | None
    attacks: tuple[str, ...] = ()  # simulated in the runs, by name
    # methods with rounds that came to nothing: how many, of how many
    empty_rounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unequal_alone: str | None = None  # why training alone is not compared
    # by method the clients whose private parts never trained
    untrained: Mapping[str, Untrained] = field(default_factory=dict)

    @property
    def text(self) -> tuple[str, ...]:
        """The verdict in sentences, the most important first."""
        return tuple(_sentences(self))

    @property
    def steps(self) -> tuple[Step, ...]:
        """What to do now."""
        if self.is_finished:
            return tuple(_steps(self))
        if len(self.runs) > 1:
            said = "Not all runs are finished. If nothing runs them, fedtailor run RUN goes on."
            return (Step(said),)
        said = "The run is not finished. If nothing runs it, this goes on with it:"
        return (Step(said, f"fedtailor run {shlex.quote(self.runs[0])}"),)

    @property
    def next_step(self) -> str:
        """The steps in one line."""
        return " ".join(f"{one.text} {one.command}".strip() for one in self.steps)


def _sentences(v: Verdict) -> Iterator[str]:
    if v.best is None:
        yield "No method has validation results to choose it by, so none is named the best."
        yield from _left_out(v)
        return
    yield _choice(v)
    if v.attacks:
        yield (
            f"An attack was simulated ({'; '.join(v.attacks)}): the results are those of the "
            "clients that don't attack."
        )
    for label, (empty, rounds) in v.empty_rounds.items():
        yield (
            f"{label} could not aggregate in {empty} of {rounds} rounds, in which the server's "
            "state stayed as it was (run.log says why)."
        )
    if v.is_one_model:
        yield f"With {v.best} all clients use one model; no part of it is fitted to one client."
    yield from _differences(v)
    for label in dict.fromkeys([v.best, *(one.over for one in _compared(v))]):
        if label in v.untrained:
            yield f"{label}: {v.untrained[label].words(v.metric)}."
    said = {one.over for one in _compared(v)}
    for one in v.ahead:
        if one.method not in said:
            yield (
                f"{one.method}, which could have been chosen as well, is "
                f"{amount(v.metric, one.value)} better than {v.best} on test data (95 % interval "
                f"{_interval(v.metric, one.low, one.high)})."
            )
    if v.has_learned is False:
        yield (
            f"{v.best} did not learn: its accuracy is not above that of each client's most "
            "frequent class."
        )
    elif clients := v.at_majority.get(v.best):
        yield (
            f"For {at_majority_names(clients)} {v.best} is no better than always answering the "
            "client's most frequent class, though another method is."
        )
    yield from _against_alone(v)
    yield from _cost(v)
    yield from _scope(v)
    yield from _left_out(v)


def _compared(v: Verdict) -> list[Difference]:
    return [one for one in (v.baseline, v.alone) if one is not None]


def _choice(v: Verdict) -> str:
    """Say which method is best on validation data, and whether its lead may be chance."""
    assert v.best is not None
    if v.methods == 1:
        return f"{v.best} is the only method, so there is nothing to compare it with."
    name = f"training alone ({v.best})" if v.is_alone else v.best
    so_far = "" if v.is_finished else "So far, "
    if v.is_alone and not so_far:
        name = name.capitalize()
    near = sorted(v.ties, key=lambda tie: abs(v.validation[tie] - v.validation[v.best or ""]))
    near = [tie for tie in near if not v.has_learned or tie not in v.not_learned]
    equal = [tie for tie in near if v.validation[tie] == v.validation[v.best]]
    behind = [f"{tie} ({_result(v, tie)})" for tie in near if tie not in equal]
    text = f"{so_far}{name} is best on validation data ({_result(v, v.best)})"
    if equal:
        verb = "is" if len(equal) == 1 else "are"
        text += f", and {listed(equal)} {verb} just as good there"
    if behind and v.baseline is not None and not v.baseline.has_interval:
        text += f". {too_few(v.baseline.num_clients)} whether its lead there over {listed(behind)} "
        text += "is chance"
    elif behind:
        text += f"; these data alone can't tell it from {listed(behind)}"
    return f"{text}."


def _result(v: Verdict, label: str) -> str:
    unit = " %" if is_percentage(v.chosen_by) else ""
    return bare(v.chosen_by, v.validation[label]) + unit


def _differences(v: Verdict) -> Iterator[str]:
    """Say how the best method stands to training alone, and to the next best one."""
    other, alone = v.baseline, v.alone
    data = "On test data its"
    if alone is not None:
        yield f"{data} {_difference(v.metric, alone, 'training alone')}"
        data = "Its"
    if other is not None and (alone is None or other.over != alone.over):
        is_tied = v.validation.get(other.over) == v.validation.get(other.method)
        name = f"{other.over}, {'as good' if is_tied else 'the next best'} on validation data"
        yield f"{data} {_difference(v.metric, other, name)}"
    if v.unequal_alone is not None:
        yield f"{v.unequal_alone}; so it is not compared."


def _difference(metric: Metric, d: Difference, name: str) -> str:
    said = trained_words(metric, d)
    return f"{_whole_difference(metric, d, name)}{f' {said}.' if said else ''}"


def trained_words(metric: Metric, d: Difference) -> str:
    """What is left of a difference over the clients that have trained with both methods; empty if
    all have."""
    if not d.num_untrained:
        return ""
    if (one := d.trained) is None:
        return f"No client has trained with both {d.method} and {d.over}"
    side = "better" if one.value >= 0 else "worse"
    text = f"{d.num_untrained} of {d.num_clients} clients have not trained with both; over the "
    text += f"others it is {amount(metric, abs(one.value))} {side}"
    if not one.has_interval:
        return text
    return f"{text} (95 % interval {_sided(metric, one.low)} to {_sided(metric, one.high)})"


def _whole_difference(metric: Metric, d: Difference, name: str) -> str:
    value = bare(metric, abs(d.value))
    side = "better" if d.value > 0 else "worse"
    text = f"{metric} is {amount(metric, abs(d.value))} {side} than with {name}"
    if value == bare(metric, 0):
        text = f"{metric} is as good as with {name}"
    if d.value == d.low == d.high == 0:
        return f"{text}, for every client."
    if not d.has_interval:
        return f"{text}; {too_few(d.num_clients)} whether that is chance."
    if d.reading == "may be chance":
        reach = f"{_sided(metric, d.low)} to {_sided(metric, d.high)}"
        return f"{text}; that may be chance (95 % interval {reach})."
    low, high = (d.low, d.high) if d.reading == "better" else (-d.high, -d.low)
    return f"{text} (95 % interval {_interval(metric, low, high)})."


def _sided(metric: Metric, value: float) -> str:
    """An end of an interval, such as ``2.5 worse``."""
    if bare(metric, abs(value)) == bare(metric, 0):
        return bare(metric, 0)
    return f"{bare(metric, abs(value))} {'better' if value > 0 else 'worse'}"


def _interval(metric: Metric, low: float, high: float) -> str:
    return f"{bare(metric, low)} to {bare(metric, high)}"


def _against_alone(v: Verdict) -> Iterator[str]:
    """Name the clients and the methods that do worse than training alone."""
    d = v.alone
    if d is not None and d.num_worse_off:
        verb = "does" if d.num_worse_off == 1 else "do"
        names = [
            f"{client_name(one.client, one.seed)} ({bare(v.metric, one.value, signed=True)})"
            for one in v.worse_off
        ]
        yield (
            f"With {v.best} {d.num_worse_off} of {d.num_clients} clients {verb} worse than alone: "
            f"{listed(names, d.num_worse_off)}."
        )
    elif d is not None:
        clients = f"none of {d.num_clients} clients does" if d.num_clients > 1 else "no client does"
        yield f"With {v.best} {clients} worse than alone."
    elif not v.is_alone and v.methods > 1 and v.unequal_alone is None:
        yield "Training alone (local) is not among the methods, so who loses against it is unknown."
    behind = [one for one in v.against_alone if one.reading == "worse" and one.method != v.best]
    if behind:
        names = [
            f"{one.method} ({bare(v.metric, one.value, signed=True)})"
            for one in sorted(behind, key=lambda one: one.value)
        ]
        yield f"Worse than training alone: {listed(names)}."
    if v.not_learned and v.is_finished:
        yield (
            f"{listed(v.not_learned)} did not learn: before you give "
            f"{'it' if len(v.not_learned) == 1 else 'them'} up, {_to_try(v, v.not_learned)}."
        )


def _to_try(v: Verdict, labels: Sequence[str]) -> str:
    """What may help methods that did not learn."""
    empty = [v.empty_rounds[label] for label in labels if label in v.empty_rounds]
    if any(2 * count >= rounds for count, rounds in empty):
        return "see why so many rounds came to nothing"
    alone = v.alone_model.method if v.alone_model else None
    if v.attacks and any(label != alone for label in labels):
        return "try a robust rule, or another one ([methods.NAME.robust]), and a run without attack"
    return "try more rounds and other learning rates (fedtailor tune searches for them)"


def _cost(v: Verdict) -> Iterator[str]:
    cost = v.cost
    if cost is None or cost.bytes is None:
        return
    times = cost.times_fewest_bytes
    if not cost.bytes:
        traffic = f"{v.best} sends nothing"
    else:
        traffic = f"{v.best} sends and receives {si(cost.bytes, 'B')} per client and round"
        if times is not None and times >= _MORE_BYTES:
            traffic += f", {times:.3g} times as much as {cost.fewest_bytes}"
    if cost.cpu_seconds is None:
        yield f"{traffic}, and took {seconds_text(cost.seconds)} s."
        return
    time = f"its training took {seconds_text(cost.cpu_seconds)} s of processor time"
    times = cost.times_fewest_cpu_seconds
    if times is not None and times >= _MORE_SECONDS:
        time += f", {times:.2g} times as much as {cost.fewest_cpu_seconds}"
    yield f"{traffic}, and {time}."


def _scope(v: Verdict) -> Iterator[str]:
    """Say what the intervals cover."""
    found = _compared(v)
    if not found or max(one.num_clients for one in found) < FEWEST:
        return
    widest = max(found, key=lambda one: one.num_clients)
    clients, seeds = widest.num_clients, widest.num_seeds
    covered = f"The intervals cover {clients} clients"
    if seeds == 1:
        yield f"{covered} of one seed; with another seed it may turn out otherwise."
    elif seeds < 5:
        yield f"{covered} over {seeds} seeds, which say little of other seeds."
    else:
        yield f"{covered} over {seeds} seeds."


def _left_out(v: Verdict) -> Iterator[str]:
    if v.left_out:
        reasons = "; ".join(f"{label} {why}" for label, why in v.left_out.items())
        yield f"Not in the choice: {reasons}."


def _steps(v: Verdict) -> Iterator[Step]:
    if v.last_is_best and v.best is not None:
        yield Step(
            f"The best round of {listed(v.last_is_best)} is the last one, so more rounds may "
            "change the order: set rounds higher, and give another --out."
        )
    if v.best is None:
        yield Step(
            f"Give clients validation data on which {v.chosen_by} is defined (split.validation), "
            "so that a method can be chosen."
        )
    elif v.has_learned is False:
        yield Step(f"Before you draw a conclusion, {_to_try(v, [v.best])}.")
    elif v.unequal_alone is not None:
        yield Step(
            "Run training alone again, in another --out, where every client trains equally often, "
            "and compare the two runs (fedtailor compare)."
        )
    elif v.alone is None and not v.is_alone:
        yield Step(
            "Add training alone to the experiment ([methods.local]) and run it again: it says "
            "whether training together pays."
        )
    elif (d := v.baseline if v.is_alone else v.alone) is None:
        yield Step("Add a federated method to the experiment, and run it again, to compare it.")
    elif d.reading == "may be chance":
        yield from _more_data(v, d)
    elif v.is_alone and d.reading == "better":
        yield Step("Train alone, as far as these data go:", _predict(v.best_model))
        yield Step("Other settings may make a federation better (fedtailor tune).")
    elif d.reading == "worse":
        yield Step(
            f"Validation and test data disagree on {v.best}, so don't rely on it yet: give clients "
            "more validation data (split.validation), or try other settings (fedtailor tune)."
        )
    else:
        if v.is_one_model:
            yield Step(f"Take {v.best}, one model for all:", _predict(v.best_model, client=None))
        else:
            yield Step(f"Take {v.best}:", _predict(v.best_model))
        if v.worse_off:
            first = v.worse_off[0]
            yield Step(
                "A client that goes on losing with it can use its own model instead:",
                _predict(v.alone_model, first.client, first.seed),
            )


def _more_data(v: Verdict, d: Difference) -> Iterator[Step]:
    better = "training together" if v.is_alone else v.best
    pays = f"Whether {better} is better than training alone is open."
    narrower = "More test examples narrow the interval, and so do more seeds:"
    if not d.has_interval:
        narrower = (
            "With so few clients, look at the result of each one. More seeds test each of them on "
            "other examples:"
        )
    seeds = ",".join(map(str, range(max(3, d.num_seeds + 2))))
    run = v.best_model.run if v.best_model else "RUN"
    yield Step(
        f"{pays} {narrower}",
        f"fedtailor run {shlex.quote(run)} --set 'seeds=[{seeds}]'",
    )
    if v.alone is not None and v.alone.over in v.ties:  # on validation data, too
        yield Step(
            f"Until then take {v.alone.over}, which trains each client alone:",
            _predict(v.alone_model),
        )
        return
    client = None if v.is_one_model else "CLIENT"
    yield Step(f"Until then take {v.best}:", _predict(v.best_model, client))


def _predict(model: Trained | None, client: str | None = "CLIENT", seed: int | None = None) -> str:
    """The command that uses a client's model; ``client`` None: the global one."""
    if model is None:
        return "fedtailor predict"
    words = ["fedtailor", "predict", model.run, *option("--method", model.method)]
    words += [] if seed is None else ["--seed", str(seed)]
    words += [] if client is None else option("--client", client)
    return shlex.join([*words, "--input", "FILE"])
