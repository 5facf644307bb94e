"""What attacks leave of each method, with and without a rule: docs/attacks.md.

    python -m evidence.attacks

No number of the page is written by hand: they stand in results.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

from tabulate import tabulate

import fedtailor as ft
from fedtailor.report.paired import Paired, paired
from fedtailor.robustness.rules import Robust

from .run import EXPERIMENTS, HERE, Run, digest, lines, planned, resolved

FILE = "attacks.toml"
MANIFEST = HERE / "manifest-attacks.toml"
PAGE = HERE.parent / "docs" / "attacks.md"

Scores = Mapping[str, float | None]  # by client


@dataclass(frozen=True)
class Outcome:
    """What one method came to under one attack, over seeds; ``clean`` are the scores of the same
    honest clients in the runs without an attack and without a rule."""

    scores: Sequence[Scores]
    clean: Sequence[Scores]

    @property
    def mean(self) -> float:
        """Over clients, then over seeds."""
        return mean(mean(v for v in one.values() if v is not None) for one in self.scores)

    @property
    def difference(self) -> Paired:
        """How far it is from the clean runs."""
        return paired(self.scores, self.clean)


class Results:
    """Lines of results by what decides them: a run of another file may be the same."""

    def __init__(self) -> None:
        self._lines = {line["digest"]: line for line in lines() if "results" in line}

    def outcome(self, runs: Sequence[Run], clean: Sequence[Run], model: str) -> Outcome | None:
        """The outcome of the seeds that have ended; None if there is none."""
        scores, beside = [], []
        for run, other in zip(runs, clean, strict=True):
            found = [self._lines.get(_digest(one)) for one in (run, other)]
            if all(line is not None and model in line["results"] for line in found):
                own, base = (_scores(line, model) for line in found if line is not None)
                scores.append(own)
                beside.append({client: base[client] for client in own})
        return Outcome(scores, beside) if scores else None


def _scores(line: Mapping[str, Any], model: str) -> Scores:
    found = line["results"][model]
    return dict(zip(map(str, found["clients"]), found["accuracy"], strict=True))


@cache
def _digest(run: Run) -> str:
    return digest(resolved(run.experiment()))


def undefended(run: Run) -> Run:
    """The run of the same method without a rule and without an attack."""
    chosen = run.experiment()
    wanted = replace(chosen.methods[run.method], robust=Robust())
    preset = next(one for one in run.settings if one.startswith("preset="))
    settings = (preset.removesuffix(",clean") + ",clean",)
    methods = ft.load(EXPERIMENTS / run.file, settings).methods
    label = next(label for label, method in methods.items() if method == wanted)
    return Run(run.file, settings, label, run.seed)


def defence(run: Run) -> str:
    """A method's rule in words."""
    robust = run.experiment().methods[run.method].robust
    steps = [*robust.before, *([robust.rule] if robust.rule != "none" else [])]
    return ", then ".join(steps) if steps else "none"


def attack(run: Run) -> str:
    """An attack in words."""
    found = run.experiment().attack
    if found.kind == "none":
        return "no attack"
    times = "" if found.strength is None else f" × {found.strength:g}"
    return f"{found.kind}{times}, {100 * found.fraction:.0f} %"


def page() -> str:
    """The page, as Markdown."""
    results, runs = Results(), planned([MANIFEST])
    presets = dict.fromkeys(_preset(run) for run in runs)
    parts = [_HEAD]
    for preset in presets:
        parts += [f"## {_TITLES[preset]}\n"]
        of = [run for run in runs if _preset(run) == preset]
        for model, title in _MODELS.items():
            rows = list(_rows(of, results, model))
            columns = list(dict.fromkeys(attack(run) for run in of))
            table = [[*row, *(found.get(name, "") for name in columns)] for row, found in rows]
            header = ["method", "rule", *columns]
            parts += [f"{title}\n", tabulate(table, headers=header, tablefmt="github") + "\n"]
        settings = dict.fromkeys(f"`fedtailor run attacks{_flags(run)}`" for run in of)
        parts += [*(f"- {command}" for command in settings), ""]
    return "\n".join(parts)


def _preset(run: Run) -> str:
    found = next(one for one in run.settings if one.startswith("preset="))
    return found.removeprefix("preset=").removesuffix(",clean")


def _flags(run: Run) -> str:
    return "".join(f" --set {setting}" for setting in run.settings)


def _rows(
    runs: Sequence[Run], results: Results, model: str
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """For each method its names and, by attack, its result."""
    for label in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == label]
        cells = {}
        for name in dict.fromkeys(attack(run) for run in own):
            of = [run for run in own if attack(run) == name]
            found = results.outcome(of, [undefended(run) for run in of], model)
            if found is not None:
                cells[name] = _cell(found, is_base=of[0] == undefended(of[0]))
        if cells:
            yield [undefended(own[0]).method, defence(own[0])], cells


def _cell(found: Outcome, *, is_base: bool) -> str:
    accuracy = f"{100 * found.mean:.1f}"
    if is_base:
        return accuracy
    low, middle, high = (100 * x for x in _interval(found.difference))
    return f"{accuracy} ({middle:+.1f}: {low:+.1f} to {high:+.1f})"


def _interval(found: Paired) -> tuple[float, float, float]:
    return found.low, found.difference, found.high


_MODELS = {
    "personal": "Accuracy of the personal models:",
    "global": "Accuracy of the global models:",
}
_TITLES = {
    "images": "Fashion-MNIST, a small network",
    "texts": "20 Newsgroups, MiniLM with LoRA",
}

_HEAD = """# What attacks leave of a method

This page says what was measured with the built-in experiment `attacks`: 20 clients, of which some
attack in every round, with and without a [rule](robustness.md) against them. Every number was
written by `python -m evidence.attacks` from the results in `evidence/results.jsonl`.

## How to read the tables

- Each number is the mean over honest clients of the accuracy on the client's own test examples, in
  percent, then over seeds. Attackers are not evaluated.
- In brackets is the difference, in points, from the runs of the same method without a rule and
  without an attack, for the same clients; and its 95 % interval over clients and seeds. There all
  20 clients train, so a rule that finds every attacker still lacks their honest examples.
- Where the interval holds 0, these data show no damage.
- A rule's number of attackers, f, is the true one. Rates were chosen without an attack.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
