"""What the papers claim beside what our runs say: docs/claims.md.

    python -m evidence.claims                       # write the page
    python -m evidence.claims fedsq-4               # a row's commands
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
from pathlib import Path
from typing import Any

import fedtailor as ft
from fedtailor.report.names import in_prose
from fedtailor.runs.manifest import open_run

from .accounting import command as count_command
from .map_tuning import end_of
from .markdown import markdown_table
from .rates import trials
from .run import HERE, line_in, lines
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
        ended = (line_in(place, experiment, run) for run in runs(claim))
        found += [line for line in ended if line is not None]
    kept = Results(found)
    if runs(claim) and not kept.seeds(claim):
        where = f"no runs of {claim['id']} are in {', '.join(map(str, places))}"
        if found:
            where = f"{where} (only of {', '.join(sorted({line['method'] for line in found}))})"
        raise ft.InputError(f"{where}; its command is: {' and '.join(commands(claim))}")
    return outcome(claim, kept)


HEAD = """# What the papers claim

Do the claims of this library's five main papers hold here, with smaller networks and fewer
examples? Compare which method is ahead, not the numbers.

COUNTS

Rows with \\* ask what the paper does not, and are not counted.
[`python -m evidence.claims fedsq-4`](evidence.md#the-papers-claims) prints a row's commands.

## How to read the tables

- **the paper**: its number and where it stands. A place alone: the text has no number.
- **ours**: test accuracies (of spans the F1) of each client's own model, in percent, at the round
  that validation chose, the mean over clients, then over seeds: A against B in the order of the
  claim, then A minus B with its 95 % interval over clients and seeds, or each seed's difference.
  "±" is the standard deviation over seeds. Rounds are those to the lower of the two best validation
  accuracies. Of three seeds, but †: one, ‡: two.
- **what differs** from the paper, beside the sentence above the table.

| what is compared | the claim holds if |
|---|---|
| two methods | the interval lies above 0; "within N points": above -N; "within ± N points": in it |
| one value a seed (decile, rounds) | the difference favours the method with every seed |
| two gains | the first interval lies above the second |
| a number | it is within a tolerance of the paper's, or reaches a bound (in brackets) |

It **holds in direction** if only the mean difference is as claimed, or with one seed alone; a
number, if it is within twice the tolerance or beyond a weaker bound. **Not here**: neither, or the
method diverged. Where the interval contains 0 our data cannot tell.

Rates are chosen on validation data by [trials](evidence.md#trials); `papers/fedsq` has the paper's.
Some methods have the rate of one that is like them, and may look worse than they are: FedAvg + FT,
Ditto, FedALT, IFCA, FedEM, FedLoRA, pFedMoE in `papers/fedmerge/weights`, and every variant
of a method. ENDS
"""


def page(found: Sequence[Line]) -> str:
    """The whole of docs/claims.md."""
    results = Results(found)
    outcomes = {claim["id"]: outcome(claim, results) for claim in claims()}
    parts = [HEAD.replace("ENDS", _ends()).replace("COUNTS", _counts(outcomes)).rstrip()]
    for paper, note in notes().items():
        of = [_row(claim, outcomes[claim["id"]]) for claim in claims() if claim["paper"] == paper]
        parts += ["", f"## {paper}", "", note, "", _COLUMNS, *of]
    parts += ["", "## What was not run here", ""]
    parts += [f"- **{paper}:** {what}" for paper, what in not_run().items()]
    return "\n".join(parts) + "\n"


def _ends() -> str:
    """The methods whose best rate is the smallest or the largest one tried, in the experiments of
    the papers."""
    said: dict[str, None] = {}  # a dict keeps the order
    for (file, _, label), tried in trials().items():
        if file.startswith("papers/") and (end := end_of(tried)):
            where = f"`{file.removesuffix('.toml')}`"
            all_of = f"all methods in {where} (two were tried)"
            said[all_of if len(tried) == 2 else f"`{label}` in {where} ({end})"] = None
    if not said:
        return "Each best rate lies between others that were tried."
    return f"A better rate may lie beyond those that were tried for {in_prose([*said])}."


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    papers = Counter(
        (claim["paper"], outcomes[claim["id"]].verdict)
        for claim in claims()
        if not claim.get("own")
    )
    rows = [[paper, *(papers[paper, v] for v in VERDICTS)] for paper in notes()]
    return markdown_table(["", *VERDICTS], rows)


_COLUMNS = "| | claim | the paper | ours | verdict | what differs |\n" + "|---" * 6 + "|"


_FEW = {1: "†", 2: "‡"}  # of seeds; the others have all


def _row(claim: Claim, found: Outcome) -> str:
    number, where, done = claim["number"], claim["where"], len(found.seeds)
    few = _FEW.get(done, "") if runs(claim) else ""
    cells = [
        claim["id"],
        claim["claim"] + (" \\*" if claim.get("own") else ""),
        where if number == "no number" else f"{number} ({where})" if where else number,
        ", ".join(filter(None, [found.ours, found.spread])) + few,
        found.verdict + (f" ({bound(claim)})" if bound(claim) else ""),
        claim["differs"],
    ]
    return f"| {' | '.join(cells)} |"


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
    claim, kept = by_name[options.row], Results(lines())
    page_says = outcome(claim, kept)
    print(f"{claim['id']}: {claim['claim']}")
    if runs(claim) and not options.runs:
        print("\n".join([*commands(claim, page_says.seeds), f"page: {_as_text(page_says)}"]))
        return
    try:
        again = repeated(claim, options.runs)
    except ft.InputError as error:
        parser.error(str(error))
    print(f"here: {_as_text(again)}\npage: {_as_text(page_says)}")
    if again.seeds:
        same = {**claim, "seeds": list(again.seeds)}
        print(f"page, of these seeds: {_as_text(outcome(same, kept))}")


def _as_text(found: Outcome) -> str:
    seeds = f"seeds {', '.join(map(str, found.seeds))}" if found.seeds else ""
    return "; ".join(part for part in (found.ours, found.spread, found.verdict, seeds) if part)


if __name__ == "__main__":
    main()
