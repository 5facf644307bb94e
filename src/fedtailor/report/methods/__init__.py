"""Figures of what single methods learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..drawing import Drawing
from ..select import Entry
from . import fedsdg, fedsq, pfedgate

FIGURES: Mapping[str, tuple[Callable[[Entry], Drawing | None], ...]] = {
from . import fedhft, fedsdg

FIGURES: Mapping[str, tuple[Callable[[Entry], Drawing | None], ...]] = {
    "fedhft": (fedhft.assignments, fedhft.kept_rows),
    "fedsdg": (fedsdg.gate_heat_map,),
    "pfedgate": (pfedgate.clustering, pfedgate.gates_by_round),
    "fedsq": (fedsq.rounds_to_best, fedsq.mask_agreement),
}
