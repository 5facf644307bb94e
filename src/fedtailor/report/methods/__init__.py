"""Figures of what single methods learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..drawing import Drawing
from ..select import Entry
from . import fedhft, fedmerge, fedsdg, fedsq, pfedgate

FIGURES: Mapping[str, tuple[Callable[[Entry], Drawing | None], ...]] = {
    "fedsdg": (fedsdg.gate_heat_map,),
    "fedhft": (fedhft.assignments, fedhft.kept_rows),
    "fedmerge": (fedmerge.weight_heat_map,),
    "pfedgate": (pfedgate.clustering, pfedgate.gates_by_round),
    "fedsq": (fedsq.rounds_to_best, fedsq.mask_agreement),
}
