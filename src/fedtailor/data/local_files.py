"""Tables in local files: csv, jsonl, json, parquet and arrow."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import InputError, brief, missing_file
from . import cells
from .by_user import files_of, rows_by_user, splits_of
from .columns import USUAL_NAMES
from .config import DataConfig
from .names import check_names
from .text_files import check_text_file, message_of, reason_of

_MANY = 200  # columns
FORMATS = {
    ".csv": "csv",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def local_tables(
    train: str, test: str | None, config: DataConfig, cache: Path
) -> tuple[Any, Any | None]:
    """Read the training file and the test file, if there is one, as `local_table` does; columns of
    numbers in a csv file are numbers in both, or in neither. A folder may hold both, as LEAF's."""
    if test is None and (splits := splits_of(Path(train).expanduser())):
        train, test = map(str, splits)
    paths = [train] if test is None else [train, test]
    named = (config.text, config.image, config.label, config.client)
    tables = [local_table(path, cache, {*USUAL_NAMES, *named}) for path in paths]
    of_csv = [number for number, path in enumerate(paths) if cells.is_csv(path)]
    if of_csv:
        converted = cells.with_numbers([tables[number] for number in of_csv], config)
        for number, table in zip(of_csv, converted, strict=True):
            tables[number] = table
    return tables[0], None if test is None else tables[1]


def local_table(name: str, cache: Path, needed: Collection[str | None] | None = None) -> Any:
    """Read a local file as a ``datasets.Dataset``; a csv file as texts, None where a cell is empty;
    a folder of JSON by user as one table, of two such folders ``train`` and ``test`` the first. Of
    a csv file with very many columns only those that are ``needed`` are read, if they are given.

    Raises:
        InputError: there is no such file, it has another format, it can't be read, or a column's
            name can't be shown.
    """
    path = Path(name).expanduser()
    if splits := splits_of(path):
        path = splits[0]
    if files_of(path):
        table = rows_by_user(path, name)
        check_names("column", table.column_names, name)
        return table
    if path.is_dir():
        raise InputError(f"{name!r} is a folder without JSON files; name a file")
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}, nor beside an experiment file"
        raise missing_file(name, where)
    if path.suffix not in FORMATS:
        raise InputError(f"can't read {name!r}; allowed: {', '.join(FORMATS)} files")
    if path.stat().st_size == 0:
        raise InputError(f"can't read {name!r}: it is empty; give a file with at least one row")
    if path.suffix in (".csv", ".jsonl"):
        check_text_file(path, name)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    from datasets import Features, Value, load_dataset
    from datasets.exceptions import DatasetsError
    from datasets.utils import logging
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)  # csv, in datasets
        disable_progress_bar()
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # an error is told once, by the one raised below
        try:
            options: dict[str, Any] = {}
            if cells.is_csv(name):
                names = cells.header(path)
                if needed is not None and len(names) > _MANY:  # datasets takes their square
                    if lacking := {*needed} - {*names, *USUAL_NAMES, None}:
                        raise ValueError(f"no column {brief(min(map(str, lacking)))}")
                    names = [column for column in names if column in needed] or names[:1]
                    options["usecols"] = names
                options |= {"features": Features({column: Value("string") for column in names})}
                options |= {"sep": cells.separator(path), **cells.AS_TEXT}
            table = load_dataset(
                FORMATS[path.suffix],
                data_files=str(path.resolve()),
                split="train",
                cache_dir=str(cache / "datasets" / digest),  # which itself goes by the file's time
                **options,
            )
        except (DatasetsError, ValueError, OSError) as error:
            problem = message_of(error.__cause__ or error)
        else:
            check_names("column", table.column_names, name)
            return table
        finally:
            logging.set_verbosity(verbosity)
            enable_progress_bar()
    if "corresponds to no data" in problem or "BatchSize must be greater than 0" in problem:
        raise InputError(f"{name!r} has no rows; give a file with at least one row")
    raise InputError(f"can't read {name!r}: {reason_of(problem)}")
