"""The clients that a source's rows name themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import InputError, listed, spelt
from ..objectives.cells import is_blank, trimmed, whole
from .columns import Columns
from .names import check_names
from .omissions import Omission, of_rows
from .table import Indices


def encode_clients(columns: Columns) -> tuple[Indices | None, tuple[str, ...] | None]:
    """Number the natural clients in sorted order; blanks around a name don't count. Returns the
    client of each row, int64 ``[N]`` (-1 where the cell is empty), and the clients' names by
    number; None and None if the source has no column of clients. Raises InputError where no row has
    a client, or clients are neither all integers nor all text, or can't be shown."""
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
    if not any(all(isinstance(value, kind) for value in values) for kind in (str, int)):
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


def columns_of_client(
    columns: Columns, client: str, where: str
) -> tuple[Columns, tuple[Omission, ...]]:
    """The rows that name ``client`` as theirs, and what is left out; all, if none name a client.
    Messages name the source ``where``. Raises InputError where the rows, or the test rows, name
    other clients alone."""
    if columns.clients is None:
        return columns, ()
    clients = [trimmed(value) for value in whole(columns.clients) or ()]
    rows = np.flatnonzero(np.array([str(value) == client for value in clients], bool))
    if not len(rows) or rows[-1] < columns.num_train < len(clients):
        there = clients[columns.num_train :] if len(rows) else clients
        sizes = Counter(str(value) for value in there if value is not None)
        names = sorted(sizes)
        raise InputError(
            f"{where} has no {'test rows' if len(rows) else 'rows'} of client "
            f"{spelt(client, names)}, but of "
            f"{listed(names, [sizes[name] for name in names]) or 'nobody'}; name one of these with "
            "--client, or leave out the column of clients"
        )
    others = np.setdiff1d(np.arange(len(clients)), rows)
    omissions = of_rows("other-client", others, "of other clients, left out", None, None)
    return replace(columns.of_rows(rows), clients=None), tuple(omissions)
