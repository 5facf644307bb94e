"""What the papers claim beside what our runs say: docs/claims.md.

    python -m evidence.claims                       # write the page
    python -m evidence.claims fedsq-4 runs/rounds   # a row again, from runs of its command

No number of the page is written by hand: the papers' numbers stand in claims.toml, ours in
results.jsonl or are counted.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedtailor as ft
from fedtailor.runs.manifest import open_run
from fedtailor.store.format import has_commit
from fedtailor.store.logs import read_commit

from .accounting import command as count_command
from .map_tuning import end_of, filled
from .markdown import markdown_table, on_one_line
from .rates import trials
from .run import HERE, Run, lines, resolved, results
from .verdicts import VERDICTS, Claim, Line, Outcome, Results, bound, outcome, runs

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
    methods: dict[tuple[str, ...], dict[str, None]] = {}  # by settings; a dict keeps the order
    for run in runs(claim):
        methods.setdefault(run.settings, {})[run.method] = None
    return [
        " ".join(
            [
                f"fedtailor run {name}",
                *(f"--set '{change}'" for change in changes),
                f"--set 'methods={_listed(list(own))}'",
                f"--set 'seeds={_listed(list(seeds) or claim['seeds'])}'",
            ]
        )
        for changes, own in methods.items()
    ]


def _listed(values: Sequence[Any]) -> str:
    """A list as TOML, without spaces."""
    return json.dumps(values, separators=(",", ":"))


def repeated(claim: Claim, places: Sequence[Path]) -> Outcome:
    """What run directories say to a claim. What is of other settings in them is left out, and so is
    what has not ended.

    Raises:
        InputError: there is no such directory, or none of the claim's runs is in it.
    """
    found: list[Line] = []
    for place in places:
        experiment = open_run(place)
        for run in runs(claim):
            if run.method not in experiment.methods or run.seed not in experiment.seeds:
                continue
            methods = {run.method: experiment.methods[run.method]}
            own = replace(experiment, methods=methods, seeds=(run.seed,))
            if resolved(own) == resolved(run.experiment()):
                found += _lines(run, place, own)
    kept = Results(found)
    if runs(claim) and not kept.seeds(claim):
        where = f"no runs of {claim['id']} are in {', '.join(map(str, places))}"
        if found:
            where = f"{where} (only of {', '.join(sorted({line['method'] for line in found}))})"
        if not places:
            where = f"{claim['id']} needs run directories"
        raise ft.InputError(f"{where}; its command is: {' and '.join(commands(claim))}")
    return outcome(claim, kept)


def _lines(run: Run, place: Path, experiment: ft.Experiment) -> list[Line]:
    """A run's line, from its run directory; none if it has not ended."""
    folder = place / "methods" / run.method / f"seed-{run.seed}"
    commit = read_commit(folder) if has_commit(folder) else None
    line: dict[str, Any] = {
        "file": run.file, "set": list(run.settings), "method": run.method, "seed": run.seed,
        "settings": resolved(experiment),
    }  # fmt: skip
    if commit is not None and commit.diverged is not None:
        return [line | {"failed": commit.diverged}]
    if commit is None or not commit.finished:
        return []
    return [line | {"results": results(place, (run.method, run.seed))}]


HEAD = """# What the papers claim

The methods of five papers are at the centre of this library. This page puts what the papers claim
beside what our runs say. The data, the networks and the number of examples are smaller than the
papers', so the papers' numbers and ours cannot be equal; what can be compared is which method is
ahead. `python -m evidence.claims` writes this page from `evidence/claims.toml` and
`evidence/results.jsonl`.

Accuracies are those of each client's own model on its own test examples, in percent, at the round
that validation chose: the mean over clients, then over seeds. The spread is a difference with its
interval, each seed's difference, or "±", the standard deviation over seeds. "A against B" has the
methods in the order of the claim, and a difference is A minus B. Of rounds fewer are better.
Training alone trains every client equally often, also where a round has a part of the clients
([how](methods/local.md#what-it-does)).

A claim **holds** if this is so:

- two methods: the 95 % interval of their paired difference, over seeds and clients, lies above 0.
  Where *what differs* says "within N points", it lies above -N; where it says "within N points on
  either side", between -N and N;
- one value a seed, such as the decile or a number of rounds: the difference favours the method with
  every seed;
- two gains: the first interval lies above the second;
- a measured number: its mean over seeds is within a tolerance of the paper's number, or reaches a
  bound; the verdict names it;
- a number that is counted, without training or from the bytes of a round: the same. It is exact, so
  one seed is enough.

It **holds in direction** if only the mean difference is as claimed, or if it holds with one seed
alone. A number does so if it is within twice the tolerance, or beyond a second, weaker bound
(`beyond` in `evidence/claims.toml`). Where the paper gives no number, the bounds are ours. **Not
here**: neither is so, or the method in question diverged. This does not refute the claim by itself:
where the interval contains 0 our data cannot tell, and a row with one seed says little. Seeds with
which the other method diverged are left out, and named. **Not run**: no seed has all its runs yet.

Rates are chosen on validation data by runs with a seed of their own, where
`evidence/manifest-papers.toml` has such trials ([how](evidence.md)). FedSQ, FedAvg and FedProx in
`papers/fedsq` have the paper's rate. Some methods have the rate of one that is like them, and may
look worse than they are: FedAvg + FT, Ditto, FedALT, IFCA, FedEM, FedLoRA, pFedMoE outside of
`papers/fedmerge/domains`, and every variant of a method, for example FedSDG with its gates fixed.
ENDS

Rows marked *our question* ask what the paper does not ask. They are not counted here:
"""

REPEAT = """
## Repeat a row

A row's command needs [an installed fedtailor](start.md); FedSQ, FedMerge and pFedGate also need
`make fashion-mnist`. `python -m evidence...` needs a copy of the repository, with its environment
active. A command with `--dry-run` says how long it takes. It runs the row's methods with the row's
seeds; where *seeds* says 2 of 3, the third has not been run.

- `python -m evidence.claims ROW RUN...` prints the row again, from the run directories that its
  command wrote: `python -m evidence.claims fedsq-4 runs/fedsq-rounds`. It leaves out what is of
  other settings.
- In the table that the command itself prints, *ours* is the column **accuracy**. The spread is in
  the verdict below it, or in `fedtailor compare RUN --against METHOD`. Differences are taken before
  rounding. Other numbers, such as rounds to an accuracy, deciles and gates, are worked out in
  `evidence/verdicts.py`.
- Commands that differ in `methods` or `seeds` alone can share an `--out`: what is done is not run
  again. For other settings give another one.
- These runs had one process with one thread. With `OMP_NUM_THREADS=1` the executors `auto`,
  `processes` and `sequential` give the same bits on a CPU. `vectorised`, a GPU, another
  processor and another version of PyTorch round otherwise. Then a client's accuracy may
  differ by an example or two.
"""


def page(found: Sequence[Line]) -> str:
    """The whole of docs/claims.md."""
    results = Results(found)
    outcomes = {claim["id"]: outcome(claim, results) for claim in claims()}
    parts = [HEAD.replace("ENDS", _ends()), _counts(outcomes), REPEAT.rstrip()]
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


def _ends() -> str:
    """The methods whose best rate is the smallest or the largest one tried, in the experiments of
    the papers."""
    said = [
        f"`{label}` in `{file.removesuffix('.toml')}` ({end})"
        for (file, _, label), tried in trials().items()
        if file.startswith("papers/") and (end := end_of(tried))
    ]
    if not said:
        return "Each best rate lies between others that were tried."
    text = f"A better rate may lie beyond those that were tried for {', '.join(said)}."
    return filled(text)


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    papers = Counter(
        (claim["paper"], outcomes[claim["id"]].verdict)
        for claim in claims()
        if not claim.get("own")
    )
    rows = [[paper, *(papers[paper, v] for v in VERDICTS)] for paper in notes()]
    return markdown_table(["", *VERDICTS], rows)


def _row(claim: Claim, found: Outcome) -> str:
    of = len(claim.get("seeds", ()))
    seeds = "none needed" if not of else f"{len(found.seeds)} of {of}"
    cells = [
        claim["id"],
        claim["claim"] + (" (our question)" if claim.get("own") else ""),
        f"{claim['number']} ({claim['where']})",
        found.ours,
        on_one_line(found.spread),
        found.verdict + (f" ({bound(claim)})" if bound(claim) else ""),
        claim["differs"],
        seeds,
        " and ".join(f"`{command}`" for command in commands(claim, found.seeds)),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Write the page, or print a row again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="?", help="the name of a row of docs/claims.md")
    parser.add_argument("runs", nargs="*", type=Path, help="run directories of its commands")
    options = parser.parse_args()
    if options.row is None:
        PAGE.write_text(page(lines()))
        return
    by_name = {claim["id"]: claim for claim in claims()}
    if options.row not in by_name:
        parser.error(f"no row {options.row!r} in docs/claims.md")
    claim = by_name[options.row]
    try:
        again = repeated(claim, options.runs)
    except ft.InputError as error:
        parser.error(str(error))
    kept = Results(lines())
    print(f"{claim['id']}: {claim['claim']}")
    print(f"here: {_as_text(again)}\npage: {_as_text(outcome(claim, kept))}")
    if again.seeds:
        same = {**claim, "seeds": list(again.seeds)}
        print(f"page, of these seeds: {_as_text(outcome(same, kept))}")


def _as_text(found: Outcome) -> str:
    seeds = f"seeds {', '.join(map(str, found.seeds))}" if found.seeds else ""
    return "; ".join(part for part in (found.ours, found.spread, found.verdict, seeds) if part)


if __name__ == "__main__":
    main()
