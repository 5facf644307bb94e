"""Write the map from the kept results: docs/when.md, its figure, what `fedtailor advise` reads, and
which method to try first, on the pages that say it.

python -m evidence.when
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evidence import cross_cells, map_tuning
from evidence.map_cells import ALONE, cells, language_models, planned_settings
from evidence.map_figure import draw
from evidence.markdown import markdown_table
from evidence.run import HERE, NO_ENDS, run_folder
from fedtailor.report.names import in_prose

PAGE = HERE.parent / "docs/when.md"
FIGURE = HERE.parent / "docs/images/when.svg"
WITH_FIRST_CHOICE = {  # pages that say it, too, and where the methods' pages lie from there
    HERE.parent / "docs/faq.md": "methods/",
    HERE.parent / "docs/methods/index.md": "",
}
BEGIN, END = "<!-- first choice: evidence/when.py -->", "<!-- end of first choice -->"
MEASURED = HERE.parent / "src/fedtailor/advice/measured.json"


def measured() -> list[dict[str, Any]]:
    """What was measured in all cells, in the order of the page."""
    return sorted((cell.measured() for cell in cells()), key=_place)


def advice(found: Sequence[Mapping[str, Any]]) -> str:
    """What `fedtailor advise` reads: the map, and the setting with a language model."""
    return json.dumps([*found, *(c.measured() for c in language_models())], indent=1) + "\n"


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The page, as Markdown."""
    sections = (part for cell in found for part in _section(cell))
    return "\n".join(
        [
            _HEAD,
            *_short(found),
            _READ.format(budget=_indented(map_tuning.budget(found))),
            *sections,
            _TAIL.format(
                missing=_missing(found),
                elsewhere=_elsewhere(found),
                edges=map_tuning.edges(found),
                gates=map_tuning.gates(found),
                head_passes=map_tuning.head_passes(found),
                absent=map_tuning.absent(found),
            ),
        ]
    )


def _indented(text: str) -> str:
    """Lines of a list's item, after its first words."""
    return map_tuning.filled(text).replace("\n", "\n  ")


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
    return said.strip() + "\n" if said else ""


def _seeds(cell: Mapping[str, Any]) -> Sequence[int]:
    """The seeds with which all methods of a setting have run."""
    seeds: Sequence[int] = cell["methods"][ALONE]["seeds"]
    return seeds


def _short(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all settings come to, in a few sentences and one row for each setting."""
    chosen = [_over_alone(cell, cell["chosen"]) for cell in found]
    shared = [_over_alone(cell, "fedavg") for cell in found if "fedavg" in cell["methods"]]
    rows = [
        [
            _DATA.get(cell["data"], cell["data"]).partition(",")[0],
            f"{cell['clients']['number']:.0f} × {cell['clients']['median_examples']:.0f}",
            f"{100 * cell['clients']['label_overlap']:.0f} %",
            cell["chosen"],
            "" if cell["chosen"] == ALONE else _signed(_over_alone(cell, cell["chosen"])),
            ", ".join(label for label in _best(cell) if label != cell["chosen"]),
            len(_seeds(cell)),
        ]
        for cell in found
    ]
    header = (
        "data", "clients × examples", "label overlap", "best method", "over local",
        "no clear difference", "seeds",
    )  # fmt: skip
    return [
        first_choice(found, "methods/"),
        f"- **Training together pays** in {sum(low > 0 for _, low, _ in chosen)} of {len(found)} "
        "settings: the method that is best on validation data is clearly ahead of training alone "
        "on test data.",
        f"- **One model for all**, FedAvg's, is clearly ahead of training alone in "
        f"{sum(low > 0 for _, low, _ in shared)} of {len(shared)} settings, and clearly behind in "
        f"{sum(high < 0 for *_, high in shared)}.\n",
        "Each row is a setting: data, number of clients, and training examples of the median "
        "client. **best method** is the one that is best on validation data. **over local** is its "
        "test accuracy minus that of training alone, in points, with the 95 % interval. **no clear "
        "difference** names other methods: the 95 % interval of the difference between their test "
        "accuracy and the highest one contains 0.\n",
        markdown_table(header, rows, words=(0, 3, 5)),
        "",
    ]


def first_choice(found: Sequence[Mapping[str, Any]], folder: str) -> str:
    """Which method to try first, as a list; the methods' pages lie in ``folder``."""
    said = []
    for (modality, pretrained), about in _KINDS.items():
        of = [c for c in found if (c["modality"], c["pretrained"]) == (modality, pretrained)]
        if of:
            said.append(f"- **{about}:** first try {_chosen_most(of, folder)}")
    models = _best_language_models()
    best, second = map(_in_words, models)
    ended = all(cell.has_ends for cell in models)
    no_ends = "" if ended else "\n  " + NO_ENDS.replace("\n", "\n  ")
    up = "" if folder else "../"
    said.append(_OTHERS.format(folder=folder, up=up, best=best, second=second, no_ends=no_ends))
    return "\n".join(said)


def _chosen_most(found: Sequence[Mapping[str, Any]], folder: str) -> str:
    """The methods that are best on validation data in most settings, and those that are in others,
    each with the label overlap of its settings."""
    overlaps: dict[str, list[float]] = {}
    for cell in found:
        overlaps.setdefault(cell["chosen"], []).append(cell["clients"]["label_overlap"])
    most = max(map(len, overlaps.values()))
    order = sorted(overlaps, key=lambda label: min(overlaps[label]))
    first = [label for label in order if len(overlaps[label]) == most]
    named = {
        label: f"[`{label}`]({folder}{label}.md) ({_range(values)})"
        for label, values in overlaps.items()
    }
    text = (
        f"{in_prose([named[label] for label in first])}, best on validation data in {most} of "
        f"{len(found)} measured settings{' each' if len(first) > 1 else ''}."
    )
    if rest := [named[label] for label in overlaps if label not in first]:
        text += f" Best in the others: {in_prose(rest)}."
    return f"{text} In brackets is the label overlap of these settings."


def _range(values: Sequence[float]) -> str:
    found = [f"{100 * value:.0f}" for value in sorted(values)]
    return f"{' and '.join(found) if len(found) < 3 else f'{found[0]} to {found[-1]}'} %"


def _in_words(cell: cross_cells.Cell) -> str:
    """A method with its perplexity and what a client sends and receives in a round."""
    numbers = cell.numbers()
    perplexity, sent = numbers["mean"], numbers["bytes_client_round"]
    assert perplexity is not None
    assert sent is not None
    return f"`{cell.method}` ({perplexity:.1f}, with {sent / 1e6:.1f} MB a client and round)"


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
    return "\n".join([f"{in_prose([f'`{m}`' for m in others])} are on that page alone.", *said])


def with_first_choice(text: str, found: Sequence[Mapping[str, Any]], folder: str) -> str:
    """A page's text with the first choice between the markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{first_choice(found, folder)}\n\n{END}{after}"


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


def _section(cell: Mapping[str, Any]) -> list[str]:
    settings = "".join(f" --set {setting}" for setting in cell["settings"])
    if len(seeds := _seeds(cell)) < len(cross_cells.SEEDS):
        settings += f" --set 'seeds={json.dumps(seeds, separators=(',', ':'))}'"
    rows = [
        [
            label,
            f"{100 * one['accuracy']:.1f}",
            "" if label == ALONE else _signed(one["over_alone"]),
            f"{100 * one['decile']:.1f}",
            "" if label == ALONE else f"{100 * one['worse_off']:.0f} %",
            f"{one['bytes'] / 1e3:,.0f}",
            "–" if one["cpu_seconds"] is None else f"{one['cpu_seconds']:.0f}",
            len(one["seeds"]),
        ]
        for label, one in cell["methods"].items()
    ]
    header = (
        "method", "accuracy", "over local", "decile", "worse off", "kB", "CPU s", "seeds",
    )  # fmt: skip
    return [
        f"### {title(cell)}\n",
        f"{sentence(cell)}\n",
        markdown_table(header, rows),
        f"\n`fedtailor run map{settings} --out {run_folder('map', cell['settings'])}`\n",
    ]


def title(cell: Mapping[str, Any]) -> str:
    """A cell in a few words."""
    clients = cell["clients"]
    return (
        f"{_DATA.get(cell['data'], cell['data'])}: {clients['number']:.0f} clients, "
        f"{clients['median_examples']:.0f} examples each, Dirichlet {cell['alpha']:g} "
        f"(label overlap {100 * clients['label_overlap']:.0f} %)"
    )


def sentence(cell: Mapping[str, Any]) -> str:
    """Which method has the highest test accuracy in a cell, which can't be told from it, how far it
    is ahead, and which one validation data chose."""
    labels = list(cell["methods"])
    best = cell["methods"][labels[0]]
    ties = [label for label in _best(cell) if label != labels[0]]
    if labels[0] == ALONE:
        said = "No method is ahead of training alone."
    else:
        said = (
            f"**{labels[0]}** has the highest test accuracy: {_signed(best['over_alone'])} points "
            "over training alone."
        )
    said += f" No clear difference: {', '.join(ties)}." if ties else ""
    chosen = cell["chosen"]
    return said + (f" Validation data chose {chosen}." if chosen != labels[0] else "")


def _signed(interval: Sequence[float]) -> str:
    difference, low, high = (100 * x for x in interval)
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"


_KINDS = {
    ("text", True): "Texts with labels, and a pretrained model",
    ("image", False): "Pictures, and a network from random weights",
}
_OTHERS = """\
- **Language models** were measured in
  [one setting]({up}cross.md#chat-messages-smollm2-135m-8-senders): {best} has the lowest perplexity
  there; {second} comes next.{no_ends}
- **Pictures with a pretrained model:** nothing like them was measured. `fedtailor advise` then goes
  by the settings with texts, and says that their order is a hint.
- **In every case** add [`local`]({folder}local.md), training alone.
  Training together has to beat it.
- On texts `fedsq` trains whole blocks, the others LoRA. FedAvg on the same blocks comes close to it
  at Dirichlet 1; at 10 its results vary much ([claims fedsq-18 and 19]({up}claims.md#fedsq)).
- **Label overlap**: the share that the class distributions of two clients have in common, the mean
  over all pairs. At 100 % all have the same classes. `fedtailor advise` prints yours."""

_DATA = {
    "20newsgroups": "20 Newsgroups, MiniLM",
    "reuters-r8": "Reuters R8, MiniLM",
    "fashion-mnist": "Fashion-MNIST, small CNN",
}

_HEAD = """# Which method should I use?

It depends on how many clients you have, how many examples each of them has, and how alike their
labels are. This page has measured results for settings that differ in these. To find the one
closest to yours:

    fedtailor advise mine.toml

The command computes all three for your clients, and finds the measured setting that is closest in
them. Settings of your kind come before others: texts or pictures,
with a pretrained model or without; and one of your own data set counts as closer. The command names
up to three methods. The one with the best validation accuracy in that setting comes first. Then
come those whose test accuracy does not differ significantly from the highest one, the most accurate
first. If there is room, methods that are clearly ahead of training alone follow. A method whose
mean is not above that of training alone is never named.

## In short
"""

_READ = """![How far each method is ahead of training alone, in points of accuracy](images/when.svg)

A bar through a point is the 95 % interval. Hollow points rest on one or two seeds, full ones on
three. The points of a setting stand side by side. Reuters R8 was measured in one setting.

## How to read the tables

- All methods of a table have the same clients, rounds, batches and model. On texts LoRA is on the
  last two of MiniLM's six blocks, for all methods that train it; so FedSDG has two gates a client.
- {budget}
- The command below a table runs `apfl` and `ifca`, too, and on texts `pfedgate`, which takes the
  longest. They have no rows here; `--set 'methods=["local","fedper"]'` runs two methods alone.
- Commands with `preset=images` need [Fashion-MNIST](data.md#use-a-ready-data-set).
- Methods are in the order of their test accuracy. To choose one, look at validation data, as the
  column *best method* above does.
- **accuracy**: the mean over clients of each client's own model on its own test examples, in
  percent, then over seeds. **decile**: the client at the worst tenth, the mean over seeds.
- **over local**: how many points the mean is above training alone, and in brackets a 95 % interval
  from resampling seeds and clients. A difference whose interval contains 0 may be chance.
- **worse off**: the share of clients that would have done better alone.
- **kB**: what one client sends and receives in a round. **CPU s**: processor time of the whole run,
  of all clients together, on one core.

## The settings
"""

_TAIL = """## What this doesn't say

What was measured is a small part of what there is. With other data, longer training or another
model the order may change. Use the page to choose two or three methods, and compare those on your
own validation data. [Fifteen methods on four data sets](cross.md) has more methods
and other data in one setting each.
{elsewhere}

**Rates.** They were searched on validation data in two settings alone: 20 Newsgroups and
Fashion-MNIST, both at Dirichlet 0.3 with about 60 examples a client. On newsgroups the trials had
half the rounds. All other settings use these rates, Reuters R8 those of newsgroups. So a method
looks worse than it is where another rate would suit it better.

{edges}

{gates}

{head_passes}

{absent}

**FedSQ.** On pictures the network begins with random weights: then the pattern that FedSQ fixes is
random, too, while its paper begins with a pretrained network. On texts FedSQ trains whole blocks,
and the others LoRA, which is most of its lead at Dirichlet 1 ([claim fedsq-18](claims.md#fedsq)).

**Inputs.** In these settings clients differ in their labels and the number of their examples. Where
they differ in their inputs, such as pictures from other scanners, nothing was measured but
[FedMerge's Figure 6](claims.md#fedmerge).

**Seeds.** A setting with one seed (the last column) says little of other seeds. The seconds leave
out runs that were interrupted.

{missing}
Every number was written by `python -m evidence.when` from the results in `evidence/results.jsonl`;
the experiment is `fedtailor run map`.
"""


def main() -> None:
    """Write the page, the figure, the table for the advice, and the first choice on other pages."""
    found = measured()
    MEASURED.write_text(advice(found))
    PAGE.write_text(page(found))
    for path, folder in WITH_FIRST_CHOICE.items():
        path.write_text(with_first_choice(path.read_text(), found, folder))
    if found:
        draw(found, FIGURE, _DATA)


if __name__ == "__main__":
    main()
