"""Metrics of a client's predictions beside loss and accuracy: macro-F1, AUC, and own functions.

They are computed where a client's examples are. Only their values leave that place, and the counts
of the confusion matrix where these are asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief, unknown
from ..objectives import OBJECTIVES
from ..objectives.objective import OWN_METRIC, MetricFunction, Objective
from ..objectives.text_metrics import WRITTEN
from ..objectives.writing import Written
from ..user_code import load, own_faults
from .config import EvaluateConfig

LARGEST = 1e60  # of a loss or a metric; sums over all clients stay finite
Labels = Any  # of a client's examples: ``[n, ...]``, or n arrays
Predictions = NDArray[np.float64]
Compared = Callable[[Labels, Predictions], tuple[Any, Any]]

METRICS = {name: one for kind in OBJECTIVES.values() for name, one in kind.metrics.items()}
"""The metrics that ``evaluate.metrics`` may name, of all kinds of task."""


@dataclass(frozen=True)
class MetricValues:
    """One client's metrics on one split, in the order of their names; None where a metric is
    undefined. ``confusion`` has the examples by true class (row) and predicted class, if asked for.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # where it comes in a message

    values: tuple[float | None, ...] = ()
    confusion: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Metrics:
    """What is computed beside loss and accuracy.

    ``given`` are functions from Python, by the names that ``config.metrics`` has for them.
    """

    config: EvaluateConfig = EvaluateConfig()
    given: Mapping[str, MetricFunction] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics' names, in the order of their values."""
        return metric_names(self.config)

    @property
    def asked(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.names) or self.config.confusion

    @cached_property
    def functions(self) -> tuple[MetricFunction, ...]:
        """The functions of `names`; those in files are loaded."""
        return tuple(self._function(spec) for spec in self.config.metrics)

    def _function(self, spec: str) -> MetricFunction:
        if spec in self.given:
            return self.given[spec]
        if ":" in spec:
            made: MetricFunction = load(spec)
            if not callable(made):
                raise InputError(f"evaluate.metrics: {spec!r} is no function")
            return made
        if spec not in METRICS:
            allowed = {*METRICS, *self.given, "FILE.py:FUNCTION"}
            raise unknown("metric", spec, allowed, where="evaluate.metrics")
        return METRICS[spec]

    def check(self, objective: Objective, *, remote: bool = False) -> None:
        """Raise InputError where the metrics can't be computed. With ``remote`` the functions are
        at the clients' sites, and not looked for."""
        always = ["loss", "accuracy"] if objective.has_hits else ["loss"]
        unfit = METRICS.keys() - objective.metrics.keys() - self.given.keys()
        has_other = not objective.metrics or bool(unfit & {*self.config.metrics})
        refused = {
            "metrics": bool(self.config.metrics) and has_other,
            "confusion": self.config.confusion and not objective.has_classes,
        }
        for what in (name for name, is_refused in refused.items() if is_refused):
            has = ", ".join([*always, *objective.metrics])
            raise InputError(f"evaluate.{what} is not for {objective.name}, which has {has}")
        double = [name for name, count in Counter(self.names).items() if count > 1]
        if double or {"loss", "accuracy"} & set(self.names):
            raise InputError(
                f"evaluate.metrics = {list(self.config.metrics)}: names must differ from each "
                "other, and from loss and accuracy"
            )
        if not remote:
            _ = self.functions
        generate = self.config.generate
        if generate.examples and not objective.learns_texts:
            raise InputError(
                "evaluate.generate is for models that learn to write texts; data.task = "
                f"{objective.name!r}"
            )
        unknown_ones = {*self.config.metric_of.values()} - objective.metrics.keys()
        if self.config.by_client and (unknown_ones or not objective.learns_texts):
            raise InputError(
                f"evaluate.by_client has metrics {sorted(self.config.metric_of.values())}; allowed "
                f"are those of written texts: {', '.join(WRITTEN)}"
            )
        if self.names and objective.learns_texts and not generate.examples:
            raise InputError(
                f"evaluate.metrics = {list(self.names)} are of texts that models write, "
                "and none are written; set evaluate.generate.examples, such as 8"
            )
        select = self.config.select
        allowed = {*always, *self.names} - {objective.tunes}
        if select not in {None, *allowed}:
            raise unknown("metric", str(select), allowed, where="evaluate.select")
        if not remote:
            objective.check_metrics([n for n in self.config.metrics if n not in self.given])
            objective.check_metrics({*self.config.metric_of.values()})

    def __call__(
        self, labels: Labels, predictions: Predictions, compared: Compared | None = None
    ) -> MetricValues:
        """The metrics of one client's examples, of what ``compared`` makes of the labels and
        predictions, if it is given. Where a prediction is not a number, as after a fine-tuning that
        diverged, all are NaN, and the confusion matrix leaves that example out."""
        if not len(predictions):
            none = (None,) * len(self.names)
            return MetricValues(none, () if self.config.confusion else None)
        finite = np.isfinite(predictions).all(1)
        values: tuple[float | None, ...] = (math.nan,) * len(self.names)
        if finite.all():
            both = compared(labels, predictions) if compared else (labels, predictions)
            targets, found = map(_read_only, both)
            values = tuple(
                self._value(spec, f, targets, found)
                for spec, f in zip(self.config.metrics, self.functions, strict=True)
            )
        if not self.config.confusion:
            return MetricValues(values)
        classes = predictions.shape[1]
        cells = labels[finite] * classes + predictions[finite].argmax(1)
        counts = np.bincount(cells, minlength=classes**2).reshape(classes, classes)
        return MetricValues(values, tuple(map(tuple, counts.tolist())))

    def of_texts(self, texts: Sequence[Written], client: str = "") -> MetricValues:
        """The metrics of the texts of one client, by name. A function of one's own takes prompt,
        answer and reference of one, and the mean counts; where there are none, all are undefined.
        """
        if not texts:
            return MetricValues((None,) * len(self.names))
        right, said = [[text.reference] for text in texts], [text.answer for text in texts]
        found: list[float | None] = []
        functions = [*zip(self.config.metrics, self.functions, strict=True)]
        if self.config.by_client:
            own = self.config.metric_of[client]
            functions.append((own, METRICS[own]))
        for spec, function in functions:
            if spec in METRICS and spec not in self.given:
                found.append(self._value(spec, function, right, said))
                continue
            each = [self._value(spec, function, *astuple(text)) for text in texts]
            known = [value for value in each if value is not None]
            found.append(sum(known) / len(known) if known else None)
        return MetricValues(tuple(found))

    def _value(self, spec: str, function: Callable[..., Any], *arguments: Any) -> float | None:
        """None for NaN: the metric is undefined for this client."""
        with own_faults():
            value: object = function(*arguments)
        try:  # a text of digits is no number, and an array of one neither
            is_one = not (np.ndim(value) or isinstance(value, str | bytes))  # type: ignore[arg-type]
            number = float(value) if is_one else math.inf  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if abs(number) > LARGEST:
            name = spec.rpartition(":")[2]
            raise InputError(
                f"metric {name!r} returned {brief(value)}; it must return one finite number, of at "
                f"most {LARGEST:g}"
            )
        return None if math.isnan(number) else number


def _read_only(values: Any) -> Any:
    """A view that can't be written to; of a list a tuple."""
    if not isinstance(values, np.ndarray):
        return tuple(values)
    view = values.view()
    view.flags.writeable = False
    return view


def metric_names(config: EvaluateConfig) -> tuple[str, ...]:
    """The names of ``config.metrics``: of ``my_file.py:my_metric`` it is ``my_metric``; and that of
    ``config.by_client``, last."""
    names = tuple(spec.rpartition(":")[2] for spec in config.metrics)
    return (*names, OWN_METRIC) if config.by_client else names
