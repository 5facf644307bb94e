"""How advice says what a method came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from ..method import FineTuning
from ..methods import METHODS
from ..store.metrics import Metric, bare, is_percentage
from ..units import si
from .measured import ALONE, Measured


def can_adapt(label: str) -> bool:
    """Whether a method can train a LoRA instead of the whole model."""
    return "rank" in {field.name for field in fields(METHODS[label])}


def cells_of(label: str, one: Measured, metric: Metric) -> tuple[str, ...]:
    """A method's row of the table, after its name."""
    if one.perplexity is not None:
        score = f"{one.perplexity:.1f}"
    else:
        share = " %" if is_percentage(metric) else ""
        score = bare(metric, one.score if one.accuracy is None else one.accuracy) + share
    what, sent = trained(label, one.settings), si(one.bytes, "B")
    if label == ALONE:
        return score, "", "", what, sent
    return score, lead(one, metric), f"{100 * one.worse_off:.0f} % of clients", what, sent


def lead(one: Measured, metric: Metric) -> str:
    """The lead over training alone with its interval: in points, in the unit of an error, or the
    change of the perplexity in percent."""
    difference, low, high = one.over_alone
    if one.perplexity is not None:
        change, low, high = (100 * math.expm1(-x) for x in (difference, high, low))
        return f"{change:+.0f} % [{low:+.0f}, {high:+.0f}]"
    by, begin, end = (bare(metric, value, signed=True) for value in (difference, low, high))
    return f"{by} [{begin}, {end}]"


def trained(label: str, settings: Sequence[str]) -> str:
    """What a method trained with these settings, in a word or two."""
    chosen = dict(one.split("=", 1) for one in settings)
    usual = "full" if issubclass(METHODS[label], FineTuning) or not can_adapt(label) else "lora"
    what = chosen.get("trainable", usual).strip("\"'")
    if what == "full" and "layers" in chosen:
        return "some layers"
    return {"full": "whole model", "lora": "LoRA", "head": "head"}[what]
