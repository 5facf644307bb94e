"""Multi-label: any number of the labels that the data name hold for an example, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .cells import Cells, flag, is_blank, parsed, trimmed, whole
from .classification import BETWEEN, largest, numbered, with_several
from .exported import ExportedModel
from .objective import OF_ROWS, MetricFunction, Objective, Roles, Scores, Targets, Tensor, Words

Holds = NDArray[np.integer[Any]]  # 0 or 1: whether each label holds, [n, labels]
Predictions = NDArray[np.float64]  # each label's probability, then the threshold: [n, labels + 1]

_THRESHOLDS = np.array(sorted(np.arange(1, 20) / 20, key=lambda value: abs(value - 0.5)))


def _decided(predictions: Predictions) -> NDArray[np.bool_]:
    """Whether the probability of each label is above the threshold, ``[n, labels]``."""
    decided: NDArray[np.bool_] = predictions[:, :-1] > predictions[:, -1:]
    return decided


def f1_micro(targets: Holds, predictions: Predictions) -> float:
    """The F1 over all labels of all examples together; NaN where none holds and none is predicted.

    >>> P = np.array([[0.9, 0.1, 0.5], [0.8, 0.6, 0.5]])
    >>> f1_micro(np.array([[1, 0], [0, 1]]), P)
    0.8
    """
    from sklearn.metrics import f1_score

    decided = _decided(predictions).astype(int)
    return float(f1_score(targets, decided, average="micro", zero_division=np.nan))


def f1_macro(targets: Holds, predictions: Predictions) -> float:
    """The mean of the F1 of each label that holds for any example; NaN where there is none."""
    from sklearn.metrics import f1_score

    options = {"labels": np.flatnonzero(targets.any(0)), "average": "macro", "zero_division": 0}
    decided = _decided(predictions).astype(int)
    return float(f1_score(targets, decided, **options)) if targets.any() else math.nan


def mean_average_precision(targets: Holds, predictions: Predictions) -> float:
    """The mean of the average precision of each label that holds for any example; NaN where there
    is none. No threshold counts."""
    from sklearn.metrics import average_precision_score

    present = np.flatnonzero(targets.any(0))
    each = [average_precision_score(targets[:, k], predictions[:, k]) for k in present]
    return float(np.mean(each)) if each else math.nan


def threshold_of(targets: Holds, predictions: Predictions) -> float:
    """The probability above which a label is predicted."""
    return float(predictions[0, -1])


@dataclass(frozen=True)
class LabelsPrediction:
    """The labels whose probability is above the threshold, and the probability of every label."""

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    def predict(self, inputs: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each label, for every text or file with a picture."""
        labels = list(self.about["id2label"].values())
        rows = [one.sigmoid().tolist() for one in self.outputs(inputs)]
        return [dict(zip(labels, row, strict=True)) for row in rows]

    def labels(self, inputs: Sequence[str]) -> list[list[str]]:
        """Return the labels of each input: those above the threshold chosen on validation data."""
        above = self.about["threshold"]
        return [[label for label, p in row.items() if p > above] for row in self.predict(inputs)]

    def say(self, given: str) -> str:
        """Return a line for each label, the most probable one first, and those above the threshold
        before."""
        row = self.predict([given])[0]
        ranked = sorted(row.items(), key=lambda pair: -pair[1])
        above = self.about["threshold"]
        return "\n".join(f"{p:.3f} {'yes' if p > above else ' no'}  {label}" for label, p in ranked)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return a line for each text, with its labels."""
        pairs = zip(self.labels(texts), texts, strict=True)
        return "\n".join(f"{'|'.join(labels) or '-'}  {text}" for labels, text in pairs)


@dataclass(frozen=True, eq=False)
class MultiLabel(Objective):
    """Each label holds or not: it is predicted where its probability is above ``threshold``."""

    threshold: float = 0.5

    name = "multi-label"
    meaning = "any number of labels for each row"
    target_names = ("labels", "label", "tags", "categories", "target")
    takes_pairs = True
    takes_flags = True
    names_classes = "labels"
    auto_classes = OF_ROWS
    metrics: ClassVar[Mapping[str, MetricFunction]] = {
        "f1_micro": f1_micro,
        "f1_macro": f1_macro,
        "map": mean_average_precision,
        "threshold": threshold_of,
    }
    reported = tuple(metrics)
    shares = frozenset({"f1_micro", "f1_macro", "map"})
    selects = "f1_micro"
    tunes = "threshold"
    target = "classes"
    answer_columns = frozenset({"labels", "probabilities"})
    exported = Exported

    def tuned(self, value: float) -> MultiLabel:
        return MultiLabel(value)

    def described(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def chosen(self, targets: Holds, predictions: NDArray[np.float64]) -> float:
        """Return the threshold, of 0.05 to 0.95 in steps of 0.05, with the best micro F1; of equal
        ones that nearest to 0.5."""
        scores = []
        for threshold in _THRESHOLDS:
            decided = predictions > threshold
            count = max(1, targets.sum() + decided.sum())
            scores.append(2 * (decided & (targets > 0)).sum() / count)
        return float(_THRESHOLDS[int(np.argmax(scores))])

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the mean binary cross-entropy of the labels; a hit has all right at 0.5."""
        import torch
        from torch.nn import functional as F

        targets = batch["labels"].to(logits)
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
        hits = ((logits > 0) == (targets > 0)).all(-1) & ~loss.isnan()
        return Scores(loss, hits.float(), torch.ones_like(loss))

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the probability of each label, float64 ``[b, labels]``."""
        return logits.double().sigmoid()

    def compared(
        self, targets: Any, predictions: NDArray[np.float64], rows: Sequence[Any], words: Words
    ) -> tuple[Holds, Predictions]:
        """Return the targets, and the probabilities with the threshold beside them."""
        threshold = np.full((len(predictions), 1), self.threshold)
        return targets, np.concatenate([predictions, threshold], 1)

    def answers(
        self, predictions: NDArray[np.float64], inputs: Sequence[Any], words: Words
    ) -> list[LabelsPrediction]:
        """Return the labels of each example, with all probabilities."""
        rows = [dict(zip(words.classes, values, strict=True)) for values in predictions.tolist()]
        return [
            LabelsPrediction(tuple(label for label, p in row.items() if p > self.threshold), row)
            for row in rows
        ]

    def undefined(self, targets: Holds, classes: Sequence[str]) -> tuple[str, ...]:
        return () if targets.any() else ("f1_macro", "map")

    def summary(self, targets: Holds, classes: Sequence[str]) -> str:
        """Return the labels with the shares of the rows for which they hold."""
        none = 100 * float((targets == 0).all(1).mean())
        shares = largest(classes, targets.mean(0))
        return f"{len(classes)} labels: {shares}; {none:.1f} % of the rows have none"

    def columns(self, answer: LabelsPrediction) -> dict[str, Any]:
        return {
            "labels": list(answer.labels),
            "probabilities": {name: round(p, 6) for name, p in answer.probabilities.items()},
        }

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Read a column of labels: a list in each cell, also as JSON; or names with one separator
        between them; or a list with a 0 or 1 for each label. An empty list has none; an empty cell
        is unknown. The labels are ``classes``, or the source's, or those that occur in training
        rows, in sorted order. Raises InputError where a cell holds no labels; no row of a split is
        known; there are fewer than two labels; a label is of no known name."""
        between = _separator(cells.values, classes)
        lists = [_labels(cells, row, between, classes) for row in range(len(cells.values))]
        known = np.array([one is not None for one in lists], bool)
        hint = " (a row without any label has an empty list, [])"
        cells.check_known(known, "labels", hint)
        if all(is_blank(cell) or flag(cell) is not None for cell in cells.values):
            raise InputError(
                f"{cells.place} says 0 or 1, or no or yes, of one label; the task {self.name!r} "
                "needs several: data.label names several such columns, or one of lists"
            )
        names = cells.classes
        if not names and (width := _width(lists)):
            names = classes or tuple(map(str, range(width)))
            if len(names) != width:
                raise InputError(
                    f"{cells.place} has {width} numbers in each row, and data.classes names "
                    f"{len(names)} labels; there must be one name for each"
                )
            lists = [None if x is None else np.flatnonzero(x).tolist() for x in lists]
        for row, one in enumerate(lists):
            if one and all(x in (0, 1, 2) for x in one) and len({*one}) < len(one):
                raise InputError(
                    f"{cells.place} holds {one} in row {cells.row_number(row)}, a number twice; "
                    "write 0 or 1 for each label in every row, or each label once"
                )
        rows = np.repeat(np.arange(len(lists)), [len(one or ()) for one in lists])
        flat = Cells(
            whole([label for one in lists for label in one or ()]) or (),
            int(np.searchsorted(rows, cells.num_train)),
            names,
            cells.place,
            [cells.row_number(row) for row in rows.tolist()],
        )
        numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        if flat.num_train or classes or names:
            numbers, names = numbered(flat, flat.values, classes)
        if len(names) < 2:
            raise InputError(
                f"{cells.place} has {len(names)} label{'s' * (len(names) != 1)}; the task "
                f"{self.name!r} needs two or more"
            )
        values = np.zeros((len(lists), len(names)), np.uint8)
        values[rows, numbers] = 1
        empty = "" if known.all() else "; an empty cell is unknown, [] says that no label holds"
        note = between and f"{cells.place}: labels are split at {between!r}{empty}"
        return Targets(values, known, names, note=note)

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return a column of several labels a row with a usual name, or, if no column is called
        like a label, several columns of 0 and 1."""
        known = {name: [x for x in cells if not is_blank(x)] for name, cells in columns.items()}
        for name in self.target_names:
            if _have_several(known.get(name, ())):
                return {"label": name}
        said = {name: {*map(flag, cells)} for name, cells in known.items()}
        several = [one for one in said.values() if one == {True, False}]
        if len(several) < 2 or any(name in columns for name in self.target_names):
            return {}
        # the first rows may lack a rare label
        return {"label": tuple(n for n, one in said.items() if one in ({False}, {True, False}))}


def _have_several(cells: Sequence[Any]) -> bool:
    """Whether the cells hold lists of names, or names with a separator between them."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    lists = [*map(parsed, cells)]
    if lists and all(isinstance(one, list) for one in lists):
        return any(isinstance(label, str) for one in lists for label in one)
    return with_several({*texts}) is not None


def _separator(values: Sequence[Any], classes: tuple[str, ...]) -> str:
    """What stands between the labels of a column's cells; empty if nothing does."""
    texts = {x for x in values if isinstance(x, str) and x.strip() not in classes and not _lists(x)}
    return next((one for one in BETWEEN if any(one in text for text in texts)), "")


def _lists(text: str) -> bool:
    return text.strip().startswith("[") and text.strip().endswith("]")


def _labels(cells: Cells, row: int, between: str, classes: tuple[str, ...]) -> Sequence[Any] | None:
    """A cell's labels; None for an empty one."""
    value = cells.values[row]
    if is_blank(value):
        return None
    if isinstance(value, str) and _lists(value):
        value = parsed(value)
    elif isinstance(value, str):
        parts = [value] if value.strip() in classes or not between else value.split(between)
        value = [part for part in map(str.strip, parts) if part]
    elif isinstance(value, int | float):
        value = [value]
    labels = value if isinstance(value, list | tuple) else [None]
    if not all(isinstance(label, str | int | float) and label == label for label in labels):
        between = " ".join(BETWEEN)
        needed = f"lists of names or whole numbers, or names with one of {between} between them"
        raise cells.refused(row, MultiLabel.name, needed)
    return [trimmed(label) for label in labels if not is_blank(label)]


def _width(lists: Sequence[Sequence[Any] | None]) -> int:
    """The length of all lists, where they have a 0 or 1 for each label; else 0."""
    known = [one for one in lists if one is not None]
    (width, *others) = {len(one) for one in known}
    are_flags = not others and width > 1 and {x for one in known for x in one} <= {0, 1}
    return width if are_flags else 0
