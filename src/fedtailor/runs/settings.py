"""Settings: ``key=value`` changes of an experiment's plain values."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, brief, unknown
from ..methods import METHODS
from ..store.format import dotted

Settings = str | Sequence[str] | Mapping[str, Any]


def changed(content: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The plain values of an experiment, changed in place by ``key=value`` settings, as in
    `read`."""
    pairs = pairs_of(settings)
    presets = content.pop("presets", {})
    chosen = pairs.pop("preset", content.pop("preset", None))
    named = str(chosen).split(",") if chosen is not None else []
    chosen_pairs: dict[str, Any] = {}
    for name in (name.strip() for name in named):
        if name not in table_of(presets, "presets"):
            if not presets:
                raise InputError(f"preset = {name!r}, and the experiment has no presets")
            raise unknown("preset", name, presets)
        chosen_pairs |= dotted(table_of(presets[name], f"presets.{name}"))
    pairs = {**chosen_pairs, **pairs}
    keep = pairs.pop("methods", None)
    present = [*content.get("methods", ())]
    parts = {key: _parts(key, present) for key in pairs}
    for key, value in pairs.items():
        set_dotted(content, parts[key], value)
    if keep is not None:
        content["methods"] = _chosen(table_of(content.get("methods", {}), "methods"), keep)
        known = [*present, *content["methods"]]
        for path in parts.values():
            if path[0] == "methods" and path[1] not in known:  # else it would be dropped unseen
                raise unknown("method", path[1], known, where=".".join(path))
    return content


def pairs_of(settings: Settings) -> dict[str, Any]:
    """Settings as a mapping from dotted keys to values; see `fedtailor.runs.experiment.read`."""
    if isinstance(settings, Mapping):
        return dict(settings)
    return dict(_setting(text) for text in ([settings] if isinstance(settings, str) else settings))


def table_of(value: Any, name: str) -> Mapping[str, Any]:
    """Check that a value is a table, and return it. Raises InputError where it is not."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table, got {brief(value)}")
    return value


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key.strip() and equals and value.strip()):
        raise InputError(f"--set takes key=value, got {brief(text)}")
    try:
        content = tomllib.loads(f"value = {value}")["value"]
    except ValueError:  # a bare word
        return key.strip(), value.strip()
    return key.strip(), content


def _parts(key: str, labels: Sequence[Any]) -> list[str]:
    """The parts of a dotted key; a method's label may have a dot, too.

    >>> _parts('methods."lr0.1".rank', ["lr0.1"]), _parts("methods.fedavg.rank", ["lr0.1"])
    (['methods', 'lr0.1', 'rank'], ['methods', 'fedavg', 'rank'])
    """
    parts = key.replace('"', "").split(".")
    for end in range(len(parts), 2, -1):
        if parts[0] == "methods" and ".".join(parts[1:end]) in labels:
            return ["methods", ".".join(parts[1:end]), *parts[end:]]
    return parts


def set_dotted(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set the key of these ``parts`` in nested tables, in place."""
    table: Any = content
    for parent in parts[:-1]:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            name = ".".join(parts)
            raise InputError(f"can't set {name!r}: {parent!r} is a value, not a table")
    table[parts[-1]] = value


def _chosen(methods: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    labels = [labels] if isinstance(labels, str) else labels
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise InputError(f"methods = {brief(labels)}: must be a list of labels")
    missing = [label for label in labels if label not in methods and label not in METHODS]
    if missing:
        raise unknown("method", str(missing[0]), {*methods, *METHODS})
    return {label: methods.get(label, {}) for label in labels}
