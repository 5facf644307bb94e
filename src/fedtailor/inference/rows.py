"""What ``fedtailor predict`` reads and writes: rows of a file, pictures of a folder."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..data.by_user import files_of
from ..data.class_folders import picture_rows
from ..data.columns import joined_inputs, read_inputs
from ..data.config import DataConfig
from ..data.conll import looks_like_conll
from ..data.images import PICTURES
from ..data.json_lines import objects_of
from ..data.roles import find_column
from ..data.sources import objective_of_data
from ..data.tables import FORMATS, check_column_names, check_text_file, local_table, separator_of
from ..errors import InputError, brief, listed, missing_file, spelt, unknown, whole_number
from ..objectives.cells import usual_column
from ..objectives.classification import Prediction
from ..objectives.objective import Objective
from ..units import counted
from .examples import picture_paths

_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,18})(?:\.0*)?\s*")

_READ_HERE = (".csv", ".tsv", ".jsonl", ".txt")
TABLES = (*_READ_HERE, *(kind for kind in FORMATS if kind not in _READ_HERE))


@dataclass(frozen=True)
class Rows:
    """Inputs in their order: texts, paths of pictures, or their pixels; and their labels and
    clients, if they have any. ``table`` has the rows of a file with columns."""

    inputs: Sequence[Any]
    labels: Sequence[str] | None = None
    clients: Sequence[str] | None = None
    table: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False)

    @property
    def are_pictures(self) -> bool:
        """Whether the inputs are no texts."""
        return isinstance(self.inputs[0], Path | np.ndarray)


def read_rows(
    source: str,
    data: DataConfig,
    *,
    images: bool,
    text: str | None = None,
    pair: Sequence[str] = (),
) -> Rows:
    """Read the inputs of predictions from a file that training reads; a txt file with one text a
    line; a picture, or a folder of pictures, in which folders may name classes; or ``-``, stdin:
    one text or one JSON object a line, or a csv if ``text`` is given, the column of texts instead
    of that of the run's ``data``. ``pair``: the columns of the two texts that the model reads, if
    it does."""
    if pair:
        data = replace(data, text=pair[0], text_pair=pair[1])
    if text is not None:
        data = replace(data, text=text, image=None)
    path = Path(source)
    if source != "-" and not path.exists():
        raise missing_file(source)
    is_conll = path.suffix == ".txt" and path.is_file() and looks_like_conll(path)
    is_table = is_conll or path.suffix in {*TABLES} - ({".txt"} if images else {*_READ_HERE})
    if is_table or (files_of(path) and not images):
        return _as_training_reads(source, data, images=images)
    if images:
        return _pictures(path, source, data)
    if source == "-":
        try:
            content = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError("stdin is not in UTF-8; convert it first") from None
        is_csv = text is not None or _reads_pairs(data)
        kind = ".jsonl" if content.lstrip().startswith("{") else ".csv" if is_csv else ".txt"
        return _of_text(content, kind, "stdin", data)
    if path.is_dir() or path.suffix not in TABLES:
        allowed = f"{', '.join(TABLES)} files, or - for stdin"
        raise InputError(f"can't read {source!r}: this model reads texts; allowed: {allowed}")
    check_text_file(path, source)
    with path.open(encoding="utf-8-sig", newline="") as file:
        content = file.read()
    return _of_text(content, path.suffix, source, data)


def _as_training_reads(source: str, data: DataConfig, *, images: bool) -> Rows:
    table = local_table(source)
    config = replace(data, name=None, path=source)
    inputs = read_inputs(table, config, objective_of_data(data))
    if isinstance(inputs, list) == images:
        has, reads = ("texts", "pictures") if images else ("pictures", "texts")
        raise InputError(f"{source} has {has}, and this model reads {reads}")
    plain = [name for name, kind in table.features.items() if type(kind).__name__ != "Image"]
    rows = zip(*(table[name][:] for name in plain), strict=True) if plain else [()] * len(table)
    cells = [dict(zip(plain, row, strict=True)) for row in rows]
    return _rows(list(inputs), cells, data, table.features)


def _pictures(path: Path, source: str, data: DataConfig) -> Rows:
    if path.is_dir():
        try:
            table = picture_rows(path, source)
        except InputError:  # folders do not name classes
            return Rows(picture_paths(path))
        return _rows([path / row["file"] for row in table], table, data)
    if path.suffix.lower() in PICTURES:
        return Rows([path])
    allowed = f"a folder of pictures, or one of {', '.join(PICTURES)}"
    raise InputError(f"can't read {source!r}: this model reads pictures; allowed: {allowed}")


def _reads_pairs(data: DataConfig) -> bool:
    return data.text_pair is not None and not objective_of_data(data).joins_columns


def _of_text(content: str, kind: str, source: str, data: DataConfig) -> Rows:
    if kind == ".txt":
        if _reads_pairs(data):
            raise InputError(
                f"{source} has one text a line, and this model reads pairs; give a table with the "
                f"columns {data.text!r} and {data.text_pair!r}"
            )
        texts = _lines(content)
        if not texts:
            raise InputError(f"{source} is empty; write one text a line into it")
        return Rows(texts)
    is_json = kind == ".jsonl"
    table = [*objects_of(_lines(content), source)] if is_json else _csv(content, source)
    if not table:
        raise InputError(f"{source} has no rows; give at least one row")
    columns = list(table[0])
    objective = objective_of_data(data)
    if objective.joins_columns:
        columns = list(dict.fromkeys(name for row in table for name in row))
        told = joined_inputs(
            columns, data, objective, lambda one: [row.get(one) for row in table], answered=False
        )
        return _rows(told, table, data)
    read = [data.text] if data.text_pair is None else [data.text, data.text_pair]
    usual, option = objective.input_names, f"--text of {source}"
    names = [find_column(columns, name, usual, option) for name in read]
    kinds, needed = ((str, list), "list of words") if objective.reads_words else (str, "text")
    for number, row in enumerate(table, 1):
        for one in names:
            if not isinstance(row.get(one), kinds):
                raise InputError(
                    f"{source}, row {number}: {one!r} is {row.get(one)!r}, not a {needed}"
                )
    inputs = [tuple(row[one] for one in names) for row in table]
    return _rows(inputs if len(names) > 1 else [one for (one,) in inputs], table, data)


def _rows(
    inputs: Sequence[Any],
    table: Sequence[Mapping[str, Any]],
    data: DataConfig,
    features: Mapping[Any, Any] = MappingProxyType({}),
) -> Rows:
    """The rows of a table, with their labels and clients where the first one has any. The
    ``features`` of its columns may have names for numbers."""
    usual = objective_of_data(data).target_names
    label = data.label or usual_column(usual, list(table[0]))
    labels, clients = (
        ["" if (cell := row.get(name)) is None else str(cell).strip() for row in table]
        if isinstance(name, str) and name in table[0]
        else None
        for name in (label, data.client)
    )
    numbered = {str(n): name for n, name in enumerate(getattr(features.get(label), "names", ()))}
    labels = labels and [numbered.get(one, one) for one in labels]
    return Rows(inputs, labels, clients, table)


def clients_of(
    rows: Rows, source: str, data: DataConfig, names: Sequence[str] | None
) -> Sequence[str]:
    """Return the client of each row, as the column of clients says. ``names`` are those of the
    run's clients, if they have any."""
    if data.client is None:
        raise InputError("the run's data have no column of clients (data.client); use --client")
    if names is None:
        raise InputError(
            f"the run's clients are not those of column {data.client!r} (split.scheme is not "
            "'natural'); use --client"
        )
    if rows.clients is None:
        raise InputError(f"{source} has no column {data.client!r}, which names each row's client")
    if "" in rows.clients:
        number = rows.clients.index("") + 1
        raise InputError(f"{source}, row {number}: {data.client!r} is empty; name a client")
    return rows.clients


def _lines(content: str) -> list[str]:
    """The lines of a file; U+2028 and form feeds, which a text may hold, end none."""
    lines = content.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _csv(content: str, source: str) -> list[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    separator = separator_of(content.partition("\n")[0])
    lines = io.StringIO(content, newline="")
    reader = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        check_column_names(reader.fieldnames or ())
        table = list(reader)
    except (csv.Error, ValueError) as error:
        where = f"line {reader.reader.line_num}"
        raise InputError(f"can't read {source} as a csv file: {where}: {error}") from None
    for number, row in enumerate(table, 1):
        if None in row or None in row.values():
            raise InputError(f"{source}, row {number} has not as many fields as the header")
    return table


def accuracy(
    predictions: Sequence[Prediction], labels: Sequence[str], classes: Sequence[str]
) -> str:
    """In words, how many predictions are right, and which labels are no class of the model, whose
    rows don't count; labels may be class names or their numbers."""
    numbers = class_numbers(labels, classes)
    others = [name for name, at in zip(labels, numbers, strict=True) if at < 0 and name.strip()]
    left_out = ""
    if others:
        rows = "1 row has a label" if len(others) == 1 else f"{len(others)} rows have labels"
        shown = listed([*dict.fromkeys(map(brief, others))])
        left_out = (
            f"; {rows} that the model does not know, left out: {shown}; it knows {listed(classes)}"
        )
    known = [(p.label, at) for p, at in zip(predictions, numbers, strict=True) if at >= 0]
    right = sum(label == classes[at] for label, at in known)
    if not known:
        return f"no row has a label{' that the model knows' if others else ''}{left_out}"
    share = f"{100 * right / len(known):.1f} %: {right} of {len(known)} rows are right"
    return f"accuracy {share}{left_out}"


def class_numbers(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """The number of each label's class; -1 where there is no label, or none of the classes. Labels
    may be class names or their numbers, unless a class is called by a number."""
    names, known = [label.strip() and label for label in labels], {"": -1}
    are_numbers = [_WHOLE.fullmatch(name) is not None for name in classes]
    if all(are_numbers) and len({*map(_whole, classes)}) == len(classes):  # then 1.0 is 1
        classes, names = [*map(_whole, classes)], [*map(_whole, names)]
    if not any(are_numbers):
        known |= {str(number): number for number in range(len(classes))}
    known |= {name: number for number, name in enumerate(classes)}
    return [known.get(name, -1) for name in names]


def _whole(name: str) -> str:
    """A whole number as Python writes it; other names as they are.

    >>> _whole("1.0"), _whole("-01"), _whole("1.5")
    ('1', '-1', '1.5')
    """
    return str(int(found[1])) if (found := _WHOLE.fullmatch(name)) else name


def check_kept(rows: Rows, columns: Sequence[str], source: str, own: Set[str]) -> None:
    """Check that the input's ``columns`` can be copied to the output, which has its ``own``."""
    if columns and rows.table is None:
        raise InputError(f"--keep: {source} has no columns; it takes a csv or jsonl file")
    for column in columns:
        if column not in (present := list((rows.table or [{}])[0])):
            raise unknown("column", column, present, where=source, kind="columns")
        if column in own:
            raise InputError(
                f"--keep {column}: the output has a column of its own with that name; rename it"
            )
        for number, row in enumerate(rows.table or (), 1):
            if column not in row:
                raise InputError(
                    f"{source}, row {number} has no {brief(column)}; add it to the row, or leave "
                    "the column out of --keep"
                )


def empty_texts(rows: Rows) -> str:
    """Return how many inputs are empty texts, in words; nothing if none is."""
    count = sum(isinstance(value, str) and not value.strip() for value in rows.inputs)
    return f"of an empty text a prediction says nothing: {counted(count, 'row')}" if count else ""


def of_others(rows: Rows, client: str, names: Sequence[str] | None) -> str:
    """Return how many rows name another client than ``client``, whose model predicts, by name or by
    number in ``names``, in words; nothing if none does, or the run's clients have no names."""
    if names is None:
        return ""
    number = whole_number(client)
    known = client in names or number is None or number >= len(names)
    name = client if known else names[number or 0]
    others = Counter(c for c in rows.clients or () if c not in ("", name))
    if not others:
        return ""
    whose = listed([spelt(other, [name]) for other in others], list(others.values()), few=5)
    return (
        f"{others.total()} of {len(rows.inputs)} rows are of other clients than {name!r}, whose "
        f"model predicts them all: {whose}; --by-client lets each row's own client predict"
    )


def as_objects(
    rows: Rows,
    results: Iterable[Any],
    objective: Objective,
    clients: Sequence[str] | None = None,
    kept: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """A JSON object for each result; pictures have the name of their ``file``, lines that were
    classified their ``text``, and rows that ``clients`` predicted the name of theirs. The input's
    columns ``kept`` come first."""
    whose = [None] * len(rows.inputs) if clients is None else clients
    table = rows.table or [{}] * len(rows.inputs)
    for value, result, client, row in zip(rows.inputs, results, whose, table, strict=True):
        of = {name: row[name] for name in kept}
        of |= {"file": str(value)} if isinstance(value, Path) else {}
        of |= {} if client is None else {"client": client}
        if rows.table is None and not rows.are_pictures:
            of["text"] = value
        yield {**of, **objective.columns(result)}


def as_csv(objects: Iterable[Mapping[str, Any]], between: str = "|") -> Iterator[str]:
    """The lines of a csv file, the header first; a column ``p(CLASS)`` for each class. Of a list
    the parts have ``between`` between them."""
    for number, content in enumerate(objects):
        flat = {name: value for name, value in content.items() if name != "probabilities"}
        flat = {k: _joined(v, between) if isinstance(v, list) else v for k, v in flat.items()}
        flat |= {f"p({name})": p for name, p in content.get("probabilities", {}).items()}
        if number == 0:
            yield _csv_line(flat)
        yield _csv_line(flat.values())


def _joined(parts: Sequence[Any], between: str) -> str:
    """A list as a text; as JSON where that would not tell its parts apart."""
    plain = parts and all(isinstance(part, str) and part and between not in part for part in parts)
    return between.join(parts) if plain else json.dumps(parts, ensure_ascii=False)


def _csv_line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
