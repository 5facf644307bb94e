"""The parts of the page that have charts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .attacks import attack_maps
from .cells import ranked
from .charts import maps, specs
from .charts.content import Groups, Json
from .costs import COSTS, is_wide
from .select import Entry
from .table import Table
from .text import TextTable


@dataclass(frozen=True)
class Control:
    """A select, or a slider over rounds, of a figure. ``name``: group, method or step."""

    name: str
    label: str
    options: Sequence[str] = ()
    rounds: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """A heading with charts. ``id`` names it in links and in files; ``method`` is the place of the
    method it is about."""

    id: str
    title: str
    caption: str = ""
    charts: Sequence[str] = ()
    controls: Sequence[Control] = ()
    tables: Sequence[TextTable] = field(default=())
    method: int | None = None

    @property
    def is_static(self) -> bool:
        """Whether it has something to read without scripts."""
        return bool(self.tables) or self.id == "clients"


def chart_specs(comparison: Table, content: Json) -> dict[str, Json]:
    """Return the specification of each chart by name."""
    labels, metric, costs = content["methods"], comparison.metric, content["costs"]
    ranks = [row.label for row in ranked(comparison)]
    found = {
        "clients": specs.clients(labels, ranks, metric),
        "client-labels": specs.client_labels(),
        "client-curves": specs.client_curves(labels, metric),
        "labels": maps.labels_of_clients(_most(content["groups"], "names")),
        "sizes": specs.sizes(),
        **{f"curves-{s}": specs.curves(labels, metric, s) for s in ("validation", "test")},
    }
    if content["ahead"]:
        found["ahead"] = specs.ahead(labels, ranks, metric)
    if content["confusion"]:
        found["confusion"] = maps.confusion(_most(content["confusion"], "classes"))
    for cost in [cost for cost in COSTS if cost in costs]:
        found[f"pareto-{cost}"] = specs.pareto(labels, metric, cost, _ticks(costs[cost]))
    for picture in content["pictures"]:
        found.setdefault(f"picture-{picture['method']}", maps.picture(picture))
    return found


def _most(of: Sequence[Json], names: str) -> Sequence[str]:
    return max((one[names] for one in of), key=len, default=())


def _ticks(values: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis, with 0 if there is one; none where costs are about alike."""
    least = is_wide(values)
    if not least:
        return []
    return [*([0.0] if min(values) == 0 else []), *_round_numbers(least / 1.5, 1.5 * max(values))]


def _round_numbers(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``; with more decades, fewer in each of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if len(powers) <= 2 else (1, 2, 5) if len(powers) <= 4 else (1,)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def sections(
    entries: Sequence[Entry], comparison: Table, content: Json, groups: Groups
) -> Iterator[Section]:
    """Yield the sections with charts, in the page's order."""
    metric = comparison.metric
    yield Section(
        "clients",
        "Clients",
        "Each dot is a client's own model on the client's own test examples; with several seeds "
        "each of them has dots. Boxes reach from the lower to the upper quarter of clients, with "
        "the median; lines from the worst to the best tenth. Choose a dot, or a client below, to "
        "see one client in detail." + _sampled(groups),
        ["clients"],
    )
    splits = [s for s in ("validation", "test") if s in content["curves"].get("split", ())]
    if len(set(content["curves"].get("round", ()))) > 1:  # else there is no curve
        yield Section(
            "convergence",
            "Results by round",
            f"The mean {metric} of the personal models over clients, by round. Lines are means "
            "over seeds, bands one standard deviation wide on each side. Marks show the reported "
            "rounds: the best on validation data, of each seed its own.",
            [f"curves-{split}" for split in splits],
        )
    if costs := [cost for cost in COSTS if cost in content["costs"]]:
        yield Section(
            "cost",
            "Cost against result",
            f"The mean test {metric} beside what it costs: the bytes that a client sends and "
            "receives until the reported round, the floating-point operations of its training "
            "until then (matrix products and convolutions), the simulated seconds until then if "
            "time was simulated, and the processor seconds and seconds of the whole training on "
            "the machine that ran it. The dashed line joins the methods for which no other "
            "one is both cheaper and better.",
            [f"pareto-{cost}" for cost in costs],
        )
    if maps := attack_maps(entries, comparison):
        yield Section(
            "attacks",
            "Attacks",
            "Means over the honest clients' own test examples at the reported rounds, and over "
            "seeds; without an attack all clients are honest. The percentage after an attack is "
            "the attackers' share of the clients. The stronger the colour, the higher the value.",
            tables=maps,
        )
    names = [name_of(entry.label) for entry in entries]
    for position, (entry, name) in enumerate(zip(entries, names, strict=True)):
        if pictures := [one for one in content["pictures"] if one["method"] == position]:
            id_ = name if names.count(name) == 1 else f"{name}-{position}"
            rounds = pictures[0]["rounds"]
            step = [Control("step", "After round", rounds=rounds)] if len(rounds) > 1 else []
            yield Section(
                f"{id_}-clients-by-round",
                f"{pictures[0]['title']}: {entry.label}",
                _caption(pictures),
                [f"picture-{position}"],
                [*_choice([content["groups"][one["group"]] for one in pictures]), *step],
                method=position,
            )
    if content["confusion"]:
        labels = [content["methods"][one["method"]] for one in content["confusion"]]
        yield Section(
            "confusion",
            "Confusion",
            "How the personal models label the clients' test examples at the reported rounds, over "
            "all clients and seeds. The colour is the share among the examples of the true class.",
            ["confusion"],
            [Control("method", "Method", labels)],
        )
    yield _labels(content["groups"], _sampled(groups))


def ahead(comparison: Table, content: Json) -> list[Section]:
    """Return the section below the verdict; none if no run has training alone."""
    if not content["ahead"]:
        return []
    words = (
        "How far each method is ahead of training alone on test data, with its 95 % interval over "
        "clients and seeds, if there are six clients. A lead or a loss without one, or whose "
        "interval contains 0, may be chance."
    )
    return [Section("ahead", "Ahead of training alone", words, ["ahead"])]


def _sampled(groups: Groups) -> str:
    if all(len(group.clients) == group.partition.clients for group in groups.values()):
        return ""
    shown = max(len(group.clients) for group in groups.values())
    most = max(group.partition.clients for group in groups.values())
    return f" Of up to {most:,} clients {shown} are shown as dots; the boxes count all."


def name_of(text: str) -> str:
    """Return ``text`` as a part of links and of files' names."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def _caption(pictures: Sequence[Json]) -> str:
    first = pictures[0]
    still = " No value has changed yet." if all(one["isFlat"] for one in pictures) else ""
    if not first["column"]:
        return f"{first['caption']} Each dot is a client.{still}"
    neutral = "" if first["neutral"] is None else (
        f" The colour in the middle is {first['neutral']:.3g}, where all begin."
    )  # fmt: skip
    ends = [end for one in pictures for end in one["lastReach"]]
    values = (
        f" The values of the last round go from {min(ends):.3g} to {max(ends):.3g}, and the "
        "colours from {:.3g} to {:.3g}.".format(*first["domain"]) if ends else ""
    )  # fmt: skip
    return f"{first['caption']}{neutral}{values}{still}"


def _choice(groups: Sequence[Json]) -> list[Control]:
    titles = [one["title"] for one in groups]
    return [Control("group", "Clients of", titles)] if len(groups) > 1 else []


def _labels(groups: Sequence[Json], sampled: str) -> Section:
    if any(one["labels"] is None for one in groups):
        words = "The training examples of each client, the largest client first."
        return Section("sizes", "Clients' data", words + sampled, ["sizes"], _choice(groups))
    first = "their true cluster, then by " if any(one["clusters"] for one in groups) else ""
    words = (
        "The examples of each client by class, over all splits. Clients are ordered by "
        f"{first}their most frequent class."
    )
    title = "Labels of the clients"
    return Section("labels", title, words + sampled, ["labels"], _choice(groups))
