"""The best round so far: the one that `report.select` will select, known while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..engine.results import Round
from ..engine.scoring import EvaluatedModel
from .metrics import Metric, best_round, summary
from .records import BestRound

_MODELS: tuple[EvaluatedModel, ...] = ("personal", "global")


def best_rounds(
    so_far: Mapping[str, BestRound], done: Round, metric: Metric
) -> dict[str, BestRound]:
    """The best round of each model, personal or global, once ``done`` is evaluated: the best on
    validation data, the earliest of equals; where no result there is a number, the last evaluated
    one.
    ``global_then``: the global model's as of the best round of the personal models, where it is
    another one."""
    best = dict(so_far)
    then = best.pop("global_then", best.get("global"))
    for model in _MODELS:
        splits = {e.split: e for e in done.evaluations if e.model == model and any(e.num_examples)}
        old = best.get(model)
        mean = summary(splits["validation"], metric).mean if "validation" in splits else math.nan
        if not math.isnan(mean):
            means = {done.number: mean}
            if old is not None and old.validation is not None:
                means[old.round] = old.validation
            if best_round(means, metric) == done.number:
                best[model] = BestRound(done.number, mean)
        elif splits and (old is None or old.validation is None):
            best[model] = BestRound(done.number, None)
    if best.get("personal") != so_far.get("personal"):
        then = best.get("global")
    if then is not None and then != best["global"]:
        best["global_then"] = then
    return best


def best_then(best: Mapping[str, BestRound]) -> dict[str, BestRound]:
    """What `best_rounds` had said as of the best round of the personal models."""
    then = {"personal": best["personal"], "global": best.get("global_then", best.get("global"))}
    return {model: about for model, about in then.items() if about is not None}
