"""Charts of single methods, beside their maps: what they show, and their specifications.

In pFedGate's charts a *block* is a block of parameters that a gate keeps or drops, as in its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..select import Entry
from . import fedhft, pfedgate
from .content import Group, Json, columns_of
from .parts import Figure

_Build = Callable[[Sequence[Entry], int, Sequence[Group]], Figure | None]
_FIGURES: Mapping[str, Mapping[str, _Build]] = {  # by method and name of the figure
    "pfedgate": {"clustering": pfedgate.gating_layers, "gates-by-round": pfedgate.gates_by_round},
    "fedhft": {"kept-rows": fedhft.kept_rows},
}


def own_figures(entries: Sequence[Entry], of: Sequence[Group]) -> list[Json]:
    """Return what the page needs of each figure, with its method's position and its name."""
    found = []
    for position, entry in enumerate(entries):
        for name, build in _FIGURES.get(entry.method, {}).items():
            figure = build(entries, position, of)
            if figure is None:
                continue
            charts = [
                {
                    "name": f"own-{position}-{name}-{k}",
                    "spec": one.spec,
                    "data": {of: columns_of(rows) for of, rows in one.rows.items()},
                }
                for k, one in enumerate(figure.charts)
            ]
            found.append(
                {
                    "method": position,
                    "figure": name,
                    "title": figure.title,
                    "caption": figure.caption,
                    "rounds": list(figure.rounds),
                    "isStacked": figure.is_stacked,
                    "charts": charts,
                }
            )
    return found
