"""The columns of a source before they become tensors: which they are, labels, natural clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from . import images
from .config import DataConfig
from .table import Indices

_TEXT = ("text", "sentence", "content")
_IMAGE = ("image", "img")
_LABEL = ("label", "labels", "target", "category")


@dataclass(frozen=True)
class Columns:
    """A source's rows: those for training first, then the official test split.

    ``read`` gives the inputs of some rows: texts, or images uint8 ``[n, C, H, W]``. ``labels`` and
    ``clients`` have one entry a row, of Python's types. ``classes`` are the names of integer
    labels, if known.
    """

    read: Callable[[Indices], list[str] | NDArray[np.uint8]]
    num_train: int
    num_test: int
    labels: Sequence[Any] | None = None
    classes: tuple[str, ...] = ()
    clients: Sequence[Any] | None = None

    def train_only(self) -> Columns:
        """Without the official test split."""
        n = self.num_train
        return Columns(
            self.read,
            n,
            0,
            None if self.labels is None else self.labels[:n],
            self.classes,
            None if self.clients is None else self.clients[:n],
        )


def of_tables(train: Any, test: Any | None, config: DataConfig, cache: Path) -> Columns:
    """The columns of one or two ``datasets.Dataset`` that ``config`` names, or the usual ones.

    Raises:
        InputError: a column is missing or holds something else, or the two don't fit together.
    """
    source = _input_column(train, config)
    label = None
    if config.task != "causal-lm":
        label = _find(train, "label", config.label, _LABEL)
    client = None if config.client is None else _find(train, "client", config.client, ())
    used = {name: None for name in (source, label, client) if name is not None}
    table = _join(train, test, list(used))
    is_image = _check_input(table, source)

    def read(rows: Indices) -> list[str] | NDArray[np.uint8]:
        chosen = table.select(rows)
        if is_image:
            return images.decode(chosen, source, cache)
        return [text or "" for text in chosen[source][:]]

    return Columns(
        read,
        len(train),
        0 if test is None else len(test),
        None if label is None else table[label][:],
        () if label is None else tuple(getattr(table.features[label], "names", None) or ()),
        None if client is None else table[client][:],
    )


def _input_column(table: Any, config: DataConfig) -> str:
    if config.text is not None and config.image is not None:
        raise InputError("data.text and data.image are both given; an example has one input")
    if config.image is not None:
        return _find(table, "image", config.image, _IMAGE)
    usual = next((name for name in _IMAGE if name in table.column_names), None)
    if config.text is None and usual and not any(name in table.column_names for name in _TEXT):
        return usual
    return _find(table, "text", config.text, _TEXT)


def _find(table: Any, role: str, named: str | None, usual: Sequence[str]) -> str:
    columns: list[str] = table.column_names
    for name in usual if named is None else (named,):
        if name in columns:
            return name
    there = ", ".join(columns)
    if named is not None:
        raise InputError(f"no column {named!r} for data.{role}; columns: {there}")
    or_else = ", or data.task = 'causal-lm'" if role == "label" else ""
    raise InputError(f"no {role} column found; set data.{role}{or_else}; columns: {there}")


def _join(train: Any, test: Any | None, used: list[str]) -> Any:
    from datasets import concatenate_datasets

    if test is None:
        return train.select_columns(used)
    for name in used:
        if name not in test.column_names:
            there = ", ".join(test.column_names)
            raise InputError(f"no column {name!r} in the test split; columns: {there}")
        if train.features[name] != test.features[name]:
            raise InputError(
                f"column {name!r} is {_kind(train, name)} in the training split but "
                f"{_kind(test, name)} in the test split"
            )
    return concatenate_datasets([train.select_columns(used), test.select_columns(used)])


def _check_input(table: Any, column: str) -> bool:
    """Whether the column holds images; raise InputError if it holds neither those nor text."""
    from datasets import Image

    feature = table.features[column]
    is_text = getattr(feature, "dtype", None) in ("string", "large_string")
    if not is_text and not isinstance(feature, Image):
        raise InputError(f"column {column!r} holds {_kind(table, column)}, not text or images")
    return not is_text


def _kind(table: Any, column: str) -> str:
    feature = table.features[column]
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def encode_labels(
    columns: Columns, classes: tuple[str, ...] = ()
) -> tuple[Indices, tuple[str, ...]]:
    """Class numbers int64 ``[N]``, and the names of the classes.

    Text labels are numbered in sorted order, integer ones are taken as they are; the classes are
    those of the training rows, unless the source names them. Where ``classes`` are given, these
    are the classes, in this order, whether they occur or not; what the source names differently is
    matched by name.

    Raises:
        InputError: a label is missing, negative, or of no known class.
    """
    labels, known = columns.labels, columns.classes
    if labels is None:
        raise InputError("classification needs a label column; set data.label")
    if classes and known:
        labels = [known[x] if x in range(len(known)) else x for x in labels]
    train, test = labels[: columns.num_train], labels[columns.num_train :]
    if all(isinstance(label, str) for label in train):
        names = classes or tuple(sorted(set(train)))
        numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    elif all(isinstance(label, int) for label in train):
        names = classes or known or tuple(map(str, range(int(max(train)) + 1)))
        numbers = {number: number for number in range(len(names))}
    else:
        odd = next((label for label in train if not isinstance(label, str | int)), train[0])
        raise InputError(f"labels must be integers or all text; there is {odd!r}")
    for split, values in (("training", train), ("test", test)):
        _check_labels(split, values, numbers, names)
    return np.array([numbers[label] for label in labels], np.int64), names


def _check_labels(
    split: str, labels: Sequence[Any], numbers: dict[Any, int], names: tuple[str, ...]
) -> None:
    odd = next((label for label in labels if label not in numbers), None)
    if odd is None and None not in labels:
        return
    allowed = f"0 to {len(names) - 1}" if 0 in numbers else ", ".join(names)
    raise InputError(
        f"labels out of range: {odd!r} in the {split} split; allowed: {allowed} "
        f"(if that split has no labels, name another one)"
    )


def encode_clients(columns: Columns) -> Indices | None:
    """A number for each natural client, int64 ``[N]``; None without such a column.

    Raises:
        InputError: a row has none.
    """
    if columns.clients is None:
        return None
    values = list(columns.clients)
    if not all(isinstance(value, str) for value in values) and not all(
        isinstance(value, int) for value in values
    ):
        odd = next((value for value in values if value is None), values[0])
        raise InputError(f"the client column must hold integers or text; there is {odd!r}")
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)
