"""The columns of a source before they become tensors: inputs, labels, natural clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief, listed, spelt
from ..objectives import OBJECTIVES, objective_of
from ..objectives.cells import Cells, flag, is_blank, trimmed, whole
from ..objectives.objective import Objective, Targets
from . import images, other_tasks
from .config import DataConfig
from .names import check_names
from .omissions import Omission, of_rows
from .table import Indices
from .templates import fill

_IMAGE = ("image", "img")
_TEXT = ("string", "large_string")
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

    def train_only(self) -> Columns:
        """Return the columns without the official test split."""
        n = self.num_train
        return replace(
            self,
            num_test=0,
            labels=None if self.labels is None else self.labels[:n],
            clients=None if self.clients is None else self.clients[:n],
            numbers=None if self.numbers is None else self.numbers[:n],
        )


def of_tables(train: Any, test: Any | None, config: DataConfig) -> Columns:
    """Return the columns of one or two ``datasets.Dataset``, the training rows and the official
    test split; where ``config`` names no columns, those with usual names are used. Raises
    InputError where a column is missing or holds something else, or the two tables differ in it."""
    objective = objective_of(config.task)
    if objective.joins_columns:
        joined = [None if one is None else _joined(one, config, objective) for one in (train, test)]
        train, test = joined
        config = replace(config, text=None, text_pair=None, label=None)
    features = dict(train.features)
    labels: tuple[str, ...] = ()
    client = None
    if config.task is None and config.label is None:
        other_tasks.check_default(first_values(train), "data.")
    if objective.reads_targets:
        named = config.label if isinstance(config.label, tuple) else (config.label,)
        labels = tuple(_find(features, "label", name, objective.target_names) for name in named)
    if config.client is not None:
        client = _find(features, "client", config.client, ())
    sources = _input_columns(features, config, objective, {*labels, client})
    check_roles(sources, labels, client, "data.")
    names = [name for name in (*sources, *labels, client) if name is not None]
    table = _join(train, test, [*dict.fromkeys(names)])
    targets, classes = None, labels
    if len(labels) > 1:
        targets = of_flags({name: table[name][:] for name in labels})
    elif labels:
        targets, classes = table[labels[0]][:], _class_names(features[labels[0]])
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


def check_roles(
    sources: Sequence[str], labels: Sequence[str], client: str | None, option: str
) -> None:
    """Raise InputError where a column has two roles; ``option`` and a role are what the user can
    set."""
    if client is not None and client in labels:
        raise InputError(
            f"{option}label and {option}client both name {client!r}, so each client would have one "
            "class; name another column (or divide by class: split.scheme = 'pathological')"
        )
    for number, source in enumerate(sources):
        if source in sources[:number]:
            raise InputError(f"both texts of an input are column {source!r}; name another one")
        if source in (*labels, client):
            role = "label" if source in labels else "client"
            raise InputError(
                f"the model's input and {option}{role} are both column {source!r}, so the input "
                f"would give the {role} away; name another column"
            )


def first_values(table: Any) -> dict[str, list[Any]]:
    """The first values of each column of a ``datasets.Dataset`` but of pictures."""
    from datasets import Image

    names = [name for name, kind in table.features.items() if not isinstance(kind, Image)]
    some = table.select_columns(names).select(range(min(_FIRST, len(table))))
    values: dict[str, list[Any]] = some[:]
    return values


def read_inputs(table: Any, config: DataConfig, objective: Objective) -> Any:
    """The inputs of all rows of a ``datasets.Dataset``, whose targets need not be there. Raises
    InputError as `of_tables` does."""
    if objective.joins_columns:
        table = _joined(table, config, objective, answered=False)
        config = replace(config, text=None, text_pair=None, label=None)
    label = config.label or usual_column(objective.target_names, table.column_names)
    labels = label if isinstance(label, tuple) else (label,)
    sources = _input_columns(dict(table.features), config, objective, {*labels, config.client})
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
    if isinstance(config.label, tuple):
        raise InputError(
            f"data.label = {brief(config.label)}: the task {objective.name!r} takes one column"
        )
    if config.client == objective.input_names[0]:
        raise InputError(
            f"data.client = {config.client!r} is how the task {objective.name!r} calls its own "
            "column; rename yours"
        )
    label = config.label
    if not answered and label not in columns:
        label = None
    every = columns
    columns = [name for name in columns if name != config.client]
    used = objective.joined(columns, config.text, config.text_pair, label)
    for name in filter(None, used):
        find_column(columns, name, (), "data.text, data.text_pair or data.label")
    check_roles([*filter(None, used[:-1])], [used[-1]] if used[1:] else [], None, "data.")
    fills = bool(config.templates) and config.client in every
    if (answered and not used[-1]) or not (fills or any(used[-3:-1] or used)):
        raise InputError(
            f"no columns have usual names for the task {objective.name!r}: "
            f"{objective.needed_columns}; name them with data.text and data.label; columns: "
            f"{', '.join(columns)}"
        )
    cells = [cells_of(name) if name else None for name in used]
    if fills and config.client is not None:
        if len(used) == 1:
            raise InputError(
                f"data.templates are for columns of prompts and answers; column {used[0]!r} holds "
                "whole conversations"
            )
        owners = cells_of(config.client)
        prompts = cells[-3] or [None] * len(owners)
        cells[-3] = fill(config.templates, prompts, owners, every, cells_of)
    return objective.conversations(cells)


def _reader(
    table: Any, sources: Sequence[str], objective: Objective, side: int | None
) -> Callable[[Indices], list[Any] | NDArray[np.uint8]]:
    are_images = [_check_input(table.features[name], name, objective) for name in sources]

    def read(rows: Indices) -> list[Any] | NDArray[np.uint8]:
        selection = table.select(rows)
        if are_images[0]:
            return images.decode(selection, sources[0], side)
        texts = [selection[source][:] for source in sources]
        if len(texts) > 1:
            return [tuple(text or "" for text in pair) for pair in zip(*texts, strict=True)]
        return [text or ([] if objective.reads_words else "") for text in texts[0]]

    return read


def _class_names(feature: Any) -> tuple[str, ...]:
    """The names that a column has for its whole numbers, also for lists of these."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


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


def _input_columns(
    features: Mapping[str, Any], config: DataConfig, objective: Objective, taken: set[str | None]
) -> tuple[str, ...]:
    """The one or two columns that the model reads; ``taken`` have another role."""
    if config.image is not None:
        if other := config.text or config.text_pair:
            raise InputError(
                f"data.text = {other!r} and data.image = {config.image!r}: an example has one "
                "input; leave one of the two out"
            )
        return (_find(features, "image", config.image, _IMAGE),)
    texts = [name for name, kind in features.items() if _kind(kind) in _TEXT and name not in taken]
    pair = named_pair(texts, config, objective)
    if pair:
        return tuple(_find(features, role, name, ()) for role, name in pair.items())
    usual = objective.input_names
    if (
        config.text is None
        and usual_column(usual, [*features]) is None
        and objective.takes_images
        and (image := usual_column(_IMAGE, [*features]))
    ):
        return (image,)
    return (_find(features, "text", config.text, usual),)


def named_pair(
    texts: Sequence[str], config: DataConfig, objective: Objective, option: str = "data.text"
) -> dict[str, str | None]:
    """The columns of the two texts of an input, by role: those that are named, or of the columns
    ``texts`` two that are called like a pair; none where an input is one text. Raises InputError
    where the task can't have pairs, or one of the two is named alone."""
    if objective.joins_columns:
        return {}
    if objective.second_names:
        return {
            "text": config.text or usual_column(objective.input_names, texts),
            "text_pair": config.text_pair or usual_column(objective.second_names, texts),
        }
    if config.text_pair is not None:
        if not objective.takes_pairs:
            raise InputError(
                f"data.text_pair = {config.text_pair!r}: the task {objective.name!r} reads one "
                "text; leave it out"
            )
        return {
            "text": config.text or usual_column(objective.input_names, texts),
            "text_pair": config.text_pair,
        }
    if config.text is not None:
        return {}
    found = other_tasks.pair_of(texts, usual_column(objective.input_names, texts))
    if found and not objective.takes_pairs:
        raise other_tasks.is_pair(found, objective.name, option)
    return dict(zip(("text", "text_pair"), found, strict=False))


def _find(features: Mapping[str, Any], role: str, name: str | None, usual: Sequence[str]) -> str:
    free = (one for one in OBJECTIVES.values() if not (one.reads_targets or one.compares))
    without = [repr(one.name) for one in free]
    hint = f"; set data.task = {' or '.join(without)}, or" if role == "label" else ";"
    return find_column([*features], name, usual, f"data.{role}", hint)


def find_column(
    columns: Sequence[str], name: str | None, usual: Sequence[str], option: str, hint: str = ";"
) -> str:
    """Return the column called ``name``; None: the first one with a ``usual`` name. ``option`` is
    what the user can set, and ``hint`` what else a message says. Raises InputError where there is
    none."""
    for candidate in usual if name is None else (name,):
        if candidate in columns:
            return candidate
    listed = ", ".join(map(str, columns))
    if name is not None:
        raise InputError(f"no column {name!r} for {option}; columns: {listed}")
    raise InputError(f"no column has a usual name for {option}{hint} name it; columns: {listed}")


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
        or any(x is not None and x % 1 for x in test[name][:])
    ):
        return test
    return test.cast_column(name, feature)


def _check_input(feature: Any, column: str, objective: Objective) -> bool:
    """Whether the column holds images; InputError if neither them nor what the task reads."""
    from datasets import Image

    if objective.reads_words:
        if _kind(getattr(feature, "feature", feature)) not in _TEXT:
            raise InputError(f"column {column!r} holds {_kind(feature)}, not lists of words")
        return False
    is_text = _kind(feature) in _TEXT
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


def encode_clients(columns: Columns) -> tuple[Indices | None, tuple[str, ...] | None]:
    """Number the natural clients in sorted order. Blanks around a name don't count.

    Returns:
        The client of each row, int64 ``[N]`` (-1 where the cell is empty), and the clients'
        names in the order of their numbers;
        None and None if the source has no column of clients.

    Raises:
        InputError: no row has a client, or clients are neither all integers nor all text, or can't
            be shown.
    """
    if columns.clients is None:
        return None, None
    cells = [trimmed(value) for value in whole(columns.clients) or ()]
    values = [value for value in cells if not is_blank(value)]
    if not values:
        raise InputError("no row has a client: the client column is empty; name another column")
    if columns.num_test and all(map(is_blank, cells[columns.num_train :])):
        raise InputError(
            f"{columns.places[1]}: no test row has a client; fill the column in, or set "
            "data.test_split = 'none' to take test rows from each client's own"
        )
    if not all(isinstance(value, str) for value in values) and not all(
        isinstance(value, int) for value in values
    ):
        wrong = next((v for v in values if not isinstance(v, str | int)), values[0])
        raise InputError(f"the client column must hold all integers or all text; it has {wrong!r}")
    check_names("client", dict.fromkeys(values), columns.places[1])
    names, numbers = np.unique(np.array(values), return_inverse=True)
    groups = np.full(len(cells), -1, np.int64)
    groups[[row for row, value in enumerate(cells) if not is_blank(value)]] = numbers
    return groups, tuple(map(str, names.tolist()))


def rows_with_blanks(values: Sequence[Any] | None) -> Indices:
    """The rows whose cell has blanks around a name that other rows have without, ascending."""
    values = values or ()
    blank = [row for row, value in enumerate(values) if trimmed(value) != value]
    without = {value for value in values if trimmed(value) == value} if blank else set()
    return np.array([r for r in blank if trimmed(values[r]) in without - {None}], np.int64)


def usual_column(usual: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first of ``usual`` that is one of the columns ``names``.

    >>> usual_column(["text", "content"], ["label", "content"])
    'content'
    """
    return next((name for name in usual if name in names), None)


def columns_of_client(
    columns: Columns, client: str, where: str
) -> tuple[Columns, tuple[Omission, ...]]:
    """The rows that name ``client`` as theirs, and what is left out; all, if none name a client.
    Messages name the source ``where``. Raises InputError where the rows, or the test rows, name
    other clients alone."""
    if columns.clients is None:
        return columns, ()
    clients = [trimmed(value) for value in columns.clients]
    rows = _rows(clients, client, where, columns.num_train)
    num_train = int(np.searchsorted(rows, columns.num_train))

    def read(selection: Indices) -> list[Any] | NDArray[np.uint8]:
        return columns.read(rows[selection])

    labels = None if columns.labels is None else [columns.labels[row] for row in rows]
    own = replace(
        columns,
        read=read,
        num_train=num_train,
        num_test=len(rows) - num_train,
        labels=labels,
        clients=None,
        numbers=(1 + np.where(rows < columns.num_train, rows, rows - columns.num_train)).tolist(),
    )
    others = np.setdiff1d(np.arange(len(clients)), rows)
    return own, tuple(of_rows("other-client", others, "of other clients, left out", None, None))


def _rows(clients: Sequence[Any], client: str, where: str, num_train: int) -> Indices:
    rows = np.flatnonzero(np.array([str(value) == client for value in clients], bool))
    if not len(rows) or rows[-1] < num_train < len(clients):
        there = clients[num_train:] if len(rows) else clients
        sizes = Counter(str(value) for value in there if value is not None)
        names = sorted(sizes)
        raise InputError(
            f"{where} has no {'test rows' if len(rows) else 'rows'} of client "
            f"{spelt(client, names)}, but of "
            f"{listed(names, [sizes[name] for name in names]) or 'nobody'}; name one of these with "
            "--client, or leave out the column of clients"
        )
    return rows
