"""The comparison as one self-contained page; without scripts it has all but the charts."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, naming
from ..store.format import dotted
from ..store.read import Run, StrPath, read_all
from ..units import fixed, si
from . import drawing, select
from .cells import text_tables
from .charts.content import Groups, Json, content, groups
from .charts.pictures import pictures
from .clients import worst_table
from .differences import difference_table
from .samples import method_samples
from .sections import ahead, chart_specs, sections
from .select import Entry
from .table import Table, table
from .text import TextTable, whole

_MAX_ROWS = 1000  # of the table of every client; with 12 methods a row takes 0.6 kB of the page


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


def every_client(shown: Json) -> TextTable:
    """Show the results of the shown clients as a table: a row a client and group."""
    labels, groups, metric = shown["methods"], shown["groups"], shown["metric"]
    digits = 1 if metric["isPercentage"] else 3
    found: dict[tuple[int, int], dict[int, float]] = {}
    for method, group, client, value in zip(*shown["results"].values(), strict=True):
        if value is not None:
            found.setdefault((group, client), {})[method] = value
    cells, keys = [], []
    for (group, client), values in sorted(found.items())[:_MAX_ROWS]:
        of = groups[group]
        shared = [of["title"]] if len(groups) > 1 else []
        texts = [fixed(values[k], digits) if k in values else "-" for k in range(len(labels))]
        sizes = str(of["train"][client]), str(of["test"][client])
        cells.append([of["names"][client], *shared, *sizes, *texts])
        keys.append(f"{group}:{client}")
    header = ["client", *(["clients of"] if len(groups) > 1 else []), "train", "test", *labels]
    title = f"Every client: examples, and test {metric['axis']} by method"
    return TextTable(title, header, cells, keys=keys, note=_left_out(shown, len(found)))


def _left_out(shown: Json, rows: int) -> str:
    """Say which clients the table lacks, and which file has them; empty if it has all."""
    cut = f"The table shows the first {_MAX_ROWS:,} of {rows:,} rows. " if rows > _MAX_ROWS else ""
    most = max(shown["groups"], key=lambda group: group["all"])
    spaced, of = len(most["names"]), most["all"]
    if spaced < of:
        cut += f"Of up to {of:,} clients the page has {spaced}, evenly spaced. "
    where = "methods/METHOD/seed-SEED/clients.jsonl"
    return f"{cut}In the run directory {where} has all of them." if cut else ""


def _about(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    is_unique = [one.name for one in runs].count(run.name) == 1
    about = {k: "none" if v is None else v for k, v in dotted(run.environment).items()}
    return {
        "name": run.name if is_unique else f"{run.name} ({run.path.name})",
        "path": str(run.path),
        "experiment": json.dumps(run.experiment, indent=2),
        "environment": {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()},
        "partitions": {seed: part.digest for seed, part in run.partitions.items()},
    }


_FILES = {"style": "page.css", "theme": "theme.js", "script": "page.js", "vega": "vega/vega.js"}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _link(text: str, kind: str) -> str:
    """A file as an address, for a link that saves it."""
    return f"data:text/{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _write(text: str, out: Path) -> None:
    """Write a temporary file and rename it: a reader sees the old page or the new one."""
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"can't write {str(out)!r}; give a file in a directory that exists")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with naming(out):
            part.write_text(text, encoding="utf-8")
            part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def compared(
    paths: StrPath | Sequence[StrPath],
) -> tuple[list[Entry], Table, Groups, Json, list[Run]]:
    """Read the runs: their methods, the table of results, the divisions, what charts show."""
    runs = read_all(paths)
    entries = select.entries(runs)
    comparison = table(runs)
    of = groups(entries)
    shown = content(entries, comparison, of) | {"pictures": pictures(entries, of)}
    return entries, comparison, of, shown, runs


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

    out = Path(out)
    entries, comparison, of, shown, runs = compared(paths)
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"link": _link, "whole": whole}
    text = environment.get_template("page.html").render(
        title=", ".join(dict.fromkeys(run.name for run in runs)),
        verdicts=[
            (one, difference_table(one.differences, one.metric)) for one in comparison.verdicts
        ],
        tables=text_tables(comparison),
        caption=comparison.caption,
        notes=comparison.notes,
        sections=list(sections(entries, comparison, shown, of)),
        samples=method_samples(entries),
        every_client=every_client(shown),
        worst=worst_table(entries, comparison.metric),
        time=_time(entries),
        runs=[_about(run, runs) for run in runs],
        labels=shown["methods"],
        ahead=ahead(comparison, shown),
        colours=list(zip(drawing.COLOURS, drawing.DARK, strict=True)),
        dashes=drawing.DASHES,
        content=_json(shown | {"look": drawing.LOOK}),
        specs=_json(chart_specs(comparison, shown)),
        **{name: (folder / f"{file}").read_text("utf-8") for name, file in _FILES.items()},
    )
    _write(text, out)
    return out
