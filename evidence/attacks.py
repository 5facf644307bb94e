"""How much attacks damage each method, with and without a rule: docs/attacks.md, and all numbers
in docs/attacks.csv.

    python -m evidence.attacks

No number of the page is written by hand: they stand in results.jsonl.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import fedtailor as ft
from fedtailor.store.metrics import ATTACK_SUCCESS
from fedtailor.uploads.rules import Robust

from .markdown import markdown_table
from .paired import Paired, paired
from .run import EXPERIMENTS, HERE, Run, digest, lines, planned, resolved

FILE = "attacks.toml"
MANIFEST = HERE / "manifest-attacks.toml"
PAGE = HERE.parent / "docs" / "attacks.md"
TABLE = HERE.parent / "docs" / "attacks.csv"

Scores = Mapping[str, float | None]  # by client


@dataclass(frozen=True)
class Outcome:
    """What one method came to under one attack, over seeds; ``clean`` are the scores of the same
    honest clients in the runs without an attack and without a rule. ``success`` is a backdoor's,
    the mean over clients of each seed; empty under other attacks."""

    scores: Sequence[Scores]
    clean: Sequence[Scores]
    success: Sequence[float] = ()

    @property
    def mean(self) -> float:
        """Over clients, then over seeds."""
        return mean(mean(v for v in one.values() if v is not None) for one in self.scores)

    @property
    def difference(self) -> Paired:
        """How far it is from the clean runs."""
        return paired(self.scores, self.clean)


@dataclass(frozen=True)
class Row:
    """A method with a rule under an attack, in words; what its ``models`` came to, and over how
    many seeds. ``is_base``: nobody attacks, and there is no rule."""

    preset: str
    settings: Sequence[str]
    attack: str
    method: str
    rule: str
    models: Mapping[str, Outcome | None]
    seeds: int
    is_base: bool

    @property
    def outcome(self) -> Outcome:
        """That of the clients' own models."""
        found = self.models["personal"]
        assert found is not None
        return found

    @property
    def points(self) -> float:
        """How far the clients' own models are from the clean runs."""
        return 100 * self.outcome.difference.difference

    @property
    def column(self) -> str:
        """The method with its rule."""
        return self.method if self.rule == "none" else f"{self.method}: {self.rule}"

    @property
    def is_damaged(self) -> bool:
        """Whether they are clearly worse than those."""
        return self.outcome.difference.high < 0


class Results:
    """Lines of results by what decides them: a run of another file may be the same."""

    def __init__(self) -> None:
        self._lines = {line["digest"]: line for line in lines() if "results" in line}

    def outcome(self, runs: Sequence[Run], clean: Sequence[Run], model: str) -> Outcome | None:
        """The outcome of the seeds that have ended; None if there is none."""
        scores, beside, success = [], [], []
        for run, other in zip(runs, clean, strict=True):
            found = [self._lines.get(_digest(one)) for one in (run, other)]
            if all(line is not None and model in line["results"] for line in found):
                own, base = (scores_of(line, model) for line in found if line is not None)
                scores.append(own)
                beside.append({client: base[client] for client in own})
                of_backdoor = self._lines[_digest(run)]["results"][model].get(ATTACK_SUCCESS)
                success += [] if of_backdoor is None else [of_backdoor]
        return Outcome(scores, beside, success) if scores else None


def scores_of(line: Mapping[str, Any], model: str) -> Scores:
    """The clients' scores in a line of results."""
    found = line["results"][model]
    return dict(zip(map(str, found["clients"]), found["accuracy"], strict=True))


@cache
def _experiment(run: Run) -> ft.Experiment:
    return run.experiment()


@cache
def _digest(run: Run) -> str:
    return digest(resolved(_experiment(run)))


def undefended(run: Run) -> Run:
    """The run of the same method without a rule and without an attack."""
    chosen = _experiment(run)
    wanted = replace(chosen.methods[run.method], robust=Robust())
    preset = next(one for one in run.settings if one.startswith("preset="))
    settings = (preset.removesuffix(",clean") + ",clean",)
    methods = ft.load(EXPERIMENTS / run.file, settings).methods
    label = next(label for label, method in methods.items() if method == wanted)
    return Run(run.file, settings, label, run.seed)


def defence(run: Run) -> str:
    """A method's rule in words."""
    robust = _experiment(run).methods[run.method].robust
    steps = [*robust.before, *([robust.rule] if robust.rule != "none" else [])]
    return ", then ".join(steps) if steps else "none"


def attack(run: Run) -> str:
    """An attack in words."""
    found = _experiment(run).attack
    if found.kind == "none":
        return _NOBODY
    times = "" if found.strength is None else f" × {found.strength:g}"
    return f"{found.kind}{times}, {100 * found.fraction:.0f} % of the clients"


@cache
def rows() -> Sequence[Row]:
    """All that were run, in the order of the manifest."""
    results, runs = Results(), planned([MANIFEST])
    groups = dict.fromkeys((_preset(run), attack(run)) for run in runs)
    return [
        row
        for group in groups
        for row in _rows([run for run in runs if (_preset(run), attack(run)) == group], results)
    ]


def page() -> str:
    """The page, as Markdown."""
    found = rows()
    parts = [_TITLE, *findings(found), "", _HEAD]
    for preset, title in _TITLES.items():
        of = [row for row in found if row.preset == preset and row.method != "local"]
        first = [row for row in of if row.method == "fedavg"]
        parts += [f"## {title}\n"]
        parts += [_pivot(some) for some in (first, [r for r in of if r not in first]) if some]
        backdoors = [row for row in of if row.outcome.success]
        parts += [_BACKDOOR, _pivot(backdoors, _success)]
    return "\n".join(parts).rstrip() + "\n"


def _pivot(found: Sequence[Row], shown: Callable[[Row], str] | None = None) -> str:
    """A row for each attack, a column for each method with its rule."""
    shown = shown or _points
    attacks = list(dict.fromkeys(row.attack for row in found))
    methods = list(dict.fromkeys(row.method for row in found))
    found = sorted(found, key=lambda row: methods.index(row.method))
    columns = list(dict.fromkeys(row.column for row in found))
    by = {(row.attack, row.column): shown(row) for row in found}
    table = [[_share(one), *(by.get((one, column), "") for column in columns)] for one in attacks]
    return markdown_table(["attack", *columns], table) + "\n"


def _share(attack: str) -> str:
    """An attack with its share of the clients, but for a fifth."""
    return attack.removesuffix(" of the clients").removesuffix(", 20 %")


def _points(row: Row) -> str:
    """The accuracy if nobody attacks, or how far it is from that; bold if clearly below."""
    one = "†" if row.seeds == 1 else ""
    if row.is_base:
        return f"{100 * row.outcome.mean:.1f} %{one}"
    return f"**{row.points:+.1f}**{one}" if row.is_damaged else f"{row.points:+.1f}{one}"


def _success(row: Row) -> str:
    return f"{100 * mean(row.outcome.success):.1f} %"


def table() -> str:
    """Everything as CSV, a line a method, a rule, an attack and a model."""
    kept = []
    for row in rows():
        for model, found in row.models.items():
            if found is None:
                continue
            of = found.difference
            numbers = [found.mean, of.difference, of.low, of.high]
            kept.append(
                [
                    _TITLES[row.preset], " ".join(row.settings), row.attack, row.method, row.rule,
                    model, row.seeds, *(f"{100 * x:.2f}" for x in numbers),
                    f"{100 * mean(found.success):.2f}" if found.success else "",
                ]
            )  # fmt: skip
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_COLUMNS, *kept])
    return text.getvalue()


_COLUMNS = (
    "data", "settings", "attack", "method", "rule", "model", "seeds", "accuracy", "difference",
    "low", "high", "backdoor_success",
)  # fmt: skip


def findings(rows: Sequence[Row]) -> list[str]:
    """What attacks do without a rule, what rules leave of FedAvg, and what FedSDG's alignment
    weights are worth."""
    attacked = [row for row in rows if row.attack != _NOBODY and row.models["personal"] is not None]
    open_ = [row for row in attacked if row.rule == "none"]
    hurt = [row for row in open_ if row.is_damaged]
    worst = min(open_, key=lambda row: row.points)
    clean = worst.outcome.mean - worst.points / 100
    return [
        f"- **Without a rule** clients' own models are damaged in {len(hurt)} of {len(open_)} "
        f"pairs of a method and an attack. The largest loss is {worst.method}'s, under "
        f"{worst.attack}: from {100 * clean:.1f} % to {100 * worst.outcome.mean:.1f} %.",
        _of_rules([row for row in attacked if row.method == "fedavg"]),
        _of_alignment(open_),
    ]


def _of_rules(rows: Sequence[Row]) -> str:
    """Which rule loses least under the attacks that all rules were run under."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        points.setdefault(row.rule, {})[row.attack] = row.points
    plain = points.pop("none")
    shared = [under for under in plain if all(under in of for of in points.values())]
    best = max(points, key=lambda rule: mean(points[rule][under] for under in shared))
    of = points[best]
    return (
        f"- **Of {len(points)} rules for FedAvg**, [{best}]({_RULES}) loses least, on average over "
        f"the {len(shared)} attacks that all were run under. Under {len(of)} attacks accuracy "
        f"changes by {min(of.values()):+.1f} to {max(of.values()):+.1f} points with it, without a "
        f"rule by {min(plain[k] for k in of):+.1f} to {max(plain[k] for k in of):+.1f}."
    )


def _of_alignment(rows: Sequence[Row]) -> str:
    """What FedSDG loses with its alignment weights and with equal ones, under the same attacks."""
    pairs = [
        (weighed, plain)
        for weighed in rows
        for plain in rows
        if (weighed.method, plain.method) == ("fedsdg", "fedsdg-uniform")
        and weighed.attack == plain.attack
    ]
    less = sum(a.points < b.points for a, b in pairs)
    verb = "do not protect" if less else "protect"
    return (
        f"- **FedSDG's alignment weights {verb} clients' own models.** With equal weights "
        f"(`fedsdg-uniform`) these lose less under {less} of {len(pairs)} attacks, on average."
    )


def _rows(runs: Sequence[Run], results: Results) -> list[Row]:
    """A row for each method that has ended with a seed."""
    rows = []
    for label, settings in dict.fromkeys((run.method, run.settings) for run in runs):
        of = [run for run in runs if (run.method, run.settings) == (label, settings)]
        clean = [undefended(run) for run in of]
        found = {model: results.outcome(of, clean, model) for model in ("personal", "global")}
        seeds = max((len(one.scores) for one in found.values() if one is not None), default=0)
        if seeds:
            about = _preset(of[0]), settings, attack(of[0]), clean[0].method, defence(of[0])
            rows.append(Row(*about, found, seeds, of == clean))
    return rows


def _preset(run: Run) -> str:
    found = next(one for one in run.settings if one.startswith("preset="))
    return found.removeprefix("preset=").removesuffix(",clean")


_TITLES = {
    "images": "Fashion-MNIST, a small network",
    "texts": "20 Newsgroups, MiniLM with LoRA",
}

_NOBODY = "nobody attacks"

_RULES = "robustness.md#protect-a-run"

_TITLE = f"""# How much attacks damage each method

Some of 20 clients attack in every round: how many points of accuracy do the others lose, with and
without a [rule]({_RULES})?
"""

_HEAD = """## How to read the tables

- A column is a method, with the steps before its rule. A row is an
  [attack](robustness.md#simulate-attacks) by a fifth of the clients, or by the share that it names;
  "× 5" is its strength.
- The first row has accuracies if nobody attacks: the mean over clients of each client's own model
  on its own test examples, then over seeds. Below it stand differences in points, of honest
  clients. **Bold**: damaged, as the 95 % interval over clients and seeds lies below 0. †: one seed.
- *Success* is that of a [backdoor](robustness.md#a-backdoor) in clients' own models.
- Where nobody attacks all 20 clients train; a rule that finds all attackers lacks their data.
- A rule's number of attackers is the true one. Rates were chosen without an attack; clip, nnm and
  meamed among two dozen rules by the validation data of seed 0, one of the seeds here.
- [attacks.csv](attacks.csv) has all intervals, the shared models, and each row's settings:
  `fedtailor run attacks --set SETTING ...` repeats it ([more](evidence.md)).
"""

_BACKDOOR = "Success of the backdoor:\n"


def main() -> None:
    """Write the page and the table."""
    PAGE.write_text(page())
    TABLE.write_text(table())


if __name__ == "__main__":
    main()
