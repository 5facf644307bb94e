"""Tables in local files: csv (or tsv), jsonl, json, parquet, arrow and CoNLL; and in folders.

The cells of a csv file are texts. A whole column of labels or clients may become numbers.
"""

from __future__ import annotations

import csv
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..disk_cache import cache_dir
from ..errors import InputError, brief, missing_file
from ..objectives import objective_of
from ..objectives.cells import usual_column, with_points
from . import class_folders, conll
from .by_user import files_of, rows_by_user
from .config import DataConfig
from .images import PICTURES
from .json_lines import objects_of
from .names import check_names
from .roles import named_pair

Kind = Literal["integer", "number", "text"]

FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((*conll.SUFFIXES, ".txt"), "conll"),
}
TEXT = ("string", "large_string")  # types of columns
_BINARY = {  # how files begin that are no text
    b"PK\x03\x04": "an Excel file or a zip archive",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a parquet file",
}
_FIRST = 100  # rows by which a column is known
_SEPARATORS = (",", ";", "\t")
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_EXACT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python writes it: "7", but not "007"
# with more digits a float would lose some: two long codes would be one class
_NUMBER = re.compile(r"\s*[+-]?([0-9]{1,15}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")

_REASONS = (  # how pandas and pyarrow say it, and how a reader of the file does
    (
        r"Expected (\d+) fields in line (\d+), saw (\d+)",
        "line {1} has {2} cells, and the lines before it {0}; is a separator not in quotes, or a "
        "quote left open?",
    ),
    (
        r"EOF inside string starting at row (\d+)",
        "the quote that opens in row {0} after the header is never closed; close it",
    ),
    (
        r"Buffer overflow caught",
        "a line does not end, or has far more cells than the others; put cells with separators or "
        "line ends in quotes",
    ),
    (
        r"Parquet magic bytes not found|Parquet file size is",
        "it is no whole parquet file; write or copy it again",
    ),
    (
        r"Not an Arrow file|metadata bytes|Invalid flatbuffers",
        "it is no whole Arrow file; write or copy it again",
    ),
    (
        r"corresponds to no data|BatchSize must be greater than 0",
        "it has no rows; give a file with at least one row",
    ),
)


def message_of(error: BaseException) -> str:
    """Return an error's words in one line, or else its type."""
    return " ".join(str(error).split()) or type(error).__name__


def local_tables(train: str, test: str | None, config: DataConfig) -> tuple[Any, Any | None]:
    """Read the training file and the test file, if there is one, as `local_table` does; columns of
    numbers in a csv file are numbers in both, or in neither. A folder may hold both."""
    if test is None and (splits := _splits_of(Path(train).expanduser(), train)):
        train, test = map(str, splits)
    paths = [train] if test is None else [train, test]
    tables = [local_table(path) for path in paths]
    of_csv = [number for number, path in enumerate(paths) if is_csv(path)]
    if of_csv:
        kinds = _kinds([tables[number] for number in of_csv], config)
        for number in of_csv:
            tables[number] = _converted(tables[number], kinds)
    return tables[0], None if test is None else tables[1]


def local_table(name: str) -> Any:
    """Read a local file as a ``datasets.Dataset``; a csv file as texts, None where a cell is empty;
    a folder of JSON by user, or of pictures by class, as one table, of two such folders ``train``
    and ``test`` the first. Raises InputError where there is no such file, it has another format,
    it can't be read or has no rows, or a column's name can't be shown."""
    path = Path(name).expanduser()
    if splits := _splits_of(path, name):
        path = splits[0]
    if files := files_of(path):
        table = rows_by_user(files, name)
    elif path.is_dir():
        table = class_folders.picture_table(path, name)
    else:
        _check_file(path, name)
        table = _read(path, name)
    if not len(table):
        raise InputError(f"{name!r} has no rows; give a file with at least one row")
    check_names("column", table.column_names, name)
    return table


def _splits_of(path: Path, name: str) -> tuple[Path, Path] | None:
    """The folders ``train`` and ``test`` of a folder, if both hold JSON files, or pictures."""
    splits = path / "train", path / "test"
    if not all(split.is_dir() for split in splits):
        return None
    if not all(map(files_of, splits)):
        if files_of(path):
            return None
        class_folders.check_splits(path, name)
    return splits


def _read(path: Path, name: str) -> Any:
    kind = FORMATS[path.suffix]
    if kind == "conll":
        return conll.conll_table(path, name)
    read = _csv_table if kind == "csv" else _by_datasets
    return _with_pictures(read(path, name), path.absolute().parent)


def _with_pictures(table: Any, folder: Path) -> Any:
    """A table with the pictures themselves where a column names their files, from ``folder`` on."""
    from datasets import Image

    first = table.data.select(text_columns(table)).slice(0, _FIRST).to_pydict()
    for name in first:
        some = next(filter(None, first[name]), "")
        if (
            _names_picture(some)
            and (folder / some).is_file()
            and all(cell is None or _names_picture(cell) for cell in table[name])
        ):
            paths = [cell and str(folder / cell) for cell in table[name]]
            table = table.remove_columns(name).add_column(name, paths).cast_column(name, Image())
    return table


def _names_picture(cell: str) -> bool:
    return cell.lower().endswith(PICTURES)


def text_columns(table: Any) -> list[str]:
    """The columns of a ``datasets.Dataset`` that hold texts."""
    kinds = {name: getattr(feature, "dtype", "") for name, feature in table.features.items()}
    return [name for name, kind in kinds.items() if kind in TEXT]


def _check_file(path: Path, name: str) -> None:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}, nor beside an experiment file"
        raise missing_file(name, where)
    if path.suffix not in FORMATS:
        raise InputError(f"can't read {name!r}; allowed: {', '.join(FORMATS)} files, and folders")
    if path.stat().st_size == 0:
        raise InputError(f"can't read {name!r}: it is empty; give a file with at least one row")
    if FORMATS[path.suffix] in ("csv", "json", "conll"):
        check_text_file(path, name)
    if path.suffix == ".txt" and not conll.looks_like_conll(path):
        raise InputError(
            f"can't read {name!r}: a txt file is read if its lines are words with their tags, such "
            "as O and B-PER (CoNLL); write texts into a csv or jsonl file, and other tags into a "
            ".conll file"
        )


def check_text_file(path: Path, name: str) -> None:
    """Check that a csv, jsonl or CoNLL file is one, and in UTF-8. Raises InputError where it is a
    spreadsheet or an archive; it has another encoding."""
    with path.open("rb") as file:
        head = file.read(4)
    for begins, what in _BINARY.items():
        if head.startswith(begins):
            raise InputError(
                f"can't read {name!r}: it is {what}, whatever its name says; save the table as "
                "text (in Excel: CSV UTF-8)"
            )
    try:
        with path.open(encoding="utf-8") as text:
            for _ in text:
                pass
    except UnicodeDecodeError:
        raise InputError(
            f"can't read {name!r}: it is not UTF-8; save it as UTF-8 (in Excel: CSV UTF-8)"
        ) from None


def _by_datasets(path: Path, name: str) -> Any:
    """Read a jsonl, parquet or arrow file."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from datasets.utils import logging
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    verbosity = logging.get_verbosity()
    disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # an error is told once, by the one raised below
    try:
        return load_dataset(
            FORMATS[path.suffix],
            data_files=str(path.resolve()),
            split="train",
            # the cache itself goes by the file's time
            cache_dir=str(cache_dir() / "datasets" / digest),
        )
    except (DatasetsError, ValueError, TypeError, OSError) as error:
        if FORMATS[path.suffix] == "json":
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                for _ in objects_of(file, name):
                    pass
        raise _unreadable(name, error.__cause__ or error) from None
    finally:
        logging.set_verbosity(verbosity)
        enable_progress_bar()


def _unreadable(name: str, error: BaseException) -> InputError:
    """The error for a file, in words for who wrote it."""
    problem = message_of(error)
    for pattern, words in _REASONS:
        if found := re.search(pattern, problem):
            return InputError(f"can't read {name!r}: {words.format(*found.groups())}")
    return InputError(f"can't read {name!r}: {problem}")


def is_csv(path: str) -> bool:
    """Whether a file is read as a csv."""
    return FORMATS.get(Path(path).suffix) == "csv"


def separator_of(header: str) -> str:
    """Return what separates the cells of a csv file, by its first line: the most frequent of a
    comma, a semicolon and a tab, outside quotes.

    >>> separator_of('"note, age, sex";label'), separator_of("note")
    (';', ',')
    """
    return max(_SEPARATORS, key=re.sub(r'"[^"]*"', "", header).count)


def _separator(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        return separator_of(file.readline())


def check_column_names(names: Sequence[str]) -> None:
    """Raise ValueError if two columns have one name; empty ones don't count.

    >>> check_column_names(["text", "label", "", "", "label"])
    Traceback (most recent call last):
    ValueError: two columns are named 'label'; rename one
    """
    counts = Counter(name for name in names if name.strip())
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"two columns are named {brief(twice[0])}; rename one")


def _csv_table(path: Path, name: str) -> Any:
    import pandas
    import pyarrow

    texts: dict[str, Any] = {"dtype": str, "keep_default_na": False, "sep": _separator(path)}
    try:
        check_column_names(pandas.read_csv(path, nrows=1, header=None, **texts).iloc[0].tolist())
        frame = pandas.read_csv(path, na_values=[""], **texts)
        if not isinstance(frame.index, pandas.RangeIndex):
            raise ValueError("row 1 has more fields than the header")
    except pandas.errors.ParserError as error:
        raise _unreadable(name, _with_line(error, path, texts["sep"])) from None
    except ValueError as error:  # pandas' other errors are among them
        raise _unreadable(name, error) from None
    schema = pyarrow.schema([(column, "string") for column in frame.columns])
    return _dataset(pyarrow.Table.from_pandas(frame, schema, preserve_index=False))


def _with_line(error: ValueError, path: Path, separator: str) -> ValueError:
    """pandas' error with the line of the file; pandas counts one with line ends in quotes once."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator)

        def line(found: re.Match[str]) -> str:
            for _ in islice(reader, int(found[0]) - 1):
                pass
            return str(reader.line_num + 1)

        return ValueError(re.sub(r"(?<=fields in line )\d+", line, str(error)))


def kind_of(cells: Iterable[str | None], *, exact: bool = False) -> Kind:
    """What a column holds; empty cells don't count. ``exact``: whole numbers are those alone that
    keep their spelling as numbers.

    >>> kind_of(["7", None, "007"]), kind_of(["7", "007"], exact=True), kind_of(["1.5", "2"])
    ('integer', 'text', 'number')
    >>> kind_of(["1", "NA"])
    'text'
    """
    present = [cell for cell in cells if cell is not None and cell.strip()]
    if present and all(map((_EXACT if exact else _INTEGER).fullmatch, present)):
        return "integer"
    if exact and all(map(_INTEGER.fullmatch, present)):
        return "text" if present else "number"
    return "number" if all(map(_NUMBER.fullmatch, present)) else "text"


def with_all_numbers(table: Any, path: str) -> Any:
    """The table of a csv file, which holds texts alone, with numbers in the columns that hold
    nothing else; with decimal commas, too, where semicolons separate the cells."""
    texts = table.select_columns(text_columns(table))[:]
    if _separator(Path(path).expanduser()) == ";":
        texts = {name: with_points(cells) for name, cells in texts.items()}
    return _converted(table, {name: kind_of(cells, exact=True) for name, cells in texts.items()})


def _kinds(tables: Sequence[Any], config: DataConfig) -> dict[str, Kind]:
    """What labels and clients are in the one or two csv tables of a source, by column.

    Labels are class numbers where all of them are whole numbers, each of one spelling, unless
    ``config.classes`` names them all. Clients are numbers where that loses nothing of their names.
    Raises InputError where all texts are numbers."""
    names = tables[0].column_names
    objective = objective_of(config.task)
    label = config.label or usual_column(objective.target_names, names)
    labels = label if isinstance(label, tuple) else (label,)
    others = [name for name in names if name not in (*labels, config.client)]
    pair = named_pair(others, config, objective)
    texts = pair.values() or [config.text or usual_column(objective.input_names, names)]
    for text in texts:
        if text is not None and text in names and kind_of(_cells(tables[:1], text)) != "text":
            raise InputError(f"column {text!r} holds numbers or nothing, not text or images")
    kinds: dict[str, Kind] = {}
    if isinstance(label, str) and objective.reads_targets:
        cells = _cells(tables, label)
        named = all(not cell or not cell.strip() or cell in config.classes for cell in cells)
        kinds[label] = "text" if named else kind_of(cells)
        words = {cell.strip() for cell in cells if cell and cell.strip()}
        of_numbers = kinds[label] == "integer" and objective.has_classes
        if of_numbers and len({*map(int, words)}) < len(words):
            kinds[label] = "text"  # 010 and 10 are two codes
    if config.client is not None:
        kind = kind_of(_cells(tables, config.client), exact=True)
        kinds[config.client] = "integer" if kind == "integer" else "text"
    return kinds


def _cells(tables: Sequence[Any], column: str) -> list[str | None]:
    with_it = [table.data for table in tables if column in table.column_names]
    return [cell for table in with_it for cell in table.column(column).to_pylist()]


def _converted(table: Any, kinds: dict[str, Kind]) -> Any:
    """A csv table with numbers in the columns of such kinds; None where a cell is empty."""
    import pyarrow

    arrow = table.data.table
    for name, kind in kinds.items():
        if kind != "text" and name in arrow.column_names:
            make, dtype = (int, "int64") if kind == "integer" else (float, "float64")
            cells = with_points(arrow.column(name).to_pylist())
            numbers = [make(cell) if cell is not None and cell.strip() else None for cell in cells]
            place = arrow.column_names.index(name)
            arrow = arrow.set_column(place, name, pyarrow.array(numbers, dtype))
    return _dataset(arrow)


def _dataset(arrow: Any) -> Any:
    """A table in memory; `from_pandas` and fingerprints take the square of many columns."""
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable(arrow), fingerprint=generate_random_fingerprint())


def written_lines(path: Path) -> int:
    """Count a file's lines that are not blank."""
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)
