"""Data sets of the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from . import columns as source_columns
from .columns import Columns
from .config import DataConfig
from .tables import message_of

_TIMEOUT = 5.0  # seconds for the hub to answer


def read_hub(config: DataConfig, cache: Path) -> Columns:
    """Raise ConnectionError if the hub can't be reached or has no such data set."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    try:
        _reach_hub()
        splits = load_dataset(config.name, config.subset, revision=config.revision)
    except (DatasetNotFoundError, HTTPError) as error:
        raise ConnectionError(message_of(error)) from error
    except (DatasetsError, ValueError, RuntimeError) as error:
        raise InputError(f"can't load {config.name!r}: {message_of(error)}") from error
    return source_columns.of_tables(*train_and_test_split(splits, config), config, cache)


def train_and_test_split(splits: Any, config: DataConfig) -> tuple[Any, Any | None]:
    """Return the training and the official test split of a ``datasets.DatasetDict``.

    A test split called ``test``, the default, may be absent; one with another name may not.

    Raises:
        InputError: there is no split of that name.
    """
    required = [config.train_split]
    if config.test_split not in (None, "test"):
        required.append(str(config.test_split))
    for name in required:
        if name not in splits:
            raise unknown("split", name, splits, kind="splits")
    return splits[config.train_split], splits.get(config.test_split)


def _reach_hub() -> None:
    """Raise ConnectionError after seconds if the hub doesn't answer; loading would try for most of
    a minute."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return  # only earlier downloads are used then
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConnectionError("HF_HUB_OFFLINE is set")
    session = huggingface_hub.get_session()
    session.head(huggingface_hub.constants.ENDPOINT, timeout=_TIMEOUT)
