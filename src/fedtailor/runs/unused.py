"""Settings that are given and change nothing, since another setting leaves them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..method import FineTuning
from ..objectives.objective import Objective
from ..optim import Optimiser
from .experiment import Experiment
from .fields import as_written

Needed = Mapping[str, tuple[str, ...]]
"""By a section's field: another field of it, and the values of that one under which it counts."""

_SECTIONS: dict[str, Needed] = {
    "split": {
        "alpha": ("scheme", "dirichlet"),
        "classes_per_client": ("scheme", "pathological"),
        "shards_per_client": ("scheme", "shards"),
        "clusters": ("scheme", "clusters"),
        "cluster_sizes": ("scheme", "clusters"),
    },
    "schedule": {"final": ("name", "linear", "cosine")},
    "engine": {
        "clients_per_step": ("executor", "vectorised", "auto"),
        "processes": ("executor", "processes", "auto"),
    },
}
_OPTIMISER: Needed = {
    "momentum": ("name", "sgd"),
    **dict.fromkeys(("beta1", "beta2", "eps"), ("name", "adam", "adamw")),
}
_METHOD: Needed = dict.fromkeys(("rank", "lora_alpha"), ("trainable", "lora"))


def unused(experiment: Experiment, labels: Sequence[str], task: Objective) -> list[str]:
    """Say which settings of an experiment, and of these methods, have no effect, and why."""
    found = [
        line
        for name, needed in _SECTIONS.items()
        for line in _unused(name, getattr(experiment, name), needed)
    ]
    local, cohort, schedule = experiment.local, experiment.cohort, experiment.schedule
    if local.steps is not None and local.epochs != 1:
        found.append(f"local.epochs = {local.epochs} has no effect beside local.steps")
    if cohort.size is not None and cohort.fraction != 1:
        found.append(f"cohort.fraction = {cohort.fraction} has no effect beside cohort.size")
    if schedule.warmup_rounds >= experiment.rounds:
        found.append(
            f"schedule.warmup_rounds = {schedule.warmup_rounds} is no less than rounds: learning "
            "rates never get as high as they are set"
        )
    if schedule.within_rounds and schedule.name == "constant" and not schedule.warmup_rounds:
        found.append("schedule.within_rounds has no effect with schedule.name = 'constant'")
    data, scheme = experiment.data, experiment.split.scheme
    if data.client is not None and scheme != "natural" and not data.templates:
        found.append(
            f"data.client = {data.client!r} does not say who is a client where split.scheme is "
            f"{scheme!r}; it is for 'natural' (rows without one are left out all the same)"
        )
    template = experiment.model.chat_template
    if template is not None and not task.joins_columns:
        found.append(
            f"model.chat_template = {template!r} has no effect on training the task {task.name!r}"
        )
    for label in labels:
        method, where = experiment.methods[label], f"methods.{label}"
        if isinstance(method, FineTuning):
            found += _unused(where, method, _METHOD)
        for field in fields(method):
            if isinstance(one := getattr(method, field.name), Optimiser):
                found += _unused(f"{where}.{field.name}", one, _OPTIMISER, field.default)
    return found


def _unused(name: str, section: Any, needed: Needed, usual: Any = None) -> Iterator[str]:
    """The fields of ``section`` that do not count, but for those with a default, its own or that of
    ``usual``."""
    defaults = {field.name: field.default for field in fields(section)}
    for field, (by, *allowed) in needed.items():
        value, chosen = getattr(section, field), getattr(section, by)
        if value not in (defaults[field], getattr(usual, field, None)) and chosen not in allowed:
            known = " or ".join(repr(one) for one in allowed if one != "auto")  # may do without
            yield (
                f"{name}.{field} = {as_written(value)} has no effect where {name}.{by} is "
                f"{chosen!r}; it is for {known}"
            )
