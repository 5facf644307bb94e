"""What runs say to a claim: by one rule for each kind of claim.

A claim is a table of claims.toml; a line is one of results.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from fedtailor.store.metrics import summarise

from .accounting import FUNCTIONS
from .paired import Paired, paired
from .run import Run

HOLDS, DIRECTION, NOT_HERE, NOT_RUN = "holds", "holds in direction", "not here", "not run"
VERDICTS = (HOLDS, DIRECTION, NOT_HERE, NOT_RUN)

Line = Mapping[str, Any]  # of results.jsonl
Claim = Mapping[str, Any]  # of claims.toml


@dataclass(frozen=True)
class Outcome:
    """What our runs say to a claim."""

    ours: str
    spread: str
    verdict: str
    seeds: Sequence[int] = ()


def runs(claim: Claim) -> list[Run]:
    """The runs that answer a claim."""
    return [
        Run(claim["file"], _settings(claim, side, key), claim[side], seed)
        for key in ("set", "than_set")
        if key == "set" or key in claim
        for seed in claim.get("seeds", ())
        for side in ("ours", "theirs")
        if side in claim
    ]


def _settings(claim: Claim, side: str, key: str = "set") -> tuple[str, ...]:
    """The settings of one side of a claim: both sides have the same, unless ``theirs_set`` says
    what the other side's are."""
    key = "theirs_set" if side == "theirs" and "theirs_set" in claim else key
    return tuple(claim.get(key, ()))


class Results:
    """The lines of results by run."""

    def __init__(self, found: Sequence[Line]) -> None:
        self._lines = {
            Run(line["file"], tuple(line["set"]), line["method"], line["seed"]): line
            for line in found
        }

    def seeds(self, claim: Claim) -> list[int]:
        """The seeds of which all runs have a line."""
        missing = {run.seed for run in runs(claim) if run not in self._lines}
        return [seed for seed in claim["seeds"] if seed not in missing]

    def diverged(self, claim: Claim, side: str) -> list[int]:
        """The seeds with which one side of a claim diverged."""
        keys = ("set", "than_set") if "than_set" in claim else ("set",)
        lines = [line for key in keys if side in claim for line in self.of(claim, side, key)]
        return sorted({line["seed"] for line in lines if "failed" in line})

    def of(self, claim: Claim, side: str, key: str = "set") -> list[Line]:
        """The lines of one side of a claim, by seed."""
        settings = _settings(claim, side, key)
        return [
            self._lines[Run(claim["file"], settings, claim[side], seed)]
            for seed in self.seeds(claim)
        ]


def outcome(claim: Claim, results: Results) -> Outcome:
    """The verdict on a claim."""
    rule = claim["rule"]
    if rule == "count":
        value = FUNCTIONS[claim["function"]](**claim["arguments"])
        return Outcome(f"{_short(value)}{claim.get('unit', '')}", "exact", _judged(value, claim))
    seeds = results.seeds(claim)
    if not seeds:
        return Outcome("", "", NOT_RUN)
    if results.diverged(claim, "ours"):
        return Outcome(f"{claim['ours']} diverged", "", NOT_HERE, seeds)
    note = ""
    if left_out := results.diverged(claim, "theirs"):
        seeds = [seed for seed in seeds if seed not in left_out]
        note = f"{claim['theirs']} diverged with seed {', '.join(map(str, left_out))}"
        if not seeds:
            return Outcome(note, "", NOT_RUN)  # beside what diverged nothing is shown
        claim, note = {**claim, "seeds": seeds}, f"; {note}"
    found = RULES[rule](claim, results)
    verdict = found.verdict
    if verdict == HOLDS and len(seeds) == 1 and rule != "bytes":
        verdict = DIRECTION  # one seed proves little
    return Outcome(f"{found.ours}{note}", found.spread, verdict, seeds)


def _ahead(claim: Claim, results: Results) -> Outcome:
    difference, means = _compared(claim, results)
    verdict = _verdict(difference.low > 0, difference.difference > 0)
    return Outcome(means, _interval(difference), verdict)


def _lower(claim: Claim, results: Results) -> Outcome:
    """Of losses, in nats: how much lower ours are."""
    ours, theirs = (
        [_scores(line, claim) for line in results.of(claim, side)] for side in ("ours", "theirs")
    )
    less = paired(theirs, ours)
    means = [mean(mean(_values(by_client)) for by_client in side) for side in (ours, theirs)]
    interval = f"{-less.difference:+.3f} [{-less.high:+.3f}, {-less.low:+.3f}]"
    verdict = _verdict(less.low > 0, less.difference > 0)
    return Outcome(f"{means[0]:.3f} against {means[1]:.3f} nats", interval, verdict)


def _level(claim: Claim, results: Results) -> Outcome:
    difference, means = _compared(claim, results)
    margin = claim["margin"] / 100
    verdict = _verdict(difference.low > -margin, difference.difference > -margin)
    return Outcome(means, _interval(difference), verdict)


def _equal(claim: Claim, results: Results) -> Outcome:
    difference, means = _compared(claim, results)
    margin = claim["margin"] / 100
    is_inside = -margin < difference.low and difference.high < margin
    verdict = _verdict(is_inside, abs(difference.difference) < margin)
    return Outcome(means, _interval(difference), verdict)


def _gains_more(claim: Claim, results: Results) -> Outcome:
    here, _ = _compared(claim, results)
    there, _ = _compared(claim, results, "than_set")
    verdict = _verdict(here.low > there.high, here.difference > there.difference)
    gains = f"{100 * here.difference:+.1f} against {100 * there.difference:+.1f}"
    return Outcome(gains, f"{_limits(here)}; {_limits(there)}", verdict)


def _decile(claim: Claim, results: Results) -> Outcome:
    model = claim.get("model", "personal")
    ours, theirs = (
        [_bottom_decile(line["results"][model]) for line in results.of(claim, side)]
        for side in ("ours", "theirs")
    )
    return _by_seed(ours, theirs, 100, ".1f")


def _sooner(claim: Claim, results: Results) -> Outcome:
    reach = claim.get("reach", 1.0)
    ours, theirs = [], []
    pairs = zip(results.of(claim, "ours"), results.of(claim, "theirs"), strict=True)
    for pair in pairs:
        curves = [line["results"]["curve"] for line in pair]
        target = reach * min(max(curve.values()) for curve in curves)
        first = [min(int(r) for r, value in c.items() if value >= target) for c in curves]
        ours.append(-first[0])
        theirs.append(-first[1])
    return _by_seed(ours, theirs, -1, ".0f")


def _figure(claim: Claim, results: Results) -> Outcome:
    values = [FIGURES[claim["figure"]](line) for line in results.of(claim, "ours")]
    spread = f"± {_short(stdev(values))}" if len(values) > 1 else ""
    return Outcome(_short(mean(values)), spread, _judged(mean(values), claim))


def _bytes(claim: Claim, results: Results) -> Outcome:
    ours, theirs = (results.of(claim, side)[0]["results"] for side in ("ours", "theirs"))
    value = theirs[claim["figure"]] / ours[claim["figure"]]
    return Outcome(f"{_short(value)} times", "exact", _judged(value, claim))


RULES: Mapping[str, Callable[[Claim, Results], Outcome]] = {
    "ahead": _ahead,
    "lower": _lower,
    "level": _level,
    "equal": _equal,
    "gains more": _gains_more,
    "decile": _decile,
    "sooner": _sooner,
    "figure": _figure,
    "bytes": _bytes,
}


def _compared(claim: Claim, results: Results, key: str = "set") -> tuple[Paired, str]:
    """The paired difference of a claim's two methods, and their means."""
    scores = [
        [_scores(line, claim) for line in results.of(claim, side, key)]
        for side in ("ours", "theirs")
    ]
    means = [100 * mean(mean(_values(by_client)) for by_client in side) for side in scores]
    return paired(*scores), f"{means[0]:.1f} against {means[1]:.1f}"


def _scores(line: Line, claim: Claim) -> dict[str, float | None]:
    """The accuracy by client, of spans the F1; or the metric that the claim names."""
    found = line["results"][claim.get("model", "personal")]
    scores = found[claim.get("metric", line["results"].get("metric", "accuracy"))]
    return dict(zip(map(str, found["clients"]), scores, strict=True))


def _values(scores: Mapping[str, float | None]) -> list[float]:
    return [value for value in scores.values() if value is not None]


def _bottom_decile(found: Mapping[str, Any]) -> float:
    kept = summarise(found["accuracy"], found["num_examples"], higher_is_better=True)
    return kept.bottom_decile


def _by_seed(ours: Sequence[float], theirs: Sequence[float], factor: float, form: str) -> Outcome:
    """The verdict on numbers of which each seed has one; more is better."""
    differences = [x - y for x, y in zip(ours, theirs, strict=True)]
    verdict = _verdict(min(differences) > 0, mean(differences) > 0)
    means = " against ".join(format(factor * mean(side), form) for side in (ours, theirs))
    spread = ", ".join(format(factor * difference, "+" + form) for difference in differences)
    return Outcome(means, f"by seed {spread}", verdict)


def _verdict(holds: bool, goes_that_way: bool) -> str:
    return HOLDS if holds else DIRECTION if goes_that_way else NOT_HERE


def bound(claim: Claim) -> str:
    """What a number has to reach, in words; empty for a comparison."""
    if "near" in claim:
        return f"{claim['near']:g} ± {claim['tolerance']:g}"
    return next((f"{words} {claim[key]:g}" for key, words in _BOUNDS if key in claim), "")


_BOUNDS = (("at_least", "at least"), ("at_most", "at most"))


def _judged(value: float, claim: Claim) -> str:
    """The verdict on one number: by ``near`` and ``tolerance``, or by ``at_least`` or ``at_most``
    with ``beyond``, from where on the direction is right."""
    if "near" in claim:
        distance, tolerance = abs(value - claim["near"]), claim["tolerance"]
        return _verdict(distance <= tolerance, distance <= 2 * tolerance)
    sign = 1 if "at_least" in claim else -1
    bound = claim["at_least" if sign > 0 else "at_most"]
    return _verdict(sign * value >= sign * bound, sign * value > sign * claim["beyond"])


def same_cluster(line: Line) -> float:
    """FedMerge: the share of clients whose most similar row of weights, by cosine, is that of a
    client of the same cluster."""
    weights = np.array(line["results"]["weights"])
    split = line["settings"]["split"]
    clusters = np.repeat(np.arange(split["clusters"]), split["cluster_sizes"])
    rows = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    return float((clusters[cosines.argmax(axis=1)] == clusters).mean())


def gates_by_block(line: Line) -> float:
    """FedSDG: the range over blocks of the gates' mean over clients."""
    return float(np.ptp(np.array(line["results"]["gates"]).mean(axis=0)))


def last_gate(line: Line) -> float:
    """FedSDG: the mean gate of the last block minus that of the others."""
    by_block = np.array(line["results"]["gates"]).mean(axis=0)
    return float(by_block[-1] - by_block[:-1].mean())


FIGURES: Mapping[str, Callable[[Line], float]] = {
    "same_cluster": same_cluster,
    "gates_by_block": gates_by_block,
    "last_gate": last_gate,
    "sparsity": lambda line: float(line["results"]["sparsity"]),
    "like_layers": lambda line: float(line["results"]["like_layers"]),
}


def _interval(found: Paired) -> str:
    return f"{100 * found.difference:+.1f} {_limits(found)}"


def _limits(found: Paired) -> str:
    return f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def _short(value: float) -> str:
    """Three digits."""
    if not value:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
