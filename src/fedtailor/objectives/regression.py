"""Regression: each example has a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .cells import Cells, is_blank, with_points
from .exported import ExportedModel
from .objective import OF_ROWS, MetricFunction, Objective, Scores, Targets, Tensor, Words

Numbers = NDArray[np.float64]
_MOST = 1e30  # of a target; its square and sums of squares stay finite


def mean_error(function: str, targets: Numbers, predictions: Numbers) -> float:
    """A mean error of n predictions ``[n, 1]``, in the unit of the targets, by scikit-learn.

    >>> targets, predictions = np.array([1.0, 3.0]), np.array([[1.0], [1.0]])
    >>> mean_error("root_mean_squared_error", targets, predictions) == math.sqrt(2)
    True
    """
    from sklearn import metrics

    return float(getattr(metrics, function)(targets, predictions[:, 0]))


def r2(targets: Numbers, predictions: Numbers) -> float:
    """The share of the targets' variance that is explained; NaN where all targets are equal."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, predictions[:, 0])) if np.ptp(targets) else math.nan


def correlation(function: str, targets: Numbers, predictions: Numbers) -> float:
    """Pearson's correlation (SciPy's ``pearsonr``), or Spearman's of ranks (``spearmanr``): 0 where
    all predictions are equal, NaN where all targets are."""
    from scipy import stats

    if len(targets) < 2 or not np.ptp(targets):
        return math.nan
    if not np.ptp(predictions):
        return 0.0
    return float(getattr(stats, function)(targets, predictions[:, 0]).statistic)


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    def predict(self, inputs: Sequence[str]) -> list[float]:
        """Return a number for every text or file with a picture."""
        mean, deviation = self.about["scale"]
        return [mean + deviation * float(one) for one in self.outputs(inputs)]

    def say(self, given: str) -> str:
        """Return the number."""
        return f"{self.predict([given])[0]:.6g}"

    def say_all(self, texts: Sequence[str]) -> str:
        """Return a line for each text, with its number."""
        return "\n".join(f"{n:.6g}  {t}" for t, n in zip(texts, self.predict(texts), strict=True))


@dataclass(frozen=True, eq=False)
class Regression(Objective):
    """A number an example. The model's output is scaled: its 0 is ``mean``, and its 1 is one
    ``deviation`` above."""

    mean: float = 0.0
    deviation: float = 1.0
    huber_delta: float | None = None  # in deviations

    name = "regression"
    meaning = "a number for each row"
    target_names = ("target", "value", "score", "rating", "label", "labels", "y")
    auto_classes = OF_ROWS
    metrics: ClassVar[Mapping[str, MetricFunction]] = {
        "rmse": partial(mean_error, "root_mean_squared_error"),
        "mae": partial(mean_error, "mean_absolute_error"),
        "r2": r2,
        "pearson": partial(correlation, "pearsonr"),
        "spearman": partial(correlation, "spearmanr"),
    }
    reported = tuple(metrics)
    errors = frozenset({"rmse", "mae"})
    takes_pairs = True
    selects = "rmse"
    has_hits = False
    outputs = 1
    answer_columns = frozenset({"number"})
    settings = ("scale", "huber_delta")
    exported = Exported

    def numbers(self, given: Mapping[str, Any], targets: Targets | None) -> tuple[float, ...]:
        scale, delta = () if targets is None else targets.scale, given["huber_delta"]
        return (*scale, delta) if scale and delta else scale

    def scaled(self, scale: Sequence[float]) -> Regression:
        return Regression(*scale) if scale else self

    def described(self) -> dict[str, Any]:
        return {"scale": [self.mean, self.deviation]}

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the squared error, in squares of the targets' deviation; with a ``huber_delta``
        Huber's loss: half of that up to the delta, and linear above."""
        import torch
        from torch.nn import functional as F

        targets = ((batch["labels"] - self.mean) / self.deviation).to(logits)
        loss = (logits[:, 0] - targets).square()
        if (delta := self.huber_delta) is not None:
            loss = F.huber_loss(logits[:, 0], targets, reduction="none", delta=delta)
        return Scores(loss, torch.zeros_like(loss), torch.ones_like(loss))

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers, float64 ``[b, 1]``."""
        return self.mean + self.deviation * logits.double()

    def answers(self, predictions: Numbers, inputs: Sequence[Any], words: Words) -> list[float]:
        """Return the number of each example."""
        numbers: list[float] = predictions[:, 0].tolist()
        return numbers

    def undefined(self, targets: Numbers, classes: Sequence[str]) -> tuple[str, ...]:
        return ("r2", "pearson", "spearman") if len(np.unique(targets)) < 2 else ()

    def summary(self, targets: Numbers, classes: Sequence[str]) -> str:
        """Return the range and the mean of the numbers."""
        least, most, mean = targets.min(), targets.max(), targets.mean()
        return f"numbers from {least:g} to {most:g}, {mean:g} on average"

    def columns(self, answer: float) -> dict[str, Any]:
        return {"number": float(f"{answer:.9g}")}  # the digits that a model's output has

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Read a column of numbers, also as texts with decimal commas or with commas between
        thousands; empty cells are unknown. Raises InputError where a cell holds no number, or no
        row of a split has one."""
        cells = replace(cells, values=with_points(cells.values))
        values = np.array([_number(cells, row) for row in range(len(cells.values))])
        known = ~np.isnan(values)
        cells.check_known(known, "a number")
        train = values[: cells.num_train][known[: cells.num_train]]
        scale = float(train.mean()), float(train.std())
        return Targets(np.where(known, values, 0.0), known, scale=scale)


def _number(cells: Cells, row: int) -> float:
    """A cell's number; NaN for an empty one."""
    value = cells.values[row]
    if is_blank(value):
        return math.nan
    is_odd = isinstance(value, bool) or (isinstance(value, str) and "_" in value)
    try:
        number = math.nan if is_odd else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MOST:
        needed = f"numbers such as 1234.5, of at most {_MOST:g}; an empty cell is none"
        raise cells.refused(row, Regression.name, needed)
    return number
