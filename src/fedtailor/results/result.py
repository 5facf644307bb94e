"""A run as tables, models and a report."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, get_args

import numpy as np

from ..data import Data, Dataset
from ..errors import InputError, unknown
from ..report.cells import text_tables
from ..report.comparison import compare, verdict_lines
from ..report.flat import frame
from ..report.page import write
from ..report.select import choose, entries, reported
from ..report.table import table
from ..report.untrained import untrained_of
from ..runs.run import run as run_into_directory
from ..store.metrics import Metric, higher_is_better, summary
from ..store.read import Run, Trial, read
from ..store.selection import Model, by_round, select_by, select_round
from ..task.backbone import Backbone
from ..units import counted, fixed

if TYPE_CHECKING:
    import pandas as pd

    from ..inference.model import PersonalModel

P = ParamSpec("P")
HeldOut = Literal["test", "validation"]
_MODELS: tuple[Model, ...] = ("personal", "global", "novel")


@dataclass(frozen=True)
class Best:
    """The method with the best results on validation data.

    ``score`` is the mean over clients and seeds of the personal models' ``metric``, the one by
    which rounds are selected, each seed at its reported round; ``scores`` has those of all methods
    that could be chosen. ``rounds`` are the reported rounds, one a seed. ``untrained`` says by
    method how many clients' private parts never trained, where some did not.
    """

    label: str
    metric: Metric
    score: float
    rounds: tuple[int, ...]
    scores: Mapping[str, float]
    untrained: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        others = sorted(
            (value, label) for label, value in self.scores.items() if label != self.label
        )
        others = others[::-1] if higher_is_better(self.metric) else others
        behind = "".join(f", {label} {fixed(value, 4)}" for value, label in others)
        seeds = counted(len(self.rounds), "seed")
        return (
            f"{self.label}: {self.metric} {fixed(self.score, 4)} on validation (mean over clients "
            f"and {seeds}, at the reported round){behind}"
        )


@dataclass(frozen=True, repr=False)
class Result:
    """A run directory, as it is now: each call reads its files. It can stand for a path.

    ``data`` and ``backbone`` are what the run was given from Python.
    """

    path: Path
    data: Data | Dataset | None = field(default=None, compare=False)
    backbone: Backbone | None = field(default=None, compare=False)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        try:
            return f"Result({str(self.path)!r})\n\n{compare(self.path)}"
        except InputError as error:
            return f"Result({str(self.path)!r}): {error}"

    def _repr_html_(self) -> str:
        from html import escape

        comparison = table([read(self.path)])
        parts = [f"<p><b>{escape(str(self.path))}</b></p>"]
        for lines, differences in verdict_lines(comparison):
            parts.append(f"<p>{'<br>'.join(map(escape, lines))}</p>")
            parts += [differences.html()] if differences else []
        parts += [one.html() for one in text_tables(comparison)]
        notes = [*comparison.caption, *comparison.notes]
        return "\n".join([*parts, *(f"<p><small>{escape(note)}</small></p>" for note in notes)])

    def table(self) -> pd.DataFrame:
        """Return the comparison, one row a method, in full precision.

        ``accuracy`` (a fraction; ``loss`` for language modelling, or the metric by which rounds are
        selected) is the mean over clients of the personal models on test data, then over seeds;
        ``weighted``, ``std``, ``decile`` and ``worst`` are over clients, too. ``majority`` is the
        mean of each client's most frequent class; a method that is not above it ``did_not_learn``.
        ``global`` and ``novel`` are the same mean of the global model and of novel clients,
        ``before`` that of the models from which the run went on. Columns with ``seed_std`` are the
        standard deviation over seeds. Costs are those of a client and round. Raises InputError
        where no round is committed yet, or a file is damaged."""
        comparison = table([read(self.path)])
        return frame(comparison.rows, comparison.metric)

    def clients(
        self, method: str | None = None, seed: int | None = None, split: HeldOut = "test"
    ) -> pd.DataFrame:
        """Return the results of every client at the reported round, one row a client and model.

        Columns: ``method`` (its label), ``seed``, ``model`` (personal, global or novel), ``round``,
        ``client`` (its number), ``name`` (if clients have names), ``num_examples``, ``accuracy``
        (a fraction), ``loss``, and the experiment's other metrics.

        Args:
            method: a label; None: all.
            seed: None: all.
            split: the examples: those for test or those for validation.

        Raises:
            InputError: no such method, seed or split, no round is committed yet, or a file is
                damaged.
        """
        import pandas as pd

        if split not in get_args(HeldOut):
            raise unknown("split", split, get_args(HeldOut))
        done = read(self.path)
        frames = []
        for trial, model in itertools.product(self._trials(done, method, seed), _MODELS):
            selected = select_round(trial, model, select_by(done))
            if selected is None or selected.round not in by_round(trial, model, split):
                continue
            evaluation = by_round(trial, model, split)[selected.round]
            names = done.partitions[trial.seed].names
            results = {"accuracy": evaluation.accuracy, "loss": evaluation.loss}
            columns = {
                "method": trial.label,
                "seed": trial.seed,
                "model": model,
                "round": evaluation.round,
                "client": evaluation.clients,
                **({} if names is None else {"name": [names[k] for k in evaluation.clients]}),
                "num_examples": evaluation.num_examples,
                **{
                    name: np.array(values, np.float64)  # None becomes nan
                    for name, values in {**results, **evaluation.metrics}.items()
                },
            }
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def history(self, method: str | None = None, seed: int | None = None) -> pd.DataFrame:
        """Return every round so far, one row a method, seed and round.

        Columns: ``method``, ``seed``, ``round``, ``train_loss``, ``lr_scale``, ``bytes_down`` and
        ``bytes_up`` of the whole cohort, ``seconds``, ``simulated_seconds`` where time is
        simulated, ``epsilon`` (of all rounds so far) where there is noise, ``clip`` where that
        moves; and for each model and split the mean over clients, such as
        ``personal_validation``: an accuracy as a fraction, or a loss for language modelling; not a
        number in rounds without an evaluation.

        Args:
            method: a label; None: all.
            seed: None: all.

        Raises:
            InputError: no such method or seed, no round is committed yet, or a file is damaged.
        """
        import pandas as pd

        done = read(self.path)
        metric = select_by(done)
        rows: list[dict[str, Any]] = []
        for trial in self._trials(done, method, seed):
            means = _means(trial, metric)
            seconds = {timing.round: sum(timing.seconds.values()) for timing in trial.timings}
            rows += [
                {
                    "method": trial.label,
                    "seed": trial.seed,
                    "round": record.round,
                    "train_loss": record.train_loss,
                    "lr_scale": record.lr_scale,
                    "bytes_down": record.bytes_down,
                    "bytes_up": record.bytes_up,
                    "seconds": seconds.get(record.round),
                    **{
                        name: value
                        for name in ("simulated_seconds", "epsilon", "clip")
                        if (value := getattr(record, name)) is not None
                    },
                    **{name: values.get(record.round, np.nan) for name, values in means.items()},
                }
                for record in trial.history
            ]
        return pd.DataFrame(rows)

    @property
    def best(self) -> Best:
        """The method with the best mean validation result of the personal models. Methods that
        diverged with a seed, or lack one, can't be chosen. Test data play no part. Raises
        InputError where there are no validation results to choose by."""
        choice = choose(entries([read(self.path)]))
        if (best := choice.best()) is None:
            raise InputError(
                f"{self.path}: no method has validation results with every seed; there is nothing "
                "to choose by"
            )
        untrained = {one.label: untrained_of(one, choice.metric) for one in choice.entries}
        return Best(
            best.label,
            choice.metric,
            choice.scores[best.label],
            tuple(
                selected.round
                for trial, selected in reported(best)
                if trial.seed in (choice.seeds or [trial.seed])
            ),
            choice.scores,
            {label: one.share for label, one in untrained.items() if one is not None},
        )

    def model(
        self, method: str | None = None, client: str | int | None = None, seed: int | None = None
    ) -> PersonalModel:
        """Return a model of the reported round, which predicts (`fedtailor.load_model`).

        Args:
            method: a label; None: the `best`.
            client: a client's name or number; None: the global model.
            seed: None: the experiment's first.

        Raises:
            InputError: no such method, client or seed; the run is unfinished.
        """
        from ..inference.model import load_model

        label = self.best.label if method is None else method
        return load_model(self.path, label, client, seed, data=self.data, backbone=self.backbone)

    def report(self, path: Path | str | None = None) -> Path:
        """Write the table and the figures as one HTML file, and return its path.

        Args:
            path: the file; None: ``report.html`` in the run directory.
        """
        return write(self.path, self.path / "report.html" if path is None else path)

    def _trials(self, done: Run, method: str | None, seed: int | None) -> Sequence[Trial]:
        labels = dict.fromkeys(trial.label for trial in done.trials)
        if method is not None and method not in labels:
            raise unknown("method", method, labels)
        seeds = sorted({trial.seed for trial in done.trials})
        if seed is not None and seed not in seeds:
            allowed = ", ".join(map(str, seeds))
            raise InputError(f"no seed {seed} in {self.path}; allowed: {allowed}")
        return [
            trial
            for trial in done.trials
            if method in (None, trial.label) and seed in (None, trial.seed)
        ]


def open_result(path: Path | str) -> Result:
    """Open an old run.

    Raises:
        InputError: there is no run at ``path``.

    >>> open_result("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no run at nowhere; give a directory that `fedtailor run` wrote
    """
    path = Path(path)
    if not (path / "experiment.json").is_file():
        raise InputError(f"no run at {path}; give a directory that `fedtailor run` wrote")
    return Result(path)


def _returning_result(function: Callable[P, Path]) -> Callable[P, Result]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        data, backbone = (kwargs.get(name) for name in ("data", "backbone"))
        return Result(function(*args, **kwargs), data, backbone)  # type: ignore[arg-type]

    run.__module__ = __name__
    run.__annotations__["return"] = "Result"
    del run.__wrapped__  # its annotation says Path
    signature = inspect.signature(function)
    run.__signature__ = signature.replace(return_annotation=Result)  # type: ignore[attr-defined]
    return run


run = _returning_result(run_into_directory)


def _means(trial: Trial, metric: Metric) -> dict[str, dict[int, float]]:
    """The means over clients by round, of each model and split that was evaluated."""
    return {
        f"{model}_{split}": {number: summary(one, metric).mean for number, one in found.items()}
        for model, split in itertools.product(_MODELS, ("validation", "test"))
        if (found := by_round(trial, model, split))
    }
