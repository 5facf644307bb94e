"""What the papers claim beside what our runs say: docs/claims.md.

    python -m evidence.claims

No number of the page is written by hand: the papers' numbers stand in claims.toml, ours in
results.jsonl or are counted.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from fedtailor.report.paired import Paired, paired

from .accounting import FUNCTIONS
from .accounting import command as count_command
from .markdown import markdown_table, on_one_line
from .run import HERE, Run, lines

CLAIMS = HERE / "claims.toml"
PAGE = HERE.parent / "docs" / "claims.md"

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


def claims() -> list[Claim]:
    """The claims, in the file's order."""
    content: list[Claim] = tomllib.loads(CLAIMS.read_text())["claims"]
    return content


def notes() -> dict[str, str]:
    """What the page says of each paper, above its claims; in the order of the page."""
    content: dict[str, str] = tomllib.loads(CLAIMS.read_text())["papers"]
    return content


def not_run() -> dict[str, str]:
    """What each paper measures and no claim here covers."""
    content: dict[str, str] = tomllib.loads(CLAIMS.read_text())["not-run"]
    return content


def runs(claim: Claim) -> list[Run]:
    """The runs that answer a claim."""
    methods = [claim[side] for side in ("ours", "theirs") if side in claim]
    settings = [claim.get(key, []) for key in ("set", "than_set") if key == "set" or key in claim]
    return [
        Run(claim["file"], tuple(chosen), method, seed)
        for chosen in settings
        for seed in claim.get("seeds", ())
        for method in methods
    ]


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
        settings = tuple(claim.get(key, ()))
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
    return Outcome(gains, f"{_interval(here)}; {_interval(there)}", verdict)


def _decile(claim: Claim, results: Results) -> Outcome:
    ours, theirs = (
        [_bottom_decile(line, claim) for line in results.of(claim, side)]
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
    """The accuracy by client."""
    found = line["results"][claim.get("model", "personal")]
    return dict(zip(map(str, found["clients"]), found["accuracy"], strict=True))


def _values(scores: Mapping[str, float | None]) -> list[float]:
    return [value for value in scores.values() if value is not None]


def _bottom_decile(line: Line, claim: Claim) -> float:
    """The accuracy of the client that a tenth of all, rounded down, are below."""
    values = sorted(_values(_scores(line, claim)))
    return values[len(values) // 10]


def _by_seed(ours: Sequence[float], theirs: Sequence[float], factor: float, form: str) -> Outcome:
    """The verdict on numbers of which each seed has one; more is better."""
    differences = [x - y for x, y in zip(ours, theirs, strict=True)]
    verdict = _verdict(min(differences) > 0, mean(differences) > 0)
    means = " against ".join(format(factor * mean(side), form) for side in (ours, theirs))
    spread = ", ".join(format(factor * difference, "+" + form) for difference in differences)
    return Outcome(means, f"by seed {spread}", verdict)


def _verdict(holds: bool, goes_that_way: bool) -> str:
    return HOLDS if holds else DIRECTION if goes_that_way else NOT_HERE


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


FIGURES: Mapping[str, Callable[[Line], float]] = {
    "same_cluster": same_cluster,
    "gates_by_block": gates_by_block,
    "sparsity": lambda line: float(line["results"]["sparsity"]),
    "like_layers": lambda line: float(line["results"]["like_layers"]),
}


def _interval(found: Paired) -> str:
    low, difference, high = (100 * x for x in (found.low, found.difference, found.high))
    return f"{difference:+.1f} ({low:+.1f} to {high:+.1f})"


def _short(value: float) -> str:
    """Three digits."""
    if not value:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def commands(claim: Claim, seeds: Sequence[int] = ()) -> list[str]:
    """What a reader types for a claim: with these ``seeds``, or with all that are planned."""
    if claim["rule"] == "count":
        return [count_command(claim["function"], claim["arguments"])]
    name = claim["file"].removesuffix(".toml")
    methods = list(dict.fromkeys(run.method for run in runs(claim)))
    lists = [("methods", methods), ("seeds", list(seeds) or claim["seeds"])]
    chosen = [f"{key}={json.dumps(values, separators=(',', ':'))}" for key, values in lists]
    settings = dict.fromkeys(run.settings for run in runs(claim))
    return [
        " ".join(
            [f"fedtailor run {name}", *(f"--set '{change}'" for change in [*changes, *chosen])]
        )
        for changes in settings
    ]


HEAD = """# What the papers claim

Five papers' systems are built in. This page puts what they claim beside what runs of this library
say. The data, the networks and the number of examples are smaller than the papers', so the papers'
numbers and ours cannot be equal; what can be compared is which method is ahead. `python -m
evidence.claims` writes this page from `evidence/claims.toml` and `evidence/results.jsonl`.

Accuracies are those of each client's own model on its own test examples, in percent, at the round
that validation chose: the mean over clients, then over seeds. The spread is a difference with its
interval, each seed's difference, or "±", the standard deviation over seeds.

A claim **holds** if this is so:

- two methods: the 95 % interval of their paired difference, over seeds and clients, lies above 0.
  Where *what differs* says "within one point", it lies above -1; where it says "one point on either
  side", between -1 and 1;
- one value a seed, such as the decile or a number of rounds: the difference favours the method with
  every seed;
- two gains: the first interval lies above the second;
- a measured number: its mean over seeds is within a tolerance of the paper's number, or reaches a
  bound. `evidence/claims.toml` has the tolerance or the bound of each;
- a number that is counted, without training or from the bytes of a round: the same. It is exact, so
  one seed is enough.

It **holds in direction** if only the mean difference is as claimed, if a number misses its bound
but goes the right way (or is within twice the tolerance), or if it holds with one seed alone.
**Not here**: neither is so, or the method in question diverged. Seeds with which the other method
diverged are left out, and named. **Not run**: no run has ended yet.

Rates are chosen on validation data by runs with a seed of their own, where
`evidence/manifest-papers.toml` has such trials ([how](evidence.md)). FedSQ, FedAvg and FedProx in
`papers/fedsq` have the paper's rate. Some baselines have the rate of a method that is like them,
and may look worse than they are: FedAvg + FT, Ditto, FedALT, IFCA, FedEM, pFedMoE and FedLoRA.
"""

REPEAT = """
## Repeat a row

A row's command needs [an installed fedtailor](start.md); FedSQ, FedMerge and pFedGate also need
`make fashion-mnist`. `python -m evidence...` needs a copy of the repository, with its environment
active. A command with `--dry-run` says how long it takes. It runs the row's methods with the row's
seeds; where *seeds* says 2 of 3, the third has not been run.

- *ours* is the column **accuracy** of the table that the command prints. The spread is in the
  verdict below it, or in `fedtailor compare RUN --against METHOD`. Differences are taken before
  rounding.
- Other numbers are worked out by a function of `evidence/claims.py` from what is in the run
  directory: rounds to an accuracy (`_sooner`), deciles (`_decile`), and the figures named in
  `FIGURES` (gates, sparsity, similar layers, clients of one cluster).
- Commands that differ in `methods` or `seeds` alone can share an `--out`: what is done is not run
  again. For other settings give another one.
- These runs had one process with one thread. On a CPU, `auto` and `processes` give the same bits;
  `sequential` does with `OMP_NUM_THREADS=1`. `vectorised`, a GPU, another processor and another
  version of PyTorch round otherwise. Then a client's accuracy may differ by an example or two.
"""


def page(found: Sequence[Line]) -> str:
    """The whole of docs/claims.md."""
    results = Results(found)
    outcomes = {claim["id"]: outcome(claim, results) for claim in claims()}
    parts = [HEAD, _counts(outcomes), REPEAT.rstrip()]
    for paper, note in notes().items():
        parts += ["", f"## {paper}", "", note, ""]
        parts += [
            "| | claim | the paper | ours | spread | verdict | what differs | seeds | command |"
        ]
        parts += ["|---|---|---|---|---|---|---|---|---|"]
        parts += [
            _row(claim, outcomes[claim["id"]]) for claim in claims() if claim["paper"] == paper
        ]
    parts += ["", "## What was not run here", ""]
    parts += [f"- **{paper}:** {what}" for paper, what in not_run().items()]
    return "\n".join(parts) + "\n"


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    papers = Counter((claim["paper"], outcomes[claim["id"]].verdict) for claim in claims())
    rows = [[paper, *(papers[paper, v] for v in VERDICTS)] for paper in notes()]
    return markdown_table(["", *VERDICTS], rows)


def _row(claim: Claim, found: Outcome) -> str:
    of = len(claim.get("seeds", ()))
    seeds = "none needed" if not of else f"{len(found.seeds)} of {of}"
    cells = [
        claim["id"],
        claim["claim"],
        f"{claim['number']} ({claim['where']})",
        found.ours,
        on_one_line(found.spread),
        found.verdict,
        claim["differs"],
        seeds,
        " and ".join(f"`{command}`" for command in commands(claim, found.seeds)),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(lines()))
