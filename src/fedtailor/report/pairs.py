"""How far every method is ahead of one of them, over pairs of a client and a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from ..errors import unknown
from ..run_format import as_json
from .differences import Difference, comparable_entries, difference, results_of
from .numbers import bare
from .read import StrPath, read_all
from .select import Metric, is_percentage, metric_of
from .untrained import untrained_notes
from .verdict import trained_words


@dataclass(frozen=True)
class Pairs:
    """The differences of test results from the method ``against``, the largest first."""

    against: str
    metric: Metric
    differences: Sequence[Difference]
    notes: Sequence[str] = ()  # what to read before comparing

    def as_text(self) -> str:
        """The differences as a table for a terminal."""
        unit = "points" if is_percentage(self.metric) else self.metric
        header = ["method", f"ahead ({unit})", "95 % interval", "these data show", "worse off"]
        body = tabulate(
            [self._row(one) for one in self.differences],
            header,
            disable_numparse=True,
            colalign=("left", "right", "right", "left", "right") if self.differences else None,
        )
        title = f"Test {self.metric}: how far each method is ahead of {self.against}"
        return "\n".join([title, body, *self.notes])

    def as_json(self) -> str:
        """The differences as JSON, in full precision."""
        return as_json([dataclasses.asdict(one) for one in self.differences], 2)

    def _row(self, one: Difference) -> list[str]:
        low, high = (bare(self.metric, value, signed=True) for value in (one.low, one.high))
        return [
            one.method,
            bare(self.metric, one.value, signed=True),
            f"{low} to {high}" if one.has_interval else "-",
            one.words,
            f"{one.num_worse_off} of {one.num_clients} clients",
        ]


def pairs(paths: StrPath | Sequence[StrPath], against: str, metric: Metric | None = None) -> Pairs:
    """Compare every method of the runs at ``paths`` with the one that is called ``against``, where
    the runs divide the same data alike.

    Args:
        paths: one or several run directories.
        against: the label of a method.
        metric: what is compared; None: that by which the runs select their rounds.

    Raises:
        InputError: no method has this label, or a path has no run that can be read.
    """
    runs = read_all(paths)
    shown = metric_of(runs) if metric is None else metric
    groups = comparable_entries(runs)
    if against not in (labels := [entry.label for members in groups for entry in members]):
        raise unknown("method", against, labels)
    found, notes = [], list[str]()
    for members in groups:
        for base in (entry for entry in members if entry.label == against):
            others = [entry for entry in members if entry is not base]
            of_base = results_of(base, shown)
            found += [difference(results_of(entry, shown), of_base) for entry in others]
            notes += untrained_notes([base, *others], shown)
    known = sorted((one for one in found if one is not None), key=lambda one: -one.value)
    notes += [f"{one.method}: {said}" for one in known if (said := trained_words(shown, one))]
    return Pairs(against, shown, known, list(dict.fromkeys(notes)))
