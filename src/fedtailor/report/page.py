"""The comparison as one self-contained page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from . import drawing, figures
from .drawing import Drawing
from .methods import FIGURES
from .read import Run, read_all
from .select import Entry, entries, metric_of
from .table import Block, blocks, si, table


def _drawings(runs: Sequence[Run], shown: Sequence[Entry]) -> Iterator[Drawing]:
    metric = metric_of(runs)
    yield figures.convergence(shown, metric)
    yield figures.distribution(shown, metric)
    yield figures.cost(shown, metric)
    for entry in shown:
        for draw in FIGURES.get(entry.method, ()):
            if (drawn := draw(entry)) is not None:  # a method may have nothing to show
                yield drawn
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(next(iter(run.partitions.values())).digest, run)
    for run in first.values():
        yield figures.labels(run)


def _bytes(sizes: Mapping[str, int]) -> tuple[str, str]:
    """Bytes by dtype, and their sum."""
    parts = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
    return parts or "-", f"{sum(sizes.values()):,}"


def _ledger(shown: Sequence[Entry]) -> Block:
    header = ["method", "seeds", "down", "in all", "up", "in all"]
    cells = []
    for entry in shown:
        seeds: dict[tuple[str, ...], list[str]] = {}
        for trial in entry.trials:
            if trial.costs is None:
                continue
            found = tuple(
                text for sizes in (trial.costs.down, trial.costs.up) for text in _bytes(sizes)
            )
            seeds.setdefault(found, []).append(str(trial.seed))
        cells += [[entry.label, ", ".join(of), *found] for found, of in seeds.items()]
    return Block("Bytes a client a round, as encoded", header, cells)


def _time(shown: Sequence[Entry]) -> Block:
    trials = [(entry.label, trial) for entry in shown for trial in entry.trials]
    phases = list(dict.fromkeys(p for _, trial in trials for t in trial.timings for p in t.seconds))
    cells = []
    for label, trial in trials:
        by_phase = [sum(t.seconds.get(phase, 0.0) for t in trial.timings) for phase in phases]
        peaks = [t.peak_memory_mb for t in trial.timings if t.peak_memory_mb is not None]
        numbers = [f"{seconds:.2f}" for seconds in [*by_phase, float(np.sum(by_phase))]]
        peak = si(max(peaks) * 1e6, "B") if peaks else "-"
        cells.append([label, str(trial.seed), *numbers, peak])
    header = ["method", "seed", *phases, "in all", "peak memory"]
    return Block("Seconds by phase, over the committed rounds", header, cells)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _about(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "experiment": json.dumps(run.experiment, indent=2),
        "environment": _flat(run.environment),
        "partitions": {seed: part.digest for seed, part in run.partitions.items()},
    }


def _write(text: str, out: Path) -> None:
    """Write beside ``out``, then rename: a reader sees the old page or the new one."""
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


def write(paths: Sequence[Path], out: Path) -> Path:
    """Write the comparison of the runs at ``paths`` as the HTML file ``out``; returns ``out``.

    Raises InputError if a path holds no run that can be shown, or ``out`` can't be written.

    >>> write([Path("nowhere")], Path("page.html"))
    Traceback (most recent call last):
    fedtailor.errors.InputError: no directory 'nowhere'; give one that `fedtailor run` wrote
    """
    import jinja2
    import matplotlib

    runs = read_all(paths)
    shown = entries(runs)
    made = table(runs)
    with matplotlib.rc_context(drawing.RC):
        drawn = [
            (found, drawing.svg(found, f"figure{number}"))
            for number, found in enumerate(_drawings(runs, shown), start=1)
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
        blocks=blocks(made),
        caption=made.caption,
        notes=made.notes,
        drawings=drawn,
        ledgers=[_ledger(shown), _time(shown)],
        runs=[_about(run) for run in runs],
    )
    _write(text, out)
    return out
