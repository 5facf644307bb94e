"""How the settings of the map's methods were chosen, and which rows it lacks, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.map_cells import FILE
from evidence.rates import best_of, trials, validation
from fedtailor.methods import METHODS
from fedtailor.report.names import in_prose

Found = Sequence[Mapping[str, Any]]
Own = tuple[str, ...]  # a trial's settings

_TUNED_IN = {"text": ("rounds=5",), "image": ("preset=images",)}
_CALLED = {"text": "texts", "image": "pictures"}
_NAMED = 4  # methods in a sentence
_GATES = ("papers/fedsdg/clients.toml", (), "fedsdg")
_ALIKE = ("quickstart.toml", (), "fedsdg")


def budget(found: Found) -> str:
    """How many trials each method had, and what they varied."""
    counts, said = [], []
    for modality in _TUNED_IN:
        of = _of_modality(found, modality)
        numbers = sorted({len(own) for own in of.values()})
        counts.append(f"{' to '.join(map(str, numbers))} on {_CALLED[modality]}")
        further = {
            f"`{method}`": [f"`{name}`" for name in _varied(tried) if name != "optimiser.lr"]
            for method, tried in sorted(of.items())
        }
        if two := [f"{method} ({in_prose(names)})" for method, names in further.items() if names]:
            said.append(
                f"On {_CALLED[modality]} those of {in_prose(two)} also vary the setting in "
                "brackets."
            )
    trial = f"with a seed that no table has, of the learning rate: {in_prose(counts)}."
    first = "Each method's are the best of the same number of trials on validation data,"
    return " ".join([first, trial, *said])


def edges(found: Found) -> str:
    """For how many methods the best rate was the smallest or the largest of those tried."""
    return ends({called: _of_modality(found, kind) for kind, called in _CALLED.items()})


def ends(tried: Mapping[str, Mapping[str, Mapping[Own, Mapping[str, Any]]]]) -> str:
    """Where the best rates lie between others that were tried, and where they don't.

    `tried` has the lines of trials by data, by method, and by the trial's settings.
    """
    inside, said = [], []
    for data, methods in tried.items():
        at: dict[str, list[str]] = {}
        for method, of in sorted(methods.items()):
            if end := end_of(of):
                at.setdefault(end, []).append(f"`{method}`")
        if not at:
            inside.append(data)
        for end, names in at.items():
            which = f": {in_prose(names)}" if len(names) <= _NAMED else ""
            counts = f"{len(names)} of {len(methods)} methods"
            said.append(f"On {data} the best rate is {end}, for {counts}{which}.")
    if said:
        said.append("Beyond that end nothing was tried: a better rate may lie there.")
    if inside:
        where = in_prose(inside)
        said = [f"On {where} each method's best rate lies between others that were tried.", *said]
    return " ".join(said)


def end_of(tried: Mapping[Own, Mapping[str, Any]]) -> str:
    """Which end of a method's rates, or of the one other setting that was tried, its best one is,
    in words; empty if it lies between others, or if there is one alone."""
    varied = _varied(tried)
    name = varied[0] if len(varied) == 1 else "optimiser.lr"
    rates = sorted({_value(own, name) for own in tried})
    rate = _value(best_of(tried), name)
    if len(rates) == 1 or rates[0] < rate < rates[-1]:
        return ""
    what = "one" if name == "optimiser.lr" else f"`{name}`"
    return f"the {'largest' if rate == rates[-1] else 'smallest'} {what} tried, {rate:g}"


def absent(found: Found) -> str:
    """Why some methods have rows for one kind of data alone."""
    rows = {
        modality: {m for cell in found if cell["modality"] == modality for m in cell["methods"]}
        for modality in _TUNED_IN
    }
    lora = sorted(rows["text"] - rows["image"])
    said = [f"{in_prose([f'`{m}`' for m in lora])} have no rows for pictures ([why](cross.md))."]
    for method in sorted(rows["image"] - rows["text"]):
        said.append(f"`{method}` has none for texts: see [another table](cross.md).")
    return "**Missing rows.** " + " ".join(said)


def gates(found: Found) -> str:
    """That the map has another rate of FedSDG's gates than the default, and what both came to."""
    settings = next(c["methods"]["fedsdg"]["settings"] for c in found if "fedsdg" in c["methods"])
    used = next((float(s.split("=")[1]) for s in settings if s.startswith("lr_gate=")), None)
    default: float = METHODS["fedsdg"]().lr_gate  # type: ignore[attr-defined]
    if used is None:
        return ""
    tried = trials()
    rate = _rate(best_of(tried[_GATES]))
    scores = {  # of the trials with the same rate of all else
        _value(own, "lr_gate"): 100 * validation(line)
        for own, line in tried[_GATES].items()
        if _rate(own) == rate
    }
    alike = {_value(own, "lr_gate"): 100 * validation(line) for own, line in tried[_ALIKE].items()}
    return (
        f"**FedSDG's** gates learn at {used:g} here, and at {default:g} by default, chosen later. "
        f"On validation data these came to {scores[used]:.1f} and {scores[default]:.1f} % at "
        f"Dirichlet 0.1 (20 clients, one seed), to {alike[used]:.1f} and {alike[default]:.1f} % "
        "in the quickstart: where clients differ much FedSDG may do better than here."
    )


def head_passes(found: Found) -> str:
    """How many passes FedRep's heads had, which nobody tuned."""
    said = []
    for modality, called in _CALLED.items():
        of = next(c for c in found if c["modality"] == modality and "fedrep" in c["methods"])
        (number,) = [
            s.split("=")[1]
            for s in of["methods"]["fedrep"]["settings"]
            if s.startswith("head_passes=")
        ]
        said.append(f"{number} on {called}")
    return f"**FedRep's** `head_passes`, {in_prose(said)}, was not tuned."


def _of_modality(found: Found, modality: str) -> dict[str, Mapping[Own, Mapping[str, Any]]]:
    """The trials of the methods that the map has for texts, or for pictures."""
    here = {m for cell in found if cell["modality"] == modality for m in cell["methods"]}
    base = _TUNED_IN[modality]
    return {
        m: of for (file, b, m), of in trials().items() if (file, b) == (FILE, base) and m in here
    }


def _varied(tried: Mapping[Own, Any]) -> list[str]:
    """The settings of which the trials have several values."""
    values: dict[str, set[str]] = {}
    for own in tried:
        for setting in own:
            name, _, value = setting.partition("=")
            values.setdefault(name.split(".", 2)[2], set()).add(value)
    return [name for name, several in values.items() if len(several) > 1]


def _rate(own: Own) -> float:
    return _value(own, "optimiser.lr")


def _value(own: Own, name: str) -> float:
    """The value of a setting in a trial."""
    (value,) = [s.partition("=")[2] for s in own if s.partition("=")[0].endswith(f".{name}")]
    return float(value)
