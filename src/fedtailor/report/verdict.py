"""A verdict on runs as data, and in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .differences import FEWEST, Difference, too_few
from .names import in_prose
from .numbers import amount, bare, seconds_text, si
from .select import Metric, is_percentage
from .text import option
from .untrained import Untrained


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
    """The verdict on runs with the same clients, as data; ``text`` puts it in words.

    ``best`` has the best mean result in ``validation``, which is measured by ``chosen_by``; its
    lead over ``ties`` may be chance. ``baseline`` is the next one that is another method, and
    ``alone`` is training without a federation. ``against_alone`` has every other method.
    ``worse_off`` names the clients that lose most with ``best`` against training alone. ``bytes``
    are those of a client and round, down and up; ``seconds`` those of the whole training on the
    clock, and ``cpu_seconds`` those of all clients' training over all cores. ``left_out`` says why
    a method could not be chosen.
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
    baseline: Difference | None
    alone: Difference | None
    against_alone: tuple[Difference, ...]
    worse_off: tuple[str, ...]
    bytes: float | None
    seconds: float | None
    cpu_seconds: float | None
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
        runs = shlex.join(self.runs) if len(self.runs) == 1 else "RUN"
        said = "A run is not finished. If nothing runs it, this goes on with it:"
        return (Step(said, f"fedtailor run {runs}"),)

    @property
    def next_step(self) -> str:
        """The steps in one line."""
        return " ".join(f"{one.text} {one.command}".strip() for one in self.steps)


def _sentences(v: Verdict) -> Iterator[str]:
    if v.best is None:
        yield "No method has validation results to choose it by, so none is named the best."
    else:
        yield _choice(v, v.best)
        yield from _circumstances(v)
        yield from _differences(v)
        yield from _losses(v)
        yield from _cost(v)
        yield from _scope(v)
    if v.left_out:
        reasons = "; ".join(f"{label} {why}" for label, why in v.left_out.items())
        yield f"Not in the choice: {reasons}."


def _choice(v: Verdict, best: str) -> str:
    """Say which method is best on validation data, and from which ones it can't be told."""
    if v.methods == 1:
        return f"{best} is the only method, so there is nothing to compare it with."
    unit = " %" if is_percentage(v.chosen_by) else ""
    values = {name: f"{bare(v.chosen_by, x)}{unit}" for name, x in v.validation.items()}
    so_far = "" if v.is_finished else "So far, "
    name = f"{'training' if so_far else 'Training'} alone ({best})" if v.is_alone else best
    ties = sorted(v.ties, key=lambda tie: abs(v.validation[tie] - v.validation[best]))
    near = [f"{k} ({values[k]})" for k in ties if not v.has_learned or k not in v.not_learned]
    open_ = f"; these data alone can't tell it from {in_prose(near)}" if near else ""
    return f"{so_far}{name} is best on validation data ({values[best]}){open_}."


def _circumstances(v: Verdict) -> Iterator[str]:
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
    if v.has_learned is False:
        yield (
            f"{v.best} did not learn: its accuracy is not above that of each client's most "
            "frequent class."
        )


def _compared(v: Verdict) -> list[Difference]:
    """How the best method stands to training alone, and to the next best one."""
    found = {one.over: one for one in (v.alone, v.baseline) if one is not None}
    return list(found.values())


def _differences(v: Verdict) -> Iterator[str]:
    for place, one in enumerate(_compared(v)):
        is_alone = v.alone is not None and one.over == v.alone.over
        name = "training alone" if is_alone else f"{one.over}, the next best on validation data"
        said = trained_words(v.metric, one)
        text = f"{'Its' if place else 'On test data its'} {_difference(v.metric, one, name)}"
        yield f"{text} {said}." if said else text
    if v.unequal_alone is not None:
        yield f"{v.unequal_alone}; so it is not compared."
    for label, untrained in v.untrained.items():
        if label == v.best or label in [one.over for one in _compared(v)]:
            yield f"{label}: {untrained.words(v.metric)}."


def _difference(metric: Metric, d: Difference, name: str) -> str:
    text = f"{metric} is {_sided(metric, d.value)} than with {name}"
    if bare(metric, abs(d.value)) == bare(metric, 0):
        text = f"{metric} is as good as with {name}"
    if d.value == d.low == d.high == 0:
        return f"{text}, for every client."
    if not d.has_interval:
        return f"{text}; {too_few(d.num_clients)} whether that is chance."
    chance = "; that may be chance" if d.reading == "may be chance" else ""
    return f"{text}{chance} ({_interval(metric, d)})."


def _sided(metric: Metric, value: float) -> str:
    return f"{amount(metric, abs(value))} {'better' if value >= 0 else 'worse'}"


def _interval(metric: Metric, d: Difference) -> str:
    """Such as ``95 % interval 1.2 to 3.4``, or with both sides if it reaches from one to the
    other."""
    low, high = bare(metric, abs(d.low)), bare(metric, abs(d.high))
    if d.low < 0 < d.high:
        return f"95 % interval {low} worse to {high} better"
    return f"95 % interval {high} to {low}" if d.value < 0 else f"95 % interval {low} to {high}"


def trained_words(metric: Metric, d: Difference) -> str:
    """What is left of a difference over the clients that have trained with both methods; empty if
    all have."""
    if not d.num_untrained:
        return ""
    if (one := d.trained) is None:
        return f"No client has trained with both {d.method} and {d.over}"
    text = f"{d.num_untrained} of {d.num_clients} clients have not trained with both; over the "
    text += f"others it is {_sided(metric, one.value)}"
    return f"{text} ({_interval(metric, one)})" if one.has_interval else text


def _losses(v: Verdict) -> Iterator[str]:
    """Name the clients and the methods that do worse than training alone, or did not learn."""
    if (d := v.alone) is not None:
        names = f": {in_prose(v.worse_off, d.num_worse_off)}" if d.num_worse_off else ""
        count = d.num_worse_off or "none"
        verb = "do" if d.num_worse_off > 1 else "does"
        yield f"With {v.best} {count} of {d.num_clients} clients {verb} worse than alone{names}."
    elif not v.is_alone and v.methods > 1 and v.unequal_alone is None:
        yield "Training alone (local) is not among the methods, so who loses against it is unknown."
    behind = [one for one in v.against_alone if one.reading == "worse" and one.method != v.best]
    if behind:
        ordered = sorted(behind, key=lambda one: one.value)
        methods = [f"{one.method} ({bare(v.metric, one.value, signed=True)})" for one in ordered]
        yield f"Worse than training alone: {in_prose(methods)}."
    if v.not_learned and v.is_finished:
        yield f"{in_prose(v.not_learned)} did not learn: before you give up, {_to_try(v)}."


def _to_try(v: Verdict) -> str:
    """What may help methods that did not learn."""
    if any(2 * empty >= rounds for empty, rounds in v.empty_rounds.values()):
        return "see why so many rounds came to nothing"
    if v.attacks:
        return "try a robust rule, or another one ([methods.NAME.robust]), and a run without attack"
    return "try more rounds and other learning rates (fedtailor tune searches for them)"


def _cost(v: Verdict) -> Iterator[str]:
    if v.bytes is None or v.seconds is None:
        return
    sent = f"and receives {si(v.bytes, 'B')} per client and round" if v.bytes else "nothing"
    time = f"took {seconds_text(v.seconds)} s"
    if v.cpu_seconds is not None:
        time = f"its training took {seconds_text(v.cpu_seconds)} s of processor time"
    yield f"{v.best} sends {sent}, and {time}."


def _scope(v: Verdict) -> Iterator[str]:
    """Say what the intervals cover."""
    widest = max(_compared(v), key=lambda one: one.num_clients, default=None)
    if widest is None or widest.num_clients < FEWEST:
        return
    seeds = widest.num_seeds
    of = " of one seed; with another seed it may turn out otherwise" if seeds == 1 else (
        f" over {seeds} seeds{', which say little of other seeds' if seeds < 5 else ''}"
    )  # fmt: skip
    yield f"The intervals cover {widest.num_clients} clients{of}."


def _steps(v: Verdict) -> Iterator[Step]:
    if v.last_is_best and v.best is not None:
        yield Step(
            f"The best round of {in_prose(v.last_is_best)} is the last one, so more rounds may "
            "change the order: set rounds higher, and give another --out."
        )
    d = v.baseline if v.is_alone else v.alone
    if v.best is None:
        yield Step(
            f"Give clients validation data on which {v.chosen_by} is defined (split.validation), "
            "so that a method can be chosen."
        )
    elif v.has_learned is False:
        yield Step(f"Before you draw a conclusion, {_to_try(v)}.")
    elif v.unequal_alone is not None:
        yield Step(
            "Run training alone again, in another --out, where every client trains equally often, "
            "and compare the two runs (fedtailor compare)."
        )
    elif d is None and not v.is_alone:
        yield Step(
            "Add training alone to the experiment ([methods.local]) and run it again: it says "
            "whether training together pays."
        )
    elif d is None:
        yield Step("Add a federated method to the experiment, and run it again, to compare it.")
    elif d.reading == "may be chance":
        yield from _more_data(v, d)
    elif d.reading == "worse":
        yield Step(
            f"Validation and test data disagree on {v.best}, so don't rely on it yet: give clients "
            "more validation data (split.validation), or try other settings (fedtailor tune)."
        )
    elif v.is_alone:
        yield Step("Train alone, as far as these data go:", _predict(v.best_model))
    else:
        yield _take(v)


def _take(v: Verdict, until_then: str = "") -> Step:
    one_model = ", one model for all" if v.is_one_model else ""
    said = f"{until_then or 'Take'} {v.best}{one_model}:"
    return Step(said, _predict(v.best_model, is_one_model=v.is_one_model))


def _more_data(v: Verdict, d: Difference) -> Iterator[Step]:
    better = "training together" if v.is_alone else v.best
    narrower = "More test examples narrow the interval, and so do more seeds:"
    if not d.has_interval:
        narrower = "With so few clients, look at the result of each one, and try more seeds:"
    seeds = ",".join(map(str, range(max(3, d.num_seeds + 2))))
    run = shlex.quote(v.best_model.run) if v.best_model else "RUN"
    yield Step(
        f"Whether {better} is better than training alone is open. {narrower}",
        f"fedtailor run {run} --set 'seeds=[{seeds}]'",
    )
    if v.alone is not None and v.alone.over in v.ties:  # on validation data, too
        said = f"Until then take {v.alone.over}, which trains each client alone:"
        yield Step(said, _predict(v.alone_model))
    else:
        yield _take(v, "Until then take")


def _predict(model: Trained | None, *, is_one_model: bool = False) -> str:
    """The command that uses a client's model, or the one of all clients."""
    if model is None:
        return "fedtailor predict"
    words = ["fedtailor", "predict", model.run, *option("--method", model.method)]
    words += [] if is_one_model else ["--client", "CLIENT"]
    return shlex.join([*words, "--input", "FILE"])
