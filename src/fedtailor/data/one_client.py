"""The rows of one client, from data that may hold those of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, listed, spelt
from ..objectives.cells import trimmed
from .columns import Columns
from .omissions import Omission, of_rows
from .table import Dataset, Images, Indices, Tokens


def columns_of_client(
    columns: Columns, client: str, where: str
) -> tuple[Columns, tuple[Omission, ...]]:
    """The rows that name ``client`` as theirs, and what is left out; all, if none name a client.
    Messages name the source ``where``.

    Raises:
        InputError: the rows, or the test rows, name other clients alone.
    """
    if columns.clients is None:
        return columns, ()
    clients = [trimmed(value) for value in columns.clients]
    rows = _rows(clients, client, where, columns.num_train)
    num_train = int(np.searchsorted(rows, columns.num_train))

    def read(selection: Indices) -> list[str] | NDArray[np.uint8]:
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
    return own, _others(len(columns.clients), rows)


def dataset_of_client(dataset: Dataset, client: str, where: str) -> Dataset:
    """The same as `columns_of_client` of a data set; ``omissions`` are the other clients' rows."""
    names, groups, labels = dataset.client_names, dataset.groups, dataset.labels
    if names is None or groups is None:
        return dataset
    clients = [names[group] for group in groups.tolist()]
    rows = _rows(clients, client, where, dataset.num_train)
    return replace(
        dataset,
        inputs=_selected(dataset.inputs, rows),
        num_train=int(np.searchsorted(rows, dataset.num_train)),
        digest="",
        labels=None if labels is None else labels[rows],
        groups=None,
        client_names=None,
        omissions=_others(len(groups), rows),
    )


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


def _others(count: int, rows: Indices) -> tuple[Omission, ...]:
    others = np.setdiff1d(np.arange(count), rows)
    return tuple(of_rows("other-client", others, "of other clients, left out", None, None))


def _selected(inputs: Tokens | Images, rows: Indices) -> Tokens | Images:
    if isinstance(inputs, Images):
        return Images(inputs.values[rows])
    ends = np.cumsum(inputs.lengths(rows))
    values = [inputs.values[inputs.offsets[row] : inputs.offsets[row + 1]] for row in rows]
    cut = None if inputs.cut is None else np.flatnonzero(np.isin(rows, inputs.cut))
    return Tokens(np.concatenate(values), np.concatenate([[0], ends]), cut)
