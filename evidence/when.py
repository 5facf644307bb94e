"""Write the map from the kept results: docs/when.md, docs/when.csv, its figure, and what `fedtailor
advise` reads.

python -m evidence.when
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from evidence import cross_cells, map_tuning
from evidence.map_cells import ALONE, cells, language_models, other_tasks, planned_settings
from evidence.map_figure import draw
from evidence.markdown import markdown_table
from evidence.run import HERE
from fedtailor.methods import METHODS
from fedtailor.report.names import in_prose
from fedtailor.store.metrics import bare, is_percentage

PAGE = HERE.parent / "docs/when.md"
FIGURE = HERE.parent / "docs/images/when.svg"
TABLE = HERE.parent / "docs/when.csv"
MEASURED = HERE.parent / "src/fedtailor/advice/measured.json"


def measured() -> list[dict[str, Any]]:
    """What was measured in all cells, in the order of the page."""
    return sorted((cell.measured() for cell in cells()), key=_place)


def advice(found: Sequence[Mapping[str, Any]]) -> str:
    """What `fedtailor advise` reads: the map, the setting with a language model, other tasks."""
    more = [cell.measured() for cell in [*language_models(), *other_tasks()]]
    return json.dumps([*found, *more], indent=1) + "\n"


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The page, as Markdown."""
    kinds = [[cell for cell in found if cell["modality"] == kind] for kind in ("text", "image")]
    return "\n".join(
        [
            _HEAD,
            first_choice(found),
            _short(found),
            _settings(found),
            _READ.format(seeds=in_prose(sorted({str(len(_seeds(cell))) for cell in found}))),
            *(_leads(found, of) for of in kinds),
            _FIGURE,
            *filter(None, [_tasks()]),
            _TAIL.format(
                missing=_missing(found),
                budget=map_tuning.budget(found),
                elsewhere=_elsewhere(found),
                edges=map_tuning.edges(found),
                gates=map_tuning.gates(found),
                head_passes=map_tuning.head_passes(found),
                absent=map_tuning.absent(found),
            ),
        ]
    )


def _missing(found: Sequence[Mapping[str, Any]]) -> str:
    """The settings that are planned and not run with all methods, as a sentence."""
    run = {tuple(cell["settings"]) for cell in found}
    left = [
        " ".join(f"--set {one}" for one in each) for each in planned_settings() if each not in run
    ]
    commands = "; ".join(f"`fedtailor run map {settings}`" for settings in left)
    said = f"Planned, and not yet run with all methods: {commands}. " if left else ""
    if any(len(seeds) < len(cross_cells.SEEDS) for seeds in map(_seeds, found)):
        said += "Further seeds of the settings with one or two are planned, too."
    return f"\n- {said.strip()}" if said else ""


def _seeds(cell: Mapping[str, Any]) -> Sequence[int]:
    """The seeds with which all methods of a setting have run."""
    seeds: Sequence[int] = cell["methods"][ALONE]["seeds"]
    return seeds


def first_choice(found: Sequence[Mapping[str, Any]]) -> str:
    """Which methods to try first, as a table: those that are best on validation data in most
    settings of a kind first."""
    rows = []
    for (modality, pretrained), about in _KINDS.items():
        of = [c for c in found if (c["modality"], c["pretrained"]) == (modality, pretrained)]
        overlaps: dict[str, list[float]] = {}
        for cell in of:
            overlaps.setdefault(cell["chosen"], []).append(cell["clients"]["label_overlap"])
        for label in sorted(overlaps, key=lambda name: (-len(overlaps[name]), min(overlaps[name]))):
            rows.append(
                [
                    about,
                    _range(overlaps[label]),
                    f"[`{label}`](methods/{label}.md)",
                    f"{len(overlaps[label])} of {len(of)} settings",
                ]
            )
    best, second = _best_language_models()
    why = f"[one setting](cross.md), by perplexity: {_in_words(best)}; next {_in_words(second)}"
    rows.append(["Language models", "", f"[`{best.method}`](methods/{best.method}.md)", why])
    for cell in (task.measured() for task in other_tasks()):
        label, seeds = cell["chosen"], len(_seeds(cell))
        why = f"[one setting](#other-tasks), {_in_seeds(seeds)}"
        task = f"{_TASKS[cell['file']]}, pretrained model"
        rows.append([task, "", f"[`{label}`](methods/{label}.md)", why])
    rows.append(["Pictures, pretrained model", "", "", "not measured: `advise` goes by texts"])
    header = ["your data", "label overlap", "first try", "best on validation data in"]
    return markdown_table(header, rows, words=(0, 1, 2, 3)) + "\n"


def _short(found: Sequence[Mapping[str, Any]]) -> str:
    """Where training together pays, in two sentences."""
    chosen = [_over_alone(cell, cell["chosen"]) for cell in found]
    shared = [_over_alone(cell, "fedavg") for cell in found if "fedavg" in cell["methods"]]
    return _IN_ALL.format(
        pays=sum(low > 0 for _, low, _ in chosen),
        settings=len(found),
        ahead=sum(low > 0 for _, low, _ in shared),
        shared=len(shared),
        behind=sum(high < 0 for *_, high in shared),
    )


def _settings(found: Sequence[Mapping[str, Any]]) -> str:
    """One row for each setting."""
    rows = [
        [
            _LETTERS[number],
            _DATA.get(cell["data"], cell["data"]).partition(",")[0],
            f"{cell['clients']['number']:.0f} × {cell['clients']['median_examples']:.0f}",
            f"{cell['alpha']:g}",
            f"{100 * cell['clients']['label_overlap']:.0f} %",
            cell["chosen"],
            "" if cell["chosen"] == ALONE else _signed(_over_alone(cell, cell["chosen"])),
            ", ".join(label for label in _best(cell) if label != cell["chosen"]),
        ]
        for number, cell in enumerate(found)
    ]
    header = (
        "", "data", "clients × examples", "Dirichlet", "label overlap", "best method",
        "over local", "no clear difference",
    )  # fmt: skip
    return markdown_table(header, rows, words=(0, 1, 5, 7)) + "\n"


def _leads(found: Sequence[Mapping[str, Any]], of: Sequence[Mapping[str, Any]]) -> str:
    """How far each method is ahead of training alone in these settings."""
    names = sorted(
        {name for cell in of for name in cell["methods"]},
        key=lambda name: (
            -mean(_over_alone(cell, name)[0] for cell in of if name in cell["methods"])
        ),
    )
    rows = [[name, *(_lead(cell, name) for cell in of)] for name in names]
    header = ["method", *(_LETTERS[found.index(cell)] for cell in of)]
    return markdown_table(header, rows) + "\n"


def _lead(cell: Mapping[str, Any], name: str) -> str:
    """Points over training alone: bold if clearly ahead, in brackets if clearly behind; its own
    accuracy for training alone."""
    metric = cell.get("metric", "accuracy")
    if name not in cell["methods"]:
        return ""
    if name == ALONE:
        one = cell["methods"][ALONE]
        return _score(cell, one.get("accuracy", one.get("score")))
    lead, low, high = _over_alone(cell, name)
    shown = bare(metric, lead, signed=True)
    return f"**{shown}**" if low > 0 else f"({shown})" if high < 0 else shown


def _score(cell: Mapping[str, Any], value: float) -> str:
    metric = cell.get("metric", "accuracy")
    return bare(metric, value) + (" %" if is_percentage(metric) else "")


def _tasks() -> str:
    """How far each method is ahead of training alone on other tasks."""
    found = [cell.measured() for cell in other_tasks()]
    if not found:
        return ""
    names = [name for name in METHODS if any(name in cell["methods"] for cell in found)]
    rows = [
        [
            f"`{cell['file']}`", cell["metric"], len(_seeds(cell)), cell["chosen"],
            _score(cell, cell["without_model"]),
            *(_lead(cell, name) for name in names),
        ]
        for cell in found
    ]  # fmt: skip
    header = ["experiment", "metric", "seeds", "best method", "no model", *names]
    return _OTHER.format(table=markdown_table(header, rows, words=(0, 1, 3)))


def _in_seeds(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds"


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Everything as CSV, a line a setting and a method."""
    rows = [
        [
            _LETTERS[number], cell["data"], " ".join(cell["settings"]), cell["clients"]["number"],
            cell["clients"]["median_examples"], cell["alpha"], cell["clients"]["label_overlap"],
            label, len(one["seeds"]), one["accuracy"], one["decile"], *one["over_alone"],
            one["worse_off"], one["bytes"], one["cpu_seconds"], label == cell["chosen"],
        ]
        for number, cell in enumerate(found)
        for label, one in cell["methods"].items()
    ]  # fmt: skip
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_COLUMNS, *rows])
    return text.getvalue()


_COLUMNS = (
    "setting", "data", "settings", "clients", "median_examples", "dirichlet", "label_overlap",
    "method", "seeds", "accuracy", "decile", "over_local", "over_local_low", "over_local_high",
    "worse_off", "bytes_client_round", "cpu_seconds", "chosen",
)  # fmt: skip


def _range(values: Sequence[float]) -> str:
    found = [f"{100 * value:.0f}" for value in sorted(values)]
    return f"{' and '.join(found) if len(found) < 3 else f'{found[0]} to {found[-1]}'} %"


def _in_words(cell: cross_cells.Cell) -> str:
    """A method with its perplexity and what a client sends and receives in a round."""
    numbers = cell.numbers()
    perplexity, sent = numbers["mean"], numbers["bytes_client_round"]
    assert perplexity is not None
    assert sent is not None
    return f"`{cell.method}` {perplexity:.1f}, with {sent / 1e6:.1f} MB a client and round"


def _best_language_models() -> list[cross_cells.Cell]:
    """The two methods with the lowest perplexity in the cross table."""
    found = [cell for cell in cross_cells.cells() if cell.data.is_text and not cell.missing]
    return sorted(found, key=cross_cells.score_of, reverse=True)[:2]


def _elsewhere(found: Sequence[Mapping[str, Any]]) -> str:
    """Which methods of the cross table that the map lacks are among its best, as sentences."""
    here = {name for cell in found for name in cell["methods"]}
    where: dict[str, list[str]] = {}
    crossed = cross_cells.cells()
    for data in cross_cells.DATA:
        for method in cross_cells.best([cell for cell in crossed if cell.data == data]):
            where.setdefault(method, []).append(data.name)
    others = [m for m in cross_cells.SYSTEMS + cross_cells.BASELINES if m not in here]
    said = [
        f"`{method}` is there the best, or can't be told from it, on {in_prose(where[method])}."
        for method in others
        if method in where
    ]
    names = in_prose([f"`{method}`" for method in others])
    return "\n".join([f"{names} were measured on [another page](cross.md) alone.", *said])


def _place(cell: Mapping[str, Any]) -> tuple[bool, str, float, float, float]:
    """Where a setting stands on the page: texts first, by data, and by what is changed."""
    clients = cell["clients"]
    size = round(clients["median_examples"], -1)
    is_image = cell["modality"] == "image"
    return is_image, cell["data"], clients["number"], size, clients["label_overlap"]


def _over_alone(cell: Mapping[str, Any], label: str) -> Sequence[float]:
    found: Sequence[float] = cell["methods"][label]["over_alone"]
    return found


def _best(cell: Mapping[str, Any]) -> list[str]:
    """The best method, and those that can't be told from it."""
    return [label for label, one in cell["methods"].items() if one["over_best"][2] >= 0]


def _signed(interval: Sequence[float]) -> str:
    difference, low, high = (100 * x for x in interval)
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KINDS = {
    ("text", True): "Texts with labels, pretrained model",
    ("image", False): "Pictures, random weights",
}

_DATA = {
    "20newsgroups": "20 Newsgroups, MiniLM",
    "reuters-r8": "Reuters R8, MiniLM",
    "fashion-mnist": "Fashion-MNIST, small CNN",
}

_HEAD = """# Which method should I use?

It depends on how many clients you have, how many examples each has, and how alike their labels are.
`fedtailor advise mine.toml` computes these three for your clients, finds the closest setting on
this page, and names up to three methods that did well in it.

## In short
"""

_IN_ALL = """Always run [`local`](methods/local.md), training alone, too. The method that validation
data chose clearly beats it in {pays} of the {settings} settings below. One model for all,
[`fedavg`](methods/fedavg.md), is clearly ahead of it in {ahead} of {shared}, and clearly behind in
{behind}.

*Label overlap* is the share that the class distributions of two clients have in common, the mean
over all pairs; `advise` prints yours.

On texts `fedsq` trains whole blocks, the others LoRA. FedAvg on the same blocks comes close to it
at Dirichlet 1; at 10 its results vary much ([claims fedsq-18 and 19](claims.md#fedsq)).

## The settings

*Examples*: of the median client, for training. *Best method*: on validation data. *Over local*: its
test accuracy minus training alone's, in points, with the 95 % interval over clients and seeds. *No
clear difference*: methods whose interval to the highest test accuracy contains 0.
"""

_READ = """How many points is each method's mean accuracy over clients above that of training alone
(the row `local`)? **Bold**: clearly ahead. In brackets: clearly behind. Elsewhere the 95 % interval
contains 0. In a setting all methods have the same clients, rounds, batches and model: with texts
MiniLM with LoRA on the last two of six blocks, with pictures a small CNN. Seeds: {seeds}.
"""

_FIGURE = """[when.csv](when.csv) has intervals, bytes, time, the client at the worst tenth, and
the share of clients that would have done better alone. Its column `settings` repeats a setting:
`fedtailor run map --set ...`.

![How far each method is ahead of training alone, in points of accuracy](images/when.svg)
"""

_TASKS: Mapping[str, str] = {
    "papers/fedhft/pairs": "Pairs of texts",
    "papers/fedhft/spans": "Questions about a text",
    "tweets": "A number to predict",
}

_OTHER = """## Other tasks

We made these of real texts ([what they ask](evidence.md#tasks-that-we-made)). 8 clients have 40
examples each, and 9 rounds; MiniLM has LoRA on the last of its blocks. Numbers are as above, in the
task's own metric: points, or by how much an RMSE is lower. *No model*: any answer to a pair, a
passage drawn at random, the mean of a client's training rows. So little data and training hardly
tells the methods apart.

{table}
"""

_TAIL = """## What this doesn't say

With other data, longer training or another model the order may change: compare two or three methods
on your own validation data.
{elsewhere}

- **Settings.** {budget}
- **Rates** were searched in two settings alone: 20 Newsgroups, with half the rounds, and
  Fashion-MNIST, both at Dirichlet 0.3 with about 60 examples a client. Elsewhere a method may look
  worse than it is. {edges}
- {gates}
- {head_passes}
- {absent}
- **FedSQ** is made for pretrained networks; on pictures its pattern is that of random weights.
- **Inputs**, such as scanners, differ only in [FedMerge's Figure 6](claims.md#fedmerge), here
  labels and numbers of examples.{missing}

`python -m evidence.when` writes every number ([how](evidence.md)). `preset=images` needs
[Fashion-MNIST](data.md#use-a-ready-data-set).
"""


def main() -> None:
    """Write the page, the table, the figure, and what the advice reads."""
    found = measured()
    MEASURED.write_text(advice(found))
    PAGE.write_text(page(found))
    TABLE.write_text(table(found))
    if found:
        draw(found, FIGURE, _DATA)


if __name__ == "__main__":
    main()
