"""Live charts of single methods, beside their maps: what they show, and their specifications.

Each stands for a drawing of ``report/methods``, which the page shows without scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..select import Entry
from . import fedhft, fedsq, pfedgate
from .content import Group, Json
from .parts import Figure, Rows

_Build = Callable[[Sequence[Entry], int, Sequence[Group]], Figure | None]
_FIGURES: Mapping[str, Mapping[str, _Build]] = {  # by method and name of the drawing
    "pfedgate": {"clustering": pfedgate.gating_layers, "gates_by_round": pfedgate.gates_by_round},
    "fedhft": {"kept_rows": fedhft.sent_rows},
    "fedsq": {"rounds_to_best": fedsq.rounds_to_best, "mask_agreement": fedsq.by_activation},
}


def own_figures(entries: Sequence[Entry], of: Sequence[Group]) -> list[Json]:
    """Return what the page needs of each live figure, with its method's position and the name of
    the drawing for which it stands."""
    found = []
    for position, entry in enumerate(entries):
        for draw, build in _FIGURES.get(entry.method, {}).items():
            figure = build(entries, position, of)
            if figure is None:
                continue
            charts = [
                {
                    "name": f"own-{position}-{draw}-{k}",
                    "spec": one.spec,
                    "data": {name: _by_column(rows) for name, rows in one.rows.items()},
                }
                for k, one in enumerate(figure.charts)
            ]
            found.append(
                {
                    "method": position,
                    "drawing": draw,
                    "caption": figure.caption,
                    "rounds": list(figure.rounds),
                    "isStacked": figure.is_stacked,
                    "charts": charts,
                }
            )
    return found


def _by_column(rows: Rows) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns
