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
from .table import Indices


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
