"""Test files that spell columns, clients or labels otherwise than their training file: refused in a
line, or each row is at the client that its name says, with its label, or told to be left out."""

from __future__ import annotations

import csv
import io
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from .mutations import Attempt, Change, read

_NAMES = (
    "1 2 3", "01 02 1", "1.5 2.5", "Berlin Rome", "Zürich Genève", "New_York Los_Angeles", "9 10",
    "true false", "NA nan", "1e3 2e3", "-1 1", "None NULL", "007 7", "2024-01-01 2024-01-02",
    "12345678901234567890 1", "\U0001f600 \U0001f601", "0 1", "yes no", "a A", "1 1.5", "0.1 0.10",
)  # fmt: skip
_SPELT: tuple[Callable[[str], str], ...] = (
    lambda s: s + ".0", lambda s: f" {s}", lambda s: f"{s} ", str.upper, str.lower, str.title,
    lambda s: unicodedata.normalize("NFD", s), lambda s: s + "\u200d", lambda s: "0" + s,
    lambda s: s.replace(" ", "\u00a0"), lambda s: "+" + s, lambda s: s + "x", lambda s: f'"{s}"',
    lambda s: s.translate({48 + i: 0xFF10 + i for i in range(10)}), lambda s: s.replace("a", "а"),
    lambda s: "", lambda s: " ", lambda s: s[::-1], lambda s: s + "e0", lambda s: s + "\n",
    lambda s: s if (n := _number(s)) is None else str(n), lambda s: 600 * s,
    lambda s: "nan", lambda s: "site 9", lambda s: "-" + s,
)  # fmt: skip
_COLUMNS: tuple[Callable[[str], str | None], ...] = (
    str.upper, str.title, lambda s: f"{s} ", lambda s: f" {s}", lambda s: s + "s", lambda s: None,
    lambda s: "", lambda s: s + "\u200b",
)  # fmt: skip
_TRAINED, _TESTED = 36, 18  # rows

Row = dict[str, str]


def test_files(folder: Path) -> Attempt:
    """Load a training file with a test file, and divide the rows among the clients."""
    import datasets  # noqa: F401  imported here, its seconds are not those of a mutation
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from fedtailor.data import DataConfig, SplitConfig, load_data
    from fedtailor.data.partition import partition

    words = ["[PAD]", "[UNK]", *(f"w{row}" for row in range(_TESTED))]  # tell the rows apart
    model = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]"
    )

    def attempt(rng: random.Random) -> Change:
        trained, tested, change = _tables(rng)
        form = rng.choice(["csv", "csv", "jsonl", "parquet"])
        other = form if rng.random() < 0.8 else rng.choice(["csv", "jsonl", "parquet"])
        paths = folder / f"train.{form}", folder / f"test.{other}"
        _write(rng, paths[0], trained)
        _write(rng, paths[1], tested)
        natural = rng.random() < 0.8
        config = DataConfig(
            path=str(paths[0]), test_path=str(paths[1]), client="site" if natural else None
        )
        split = SplitConfig(None, "natural") if natural else SplitConfig(3, "dirichlet", alpha=9.0)

        def check() -> None:
            data = load_data(config, tokenizer)
            parts = partition(data, split, rng.randrange(9))
            used = 0
            names = {row["site"] for row in trained} if form == other == "csv" else set()
            for client in range(len(parts.test)):
                for row in parts.test[client].tolist():
                    at = int(data.inputs.batch(np.array([row]))["input_ids"][0, 0]) - 2
                    used += 1
                    label = data.classes[data.labels[row]]
                    _check("label", label, tested[at]["label"], set())
                    if natural:
                        _check("client", parts.names[client], tested[at]["site"], names)
            omissions = [*data.omissions, *parts.omissions]
            told = sum(o.count for o in omissions if o.kind in ("no-client", "no-label"))
            if used + told != len(tested):
                raise AssertionError(f"{used} used, {told} told of {len(tested)}")

        read(check)
        return change

    return attempt


def _number(text: str) -> float | None:
    try:
        return float({"true": "1", "false": "0"}.get(text.strip().lower(), text))
    except ValueError:
        return None


def _check(what: str, found: str, written: str, known: set[str]) -> None:
    """Check that ``written`` may be ``found``: it is, or is the same number and not ``known``."""
    name = written.strip()
    same_number = name not in known and None is not _number(name) == _number(found)
    if not (found == name or same_number):
        raise AssertionError(f"{what} {written!a} became {found!a}")


def _tables(rng: random.Random) -> tuple[list[Row], list[Row], Change]:
    """The rows of the training file and of the test file, and how the latter differs."""
    sites, labels = ([n.replace("_", " ") for n in rng.choice(_NAMES).split()] for _ in range(2))
    trained = [
        {"text": f"old {row}", "label": rng.choice(labels), "site": sites[row % len(sites)]}
        for row in range(_TRAINED)
    ]
    few = rng.random() < 0.1  # one class, or one client
    tested = [
        {"text": f"w{row}", "label": rng.choice(labels[few:]), "site": rng.choice(sites[few:])}
        for row in range(_TESTED if rng.random() < 0.95 else 0)
    ]
    changes = []
    for _ in range(rng.randint(0, 2)):
        column, number = rng.choice(["label", "site"]), rng.randrange(len(_SPELT))
        share = rng.choice([0.1, 0.5, 1.0])
        for row in tested:
            if rng.random() < share:
                row[column] = _SPELT[number](row[column])
        changes.append(f"{column} {number}")
    if rng.random() < 0.2:
        column, number = rng.choice(["text", "label", "site"]), rng.randrange(len(_COLUMNS))
        new = _COLUMNS[number](column)
        tested = [{new if c == column else c: v for c, v in r.items()} for r in tested]
        tested = [{c: v for c, v in row.items() if c is not None} for row in tested]
        changes.append(f"column {column} {number}")
    return trained, tested, Change(", ".join(changes))


def _write(rng: random.Random, path: Path, rows: list[Row]) -> None:
    """Write a table; what is written as a number may be one there."""
    if path.suffix == ".csv":
        file = io.StringIO(newline="")
        table = csv.DictWriter(
            file,
            list(rows[0]) if rows else ["text", "label", "site"],
            delimiter=rng.choice(",;\t"),
            lineterminator=rng.choice(["\n", "\r\n"]),
        )
        table.writeheader()
        table.writerows(rows)
        path.write_bytes(file.getvalue().encode(rng.choice(["utf-8", "utf-8-sig"])))
        return
    typed = rng.random() < 0.5
    cells = [{c: _typed(v) if typed and c != "text" else v for c, v in row.items()} for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in cells))
        return
    columns = {c: [row[c] for row in cells] for c in (cells[0] if cells else ())}
    try:
        parquet.write_table(pyarrow.table(columns), path)
    except (pyarrow.ArrowException, OverflowError):  # numbers and text in one column
        parquet.write_table(pyarrow.table({c: list(map(str, v)) for c, v in columns.items()}), path)


def _typed(text: str) -> Any:
    """A number, a truth value or null, as JSON reads the text, else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text or None
    return text if isinstance(value, str) else value
