"""What noise for privacy costs each method: docs/noise.md and its figure.

    python -m evidence.noise

No number of the page is written by hand: they stand in results.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor.report.drawing import COLOURS, SHAPES, svg

from .attacks import scores_of
from .markdown import markdown_table
from .paired import Paired, paired
from .rates import TUNED, validation
from .run import HERE, PRIVACY, Run, lines, planned

PAGE = HERE.parent / "docs" / "noise.md"
FIGURE = HERE.parent / "docs" / "images" / "noise.svg"
FILE = "privacy.toml"
CHATS = "privacy-chats.toml"
ALONE = "local"
LEVELS = ("30", "8", "3", "1")  # epsilons
OPEN = "preset=open"  # no noise, and no bound
MAIN = "8"  # the epsilon that has several seeds, and chose the rates
FIRST = 0  # the seed that every epsilon has

Scores = Mapping[str, float | None]  # by client
Json = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The clients' scores by alpha, method, epsilon and seed; training alone has those of `MAIN`
    at every epsilon, as it sends nothing."""

    scores: Mapping[tuple[float, str, str, int], Scores]

    @property
    def alphas(self) -> list[float]:
        """From clients that differ much to those that differ less."""
        return sorted({alpha for alpha, *_ in self.scores})

    @property
    def methods(self) -> list[str]:
        """Training alone first, then in the file's order."""
        return list(dict.fromkeys(method for _, method, *_ in self.scores))

    def seeds(self, alpha: float, method: str, level: str = MAIN) -> list[int]:
        """Those that the method and training alone have."""
        return [
            seed
            for (*cell, seed) in self.scores
            if cell == [alpha, method, level] and self.of(alpha, ALONE, level, seed)
        ]

    def of(self, alpha: float, method: str, level: str, seed: int) -> Scores | None:
        """One run's; None where there is none."""
        level = MAIN if method == ALONE else level
        return self.scores.get((alpha, method, level, seed))

    def accuracy(self, alpha: float, method: str, level: str, seeds: Iterable[int]) -> float | None:
        """The mean over clients, then over seeds, in percent; None where there is none."""
        found = [self.of(alpha, method, level, seed) for seed in seeds]
        known = [[x for x in one.values() if x is not None] for one in found if one is not None]
        return 100 * mean(map(mean, known)) if known else None

    def lead(self, alpha: float, method: str, level: str, seeds: Sequence[int]) -> Paired | None:
        """How far the method is ahead of training alone."""
        found = [[self.of(alpha, one, level, seed) for one in (method, ALONE)] for seed in seeds]
        both = [(ours, alone) for ours, alone in found if ours and alone]
        return paired([x for x, _ in both], [y for _, y in both]) if both else None


@cache
def found() -> Results:
    """All that were run, in the order of the manifest."""
    kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
    scores: dict[tuple[float, str, str, int], Scores] = {}
    for run in planned([PRIVACY]):
        line = kept.get((run.file, run.settings, run.method, run.seed))
        if run.file == FILE and run.seed != TUNED and line is not None and "results" in line:
            key = (_alpha(run), run.method, _level(run), run.seed)
            scores[key] = scores_of(line, "personal")
    return Results(scores)


def _alpha(run: Run) -> float:
    return float(_value(run, "split.alpha") or 0.3)


def _level(run: Run) -> str:
    return f"{float(_value(run, 'privacy.epsilon') or MAIN):g}"


def _value(run: Run, field: str) -> str | None:
    values = [s.partition("=")[2] for s in run.settings if s.partition("=")[0] == field]
    return values[0] if values else None


def page() -> str:
    """The page, as Markdown."""
    results = found()
    parts = [_TITLE, *findings(results), "", _SETTING, _TABLES.format(seeds=_seeds(results))]
    for alpha in results.alphas:
        parts += [f"Dirichlet {alpha:g}:\n", _table(results, alpha), ""]
    return "\n".join([*parts, _TRIALS, _trials(), "", _CHATS, _chats()]).rstrip() + "\n"


def _seeds(results: Results) -> str:
    """How many seeds the methods have at the main epsilon."""
    found = sorted({len(results.seeds(a, m)) for a in results.alphas for m in results.methods})
    return f"{found[0]} seeds" if len(found) == 1 else f"{found[0]} to {found[-1]} seeds"


def findings(results: Results) -> list[str]:
    """Who is ahead of training alone under noise."""
    return [_ahead(results, alpha) for alpha in results.alphas]


def _ahead(results: Results, alpha: float) -> str:
    leads = [
        (f"{method} ({100 * lead.difference:+.1f})", lead)
        for method in results.methods
        if method != ALONE
        and (lead := results.lead(alpha, method, MAIN, results.seeds(alpha, method)))
    ]
    where = f"at Dirichlet {alpha:g} and epsilon {MAIN}"
    return f"- **Against training alone**, {where}, in points: {_in_order(leads)}."


def _in_order(leads: Iterable[tuple[str, Paired]]) -> str:
    """Which leads lie above 0, about it and below."""
    by: dict[str, list[str]] = {"ahead of it": [], "level with it": [], "behind it": []}
    words = list(by)
    for name, lead in leads:
        by[words[0] if lead.low > 0 else words[2] if lead.high < 0 else words[1]].append(name)
    return "; ".join(f"{word}: {', '.join(of)}" for word, of in by.items() if of)


def _table(results: Results, alpha: float) -> str:
    header = ["method", *(f"epsilon {level}" for level in LEVELS)]
    header += [f"epsilon {MAIN}, all seeds", "over local"]
    rows = []
    for method in results.methods:
        seeds = results.seeds(alpha, method)
        cells = [results.accuracy(alpha, method, level, [FIRST]) for level in LEVELS]
        lead = None if method == ALONE else results.lead(alpha, method, MAIN, seeds)
        rows.append([
            method, *(_number(x) for x in cells),
            _number(results.accuracy(alpha, method, MAIN, seeds)),
            "" if lead is None else _interval(lead),
        ])  # fmt: skip
    return markdown_table(header, rows)


def _trials() -> str:
    """The best rate of each method with noise and without, and its validation accuracy."""
    best: dict[tuple[str, bool], tuple[float, float]] = {}
    for line in lines():
        if line["file"] == FILE and line["seed"] == TUNED and "results" in line:
            key = line["method"], OPEN in line["set"]
            rate = line["settings"]["methods"][0]["optimiser"]["lr"]
            best[key] = max(best.get(key, (0.0, 0.0)), (validation(line), rate))
    rows = []
    for method in dict.fromkeys(name for name, _ in best if name != ALONE):
        cells = [best.get((method, is_open), (None, "")) for is_open in (True, False)]
        rows.append([method, *(x for score, rate in cells for x in (_percent(score), rate))])
    return markdown_table(["method", "no noise", "rate", f"epsilon {MAIN}", "rate"], rows)


def _chats() -> str:
    """Perplexities of the answers, and differences of the loss to training alone in nats."""
    kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
    losses = dict[tuple[str, str, int], Scores]()  # by method, epsilon and seed
    for run in planned([PRIVACY]):
        line = kept.get((run.file, run.settings, run.method, run.seed))
        if run.file == CHATS and run.seed != TUNED and line is not None and "results" in line:
            of = line["results"]["personal"]
            of_client = dict(zip(map(str, of["clients"]), of["loss"], strict=True))
            losses[run.method, _level(run), run.seed] = of_client
    rows, leads = [], list[tuple[str, Paired]]()
    for method in dict.fromkeys(method for method, *_ in losses):
        seeds = [seed for one, level, seed in losses if (one, level) == (method, MAIN)]
        known = [[x for x in losses[method, MAIN, k].values() if x is not None] for k in seeds]
        cells = [f"{math.exp(mean(map(mean, known))):.1f}"]
        for level in LEVELS if method != ALONE else ():
            told = [k for k in seeds if (method, level, k) in losses]
            lead = paired(
                [losses[ALONE, MAIN, k] for k in told], [losses[method, level, k] for k in told]
            )
            cells.append(f"{-lead.difference:+.3f} [{-lead.high:+.3f}, {-lead.low:+.3f}]")
            leads += [(method, lead)] if level == MAIN else []
        rows.append([method, *cells, *[""] * (1 + len(LEVELS) - len(cells))])
    header = ["method", f"perplexity at {MAIN}", *(f"epsilon {level}" for level in LEVELS)]
    table = markdown_table(header, rows)
    return f"Against training alone, at epsilon {MAIN}: {_in_order(leads)}.\n\n{table}"


def _percent(score: float | None) -> str:
    return _number(None if score is None else 100 * score)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _interval(lead: Paired) -> str:
    points = [100 * x for x in (lead.difference, lead.low, lead.high)]
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*points)


def draw(results: Results, path: Path) -> None:
    """Draw how far each method is ahead of training alone, by epsilon, a chart for each split."""
    path.write_text(svg({"hconcat": [_chart(results, alpha) for alpha in results.alphas]}))


def _chart(results: Results, alpha: float) -> Json:
    names = [method for method in results.methods if method != ALONE]
    rows = []
    for number, method in enumerate(names):
        for place, level in enumerate(LEVELS):
            lead = results.lead(alpha, method, level, [FIRST])
            if lead is not None:
                low, middle, high = (100 * x for x in (lead.low, lead.difference, lead.high))
                at = place + 0.06 * (number - (len(names) - 1) / 2)
                rows.append(
                    {"method": method, "place": at, "lead": middle, "low": low, "high": high}
                )
    said = " : ".join(f"datum.value == {k} ? '{level}'" for k, level in enumerate(LEVELS))
    x = {"field": "place", "type": "quantitative", "title": "epsilon",
         "scale": {"domain": [-0.4, len(LEVELS) - 0.6], "nice": False},
         "axis": {"values": list(range(len(LEVELS))), "labelExpr": f"{said} : ''", "grid": False,
                  "labelOverlap": False}}  # fmt: skip
    title = {"type": "quantitative", "title": "points over training alone"}
    colour = {"field": "method", "type": "nominal", "legend": {"title": None},
              "scale": {"domain": names, "range": COLOURS[: len(names)]}}  # fmt: skip
    shape = {**colour, "scale": {"domain": names, "range": SHAPES[: len(names)]}}
    y = {"field": "lead", **title}
    return {
        "title": f"Dirichlet {alpha:g}", "width": 330, "height": 280, "data": {"values": rows},
        "layer": [
            {"data": {"values": [{}]}, "mark": {"type": "rule", "color": "#999999"},
             "encoding": {"y": {"datum": 0, "type": "quantitative"}}},
            {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.7},
             "encoding": {"x": x, "y": y, "color": colour}},
            {"mark": {"type": "rule", "strokeWidth": 0.8},
             "encoding": {"x": x, "y": {"field": "low", **title}, "y2": {"field": "high"},
                          "color": colour}},
            {"mark": {"type": "point", "size": 45, "opacity": 1},
             "encoding": {"x": x, "y": y, "stroke": colour, "fill": colour, "shape": shape}},
        ],
    }  # fmt: skip


_TITLE = """# What noise for privacy costs

500 clients with about 18 training examples each train together under [differential privacy of
clients](privacy.md). Does a part that stays at the client, and gets no noise, keep a method ahead
of training alone, which spends nothing?
"""

_SETTING = """![How far each method is ahead of training alone, by epsilon](images/noise.svg)

Seed 0; lines are 95 % intervals over clients. Epsilon falls, and noise grows, to the right.

## The setting

Posts of 20 Newsgroups of at most 24 tokens, MiniLM with LoRA of rank 2 on one layer and a head,
three rounds of all clients with three epochs each, `clip = 1`, delta 500^-1.1:
`fedtailor run privacy --set privacy.epsilon=3.0`, three minutes a method on one core.

| method | shared, with noise | private, without noise |
|---|---|---|
| local | | LoRA and head |
| fedavg | LoRA and head | |
| ffa-lora | one factor of LoRA, and head; the other factor stays as it began | |
| fedper | LoRA | head |
| fedsa-lora | one factor of LoRA, and head | the other factor |
| fedsdg, with equal weights | one branch of LoRA, and head | the other branch, and gates |

Learning rates are the best of four on validation data (of five for local and six for fedavg, whose
best of four were at an end; its 0.3 is level with 1.0), with noise at epsilon 8, at Dirichlet 0.3
and seed 10; they stand for every epsilon. Training alone sends nothing, so it is the same in all
columns.
"""

_TABLES = """## Accuracy

In percent: each client's own model on its own test examples, the mean over 200 clients. Columns by
epsilon are of seed 0; the last two of {seeds} at epsilon 8, with the difference to local and its
95 % interval over clients and seeds.
"""


_TRIALS = """## Without noise

Validation accuracy in percent, at Dirichlet 0.3 and seed 10, of each method at the best of its
rates: without noise and bound (of 0.003, 0.01 and 0.03, for fedavg of 0.1, too), and with both. The
bound does more than limit what one client tells: fedper bears a higher rate with it, and is better
with bound and noise than without either.
"""

_CHATS = """## On instructions

200 speakers of chitchat with six training examples each, SmolLM2-135M-Instruct with LoRA of rank 2
on one projection of its last block, three rounds of all clients with one step each, `clip = 0.5`,
delta 200^-1.1: `fedtailor run privacy-chats`, with [data that we
made](evidence.md#tasks-that-we-made). Rates are the best of four on validation data of 40 of the
clients, with as much noise on their mean as the 200 have at epsilon 8. The table has the perplexity
of the answers at epsilon 8 and, for each epsilon, the difference of the loss to local in nats
(below 0: better) with its 95 % interval over clients. Epsilon 8 has three seeds, the others seed 0.
"""


def main() -> None:
    """Write the page and the figure."""
    PAGE.write_text(page())
    draw(found(), FIGURE)


if __name__ == "__main__":
    main()
