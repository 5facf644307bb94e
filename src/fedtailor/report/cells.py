"""The comparison as formatted cells: for a terminal, and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

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


def _majority_cells(comparison: Table, columns: int) -> list[list[str]]:
    several = len(comparison.majority_class) > 1
    cells = []
    for one in comparison.majority_class:
        values = (one.mean, one.weighted, one.std, one.bottom_decile, one.worst)
        texts = [f"majority class ({one.run_name})" if several else "majority class"]
        texts += [_cell(v, 100, 1, seeds=v is one.mean or v is one.weighted) for v in values]
        cells.append(texts + ["-"] * (columns - len(texts)))
    return cells


_Column = tuple[str, Callable[[Row], str], Callable[[Row], Spread | None] | None, bool]


def _columns(comparison: Table) -> Iterator[_Column]:
    """Yield the columns after the first: a title, the text of a row's cell, the value by which the
    best cell is marked (None: no cell is), and whether higher values are better."""
    metric, rows = comparison.metric, comparison.rows
    results = [row.personal_model for row in rows if row.personal_model is not None]
    is_lm = any(result.perplexity is not None for result in results)

    def of(
        title: str,
        value: str = "",  # of a model's result; the mean of the metric ``by``
        model: str = "personal_model",
        *,
        by: Metric = metric,
        form: tuple[float, int] | None = None,
        seeds: bool = True,
        is_marked: bool = True,
    ) -> _Column:
        def spread(row: Row) -> Spread | None:
            result: ModelResult | None = getattr(row, model)
            if result is None:
                return None
            if value:
                found: Spread | None = getattr(result, value)
                return found
            return result.accuracy if by == "accuracy" else result.metrics.get(by)

        def text(row: Row) -> str:
            return _cell(spread(row), *(form or scale_of(by)), seeds=seeds)

        return title, text, spread if is_marked else None, higher_is_better(by)

    def rounds(model: str, title: str = "its\nround") -> _Column:
        return title, lambda row: _rounds(getattr(row, model)), None, True

    yield of(metric, "mean")
    yield of("weighted", "weighted", seeds=not is_lm)
    yield of("std", "std", seeds=False, is_marked=False)
    yield of("decile", "bottom_decile", seeds=False)
    yield of("worst", "worst", seeds=False)
    if is_lm:
        yield of("ppl", "perplexity", form=(1, 1), seeds=False)
        yield of("token\nacc. %", by="accuracy")
    for name in _other_metrics(metric, results):
        if not (is_lm and name == "accuracy"):
            yield of(name, by=name, is_marked=name not in TUNED)
    if any(row.validation is not None for row in rows):
        by = comparison.chosen_by
        title = "valida-\ntion" if is_lm else "validation"
        yield (
            title if by == metric else f"{title}\n{by}",
            lambda row: _cell(row.validation, *scale_of(by), seeds=not is_lm),
            lambda row: row.validation,
            higher_is_better(by),
        )
    yield rounds("personal_model", "round")
    yield of("global", "mean", "global_model", seeds=not is_lm)
    yield rounds("global_model")
    if any(row.global_model and ATTACK_SUCCESS in row.global_model.metrics for row in rows):
        yield of("global attack\nsuccess", model="global_model", by=ATTACK_SUCCESS)
    if any(row.novel_clients for row in rows):
        yield of("novel", "mean", "novel_clients")
        yield rounds("novel_clients")
    if any(row.before for row in rows):
        yield "before", lambda row: _cell(row.before, *scale_of(metric)), None, True


def _best(values: Sequence[Spread | None], *, is_higher_better: bool) -> set[int]:
    sign = 1 if is_higher_better else -1
    means = {
        position: sign * value.mean
        for position, value in enumerate(values)
        if value is not None and not math.isnan(value.mean)
    }
    top = max(means.values(), default=0.0)
    best = {k for k, value in means.items() if value == top}
    return best if len(best) < len(means) else set()


def _results(comparison: Table) -> TextTable:
    rows, columns = ranked(comparison), list(_columns(comparison))
    header = ["method", *(title for title, *_ in columns)]
    cells = [[_name(row), *(text(row) for _, text, _, _ in columns)] for row in rows]
    cells += _majority_cells(comparison, len(header))
    groups = {row.group for row in rows}
    best = frozenset(
        (position, column)
        for column, (_, _, value, higher) in enumerate(columns, start=1)
        if value is not None
        for group in groups
        for position in _best(
            [value(row) if row.group == group else None for row in rows], is_higher_better=higher
        )
    )
    title = f"Test {comparison.metric}{unit_of(comparison.metric)}, the best first"
    if len(groups) > 1:
        title += "; runs with other clients are ranked apart"
    return TextTable(title, header, cells, best)


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
