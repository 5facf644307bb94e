"""Methods on tasks of natural instructions, a client a task: a section of docs/results.md.

    python -m evidence.instructions

Its numbers stand in results.jsonl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from fedtailor.report.paired import paired

from .markdown import markdown_table
from .run import HERE, PAPERS, lines, planned

PAGE = HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- instructions: evidence/instructions.py -->", "<!-- end of instructions -->"
FILE = "papers/fedmerge/tasks.toml"
ALONE = "local"

Scores = Mapping[str, float | None]  # by client
Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by method and seed


def found() -> Results:
    """The results of the file's own settings, in the order of the manifest."""
    kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
    results: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in planned([PAPERS]):
        line = kept.get((run.file, run.settings, run.method, run.seed))
        if run.file == FILE and not run.settings and line is not None and "results" in line:
            results.setdefault(run.method, {})[run.seed] = line["results"]
    return results


def table(results: Results) -> str:
    """A row a method, those that write best first."""
    rows = []
    for method, seeds in results.items():
        loss = [[x for x in one["personal"]["loss"] if x is not None] for one in seeds.values()]
        rouge, own = (
            [[x for x in one["written"][name] if x is not None] for one in seeds.values()]
            for name in ("rouge1", "own_metric")
        )
        rows.append([
            method, len(seeds), f"{math.exp(mean(map(mean, loss))):.2f}",
            "" if method == ALONE else _against_alone(results, method),
            100 * mean(map(mean, rouge)), f"{100 * mean(map(_lower_half, rouge)):.1f}",
            f"{100 * mean(map(mean, own)):.1f}",
        ])  # fmt: skip
    rows.sort(key=lambda row: -row[4])
    rows = [[*row[:4], f"{row[4]:.1f}", *row[5:]] for row in rows]
    header = ["method", "seeds", "perplexity", "nats over local", "ROUGE-1", "lower half", "own"]
    return markdown_table(header, rows)


def _against_alone(results: Results, method: str) -> str:
    seeds = [seed for seed in results[method] if seed in results[ALONE]]
    ours, alone = ([_losses(results[one][seed]) for seed in seeds] for one in (method, ALONE))
    lead = paired(alone, ours)
    return f"{-lead.difference:+.3f} [{-lead.high:+.3f}, {-lead.low:+.3f}]"


def _losses(result: Mapping[str, Any]) -> Scores:
    of = result["personal"]
    return dict(zip(map(str, of["clients"]), of["loss"], strict=True))


def _lower_half(scores: Sequence[float]) -> float:
    return mean(sorted(scores)[: (len(scores) + 1) // 2])


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    between = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(between.sub(f"{BEGIN}\n{table(found())}\n{END}", text))


if __name__ == "__main__":
    main()
