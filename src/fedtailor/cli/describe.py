"""``fedtailor describe``: a method's fields, update and paper."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from .options import add_json

if TYPE_CHECKING:
    from ..method import Method

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "method",
        help="a name, FILE.py:CLASS or package.module:CLASS; or 'experiment', for the fields of an "
        "experiment file's sections",
    )
    add_json(parser)


def command(options: argparse.Namespace) -> None:
    from ..methods import METHODS
    from ..runs.experiment import Experiment, configured_method

    if options.method == "experiment":
        every = _fields(Experiment({"local": METHODS["local"]()}))
        fields = [field for field in every if field["field"] != "methods"]
        print(json.dumps({"fields": fields}, indent=2) if options.json else _table(fields))
        return
    configured = configured_method(options.method)
    method, fields = type(configured), list(_fields(configured))
    if options.json:
        paper = dataclasses.asdict(method.paper())
        described = {"name": method.name, "family": _family(method), "paper": paper}
        print(json.dumps({**described, "fields": fields}, indent=2))
        return
    print("\n\n".join(_sections(method, fields)))


def summary(method: type[Method]) -> str:
    """What the method does, from the first line of its module.

    >>> from fedtailor.methods.fedprox import FedProx
    >>> summary(FedProx)
    'FedAvg whose clients are held near the model that they received'
    """
    opening, _, _ = _documentation(method).partition("\n\n")
    _, _, text = " ".join(opening.split()).partition(": ")
    return text.removesuffix(".")


def _documentation(method: type[Method]) -> str:
    return inspect.getdoc(sys.modules[method.__module__]) or ""


def _family(method: type[Method]) -> str:
    return getattr(method, "family", "your own")


def _sections(method: type[Method], fields: list[dict[str, Any]]) -> Iterator[str]:
    paper = method.paper()
    opening, _, body = _documentation(method).partition("\n\n")
    yield f"{method.name} ({_family(method)})\n{opening}"
    if paper.title:
        _, _, body = body.partition("\n\n")  # the citation comes first
        cited = {"title": paper.title, "authors": paper.authors, "venue": paper.venue}
        lines = (f"{name:<9}{text}" for name, text in cited.items())
        yield "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 9) for line in lines)
    yield body
    yield inspect.getdoc(method) or ""
    yield _table(fields)


def _table(fields: list[dict[str, Any]]) -> str:
    from tabulate import tabulate

    rows = [(row["field"], _as_toml(row["default"]), row["type"]) for row in fields]
    left = max(len(name) for name, _, _ in rows), max(len(default) for _, default, _ in rows)
    wrapped = [(*row, textwrap.fill(kind, max(30, 92 - sum(left)))) for *row, kind in rows]
    return tabulate(wrapped, headers=["field", "default", "type"], disable_numparse=True)


def _fields(settings: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    """The fields of a dataclass with its defaults, and those of the dataclasses in it, dotted."""
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in sorted(
        dataclasses.fields(settings), key=lambda f: (f.name == "robust", f.kw_only is True)
    ):
        name, default = prefix + field.name, getattr(settings, field.name)
        entry, *_ = typing.get_args(hints[field.name]) or (None,)
        if dataclasses.is_dataclass(default):
            yield from _fields(default, f"{name}.")
        elif isinstance(entry, type) and dataclasses.is_dataclass(entry):  # a list of tables
            yield from _fields(entry(), f"{name}[].")
        else:
            default = "none" if default is None else default
            yield {"field": name, "default": default, "type": _type(hints[field.name])}


def _as_toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _type(hint: Any) -> str:
    """A field's type, as a reader of an experiment file has it.

    >>> from annotated_types import Gt, Le
    >>> _type(Annotated[float, Gt(0), Le(1)] | None), _type(Literal["T", 2])
    ('float > 0, <= 1 | none', 'T | 2')
    >>> _type(tuple[str, ...])
    'list of str'
    """
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *limits = arguments
        bounds = [
            f"{sign} {_number(getattr(limit, name))}"
            for limit in limits
            for name, sign in _SIGNS.items()
            if hasattr(limit, name)
        ]
        comma = ", " if typing.get_origin(base) else " "
        return f"{_type(base)}{comma}{', '.join(bounds)}"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    return "none" if hint is types.NoneType else hint.__name__


def _number(value: float) -> str:
    """A limit.

    >>> _number(1e6), _number(0.5), _number(1e18), _number(2**63)
    ('1,000,000', '0.5', '1e18', '2^63')
    """
    if value == 2**63:
        return "2^63"
    if value >= 1e12:
        return f"{value:g}".replace("e+", "e")
    return f"{int(value):,}" if value == int(value) else str(value)
