"""Methods on instructions: a client a task, and a client a speaker. Two tables of docs/results.md.

    python -m evidence.instructions

Their numbers stand in results.jsonl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedtailor.objectives.objective import OWN_METRIC

from .markdown import markdown_table
from .paired import paired
from .run import HERE, PAPERS, Run, lines, planned

PAGE = HERE.parent / "docs" / "results.md"
ALONE = "local"

Scores = Mapping[str, float | None]  # by client
Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by method and seed


@dataclass(frozen=True)
class Table:
    """One experiment of the manifest. ``rouge`` is the metric of ``heading``; ``own`` is there
    where clients have metrics of their own."""

    name: str
    file: str
    data: str | None  # which the settings of its runs name; None: runs without settings
    rouge: str
    heading: str
    own: bool

    @property
    def runs(self) -> list[Run]:
        """Its runs, in the order of the manifest."""
        chosen = () if self.data is None else (f"data.path={self.data}",)
        return [
            run for run in planned([PAPERS])
            if run.file == self.file and run.settings[:1] == chosen
        ]  # fmt: skip

    def found(self) -> Results:
        """The results of those that have some."""
        kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
        results: dict[str, dict[int, Mapping[str, Any]]] = {}
        for run in self.runs:
            line = kept.get((run.file, run.settings, run.method, run.seed), {})
            if "results" in line:
                results.setdefault(run.method, {})[run.seed] = line["results"]
        return results

    def text(self, results: Results) -> str:
        """Between its marks, a row a method, those that write best first."""
        rows = []
        for method, seeds in results.items():
            loss = [[x for x in one["personal"]["loss"] if x is not None] for one in seeds.values()]
            rouge = _written(seeds.values(), self.rouge)
            own = _written(seeds.values(), OWN_METRIC) if self.own else []
            rows.append([
                method, len(seeds), f"{math.exp(mean(map(mean, loss))):.2f}",
                "" if method == ALONE else _against_alone(results, method),
                100 * mean(map(mean, rouge)), f"{100 * mean(map(_lower_half, rouge)):.1f}",
                *([f"{100 * mean(map(mean, own)):.1f}"] if self.own else []),
            ])  # fmt: skip
        rows.sort(key=lambda row: -row[4])
        rows = [[*row[:4], f"{row[4]:.1f}", *row[5:]] for row in rows]
        header = ["method", "seeds", "perplexity", "nats over local", self.heading, "lower half"]
        table = markdown_table([*header, *(["own"] if self.own else [])], rows)
        return f"<!-- {self.name}: evidence/instructions.py -->\n{table}\n{self.end}"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"


TASKS = Table("instructions", "papers/fedmerge/tasks.toml", None, "rouge1", "ROUGE-1", own=True)
ROLES = Table(
    "roles", "papers/fedmerge/personas.toml", "made/roles-train.jsonl", "rougeL", "ROUGE-L",
    own=False,
)  # fmt: skip
TABLES = (TASKS, ROLES)


def _written(results: Iterable[Mapping[str, Any]], name: str) -> list[list[float]]:
    """A metric by seed, of the clients that have it."""
    return [[x for x in one["written"][name] if x is not None] for one in results]


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
    """Write the tables into the page."""
    text = PAGE.read_text()
    for one in TABLES:
        new = one.text(one.found())
        begin = re.escape(new.partition("\n")[0])
        text = re.sub(
            f"{begin}\n.*?{re.escape(one.end)}", lambda _, new=new: new, text, flags=re.DOTALL
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
