"""The place of a model's files: a package, a folder, or the Hugging Face hub."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, brief, unknown
from ..user_code import FROM_PYTHON
from .config import ModelConfig
from .packages import BUILTIN

_TIMEOUT = 5.0  # seconds for the hub to answer


def locate(config: ModelConfig) -> str:
    """Return the model's path on this machine, or its hub name. Raises InputError where the model
    is neither on this machine nor named like one of the hub."""
    name = config.name
    if name.startswith(FROM_PYTHON):
        raise InputError("the run's model was given from Python; give it again: backbone=...")
    check_revision(config)
    path = Path(name).expanduser()
    if name in BUILTIN:
        found = BUILTIN[name].find()
        if found is None:
            raise InputError(
                f"model {name!r} isn't on this machine; get it with: {BUILTIN[name].get}"
            )
        return str(found)
    if path.is_dir():
        return str(path)
    if path.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise InputError(f"no folder {name!r}; a model's folder holds config.json and its weights")
    if "/" not in name:
        kind = "a hub model is written owner/model; built-in"
        raise unknown("model", name, BUILTIN, kind=kind)
    return name


def check_revision(config: ModelConfig) -> None:
    """Raise InputError if a model that is not of the hub is asked for at a revision."""
    name = config.name
    if config.revision is not None and (name in BUILTIN or Path(name).expanduser().is_dir()):
        raise InputError(
            f"model.revision = {brief(config.revision)} is for models of the hub, and {name!r} is "
            f"{'built in' if name in BUILTIN else 'a folder'}; leave it out"
        )


def origin(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return arguments of from_pretrained: whether to ask the hub, for which revision, and to run
    no code from it."""
    local = Path(source).is_dir() or not hub_in_reach()
    wanted = {} if revision is None else {"revision": revision}
    return {"local_files_only": local, "trust_remote_code": False, **wanted}


@functools.cache
def hub_in_reach() -> bool:
    """Ask the hub once, since transformers would try for half a minute each time."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    if huggingface_hub.is_offline_mode():
        return False
    try:
        session = huggingface_hub.get_session()
        session.head(huggingface_hub.constants.ENDPOINT, timeout=_TIMEOUT)
    except HTTPError:
        return False
    return True


def transformers_config(source: str, config: ModelConfig) -> Any:
    """Read the Hugging Face configuration of the model at ``source``, a folder or a hub name.
    Raises InputError where the configuration is missing or can't be read."""
    from transformers import AutoConfig

    what = f"can't read model {config.name!r}"
    if not Path(source).is_dir():
        at = "" if config.revision is None else f" at revision {brief(config.revision)}"
        what = (
            f"model {config.name!r}{at} is not a folder, was not downloaded before, and can't be "
            "read from the Hugging Face hub"
        )
    with faults_of_files(what):
        return AutoConfig.from_pretrained(source, **origin(source, config.revision))


@contextmanager
def faults_of_files(what: str) -> Iterator[None]:
    """Raise InputError, as ``what`` and one line, for whatever goes wrong while transformers and
    its like build a model or a tokenizer from files. The files may say anything, and these
    libraries raise anything, so this one place takes every exception."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # see above
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(f"{what}: {kind}{first_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers, written in Rust
            raise
        raise InputError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the last one where the first says too
    little; or the error's type.

    >>> first_line(TypeError("Validation error for field 'size':\\n    expected int, got float"))
    "Validation error for field 'size': expected int, got float"
    """
    first, *others = str(error).strip().split("\n")
    if others and first.endswith((":", "(")):
        return f"{first} {'... ' if others[1:] else ''}{others[-1].strip()}"
    return first or type(error).__name__
