"""Compare an experiment's clients with those that were measured, and name methods to try."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tabulate import tabulate

from ..data.federation import Federation
from ..data.labels import label_counts, label_overlap
from ..errors import InputError
from ..method import FineTuning
from ..methods import METHODS
from ..objectives import OBJECTIVES
from ..runs.build import Inputs
from ..runs.experiment import Experiment
from ..runs.manifest import read_data_manifest
from ..store.metrics import Metric, bare, is_percentage
from ..store.read import read
from ..units import counted, si
from .measured import ALONE, Measured, Population, Regime, Setting, measured_settings

MOST = 3  # methods that are named
BASELINES = ("fedavg", ALONE)  # what every comparison has
_FAR = 1.0
_OTHER_DATA = 0.5  # how much farther a setting is if its data set is another one
_FULL = 3  # seeds of a setting that is measured in full
_OF_THE_MODEL = ("trainable=", "rank=", "lora_alpha=", "layers=", "optimiser.")  # settings


@dataclass(frozen=True)
class Advice:
    """Methods to try, the likeliest first, and the measured ``setting`` that speaks for them.

    ``methods`` is empty where nothing like the experiment was measured, and ``why_none`` says why,
    or where no method was ahead of training alone.
    ``distance`` of more than 1 is far: the clients are more than three times as many, say.
    ``own`` are the labels that the experiment has: their settings are its own. The methods that it
    lacks get those of the measurement; where that trained another model or other layers, or is of
    another kind than the experiment's ``kind``, those that can train an adapter get
    ``fine_tuning``: what a method of the experiment trains, ``like`` which they are set, and how.
    ``left_out`` are those that would be named and can only train the model's own weights, which
    nobody has measured with this pretrained one.
    """

    clients: Population
    kind: Regime
    setting: Setting | None
    distance: float
    methods: Sequence[str]
    why_none: str = ""
    own: Sequence[str] = ()
    fine_tuning: Sequence[str] = ()
    like: str = ""
    is_same_model: bool = True
    left_out: Sequence[str] = ()

    @property
    def is_like_yours(self) -> bool:
        """The measured setting is of the experiment's kind."""
        return self.setting is not None and self.setting.kind == self.kind

    @property
    def alone_is_as_good(self) -> bool:
        """In the measurement the method that validation data chose was not clearly ahead of
        training alone."""
        one = self.setting
        return one is not None and not one.methods[one.chosen].is_ahead_of_alone

    def lines(self, source: str, changes: Sequence[str] = ()) -> list[str]:
        """Return the advice as text, for an experiment that the command line calls ``source``, with
        the settings ``changes``."""
        said = [f"your clients      {self.clients}"]
        if self.setting is None:
            return [*said, self.why_none]
        said.append(f"closest measured  {self.setting.clients}")
        said.append(f"                  {self.setting}")
        said += [f"                  {line}" for line in self._doubts(self.setting)]
        own = [label for label in self.own if label in METHODS]
        if missing := [label for label in own if label not in self.setting.methods]:
            said.append(f"not measured      {', '.join(missing)}, which your experiment has")
        if self.left_out:
            said.append(
                f"left out          {', '.join(self.left_out)}: no adapter, and not measured with "
                "your model"
            )
        said.append("")
        if self.alone_is_as_good:
            said += [*self._alone(self.setting), ""]
        said += [*self._table(self.setting), ""]
        labels, what = self.labels(), "Compare them on your own validation data"
        if not self.methods:
            labels, what = (
                BASELINES,
                "See on your own validation data whether one model for all pays",
            )
        said.append(f"{what}{self._whose_settings(labels)}:")
        said += [f"  {line}" for line in self.command(source, changes, labels)]
        said += [
            "If the experiment has already run, this adds the missing methods to its table.",
            "With --dry-run at its end it says how long that takes, and how many bytes.",
        ]
        is_lm = OBJECTIVES[self.setting.task].generates
        page = "docs/cross.md has its table" if is_lm else "docs/when.md has them all"
        said.append(f"The measurement: {self.setting.command} ({page})")
        return said

    def _alone(self, setting: Setting) -> Iterator[str]:
        if setting.chosen == ALONE:
            yield "Validation data chose training alone there."
        else:
            chosen = setting.chosen
            yield f"Training alone was as good there as {chosen}, which validation data chose."
        ahead = [label for label, one in setting.methods.items() if one.is_ahead_of_alone]
        if ahead := [label for label in ahead if label not in self.left_out]:
            yield f"Clearly ahead of training alone: {', '.join(ahead)}."
        elif not self.methods:
            yield f"No {'other ' if self.left_out else ''}method was ahead of it."

    def _whose_settings(self, labels: Sequence[str]) -> str:
        added = [label for label in labels if label not in self.own]
        if not added:
            return ""
        if self.like:
            whole = [label for label in added if not can_adapt(label)]
            rest = f"; {' and '.join(whole)} can't train an adapter" if whole else ""
            adapted = f"the optimiser and the adapter of your {self.like}"
            return f". Methods that your file lacks have {adapted}{rest}"
        if self.fine_tuning:
            return ", with LoRA"
        if not self.is_like_yours:
            return ""
        return ", with the settings of the measurement"

    def _doubts(self, setting: Setting) -> Iterator[str]:
        """Why the measured figures are no promise."""
        if not self.is_like_yours:
            yield f"Nothing was measured with {self.kind}. The figures below"
            yield f"are of {setting.kind}: only their order is a hint."
        elif self.distance > _FAR:
            far = " and ".join(setting.differences(self.clients))
            yield f"That is far from yours, by {far}: take the order below as a guess."
        if self.is_like_yours and not setting.has_ends:
            yield "The perplexities count no end-of-text token, as those of your run will."
        if not setting.has_learned:
            yield "No method was better there than an answer without a model: the order is a guess."
        if setting.num_seeds < _FULL:
            seeds = counted(setting.num_seeds, "seed")
            yield f"The figures rest on {seeds}: with other seeds they may differ."

    def _table(self, setting: Setting) -> list[str]:
        """What the named methods came to; the score only where the kind is the same."""
        is_lm = OBJECTIVES[setting.task].generates
        header = [
            "method",
            f"{'perplexity' if is_lm else setting.metric} measured",
            f"{'perplexity against' if is_lm else 'lead over'} local, 95 % interval",
            "worse off",
            "trains",
            "traffic a round, both ways",
        ]
        rows = [
            [label, *cells_of(label, setting.methods[label], setting.metric)]
            for label in self.labels()
        ]
        if not self.is_like_yours:
            del header[1]
            for row in rows:
                del row[1]
        right = ["left", *["right"] * (len(header) - 1)]
        right[-2] = "left"
        return tabulate(rows, headers=header, colalign=right, disable_numparse=True).splitlines()

    def labels(self) -> Sequence[str]:
        """The named methods, and training alone."""
        return list(dict.fromkeys([*self.methods, ALONE]))

    def command(self, source: str, changes: Sequence[str], labels: Sequence[str]) -> list[str]:
        """What to type to run the methods ``labels``, in lines of a shell."""
        parts = [" ".join([f"fedtailor run {shlex.quote(source)}", *map(_set, changes)])]
        parts.append(_set("methods=[" + ", ".join(f'"{label}"' for label in labels) + "]"))
        for label in labels:
            of = [_set(f"methods.{label}.{setting}") for setting in self.settings_of(label)]
            parts += [" ".join(of)] if of else []
        return [*(f"{part} \\" for part in parts[:-1]), parts[-1]]

    def settings_of(self, label: str) -> tuple[str, ...]:
        """The settings of a method that the experiment lacks, where they are not its defaults:
        those of the measurement, and of `fine_tuning` instead of those that depend on the model."""
        if label in self.own:
            return ()
        known = {} if self.setting is None or not self.is_like_yours else self.setting.methods
        measured = known[label].settings if label in known else ()
        if not self.fine_tuning or (not can_adapt(label) and self.is_same_model):
            return measured
        kept = [one for one in measured if not one.startswith(_OF_THE_MODEL)]
        if not can_adapt(label):  # an adapter's rate is no rate for a whole model
            return tuple(kept)
        whole = issubclass(METHODS[label], FineTuning)
        mine = [one for one in self.fine_tuning if whole or one.startswith("optimiser.")]
        return (*mine, *kept)


def can_adapt(label: str) -> bool:
    """Whether a method can train a LoRA instead of the whole model."""
    return "rank" in {field.name for field in fields(METHODS[label])}


def cells_of(label: str, one: Measured, metric: Metric) -> tuple[str, ...]:
    """A method's row of the table, after its name."""
    if one.perplexity is not None:
        score = f"{one.perplexity:.1f}"
    else:
        share = " %" if is_percentage(metric) else ""
        score = bare(metric, one.score if one.accuracy is None else one.accuracy) + share
    what, sent = trained(label, one.settings), si(one.bytes, "B")
    if label == ALONE:
        return score, "", "", what, sent
    return score, lead(one, metric), f"{100 * one.worse_off:.0f} % of clients", what, sent


def lead(one: Measured, metric: Metric) -> str:
    """The lead over training alone with its interval: in points, in the unit of an error, or the
    change of the perplexity in percent."""
    difference, low, high = one.over_alone
    if one.perplexity is not None:
        change, low, high = (100 * math.expm1(-x) for x in (difference, high, low))
        return f"{change:+.0f} % [{low:+.0f}, {high:+.0f}]"
    by, begin, end = (bare(metric, value, signed=True) for value in (difference, low, high))
    return f"{by} [{begin}, {end}]"


def trained(label: str, settings: Sequence[str]) -> str:
    """What a method trained with these settings, in a word or two."""
    chosen = dict(one.split("=", 1) for one in settings)
    usual = "full" if issubclass(METHODS[label], FineTuning) or not can_adapt(label) else "lora"
    what = chosen.get("trainable", usual).strip("\"'")
    if what == "full" and "layers" in chosen:
        return "some layers"
    return {"full": "whole model", "lora": "LoRA", "head": "head"}[what]


def _set(change: str) -> str:
    return f"--set {shlex.quote(change)}"


def advise(experiment: Experiment, source: Path | str) -> Advice:
    """Say which methods to try for the clients of an experiment, by their numbers of training
    examples and all labels. ``source`` is the experiment file, or a run directory: of a run, what
    it has kept is enough; a deployment's keeps its clients' sizes, and no labels."""
    run = Path(source)
    if (run / "experiment.json").is_file():
        found = sorted(run.glob("partitions/seed-*.json"))
        if not found:
            raise InputError(f"{run} has not begun, so its clients are unknown; give the file")
        manifest = read_data_manifest(found[0])
        clients = replace(clients_of_run(run), pairs=bool(manifest.get("pair")))
        return advise_for(clients, manifest["modality"], experiment)
    inputs = Inputs.load(replace(experiment, seeds=experiment.seeds[:1]), None, None)
    (federation,) = inputs.federations.values()
    return advise_for(clients_of(federation), federation.dataset.modality, experiment)


def advise_for(
    clients: Population,
    modality: Literal["text", "image"],
    experiment: Experiment,
    settings: Sequence[Setting] | None = None,
) -> Advice:
    """Say which methods to try for ``clients`` with texts or pictures, from ``settings``; None: all
    that were measured. Only those of the same task count. Of them, those with a model that is
    pretrained as the experiment's is are preferred, then those with such data. The closest of them
    counts, and the same data set makes one closer."""
    kind = Regime(modality, experiment.model.pretrained, clients.task, clients.pairs)
    known = measured_settings() if settings is None else settings
    settings = [one for one in known if one.task == clients.task]
    if not settings:
        why = (
            f"Nothing was measured for the task {clients.task}. Compare a few methods\non your own "
            "validation data, for example local, fedavg and fedavg-ft."
        )
        return Advice(clients, kind, None, 0.0, (), why)

    def rank(one: Setting) -> tuple[bool, bool, float]:
        elsewhere = _OTHER_DATA if one.data != experiment.data.name else 0.0
        other_inputs = (one.kind.modality, one.kind.pairs) != (modality, clients.pairs)
        far = one.distance(clients) + elsewhere
        return one.kind.pretrained != kind.pretrained, other_inputs, far

    nearest = min(settings, key=rank)
    is_same_model = (nearest.kind, nearest.model) == (kind, experiment.model.name)
    order = _order(nearest)
    has_no_measure = kind.pretrained and not is_same_model
    whole = [name for name in order if has_no_measure and not can_adapt(name)]
    named = [name for name in order if name not in whole][:MOST]
    like, fine_tuning = _fine_tuning(experiment, kind, nearest)
    return Advice(
        clients,
        kind,
        nearest,
        nearest.distance(clients),
        named,
        own=tuple(experiment.methods),
        fine_tuning=fine_tuning,
        like=like,
        is_same_model=is_same_model,
        left_out=[name for name in order[:MOST] if name in whole],
    )


def _order(setting: Setting) -> list[str]:
    """The methods to name, the likeliest first: the one that validation data chose, then by test
    score those that can't be told from the best, then those that are clearly ahead of training
    alone. One whose mean is not above that of training alone is none of them."""
    above = {label: one for label, one in setting.methods.items() if one.over_alone[0] > 0}
    chosen = [setting.chosen] if setting.chosen in above else []
    ties = [label for label, one in above.items() if one.over_best[2] >= 0]
    ahead = [label for label, one in above.items() if one.is_ahead_of_alone]
    return list(dict.fromkeys([*chosen, *ties, *ahead]))


def _fine_tuning(
    experiment: Experiment, kind: Regime, nearest: Setting
) -> tuple[str, tuple[str, ...]]:
    """The experiment's first method with an adapter, or a head alone, and what it trains, and how;
    nothing where the nearest setting trained the same layers of the same model. Where no method can
    say it, and nothing of the kind was measured, an adapter is for a pretrained model of texts."""
    model = experiment.model
    measured = (nearest.kind, nearest.model, nearest.targets)
    if measured == (kind, model.name, model.targets):
        return "", ()
    usual, own = _fields(FineTuning()), experiment.methods
    for label, method in own.items():
        if isinstance(method, FineTuning) and method.trainable != "full":
            mine = _fields(method)
            return label, tuple(f"{key}={mine[key]}" for key in mine if mine[key] != usual[key])
    is_new = nearest.kind != kind and replace(kind, pairs=False) == Regime("text", True)
    has_any = any(isinstance(method, FineTuning) for method in own.values())
    return "", ("trainable=lora",) if is_new and not has_any else ()


def _fields(method: FineTuning) -> dict[str, Any]:
    chosen = {name: getattr(method, name) for name in ("trainable", "rank", "lora_alpha")}
    return chosen | {f"optimiser.{name}": v for name, v in asdict(method.optimiser).items()}


def clients_of(federation: Federation) -> Population:
    """Return what is known of the clients of a federation."""
    dataset = federation.dataset
    sizes = [federation.num_rows(k, "train") for k in range(federation.num_clients)]
    overlap = None if dataset.class_numbers is None else label_overlap(label_counts(federation))
    median = float(np.median(sizes))
    return Population(len(sizes), median, overlap, dataset.task, bool(dataset.pair))


def clients_of_run(path: Path) -> Population:
    """Return what a run directory has kept of its clients."""
    partition = next(iter(read(path).partitions.values()))
    overlap = None if partition.labels is None else label_overlap(np.asarray(partition.labels))
    median = float(np.median(partition.train))
    return Population(len(partition.train), median, overlap, partition.task)
