"""Which model a new client keeps: the one that is best on its validation examples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..data.federation import Federation
from ..engine.joining import Candidate
from ..engine.scoring import SPLITS

MODELS = {  # as results name them, in the order in which equal ones are preferred
    "fitted": "fitted to the new client",
    "guess": "sent by the server, not fitted",
    "global": "the global model",
}

CandidateScores = Mapping[str, Mapping[str, Mapping[str, float | None]]]  # by model, split, metric
_FEW = 30  # validation examples: with fewer, one of them is more than three points


def choose(
    candidates: Mapping[str, Candidate],
    count: int,
    *,
    fits: bool,
    label: str,
    by_loss: bool = False,
    private: bool = False,
) -> tuple[str, str]:
    """The name of the best candidate on ``count`` validation examples, by hits or ``by_loss``, and
    the reason in words. Of equal ones the first of `fitted`, `guess`, `global` is taken.

    Without validation examples nothing speaks for the fitted one, so another one is kept, unless
    there is none but a guess with ``private`` tensors, which nobody has trained.
    """
    present = [name for name in MODELS if name in candidates]
    sums = {name: candidates[name].sums for name in present}
    if not fits:
        return present[-1], f"{label} keeps nothing by client, so there is nothing to fit"
    same = all(np.array_equal(found, sums["fitted"]) for found in sums.values())
    if "global" in present and same and sums["fitted"][:, 2].any():
        return "global", f"what {label} keeps by client does not change its predictions"
    if not sums["fitted"][0, 2]:
        note = "there are no validation examples to check the fitted model"
        if "global" in candidates:
            return "global", note
        if not private:
            return "guess", note
        return "fitted", f"{note}, but {label} has no other one that is trained"
    best = max(present, key=lambda name: _rank(sums[name][0], by_loss))
    few = ", too few to choose by with confidence" if count < _FEW else ""
    examples = "validation example" if count == 1 else f"{count} validation examples"
    note = f"the best of {len(present)} on its {examples}{few}"
    as_accurate = [name for name in present if sums[name][0, 1] == sums[best][0, 1]]
    if by_loss or len(as_accurate) == 1:
        return best, note
    return best, f"{note}; of equal accuracy, it has the lowest loss"


def _rank(sums: NDArray[np.float64], by_loss: bool) -> tuple[float, float]:
    loss, hits, _ = sums
    return 0.0 if by_loss else float(hits), -float(loss) if np.isfinite(loss) else -np.inf


def all_scores(
    federation: Federation, number: int, candidates: Mapping[str, Candidate]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """The scores of a new client's candidates, by accuracy, loss and the metric that chooses the
    round of the task, and of always its most frequent class, if there are classes."""
    scores, objective = {}, federation.dataset.objective
    # what a task tunes was chosen by each candidate for itself
    own = {objective.selects} & {*objective.metrics} if objective.tunes is None else set[str]()
    if federation.dataset.class_numbers is not None:
        scores["majority"] = _majority(federation, number)
    for name in reversed(MODELS):
        if name in candidates:
            by_split = zip(SPLITS, candidates[name].sums, strict=True)
            scores[name] = {split: _means(sums) for split, sums in by_split}
            for split, metrics in zip(SPLITS, candidates[name].metrics, strict=False):
                scores[name][split] |= {one: metrics[one] for one in own & metrics.keys()}
            if not objective.has_hits:
                scores[name] = {k: {**one, "accuracy": None} for k, one in scores[name].items()}
    return scores


def did_not_learn(scores: CandidateScores, kept: str) -> bool:
    """Whether the kept model is no better on test examples than the most frequent class."""
    most = scores["majority"]["test"]["accuracy"] if "majority" in scores else None
    reached = scores[kept]["test"]["accuracy"]
    return most is not None and reached is not None and reached <= most


def _majority(federation: Federation, number: int) -> dict[str, dict[str, float | None]]:
    labels = federation.dataset.class_numbers
    assert labels is not None
    most = np.bincount(labels[federation.rows(number, "train")]).argmax()
    hits = {split: labels[federation.rows(number, split)] == most for split in SPLITS}
    return {
        split: {
            "accuracy": float(hit.mean()) if len(hit) else None,
            "loss": None,
            "count": len(hit),
        }
        for split, hit in hits.items()
    }


def _means(sums: NDArray[np.float64]) -> dict[str, float | None]:
    loss, hits, count = sums.tolist()
    if not count:
        return {"accuracy": None, "loss": None, "count": 0}
    return {"accuracy": hits / count, "loss": loss / count, "count": count}
