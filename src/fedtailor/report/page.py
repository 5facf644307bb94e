"""The comparison as one self-contained page, without scripts and without links to other files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from . import drawing, figures, select
from .cells import text_tables
from .clients import worst_table
from .drawing import Drawing
from .methods import FIGURES
from .numbers import si
from .read import Run, StrPath, read_all
from .select import Entry, Metric
from .table import table
from .text import TextTable


def _drawings(runs: Sequence[Run], entries: Sequence[Entry], metric: Metric) -> Iterator[Drawing]:
    yield figures.convergence(entries, metric)
    yield figures.distribution(entries, metric)
    yield figures.cost(entries, metric)
    for entry in entries:
        if (matrix := figures.confusion(entry)) is not None:
            yield matrix
        for draw in FIGURES.get(entry.method, ()):
            if (figure := draw(entry)) is not None:  # a method may have nothing to show
                yield figure
    by_partition: dict[str, Run] = {}
    for run in runs:
        by_partition.setdefault(next(iter(run.partitions.values())).digest, run)
    for run in by_partition.values():
        yield figures.labels(run)


def _bytes(sizes: Mapping[str, int]) -> tuple[str, str]:
    """Return the bytes by dtype, and their sum."""
    parts = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
    return parts or "-", f"{sum(sizes.values()):,}"


def _ledger(entries: Sequence[Entry]) -> TextTable:
    header = ["method", "seeds", "down", "in all", "up", "in all"]
    cells = []
    for entry in entries:
        seeds_by_costs: dict[tuple[str, ...], list[str]] = {}
        for trial in entry.trials:
            if trial.costs is None:
                continue
            costs = tuple(
                text for sizes in (trial.costs.down, trial.costs.up) for text in _bytes(sizes)
            )
            seeds_by_costs.setdefault(costs, []).append(str(trial.seed))
        cells += [[entry.label, ", ".join(s), *costs] for costs, s in seeds_by_costs.items()]
    return TextTable("Encoded bytes per client and round", header, cells)


def _time(entries: Sequence[Entry]) -> TextTable:
    trials = [(entry.label, trial) for entry in entries for trial in entry.trials]
    phases = list(dict.fromkeys(p for _, trial in trials for t in trial.timings for p in t.seconds))
    cells = []
    for label, trial in trials:
        by_phase = [sum(t.seconds.get(phase, 0.0) for t in trial.timings) for phase in phases]
        peaks = [t.peak_memory_mb for t in trial.timings if t.peak_memory_mb is not None]
        numbers = [f"{seconds:.2f}" for seconds in [*by_phase, float(np.sum(by_phase))]]
        peak = si(max(peaks) * 1e6, "B") if peaks else "-"
        cells.append([label, str(trial.seed), *numbers, peak])
    header = ["method", "seed", *phases, "in all", "peak memory"]
    return TextTable("Seconds by phase, over the committed rounds", header, cells)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            texts |= _flat(value, f"{prefix}{key}.")
        else:
            texts[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _about(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "experiment": json.dumps(run.experiment, indent=2),
        "environment": _flat(run.environment),
        "partitions": {seed: part.digest for seed, part in run.partitions.items()},
    }


def _write(text: str, out: Path) -> None:
    """Write a temporary file and rename it: a reader sees the old page or the new one."""
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"can't write {str(out)!r}; give a file in a directory that exists")
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(out)
    finally:
        Path(name).unlink(missing_ok=True)


def write(paths: StrPath | Sequence[StrPath], out: StrPath) -> Path:
    """Write the comparison of the runs at ``paths``, one or several, as the HTML file ``out``;
    return its path.

    Raises:
        InputError: a path has no run with a committed round, a file of a run is damaged, or ``out``
            can't be written.

    >>> write("nowhere", "page.html")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no directory 'nowhere'; give one that `fedtailor run` wrote
    """
    import jinja2
    import matplotlib

    out = Path(out)
    runs = read_all(paths)
    entries = select.entries(runs)
    comparison = table(runs)
    with matplotlib.rc_context(drawing.RC):
        drawings = [
            (figure, drawing.svg(figure, f"figure{number}"))
            for number, figure in enumerate(_drawings(runs, entries, comparison.metric), start=1)
        ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        title=", ".join(dict.fromkeys(run.name for run in runs)),
        verdicts=[(", ".join(one.runs), one.text) for one in comparison.verdicts],
        tables=text_tables(comparison),
        caption=comparison.caption,
        notes=comparison.notes,
        drawings=drawings,
        worst=worst_table(entries, comparison.metric),
        ledgers=[_ledger(entries), _time(entries)],
        runs=[_about(run) for run in runs],
    )
    _write(text, out)
    return out
