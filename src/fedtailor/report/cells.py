"""The comparison as formatted cells: for a terminal, and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..store.metrics import ATTACK_SUCCESS, TUNED, Metric, higher_is_better, scale_of, unit_of
from ..units import fixed, seconds_text, si
from .clients import client_tables
from .notes import NOT_LEARNED
from .rows import ModelResult, Row, Spread
from .table import Table
from .text import TextTable


def ranked(comparison: Table) -> list[Row]:
    """Return the methods, the best shown result first; those without one last. Runs that have no
    clients in common stand one after the other.

    The rank is that on test data: it describes, while the verdict chooses by validation data.
    """
    sign = -1 if higher_is_better(comparison.metric) else 1

    def rank(row: Row) -> tuple[int, bool, float]:
        mean = row.personal_model.mean.mean if row.personal_model else math.nan
        return (row.group, True, 0.0) if math.isnan(mean) else (row.group, False, sign * mean)

    return sorted(comparison.rows, key=rank)


def _cell(spread: Spread | None, scale: float, digits: int, *, seeds: bool = True) -> str:
    if spread is None or math.isnan(spread.mean):
        return "-"
    shown = [spread.mean] if spread.std is None or not seeds else [spread.mean, spread.std]
    return "±".join(fixed(scale * value, digits) for value in shown)


def _rounds(result: ModelResult | None) -> str:
    if result is None:
        return "-"
    if len(result.rounds) > 2 and len(set(result.rounds)) > 1:
        return f"{min(result.rounds)}-{max(result.rounds)}"
    return ", ".join(map(str, dict.fromkeys(result.rounds)))


def _name(row: Row) -> str:
    has_learned = row.personal_model is None or not row.personal_model.did_not_learn
    remarks = ", ".join(filter(None, [row.progress, "" if has_learned else NOT_LEARNED]))
    return f"{row.label} ({remarks})" if remarks else row.label


def _results(comparison: Table) -> TextTable:
    metric, rows = comparison.metric, ranked(comparison)
    personal = [row.personal_model for row in rows]
    shared = [row.global_model for row in rows]
    novel = [row.novel_clients for row in rows]
    is_lm = any(model and model.perplexity is not None for model in personal)
    header, columns, best = ["method"], [[_name(row) for row in rows]], set[tuple[int, int]]()

    def add(
        title: str,
        values: Sequence[Spread | None],
        by: Metric = metric,
        *,
        form: tuple[float, int] | None = None,
        seeds: bool = True,
        is_marked: bool = True,
    ) -> None:
        if is_marked:
            best.update((place, len(header)) for place in _best(rows, values, by))
        header.append(title)
        columns.append([_cell(value, *(form or scale_of(by)), seeds=seeds) for value in values])

    def add_rounds(title: str, models: Sequence[ModelResult | None]) -> None:
        header.append(title)
        columns.append(list(map(_rounds, models)))

    add(metric, _of(personal, "mean"))
    add("weighted", _of(personal, "weighted"), seeds=not is_lm)
    add("std", _of(personal, "std"), seeds=False, is_marked=False)
    add("decile", _of(personal, "bottom_decile"), seeds=False)
    add("worst", _of(personal, "worst"), seeds=False)
    if is_lm:
        add("ppl", _of(personal, "perplexity"), form=(1, 1), seeds=False)
        add("token\nacc. %", _means(personal, "accuracy"), "accuracy")
    for name in _other_metrics(metric, [model for model in personal if model]):
        if not (is_lm and name == "accuracy"):
            add(name, _means(personal, name), name, is_marked=name not in TUNED)
    if any(row.validation is not None for row in rows):
        by = comparison.chosen_by
        title = "valida-\ntion" if is_lm else "validation"
        title = title if by == metric else f"{title}\n{by}"
        add(title, [row.validation for row in rows], by, seeds=not is_lm)
    add_rounds("round", personal)
    add("global", _of(shared, "mean"), seeds=not is_lm)
    add_rounds("its\nround", shared)
    if any(model and ATTACK_SUCCESS in model.metrics for model in shared):
        add("global attack\nsuccess", _means(shared, ATTACK_SUCCESS), ATTACK_SUCCESS)
    if any(novel):
        add("novel", _of(novel, "mean"))
        add_rounds("its\nround", novel)
    if any(row.before for row in rows):
        add("before", [row.before for row in rows], is_marked=False)
    cells = [*zip(*columns, strict=True), *_majority_cells(comparison, len(header))]
    title = f"Test {metric}{unit_of(metric)}, the best first"
    if len({row.group for row in rows}) > 1:
        title += "; runs with other clients are ranked apart"
    return TextTable(title, header, cells, frozenset(best))


def _majority_cells(comparison: Table, columns: int) -> Iterator[list[str]]:
    several = len(comparison.majority_class) > 1
    for one in comparison.majority_class:
        values = (one.mean, one.weighted, one.std, one.bottom_decile, one.worst)
        texts = [f"majority class ({one.run_name})" if several else "majority class"]
        texts += [_cell(v, 100, 1, seeds=v is one.mean or v is one.weighted) for v in values]
        yield texts + ["-"] * (columns - len(texts))


def _of(models: Sequence[ModelResult | None], name: str) -> list[Spread | None]:
    return [getattr(model, name, None) for model in models]


def _means(models: Sequence[ModelResult | None], by: Metric) -> list[Spread | None]:
    if by == "accuracy":
        return _of(models, by)
    return [None if model is None else model.metrics.get(by) for model in models]


def _best(rows: Sequence[Row], values: Sequence[Spread | None], by: Metric) -> Iterator[int]:
    """The places of the best values in each group; none where all of a group are alike."""
    sign = 1 if higher_is_better(by) else -1
    for group in {row.group for row in rows}:
        means = {
            place: sign * value.mean
            for place, (row, value) in enumerate(zip(rows, values, strict=True))
            if row.group == group and value is not None and not math.isnan(value.mean)
        }
        best = [place for place, mean in means.items() if mean == max(means.values())]
        yield from best if len(best) < len(means) else ()


def _other_metrics(shown: Metric, results: Sequence[ModelResult]) -> list[Metric]:
    names = dict.fromkeys(name for result in results for name in result.metrics)
    has_hits = any(not math.isnan(result.accuracy.mean) for result in results)
    accuracy = ["accuracy"] if has_hits and shown != "accuracy" else []
    return [*accuracy, *(name for name in names if name != shown)]


def _costs(comparison: Table) -> TextTable:
    def seconds(value: float | None) -> str:
        return "-" if value is None else seconds_text(value)

    rows = ranked(comparison)
    columns: dict[str, list[str]] = {
        "method": [row.label for row in rows],
        "down": [si(row.bytes_down, "B") for row in rows],
        "up": [si(row.bytes_up, "B") for row in rows],
        "trained": [si(row.trained) for row in rows],
        "communicated": [si(row.communicated) for row in rows],
        "private": [si(row.private) for row in rows],
        "seconds": [seconds(row.seconds) for row in rows],
        "processor\nseconds": [seconds(row.cpu_seconds) for row in rows],
        "simulated\nseconds": [seconds(row.simulated_seconds) for row in rows],
        "epsilon": ["-" if row.epsilon is None else f"{row.epsilon:.4g}" for row in rows],
    }
    for name in ("processor\nseconds", "simulated\nseconds", "epsilon"):
        if all(cell == "-" for cell in columns[name]):
            del columns[name]
    title = "Cost: bytes per client and round, parameters per client, seconds of the whole training"
    return TextTable(title, list(columns), list(zip(*columns.values(), strict=True)))


def text_tables(comparison: Table) -> list[TextTable]:
    """Format the results, those of named clients, and the costs."""
    clients = client_tables(comparison.clients, comparison.metric)
    return [_results(comparison), *clients, _costs(comparison)]
