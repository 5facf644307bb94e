"""The columns of a source before they become tensors: inputs, labels, natural clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief
from ..objectives import objective_of
from ..objectives.cells import Cells, flag, is_blank, is_whole, usual_column
from ..objectives.objective import Objective, Targets
from . import images
from .config import DataConfig
from .names import check_names
from .roles import check_default, check_roles, find_column, find_roles, input_columns
from .table import Indices
from .tables import TEXT, text_columns
from .templates import fill, left_over

_FIRST = 100  # rows by which a table's task is recognised


@dataclass(frozen=True)
class Columns:
    """A source's rows: those for training first, then the official test split.

    ``read`` returns the inputs of some rows: texts, pairs of texts (tuples), lists of words, or
    images uint8 ``[n, C, H, W]``; ``pair`` are the columns of a pair. ``labels``
    and ``clients`` have one entry a row, of Python's types. ``classes`` are the names of integer
    labels, if known. ``places`` say in messages where labels and clients stand, and ``numbers``
    which of the source's rows each row is, from 1 on in either split; None: these are all.
    """

    read: Callable[[Indices], list[Any] | NDArray[np.uint8]]
    num_train: int
    num_test: int
    labels: Sequence[Any] | None = None
    classes: tuple[str, ...] = ()
    clients: Sequence[Any] | None = None
    places: tuple[str, str] = ("the labels", "the clients")
    numbers: Sequence[int] | None = None
    pair: tuple[str, ...] = ()

    def of_rows(self, rows: Indices) -> Columns:
        """Return the columns of some ``rows`` alone, ascending."""
        first_test = self.num_train
        num_train = int(np.searchsorted(rows, first_test))
        numbers = 1 + np.where(rows < first_test, rows, rows - first_test)
        if self.numbers is not None:
            numbers = np.array(self.numbers)[rows]
        labels, clients = (
            None if values is None else [values[row] for row in rows]
            for values in (self.labels, self.clients)
        )
        return replace(
            self, read=lambda some: self.read(rows[some]), num_train=num_train,
            num_test=len(rows) - num_train, labels=labels, clients=clients,
            numbers=numbers.tolist(),
        )  # fmt: skip


def of_tables(train: Any, test: Any | None, config: DataConfig) -> Columns:
    """Return the columns of one or two ``datasets.Dataset``, the training rows and the official
    test split; where ``config`` names no columns, those with usual names are used. Raises
    InputError where a column is missing or holds something else, or the two tables differ in it."""
    objective = objective_of(config.task)
    if objective.joins_columns:
        joined = [None if one is None else _joined(one, config, objective) for one in (train, test)]
        train, test = joined
        config = replace(config, text=None, text_pair=None, label=None)
    if config.task is None and config.label is None:
        check_default(first_values(train), "data.")
    sources, labels, client = find_roles(train.column_names, text_columns(train), config, objective)
    names = [name for name in (*sources, *labels, client) if name is not None]
    table = _join(train, test, [*dict.fromkeys(names)])
    targets, classes = None, labels
    if len(labels) > 1:
        targets = of_flags({name: table[name][:] for name in labels})
    elif labels:
        feature = train.features[labels[0]]
        targets = table[labels[0]][:]
        # names of whole numbers, also of lists of these
        classes = tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())
    return Columns(
        _reader(table, sources, objective, config.picture_size),
        len(train),
        0 if test is None else len(test),
        targets,
        classes,
        None if client is None else table[client][:],
        (_place(labels, config), _place((client,), config)),
        pair=sources if len(sources) > 1 else (),
    )


def first_values(table: Any) -> dict[str, list[Any]]:
    """The first values of each column of a ``datasets.Dataset`` but of pictures."""
    from datasets import Image

    names = [name for name, kind in table.features.items() if not isinstance(kind, Image)]
    some = table.select_columns(names).select(range(min(_FIRST, len(table))))
    values: dict[str, list[Any]] = some[:]
    return values


def read_inputs(table: Any, config: DataConfig, objective: Objective) -> Any:
    """Return the inputs of all rows, whose targets need not be there. Raises as `of_tables`."""
    if objective.joins_columns:
        table = _joined(table, config, objective, answered=False)
        config = replace(config, text=None, text_pair=None, label=None)
    label = config.label or usual_column(objective.target_names, table.column_names)
    taken = {*(label if isinstance(label, tuple) else (label,)), config.client}
    texts = [name for name in text_columns(table) if name not in taken]
    sources = input_columns(table.column_names, texts, config, objective)
    return _reader(table, sources, objective, config.picture_size)(np.arange(len(table)))


def _joined(table: Any, config: DataConfig, objective: Objective, *, answered: bool = True) -> Any:
    """The table with a column of inputs that are made of several others."""
    values = joined_inputs(
        table.column_names, config, objective, lambda name: table[name][:], answered=answered
    )
    (name,) = objective.input_names
    if name in table.column_names:  # a table without any column would have no rows
        table = table.rename_column(name, f"{name}, as it was")
    return table.add_column(name, values)


def joined_inputs(
    columns: Sequence[str],
    config: DataConfig,
    objective: Objective,
    cells_of: Callable[[str], Sequence[Any]],
    *,
    answered: bool = True,
) -> list[str]:
    """The inputs that are made of several columns, ``answered`` with targets. Raises InputError
    where a column is missing."""
    label = config.label
    assert not isinstance(label, tuple), "a DataConfig refuses that"
    if config.client == objective.input_names[0]:
        raise InputError(
            f"data.client = {config.client!r} is how the task {objective.name!r} calls its own "
            "column; rename yours"
        )
    every = columns
    columns = [name for name in columns if name != config.client]
    if config.templates and not answered:
        label = label or "answer"  # the run had one
    used = objective.joined(columns, config.text, config.text_pair, label)
    if not answered:  # but for what a model reads, they may lack a column
        names = {config.text_pair, label} - {*columns}
        used = tuple("" if name in names else name for name in used)
    for name in filter(None, used):
        find_column(every, name, (), "data.text, data.text_pair or data.label")
    sources, labels = [*filter(None, used[:-1] or used)], [used[-1]] if used[1:] else []
    check_roles(sources, labels, config.client, "data.")
    fills = bool(config.templates) and config.client in every
    if (answered and not used[-1]) or not (fills or any(used[-3:-1] or used)):
        raise InputError(
            f"no columns have usual names for the task {objective.name!r}: "
            f"{objective.needed_columns}; name them with data.text and data.label; columns: "
            f"{', '.join(every)}"
        )
    cells = [cells_of(name) if name else None for name in used]
    answers = cells[-1] if answered and len(used) > 2 else None
    if answers is not None and len(answers) and all(map(is_blank, answers)):
        raise InputError(
            f"every answer in column {used[-1]!r} is empty; name another one in data.label, or "
            "write some answers"
        )
    if fills and config.client is not None:
        if len(used) < 3:
            raise InputError(
                f"data.templates are for columns of prompts and answers; column {used[-1]!r} holds "
                "whole conversations"
            )
        owners = cells_of(config.client)
        prompts = cells[-3] or [None] * len(owners)
        cells[-3] = fill(config.templates, prompts, owners, every, cells_of)
        for at in (-4, -2):  # what a template has said is not said again
            cells[at] = left_over(config.templates, cells[at], owners, used[at])
    return objective.conversations(cells)


def _reader(
    table: Any, sources: Sequence[str], objective: Objective, side: int | None
) -> Callable[[Indices], list[Any] | NDArray[np.uint8]]:
    are_images = [_check_input(table.features[name], name, objective) for name in sources]
    if len(sources) > 1 and any(are_images):
        name = brief(sources[are_images.index(True)])
        raise InputError(f"column {name} has pictures; of a pair of columns both must be texts")

    def read(rows: Indices) -> list[Any] | NDArray[np.uint8]:
        selection = table.select(rows)
        if are_images[0]:
            return images.decode(selection, sources[0], side)
        texts = [selection[source][:] for source in sources]
        if len(texts) > 1:
            return [tuple(text or "" for text in pair) for pair in zip(*texts, strict=True)]
        return [text or ([] if objective.reads_words else "") for text in texts[0]]

    return read


def _place(columns: Sequence[str | None], config: DataConfig) -> str:
    named = f"column{'s' * (len(columns) > 1)} {', '.join(map(brief, columns))}"
    return f"{named} of {config.path or config.name}"


def of_flags(columns: Mapping[str, Sequence[Any]]) -> list[list[int] | None]:
    """The numbers of the ``columns`` that hold in each row, as they say by 1, yes or true; None
    where a cell is empty. Raises InputError where a cell says something else."""
    for name, cells in columns.items():
        for cell in cells:
            if not is_blank(cell) and flag(cell) is None:
                raise InputError(
                    f"column {brief(name)} holds {brief(cell)}; as one of several labels it must "
                    "hold 0 or 1, or yes or no"
                )
    return [
        None if any(map(is_blank, row)) else [k for k, cell in enumerate(row) if flag(cell)]
        for row in zip(*columns.values(), strict=True)
    ]


def _join(train: Any, test: Any | None, names: list[str]) -> Any:
    """Append the test rows to the training rows, with the columns ``names`` alone."""
    from datasets import concatenate_datasets

    train = train.select_columns(names)
    if test is None:
        return train
    if absent := [name for name in names if name not in test.column_names]:
        listed = ", ".join(test.column_names)
        raise InputError(f"no column {absent[0]!r} in the test split; columns: {listed}")
    test = test.select_columns(names)
    for name in names:
        test = _as_whole_numbers(train, test, name)
        kinds = train.features[name], test.features[name]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"column {name!r} is {_kind(kinds[0])} in the training split but "
                f"{_kind(kinds[1])} in the test split"
            )
    return concatenate_datasets([train, test])


def _as_whole_numbers(train: Any, test: Any, name: str) -> Any:
    """The test rows; floats that are whole, which pandas makes beside empty cells, are integers
    as in the training rows, and integers are floats where those are."""
    feature = train.features[name]
    kinds = {_kind(feature), _kind(test.features[name])}
    if (
        len(kinds) == 1
        or not kinds <= {"int64", "int32", "float64", "float32"}
        or hasattr(feature, "names")
        or any(isinstance(x, float) and not is_whole(x) for x in test[name][:])
    ):
        return test
    return test.cast_column(name, feature)


def _check_input(feature: Any, column: str, objective: Objective) -> bool:
    """Whether the column holds images; InputError if neither them nor what the task reads."""
    from datasets import Image

    if objective.reads_words:
        if _kind(getattr(feature, "feature", feature)) not in TEXT:
            raise InputError(f"column {column!r} holds {_kind(feature)}, not lists of words")
        return False
    is_text = _kind(feature) in TEXT
    if not is_text and not isinstance(feature, Image):
        raise InputError(f"column {column!r} holds {_kind(feature)}, not text or images")
    return not is_text


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def targets_of(
    columns: Columns,
    objective: Objective,
    classes: tuple[str, ...] = (),
    scale: tuple[float, ...] = (),
) -> Targets | None:
    """Return what the rows of a source are to be predicted as; None if the inputs say it. Raises
    InputError where there is no column of targets, or it holds something else, or nothing that
    could be learned; a class has a name that can't be shown."""
    if not objective.reads_targets:
        return None
    if columns.labels is None:
        raise InputError(
            f"{objective.name} needs a label column, and the data have none; set data.label"
        )
    place = columns.places[0]
    cells = Cells(columns.labels, columns.num_train, columns.classes, place, columns.numbers)
    targets = objective.targets(cells, classes)
    if targets is None:
        return None
    check_names("class", targets.classes, "data.classes" if classes else place)
    if targets.classes and not classes:
        check_several(place, targets.classes)
    scale = scale or targets.scale
    if scale and not scale[1]:
        raise InputError(
            f"{place}: all training rows have the number {scale[0]:g}; there is nothing to learn"
        )
    return replace(targets, scale=scale)


def check_several(place: str, names: Collection[Any]) -> None:
    """Raise InputError where a column has but one class."""
    if len(names) < 2:
        only = ", ".join(map(repr, names)) or "nothing"
        raise InputError(f"{place} holds one class only ({only}); there is nothing to learn")
