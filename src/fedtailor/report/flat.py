"""The comparison as one table of plain numbers, for a spreadsheet or another program."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from .cells import ranked
from .rows import ModelResult, Spread
from .table import Table
from .text import inert


def to_csv(comparison: Table) -> str:
    """Format ``comparison`` as CSV: one row a method, the best first, numbers in full precision.

    Columns are the fields of `Row` and `ModelResult`: ``personal_mean`` is the mean of the personal
    models over clients and seeds, ``personal_mean_std`` its deviation over seeds.
    Accuracies are fractions, ``bytes_`` those of a client and round. What is not known is empty.
    """
    rows = [
        {"metric": comparison.metric} | dict(_cells(vars(row), "")) for row in ranked(comparison)
    ]
    header = dict.fromkeys(["label", *(name for row in rows for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_PREFIXES = {"personal_model": "personal_", "global_model": "global_", "novel_clients": "novel_"}


def _cells(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, ModelResult):
            yield from _cells(vars(value), _PREFIXES[key])
        elif isinstance(value, Mapping):
            yield from _cells(value, f"{name}_")
        elif key in _PREFIXES:
            continue  # not evaluated
        elif isinstance(value, Spread):
            yield name, repr(value.mean)
            yield f"{name}_std", "" if value.std is None else repr(value.std)
        elif value is None:
            yield name, ""
        elif isinstance(value, list | tuple):
            yield name, inert("; ".join(map(str, value)))
        else:
            yield name, inert(str(value))
