"""``fedtailor list``: list the methods, or the built-in experiments, data sets and models."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from .options import add_json

_LISTS = {
    "experiments": "the built-in experiments, which run by name",
    "methods": "the federated methods, by family",
    "datasets": "the built-in data sets, and the command that fetches each",
    "models": "the built-in models, and the command that fetches each",
}
_WIDTH = 100


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=list(_LISTS), help="default: what there is to list"
    )
    add_json(parser)


def command(options: argparse.Namespace) -> None:
    if options.what is None:
        rows = [{"list": name, "what it is": what} for name, what in _LISTS.items()]
        text = "\n".join(f"fedtailor list {name:<13}{what}" for name, what in _LISTS.items())
    elif options.what == "experiments":
        rows = _experiments()
        text = "\n".join(_wrapped(rows))
    elif options.what == "methods":
        rows, text = _methods(), "\n".join(_by_family())
    else:
        rows = {"datasets": _datasets, "models": _models}[options.what]()
        from tabulate import tabulate

        text = tabulate(rows, headers="keys")
    print(json.dumps(rows, indent=2) if options.json else text)


def _experiments() -> list[dict[str, Any]]:
    from ..runs import builtin

    return [
        {"experiment": name, "what it is": builtin.purpose(path), "presets": builtin.presets(path)}
        for name, path in builtin.experiments().items()
    ]


def _wrapped(experiments: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(row["experiment"]) for row in experiments)
    for row in experiments:
        presets = f" (presets: {', '.join(row['presets'])})" if row["presets"] else ""
        line = f"{row['experiment']:<{width}}  {row['what it is']}{presets}"
        yield textwrap.fill(line, _WIDTH, subsequent_indent=" " * (width + 2))
    yield "\nfedtailor run NAME runs one; --set preset=small is a small version of most."


def _methods() -> list[dict[str, Any]]:
    from ..methods import METHODS

    return [
        {"method": name, "family": m.family, "paper": m.paper().title, "year": m.paper().year or ""}
        for name, m in METHODS.items()
    ]


def _by_family() -> Iterator[str]:
    from ..methods import METHODS
    from .describe import summary

    width = max(map(len, METHODS))
    indent = " " * (width + 10)
    for family in dict.fromkeys(method.family for method in METHODS.values()):
        yield f"{family}:"
        for name, method in METHODS.items():
            if method.family == family:
                line = f"  {name:<{width}}  {method.paper().year or '':<4}  {summary(method)}"
                yield textwrap.fill(line, _WIDTH, subsequent_indent=indent)
        yield ""
    yield "fedtailor describe NAME prints a method's paper, update and fields."


def _datasets() -> list[dict[str, Any]]:
    from ..data import BUILTIN

    columns = ("data set", "what it is", "task", "licence", "from")
    rows = ((k, one.description, one.task, one.licence, one.get) for k, one in BUILTIN.items())
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _models() -> list[dict[str, Any]]:
    from ..models import BUILTIN

    columns = ("model", "what it is", "for", "licence", "from")
    rows = (
        (name, one.description, ", ".join(one.tasks), one.licence, one.get)
        for name, one in BUILTIN.items()
    )
    return [dict(zip(columns, row, strict=True)) for row in rows]
