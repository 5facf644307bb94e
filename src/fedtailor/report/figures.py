"""The page's charts as files, from the same specifications: with all methods, after the last round.

A chart that the page shows for one method, or for the clients of one division, at a time gives a
file for each of them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..store.read import StrPath
from .charts.content import Json
from .drawing import converter, svg
from .page import compared
from .sections import Section, ahead, chart_specs, name_of, sections


def save_figures(paths: StrPath | Sequence[StrPath], folder: StrPath) -> list[Path]:
    """Write the charts of the runs at ``paths``, each as SVG, PNG and PDF; return their paths."""
    vl = converter()
    entries, comparison, groups, shown, _ = compared(paths)
    specs = chart_specs(comparison, shown)
    parts = [*ahead(comparison, shown), *sections(entries, comparison, shown, groups)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, chart, rows in _charts(parts, shown):
        spec = specs[chart]
        params = [
            one | {"value": shown["methods"]} if one["name"] == "shown" else one
            for one in spec["params"]
        ]
        text = svg(spec | {"datasets": rows, "params": params})
        for kind, content in (
            ("svg", text.encode()),
            ("png", vl.svg_to_png(text, scale=2)),
            ("pdf", vl.svg_to_pdf(text)),
        ):
            written.append(Path(folder) / f"{name}.{kind}")
            written[-1].write_bytes(content)
    return written


def _charts(
    parts: Sequence[Section], shown: Json
) -> Iterator[tuple[str, str, Mapping[str, list[Json]]]]:
    """Yield for each file its name, the chart in it, and the chart's data sets."""
    fixed = _fixed(shown)
    used: set[str] = set()
    for part in parts:
        choices = next((control.options for control in part.controls if control.options), [""])
        for chart in part.charts:
            several = len(part.charts) > 1 and not chart.startswith("picture")
            of_chart = chart.rpartition("-")[2] if several else ""
            for at, choice in enumerate(choices):
                rows = _rows_of(chart, at, shown)
                if rows is None and at:
                    break  # it is the same for all choices
                of_choice = "" if len(choices) == 1 else name_of(choice)
                name = "-".join(filter(None, (part.id, of_chart, of_choice)))
                while name in used:
                    name += "-2"
                used.add(name)
                yield name, chart, fixed if rows is None else rows


def _rows(columns: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> list[Json]:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [row | {"method": labels[row["method"]]} if "method" in row else row for row in rows]


def _fixed(shown: Json) -> dict[str, list[Json]]:
    found = {name: _rows(shown[name], shown["methods"])
             for name in ("curves", "boxes", "costs", "ahead", "results")}  # fmt: skip
    for k, row in enumerate(found["results"]):
        row["jitter"] = math.sin(2.4 * k)
    return found


def _rows_of(chart: str, at: int, shown: Json) -> Mapping[str, list[Json]] | None:
    """The data sets of a chart with a choice of its own; None for the others."""
    kind, _, method = chart.partition("-")
    if chart in ("labels", "sizes"):
        return {chart: (_labels if chart == "labels" else _sizes)(shown["groups"][at])}
    if chart == "confusion":
        return {chart: _confusion(shown["confusion"][at])}
    if kind == "picture":
        found = [one for one in shown["pictures"] if one["method"] == int(method)][at]
        return {"cells": _picture(found, shown["groups"][found["group"]])}
    return None


def _labels(group: Json) -> list[Json]:
    return [
        {"name": group["names"][k], "class": name, "count": count}
        for k in group["order"]
        for name, count in zip(group["classes"], group["labels"][k], strict=True)
    ]


def _sizes(group: Json) -> list[Json]:
    rows = zip(group["names"], group["train"], strict=True)
    return [{"name": name, "train": size} for name, size in sorted(rows, key=lambda row: -row[1])]


def _confusion(one: Json) -> list[Json]:
    return [
        {"true": true, "predicted": predicted, "share": 100 * count / (sum(counts) or 1)}
        for true, counts in zip(one["classes"], one["counts"], strict=True)
        for predicted, count in zip(one["classes"], counts, strict=True)
    ]


def _picture(picture: Json, group: Json) -> list[Json]:
    clients, columns = picture["clients"], picture["columns"]
    shape = len(picture["rounds"]), len(clients), len(columns)
    codes = np.frombuffer(base64.b64decode(picture["data"]), "<u2").reshape(shape)[-1]
    return [
        {
            "name": group["names"][client],
            "column": column,
            "place": k + 1,
            "value": picture["low"] + picture["step"] * code,
            "truth": group["clusters"][client] if group["clusters"] else None,
        }
        for k, client in enumerate(clients)
        for column, code in zip(columns, codes[k].tolist(), strict=True)
        if code != np.iinfo(np.uint16).max
    ]
