"""What the papers claim beside what our runs say: docs/claims.md.

    python -m evidence.claims

No number of the page is written by hand: the papers' numbers stand in claims.toml, ours in
results.jsonl or are counted.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence

from .accounting import command as count_command
from .markdown import markdown_table, on_one_line
from .run import HERE, lines
from .verdicts import VERDICTS, Claim, Line, Outcome, Results, outcome, runs

CLAIMS = HERE / "claims.toml"
PAGE = HERE.parent / "docs" / "claims.md"


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
- Other numbers are worked out by a function of `evidence/verdicts.py` from what is in the run
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
