"""``fedtailor new``: write an experiment file for a table of your own."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, listed, naming, unknown
from ..units import counted
from .options import add_flag, add_json, check_place

if TYPE_CHECKING:
    from ..data.survey import Roles, Survey
    from ..objectives.objective import Targets
    from ..runs.draft import Clients

_SHOWN = 8  # names in a line
_FEW_ROWS = 10  # of a class


def add(parser: argparse.ArgumentParser) -> None:
    what = "a table: a file, or a folder of json files or of pictures by class"
    parser.add_argument("data", type=Path, metavar="DATA", help=what)
    parser.add_argument("--task", help="the kind of task; default: told by the columns")
    parser.add_argument("--text", metavar="COLUMN", help="the column of texts, or pictures")
    parser.add_argument(
        "--text-pair", metavar="COLUMN", help="the column of the second texts, if inputs are pairs"
    )
    parser.add_argument(
        "--label",
        metavar="COLUMN",
        help="the column to predict, or several of 0 and 1 with commas between; none: train a "
        "language model",
    )
    parser.add_argument(
        "--client", metavar="COLUMN", help="the column that names the client; none: there is none"
    )
    parser.add_argument("--model", help="a built-in model, owner/model of the hub, or a folder")
    parser.add_argument("--methods", metavar="NAME,...", help="the methods to compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: DATA's name with .toml")
    add_flag(parser, "--overwrite", "replace a file that exists")
    what = "ask nothing; take the guesses, as new always does outside a terminal"
    add_flag(parser, "--yes", what)
    add_json(parser, "what the table holds")


def command(options: argparse.Namespace) -> None:
    out = options.out or Path(f"{options.data.absolute().stem}.toml")
    if out.suffix != ".toml":
        raise InputError(f"--out {out}: an experiment file's name ends with .toml")
    check_place(out)
    if out.exists() and not options.overwrite:
        raise InputError(f"{out} exists; name another with --out, or replace it with --overwrite")
    from ..data.survey import survey
    from ..models import BUILTIN
    from ..runs import draft

    table = survey(str(options.data))
    draft.check_rows(table)
    asks = not (options.yes or options.json) and sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        _ask_columns(table, options)
    named = options.text, options.label, options.client, options.text_pair
    roles = table.roles(*named, options.task)
    clients = draft.Clients.of(table, roles)
    model = options.model or draft.default_model(table, roles)
    names = options.methods or ",".join(draft.default_methods(table, roles))
    if asks:
        model = options.model or _ask("model (fedtailor list models)", model)
        names = options.methods or _ask("methods (fedtailor list methods)", names)
    methods = [name.strip() for name in names.split(",")]
    text = draft.draft(table, roles, out.stem, model, methods)
    targets = draft.targets(text)
    with naming(out):
        out.write_text(text, encoding="utf-8")
    if options.json:
        print(json.dumps(_as_dict(table, roles, targets, clients, out), indent=2))
    else:
        print("\n".join(_described(table, roles, targets, clients)))
        if hint := _client_hint(table, roles, options):
            print(hint)
        if table.column(roles.source).kind == "text" and model in BUILTIN:
            print(
                f"model: {model}, which has learned from English texts; for another language give "
                "one of the hub (--model owner/model)"
            )
        print(f"\nwrote {out}; now: fedtailor run {shlex.quote(str(out))}")


def _ask_columns(table: Survey, options: argparse.Namespace) -> None:
    print(f"{table.path}: {table.rows:,} rows\n{_columns(table)}\nReturn takes the guess.")
    if not (options.task or options.text or options.label) and (task := table.recognised):
        from ..objectives import OBJECTIVES

        options.task = _ask("kind of task", task.name, columns=[*OBJECTIVES])
        if options.task == task.name:
            return
    first, second = table.pair({options.label, options.client})
    source = [column.name for column in table.source_candidates() if column.name != first]
    names = [column.name for column in table.columns]
    if options.text is None:
        guesses = [*filter(None, [first]), *source]
        options.text = _ask("column of texts or pictures", *guesses, columns=names)
        if options.text == first and second is not None and options.text_pair is None:
            what = "column of the second texts of pairs, or none"
            answer = _ask(what, second, columns=[*names, "none"])
            options.text_pair = None if answer == "none" else answer
    taken = {options.text, options.text_pair, options.client}
    found = [table.likeliest(taken), *table.label_candidates(taken)]
    label = list(dict.fromkeys(c.name for c in found if c is not None)) or ["none"]
    what = "column of labels, or none for a language model"
    options.label = options.label or _ask(what, *label, columns=[*names, "none"])
    if options.client is None:
        named = options.text, options.label, None, options.text_pair
        guess = table.roles(*named, options.task).client or "none"
        others = [c.name for c in table.client_candidates({options.text, options.label})]
        choices = dict.fromkeys([guess, *others])
        what = "column that names the client, or none"
        options.client = _ask(what, *choices, columns=[*names, "none"])


def _ask(what: str, *choices: str, columns: Sequence[str] = ()) -> str | None:
    guess = choices[0] if choices else ""
    others = f" (others: {', '.join(choices[1:_SHOWN])})" if choices[1:] else ""
    try:
        answer = input(f"{what}{others} [{guess}]: ").strip() or guess
        while columns and answer and answer not in columns:
            print(unknown("column", answer, columns))
            answer = input(f"{what} [{guess}]: ").strip() or guess
        return answer or None
    except EOFError:
        raise InputError(
            "no answer, so nothing is written; --yes accepts the guesses, and --text, --label and "
            "--client name columns"
        ) from None


def _columns(table: Survey, roles: Roles | None = None) -> str:
    from tabulate import tabulate

    taken: dict[str | None, str] = {}
    if roles is not None:
        taken = {roles.client: "client", roles.source: "input", roles.pair: "input"}
        taken |= dict.fromkeys(roles.labels, "label")
    rows = [
        (c.name, c.kind, c.distinct or "", c.missing or "", taken.get(c.name, ""))
        for c in table.columns
    ]
    headers = ["column", "holds", "values", "empty", "used as"]
    shown = 4 if roles is None else 5
    return tabulate([row[:shown] for row in rows], headers[:shown], disable_numparse=[0])


def _described(
    table: Survey, roles: Roles, targets: Targets | None, clients: Clients
) -> Iterator[str]:
    from ..objectives import DEFAULT, OBJECTIVES

    yield f"{table.path}: {table.rows:,} rows{_lines(table)}"
    yield _columns(table, roles) + "\n"
    if (side := table.column(roles.source).side) is not None:
        yield f"pictures: all become squares of {side} x {side} pixels"
    if roles.task != DEFAULT.name:
        yield f"task: {roles.task}, {OBJECTIVES[roles.task].meaning}"
    if targets is not None:
        yield from _of_targets(table, roles, targets)
    if roles.client is None:
        yield "clients: no column is known to name them, so the rows are divided at random"
        return
    nobodys = table.rows - sum(table.counts(roles.client).values())
    yield from _unused(nobodys, "client")
    yield f"clients: {len(clients.sizes)}, by {roles.client!r}, with {clients.rows} each"
    yield from _doubts("clients", table.counts(roles.client))
    if clients.too_small:
        small = [f"{name} ({count})" for name, count in clients.too_small.items()]
        yield f"left out, with fewer than {clients.least} rows: {listed(small, few=_SHOWN)}"


def _of_targets(table: Survey, roles: Roles, targets: Targets) -> Iterator[str]:
    from ..objectives import OBJECTIVES

    counts, known = targets.counts(), targets.values[targets.is_known]
    if targets.scale:
        mean, deviation = targets.scale
        yield (
            f"numbers to predict: {known.min():g} to {known.max():g}, mean {mean:g}, standard "
            f"deviation {deviation:g}"
        )
    elif counts:
        classes = [f"{name} {count:,}" for name, count in counts.items()]
        word = OBJECTIVES[roles.task].names_classes
        yield f"{word}: {len(classes)} ({listed(classes, few=_SHOWN)})"
        yield from _doubts(word, counts)
        yield from _rare(table, roles, sorted(counts.values())[len(counts) // 2])
    if targets.note:
        yield targets.note
    yield from _unused(len(targets.is_known) - len(known), "label")


def _rare(table: Survey, roles: Roles, median: int) -> Iterator[str]:
    if median >= _FEW_ROWS:
        return
    from ..objectives import OBJECTIVES, Regression

    one = OBJECTIVES[roles.task]
    of = "word" if one.reads_words else "row"
    rows = f"one {of}" if median == 1 else f"{median} {of}s"
    label = roles.label if one.has_classes else None
    is_number = isinstance(label, str) and table.column(label).kind in ("integer", "number")
    which = "" if label is None else f": is {label!r} the label? --label names another column"
    number = f"; --task {Regression.name} predicts numbers" if is_number else ""
    few = f"half of the {one.names_classes} have at most {rows}, too few to learn from"
    yield f"{few}{which}{number}"


def _client_hint(table: Survey, roles: Roles, options: argparse.Namespace) -> str:
    """Say how to name the client's column; empty if none can be the client's, or an option or an
    answer has said that there is none."""
    found = [c.name for c in table.client_candidates({*roles.columns})]
    if roles.client is not None or options.client is not None or not found:
        return ""
    from ..report.text import option

    words = ["fedtailor", "new", str(options.data)]
    for name in ("task", "text", "text-pair", "label", "model", "methods", "out"):
        if (value := getattr(options, name.replace("-", "_"))) is not None:
            words += option(f"--{name}", str(value))
    again = shlex.join([*words, *option("--client", found[0]), "--overwrite"])
    others = f" (or {listed(found[1:], few=_SHOWN)})" if found[1:] else ""
    return f"if column {found[0]}{others} names the clients: {again}"


def _lines(table: Survey) -> str:
    """How many lines the rows of a csv file have, if more: a quote may be left open."""
    from ..data.tables import is_csv, written_lines

    if not is_csv(table.path) or (lines := written_lines(Path(table.path)) - 1) <= table.rows:
        return ""
    return f" in {lines:,} lines: cells have line ends, or a quote was left open"


def _unused(rows: int, what: str) -> Iterator[str]:
    if rows:
        yield f"without a {what}, which the run leaves out: {counted(rows, 'row')}"


def _doubts(kind: str, names: Mapping[Any, int]) -> Iterator[str]:
    """Point out names that differ in capital letters alone."""
    alike: dict[str, list[str]] = {}
    for name in map(str, names):
        alike.setdefault(name.casefold(), []).append(name)
    pairs = [" and ".join(sorted(same)) for same in alike.values() if len(same) > 1]
    if pairs:
        alike_ones = listed(pairs, few=_SHOWN)
        yield f"{kind} that differ in capital letters alone count as different: {alike_ones}"


def _as_dict(
    table: Survey, roles: Roles, targets: Targets | None, clients: Clients, out: Path
) -> dict[str, Any]:
    import dataclasses

    return {
        "file": str(out),
        "rows": table.rows,
        "columns": [dataclasses.asdict(column) for column in table.columns],
        "roles": dataclasses.asdict(roles),
        "classes": {} if targets is None else targets.counts(),
        "clients": dict(clients.sizes),
        "too_small": dict(clients.too_small),
    }
