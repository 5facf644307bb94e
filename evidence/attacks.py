"""How much attacks damage each method, with and without a rule: docs/attacks.md.

    python -m evidence.attacks

No number of the page is written by hand: they stand in results.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any, get_args

import fedtailor as ft
from fedtailor.report.paired import Paired, paired
from fedtailor.store.metrics import ATTACK_SUCCESS
from fedtailor.uploads.attacks import AttackConfig, Kind
from fedtailor.uploads.rules import Robust

from .cross_cells import SYSTEMS
from .markdown import markdown_table
from .run import EXPERIMENTS, HERE, Run, digest, lines, planned, resolved, run_folder

FILE = "attacks.toml"
MANIFEST = HERE / "manifest-attacks.toml"
PAGE = HERE.parent / "docs" / "attacks.md"

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
    def under(self) -> str:
        """The attack, inside a sentence."""
        return self.attack.replace(", ", " by ")

    @property
    def is_damaged(self) -> bool:
        """Whether they are clearly worse than those."""
        return self.outcome.difference.high < 0


class Results:
    """Lines of results by what decides them: a run of another file may be the same."""

    def __init__(self) -> None:
        self._lines = {line["digest"]: line for line in lines() if "results" in line}

    def has(self, run: Run) -> bool:
        """Whether a run has ended."""
        return _digest(run) in self._lines

    def outcome(self, runs: Sequence[Run], clean: Sequence[Run], model: str) -> Outcome | None:
        """The outcome of the seeds that have ended; None if there is none."""
        scores, beside, success = [], [], []
        for run, other in zip(runs, clean, strict=True):
            found = [self._lines.get(_digest(one)) for one in (run, other)]
            if all(line is not None and model in line["results"] for line in found):
                own, base = (_scores(line, model) for line in found if line is not None)
                scores.append(own)
                beside.append({client: base[client] for client in own})
                of_backdoor = self._lines[_digest(run)]["results"][model].get(ATTACK_SUCCESS)
                success += [] if of_backdoor is None else [of_backdoor]
        return Outcome(scores, beside, success) if scores else None


def _scores(line: Mapping[str, Any], model: str) -> Scores:
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


def page() -> str:
    """The page, as Markdown."""
    results, runs = Results(), planned([MANIFEST])
    rows, parts = list[Row](), list[str]()
    for preset in dict.fromkeys(_preset(run) for run in runs):
        parts += [f"## {_TITLES[preset]}\n"]
        of = [run for run in runs if _preset(run) == preset]
        for name in dict.fromkeys(attack(run) for run in of):
            those = [run for run in of if attack(run) == name]
            found = _rows(those, results)
            rows += found
            parts += _section(name, those, found)
    missing = _missing([run for run in runs if results.has(run)])
    return "\n".join([_TITLE, *findings(rows), missing, _HEAD, *parts])


def findings(rows: Sequence[Row]) -> list[str]:
    """What attacks do without a rule, what rules leave of FedAvg, what FedSDG's alignment weights
    are worth, and how far backdoors get."""
    attacked = [row for row in rows if row.attack != _NOBODY and row.models["personal"] is not None]
    open_ = [row for row in attacked if row.rule == "none"]
    hurt = [row for row in open_ if row.is_damaged]
    worst = min(open_, key=lambda row: row.points)
    clean = worst.outcome.mean - worst.points / 100
    return [
        f"- **Without a rule,** clients' own models are damaged in {len(hurt)} of the {len(open_)} "
        "pairs of a method and an attack below. *Damaged* means that the interval of the "
        f"difference lies below 0. The largest loss is {worst.method}'s, under {worst.attack}: "
        f"from {100 * clean:.1f} % to {100 * worst.outcome.mean:.1f} %.",
        _of_rules([row for row in attacked if row.method == "fedavg"]),
        _of_alignment(open_),
        *_of_backdoors(attacked),
    ]


def _of_rules(rows: Sequence[Row]) -> str:
    """Which rule loses least under the attacks that all rules were run under."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        points.setdefault(row.rule, {})[row.under] = row.points
    plain = points.pop("none")
    shared = [under for under in plain if all(under in of for of in points.values())]
    best = max(points, key=lambda rule: mean(points[rule][under] for under in shared))
    of = points[best]
    no_better = [under for under in of if "backdoor" not in under and of[under] <= plain[under]]
    but = f" Under {_all(no_better)} accuracy is no better than without a rule."
    return (
        f"- **Of {len(points)} rules for FedAvg**, [{best}]({_RULES}) loses least, on average over "
        f"the {len(shared)} attacks that all of them were run under: "
        f"{_all(shared)}. With it, accuracy changes by {min(of.values()):+.1f} to "
        f"{max(of.values()):+.1f} points under the {len(of)} attacks below, and without a rule by "
        f"{min(plain[k] for k in of):+.1f} to {max(plain[k] for k in of):+.1f}."
        + (but if no_better else "")
    )


def _all(names: Sequence[str]) -> str:
    """Name all of them, however many, as `in_prose` doesn't."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _of_alignment(rows: Sequence[Row]) -> str:
    """What FedSDG loses with its alignment weights and with equal ones, under the same attacks."""
    pairs = [
        (weighed, plain)
        for weighed in rows
        for plain in rows
        if (weighed.method, plain.method) == ("fedsdg", "fedsdg-uniform")
        and weighed.attack == plain.attack
    ]
    less = sum(a.points < b.points and a.is_damaged for a, b in pairs)
    said = [
        f"Under {a.under} their accuracy changes by {a.points:+.1f} points, "
        f"and with equal weights by {b.points:+.1f}"
        + ("." if a.is_damaged else "; these data show no damage there.")
        for a, b in pairs
    ]
    verb = "do not protect" if less else "protect"
    return (
        f"- **FedSDG's alignment weights {verb} clients' own models.** With "
        f"equal weights (`fedsdg-uniform` in the tables) these models lose less under {less} of "
        f"{len(pairs)} attacks. {' '.join(said)}"
    )


def _of_backdoors(rows: Sequence[Row]) -> list[str]:
    """How far backdoors get with each method, a point for each attack."""
    parts = []
    for attack in dict.fromkeys(row.attack for row in rows):
        said = [
            f"{row.method} {_success(row.outcome)}"
            + ("" if row.rule == "none" else f" (rule: {row.rule})")
            for row in rows
            if row.attack == attack and row.outcome.success
        ]
        if said:
            parts.append(
                f"- **Success of {attack}**, in clients' own models (lower is better): "
                f"{', '.join(said)}."
            )
    return parts


def _missing(runs: Sequence[Run]) -> str:
    """What these runs don't cover: kinds of attack, shares of attackers, and systems."""
    usual = AttackConfig.fraction
    shares, methods = dict[str, set[float]](), dict[str, set[str]]()
    for run in runs:
        kind = _experiment(run).attack.kind
        shares.setdefault(kind, set()).add(_experiment(run).attack.fraction)
        methods.setdefault(kind, set()).add(undefended(run).method)
    said = [f"{kind} was not run" for kind in get_args(Kind) if kind not in shares]
    more = {kind: sorted(of - {usual}) for kind, of in shares.items() if of - {usual}}
    if more:
        also = [
            f"{kind} with {_all([f'{100 * x:.0f} %' for x in of])}" for kind, of in more.items()
        ]
        said.append(
            f"all attacks were run with {100 * usual:.0f} % of attackers, {_all(also)}, none with "
            "other shares"
        )
    narrow: dict[str, list[str]] = {}
    for kind, of in methods.items():
        if kind != "none" and not set(SYSTEMS) <= of:
            narrow.setdefault(_all(sorted(of)), []).append(kind)
    said += [f"only {of} was run under {_all(kinds)}" for of, kinds in narrow.items()]
    return f"- **What is missing:** {'; '.join(said)}.\n"


def _rows(runs: Sequence[Run], results: Results) -> list[Row]:
    """A row for each method that has ended with a seed."""
    rows = []
    for label, settings in dict.fromkeys((run.method, run.settings) for run in runs):
        of = [run for run in runs if (run.method, run.settings) == (label, settings)]
        clean = [undefended(run) for run in of]
        found = {model: results.outcome(of, clean, model) for model in ("personal", "global")}
        seeds = max((len(one.scores) for one in found.values() if one is not None), default=0)
        if seeds:
            about = _preset(of[0]), attack(of[0]), clean[0].method, defence(of[0])
            rows.append(Row(*about, found, seeds, of == clean))
    return rows


def _section(name: str, runs: Sequence[Run], found: Sequence[Row]) -> Iterator[str]:
    """One attack, a table."""
    rows = [
        [
            row.method,
            row.rule,
            *(cell for one in row.models.values() for cell in _cells(one, row.is_base)),
            row.seeds,
        ]
        for row in found
    ]
    if rows:
        header = ["method", "rule", "personal", "difference", "global", "difference", "seeds"]
        models = [row.models for row in found]
        if any(one and one.success for of in models for one in of.values()):
            header += ["success, personal", "success, global"]
            for row, of in zip(rows, models, strict=True):
                row += [_success(one) for one in of.values()]
        yield f"### {name[0].upper()}{name[1:]}\n"
        yield markdown_table(header, rows, words=(0, 1))
        commands = dict.fromkeys(
            f"`fedtailor run attacks{_flags(run)} --out {run_folder('attacks', run.settings)}`"
            for run in runs
        )
        yield "\n" + "\n".join(f"- {command}" for command in commands) + "\n"


def _preset(run: Run) -> str:
    found = next(one for one in run.settings if one.startswith("preset="))
    return found.removeprefix("preset=").removesuffix(",clean")


def _flags(run: Run) -> str:
    return "".join(f" --set {setting}" for setting in run.settings)


def _cells(found: Outcome | None, is_base: bool) -> tuple[str, str]:
    """The accuracy, and how far it is from the clean runs."""
    if found is None:
        return "", ""
    accuracy, difference = f"{100 * found.mean:.1f}", found.difference
    low, middle, high = (100 * x for x in (difference.low, difference.difference, difference.high))
    return accuracy, "" if is_base else f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


def _success(found: Outcome | None) -> str:
    return f"{100 * mean(found.success):.1f} %" if found and found.success else ""


_TITLES = {
    "images": "Fashion-MNIST, a small network",
    "texts": "20 Newsgroups, MiniLM with LoRA",
}

_NOBODY = "nobody attacks"

_RULES = "robustness.md#protect-a-run"

_TITLE = f"""# How much attacks damage each method

This page says what was measured with the built-in experiment `attacks`: 20 clients, of which some
attack in every round, with and without a [rule]({_RULES}) against them. Commands with
`preset=images` need [Fashion-MNIST](data.md#use-a-ready-data-set).
"""

_HEAD = f"""Every number was written by `python -m evidence.attacks` from the results in
`evidence/results.jsonl`.

## How to read the tables

- **rule** names the steps before the rule, and the rule. [Protect a run]({_RULES}) explains them,
  and [Simulate attacks](robustness.md#simulate-attacks) the attacks. "× 5" is a strength.
- Each number is the mean over honest clients of the accuracy on the client's own test examples, in
  percent, then over seeds. Attackers are not evaluated.
- **personal** is that of the clients' own models, **global** that of the shared one.
- **difference** is that, in points, from the runs of the same method without a rule and without an
  attack, for the same clients. In brackets is its 95 % interval over clients and seeds. In those
  runs all 20 clients train, so a rule that finds every attacker still lacks their honest examples.
- Where the interval contains 0, these data show no damage.
- **success** is that of a [backdoor](robustness.md#a-backdoor): the share of honest clients'
  examples of other classes that a model takes for the attackers' class once they have the trigger.
- A rule's number of attackers, f, is the true one. Rates were chosen without an attack.
- For FedAvg, `clip`, `nnm` and `meamed` in a row was chosen among two dozen rules by the validation
  data of seed 0, under a sign flip and under a little is enough. Those trials were not kept, and
  seed 0 is one of the seeds here.
- A method with one seed says little of other seeds.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
