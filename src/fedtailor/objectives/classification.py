"""Classification: each example has one of the classes that the data name."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief, listed, spelt
from .cells import Cells, is_blank, trimmed, whole
from .exported import ExportedModel
from .objective import OF_ROWS, MetricFunction, Objective, Scores, Targets, Tensor, Words

Labels = NDArray[np.int64]  # the true classes of examples, [n]
Probabilities = NDArray[np.float64]  # of each class, [n, classes]

_OTHER = "need another task: set data.task (fedtailor new: --task) to"
_LIST = re.compile(r"\s*\[([0-9\s]*|.*[,'\"].*)\]\s*", re.DOTALL)
BETWEEN = ("|", ";", ",")  # several labels in a cell
_MANY_CLASSES = 200
_SHOWN = 5  # classes in a line
_FEW_ROWS = 20


class UnknownLabelError(InputError):
    """Labels of no known class: the first one, its row, what is allowed, and how often each stands
    there."""

    def __init__(self, split: str, label: str, row: int, allowed: str, counts: str) -> None:
        self._label, self._row, self._rest = label, row, f"allowed: {allowed}{counts}"
        super().__init__(
            f"{self.in_words(f'the {split} rows')} "
            "(if these rows have no labels, name another split of the data set)"
        )

    def in_words(self, where: str) -> str:
        """Return the message about the rows of ``where``."""
        return f"unknown label {self._label} in row {self._row} of {where}; {self._rest}"


def macro_f1(labels: Labels, probabilities: Probabilities) -> float:
    """The mean F1 over the classes that occur in ``labels``, each against all others; the most
    probable class is the prediction.

    >>> P = np.array([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0]])
    >>> round(macro_f1(np.array([0, 1, 1]), P), 4)
    0.6667
    """
    predicted, classes = probabilities.argmax(1), probabilities.shape[1]
    hits = np.bincount(labels[labels == predicted], minlength=classes)
    examples = np.bincount(labels, minlength=classes)
    predictions = np.bincount(predicted, minlength=classes)
    present = examples > 0
    return float((2 * hits[present] / (examples + predictions)[present]).mean())


def auc(labels: Labels, probabilities: Probabilities) -> float:
    """The area under the ROC curve: for two classes that of the second one, else the mean over the
    classes that occur in ``labels``, each against all others. NaN if only one class occurs.

    >>> P = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    >>> auc(np.array([0, 0, 1, 1]), P)
    0.75
    """
    from scipy.stats import rankdata

    present = np.unique(labels)
    if len(present) < 2:
        return math.nan
    chosen = np.array([1]) if probabilities.shape[1] == 2 else present
    positive = labels[:, None] == chosen  # [n, chosen]
    p = positive.sum(0)
    ranks = rankdata(probabilities[:, chosen], axis=0)  # equal values share their mean rank
    pairs = (ranks * positive).sum(0) - p * (p + 1) / 2
    return float((pairs / (p * (len(labels) - p))).mean())


def matthews(labels: Labels, probabilities: Probabilities) -> float:
    """Matthews' correlation of the labels and the most probable classes, as GLUE measures CoLA: 0
    where all predictions are one class. NaN where all labels are."""
    from sklearn.metrics import matthews_corrcoef

    varies = len(np.unique(labels)) > 1
    return float(matthews_corrcoef(labels, probabilities.argmax(1))) if varies else math.nan


def f1(labels: Labels, probabilities: Probabilities) -> float:
    """The F1 of the second of two classes, as GLUE measures MRPC; NaN where no example has it and
    none is predicted so, and for more classes, which have `macro_f1`."""
    from sklearn.metrics import f1_score

    if probabilities.shape[1] != 2:
        return math.nan
    return float(f1_score(labels, probabilities.argmax(1), zero_division=np.nan))


@dataclass(frozen=True)
class Prediction:
    """The most probable class, its probability, and that of every class."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    def predict(self, inputs: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each class, for every text or file with a picture."""
        labels = list(self.about["id2label"].values())
        rows = [one.softmax(-1).tolist() for one in self.outputs(inputs)]
        return [dict(zip(labels, row, strict=True)) for row in rows]

    def say(self, given: str) -> str:
        """Return a line for each class, the most probable one first."""
        ranked = sorted(self.predict([given])[0].items(), key=lambda pair: -pair[1])
        return "\n".join(f"{p:.3f}  {label}" for label, p in ranked)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return a line for each text, with its most probable class."""
        best = [max(row.items(), key=lambda pair: pair[1]) for row in self.predict(texts)]
        return "\n".join(
            f"{p:.3f}  {label}  {text}" for text, (label, p) in zip(texts, best, strict=True)
        )


class Classification(Objective):
    """One class an example."""

    name = "classification"
    meaning = "one class for each row"
    target_names = ("label", "labels", "target", "category")
    takes_pairs = True
    names_classes = "classes"
    has_classes = True
    auto_classes = OF_ROWS
    metrics: ClassVar[Mapping[str, MetricFunction]] = {
        "macro_f1": macro_f1,
        "auc": auc,
        "f1": f1,
        "matthews": matthews,
    }
    shares = frozenset({"macro_f1", "auc", "f1"})
    selects = "accuracy"
    answer_columns = frozenset({"label", "probability", "probabilities"})
    exported = Exported

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) and the top-1 hits."""
        import torch
        from torch.nn import functional as F

        labels = batch["labels"]
        loss = F.cross_entropy(logits, labels, reduction="none")
        hits = (logits.argmax(-1) == labels) & ~loss.isnan()
        return Scores(loss, hits.float(), torch.ones_like(loss))

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the probability of each class, float64 ``[b, classes]``."""
        return logits.double().softmax(-1)

    def answers(
        self, predictions: Probabilities, inputs: Sequence[Any], words: Words
    ) -> list[Prediction]:
        """Return the most probable class of each example, with all probabilities."""
        rows = [dict(zip(words.classes, values, strict=True)) for values in predictions.tolist()]
        return [Prediction(best := max(row, key=row.__getitem__), row[best], row) for row in rows]

    def undefined(self, targets: Labels, classes: Sequence[str]) -> tuple[str, ...]:
        return ("auc", "matthews") if len(np.unique(targets)) < 2 else ()

    def summary(self, targets: Labels, classes: Sequence[str]) -> str:
        """Return the classes with their shares of the rows."""
        shares = np.bincount(targets, minlength=len(classes)) / len(targets)
        return f"{len(classes)} classes: {largest(classes, shares)}"

    def columns(self, answer: Prediction) -> dict[str, Any]:
        return {
            "label": answer.label,
            "probability": round(answer.probability, 6),
            "probabilities": {name: round(p, 6) for name, p in answer.probabilities.items()},
        }

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Number the classes of a column of labels.

        The classes are the labels that occur in training rows, in sorted order, or ``classes``,
        whether they occur or not; blanks around a text don't count. A row without a label, or with
        an empty one, has class -1. Labels that the source names in another order are matched by
        name; integer ones are numbers of ``classes``, unless these are named by the integers.
        Raises InputError where no row of a split has a label; a label is of no known class, or
        can't be shown; most rows have a label of their own."""
        labels, source_classes = whole(cells.values) or (), cells.classes
        if not source_classes and not (
            classes and all(map(classes.__contains__, map(str, labels)))
        ):
            check_labels(cells.place, labels)
        if not source_classes:
            labels = [label if label in classes else trimmed(label) for label in labels]
        cells.check_known([not is_blank(label) for label in labels], "a label")
        numbers, names = numbered(cells, labels, classes)
        return Targets(numbers, numbers >= 0, names)


def largest(classes: Sequence[str], shares: Probabilities) -> str:
    """Return the classes with the largest shares ``[classes]``, the largest first, in words.

    >>> largest(["bad", "good"], np.array([0.25, 0.75]))
    'good (75.0 %), bad (25.0 %)'
    """
    order = np.argsort(-shares, kind="stable")
    shown = ", ".join(f"{classes[k]} ({100 * shares[k]:.1f} %)" for k in order[:_SHOWN])
    return f"{shown}, ..." if len(classes) > _SHOWN else shown


def numbered(
    cells: Cells, labels: Sequence[Any], classes: tuple[str, ...]
) -> tuple[Labels, tuple[str, ...]]:
    """Return the class number of each label, -1 for an empty one, and the names of the classes, as
    `Classification.targets` says; ``labels`` are those of ``cells``, without blanks. Raises
    InputError as it does."""
    source_classes = cells.classes
    if classes and source_classes:
        allowed = range(len(source_classes))
        labels = [source_classes[x] if x in allowed else x for x in labels]
    train = [label for label in labels[: cells.num_train] if not is_blank(label)]
    test = [label for label in labels[cells.num_train :] if not is_blank(label)]
    if not any(all(isinstance(label, kind) for label in train) for kind in (str, int)):
        wrong = next((label for label in train if not isinstance(label, str | int)), train[0])
        raise InputError(f"labels must be all integers or all text; one of them is {wrong!r}")
    names = classes or source_classes
    known = {*train, *test}
    if all(isinstance(label, str) for label in train):
        names = names or tuple(sorted(set(train)))
        numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    elif not names or ({*map(str, known)} & {*names} and not source_classes):
        names = names or tuple(map(str, sorted(set(train))))
        by_name = {name: number for number, name in enumerate(names)}
        numbers = {value: by_name[str(value)] for value in known if str(value) in by_name}
    else:
        numbers = {number: number for number in range(len(names))}
    if not classes and not source_classes:
        check_few_classes(cells.place, len(names), len(train))
    _check_known(cells, labels, numbers, names)
    encoded = [-1 if is_blank(label) else numbers[label] for label in labels]
    return np.array(encoded, np.int64), names


def check_few_classes(place: str, classes: int, rows: int) -> None:
    """Raise InputError where so many labels in so many rows are more like an id column.

    >>> check_few_classes("column 'id'", 300, 300)
    Traceback (most recent call last):
    fedtailor.errors.InputError: column 'id' has 300 labels in 300 rows, as many classes as rows; \
a label has a few values, each in many rows
    """
    if classes == rows > _FEW_ROWS or (classes > _MANY_CLASSES and 2 * classes > rows):
        like = "as many classes as rows" if classes == rows else "so most classes have one row"
        raise InputError(
            f"{place} has {classes:,} labels in {rows:,} rows, {like}; a label has a few values, "
            "each in many rows"
        )


def _check_known(
    cells: Cells, labels: Sequence[Any], numbers: Mapping[Any, int], names: Sequence[str]
) -> None:
    """Raise UnknownLabelError where a label has no number, for the first split that has any."""
    n = cells.num_train
    unknown = [row for row, x in enumerate(labels) if x not in numbers and not is_blank(x)]
    if not unknown:
        return
    in_train = [row for row in unknown if row < n]
    split, rows = ("training", in_train) if in_train else ("test", unknown)
    label = labels[rows[0]]
    numbered = [*range(len(names))]
    is_range = isinstance(label, int) and (
        [*numbers] == numbered or [*names] == [*map(str, numbered)]
    )
    allowed = f"0 to {len(names) - 1}" if is_range else listed(names)
    counts = Counter(brief(labels[row]) for row in rows)
    each = f"; {len(rows)} rows have such labels: {listed([*counts], [*counts.values()])}"
    each = each if len(rows) > 1 else ""
    number = cells.row_number(rows[0])
    raise UnknownLabelError(split, spelt(label, names), number, allowed, each)


def check_labels(place: str, labels: Iterable[Any]) -> None:
    """Raise InputError where the labels are numbers to predict, lists, objects, or several in a
    cell; ``place`` says where they stand.

    >>> check_labels("column 'y'", [0.5, 2.0])
    Traceback (most recent call last):
    fedtailor.errors.InputError: column 'y' holds 0.5: numbers to predict need another task: set \
data.task (fedtailor new: --task) to 'regression'; labels are words or whole numbers
    """
    texts = set()
    for label in labels:
        is_list = isinstance(label, str) and _LIST.fullmatch(label)
        if is_list or isinstance(label, list | tuple | dict | set | np.ndarray):
            raise InputError(
                f"{place} holds lists or objects: several labels of one row, a tag for each word, "
                f"or an answer in a text {_OTHER} 'multi-label', 'token-classification' or "
                "'question-answering'; labels are words or whole numbers"
            )
        if isinstance(label, float) and label == label and not label.is_integer():
            raise InputError(
                f"{place} holds {label!r}: numbers to predict {_OTHER} 'regression'; labels are "
                "words or whole numbers"
            )
        if isinstance(label, str):
            texts.add(label)
    if cell := with_several(texts):
        raise InputError(
            f"{place} holds {brief(cell, 60)}: several labels of one row {_OTHER} "
            "'multi-label'; if it is one label, list all in data.classes"
        )


def with_several(texts: Collection[str]) -> str | None:
    """A cell of several labels, if one of its labels stands at another place in another cell: so
    ``New York, NY`` beside ``Buffalo, NY`` is none."""
    for between in BETWEEN:
        cells = [[part.strip() for part in text.split(between)] for text in sorted(texts)]
        places: dict[str, set[int]] = {}
        for parts in cells:
            for place, part in enumerate(parts):
                places.setdefault(part, set()).add(place)
        for parts in cells:
            several = len(parts) > 1 and all(parts) and len(set(parts)) == len(parts)
            if several and any(len(places[part]) > 1 for part in parts):
                return between.join(parts)
    return None
