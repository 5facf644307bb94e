"""Figures of single methods: what they learn, drawn from their diagnostics.

What is drawn of each client and round is in ``charts/pictures.py``. In pFedGate's figures a *block*
is a block of parameters that a gate keeps or drops, the paper's word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..drawing import Drawing
from ..select import Entry
from . import fedhft, fedsq, pfedgate

FIGURES: Mapping[str, tuple[Callable[[Entry], Drawing | None], ...]] = {
    "fedhft": (fedhft.kept_rows,),
    "pfedgate": (pfedgate.clustering, pfedgate.gates_by_round),
    "fedsq": (fedsq.rounds_to_best, fedsq.mask_agreement),
}
