"""The bound on the norms of uploads: it may change for the rounds that are left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# settings of ``cohort`` that bound the norms of uploads
BOUNDS = ("above_norm", "max_norm", "norm_factor", "norm_quantile")


def shown(value: Any) -> str:
    """Return a value as an experiment file has it."""
    return "none" if value is None else json.dumps(value)


def changed_bounds(old: Mapping[str, Any], new: Mapping[str, Any], number: int) -> list[str]:
    """Return a text for each of `BOUNDS` that has changed in round ``number``, from ``old`` (empty
    before the first round) to ``new``.

    >>> changed_bounds({"max_norm": None, "norm_factor": 100.0}, {"max_norm": 2.0}, 4)
    ['cohort.max_norm is 2.0 from round 4 on; it was none']
    """
    return [
        f"cohort.{name} is {shown(value)} from round {number} on; it was {shown(old[name])}"
        for name, value in new.items()
        if name in old and old[name] != value
    ]
