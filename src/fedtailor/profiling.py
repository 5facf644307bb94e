"""Where a round's time goes: a trace by PyTorch's profiler, and a table of its phases.

Code marks a phase with `phase`, which costs next to nothing unless a trace is written.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .torch_private import profiler_enabled

T = TypeVar("T")

PHASES = ("data", "forward", "backward", "optimiser", "state", "aggregate", "evaluate")

_ROUND = "round"

_MARK = "fedtailor: "


def phase(name: str) -> AbstractContextManager[object]:
    """Mark a range of the trace, if one is being written."""
    if profiler_enabled():
        return record_function(_MARK + name)
    return nullcontext()


@dataclass
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the ``with`` statement to ``name``."""
        start = time.perf_counter()
        with phase(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Subtract ``seconds`` from one phase, at most all that it has, and add them to another."""
        seconds = min(seconds, self.seconds.get(source, 0.0))
        for name, change in ((source, -seconds), (target, seconds)):
            self.seconds[name] = self.seconds.get(name, 0.0) + change


class Trace:
    """The trace of one round of the first iteration that `follow` sees.

    ``path`` ends in ``.json.gz``; chrome://tracing and Perfetto open the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.title = ""  # of the traced round; empty: no round was traced so far

    def follow(self, rounds: Iterator[T], title: str) -> Iterator[T]:
        """Yield ``rounds``, and trace the second one, since the first one also warms up.

        The first round is traced too, and its trace stays if there is no second one. Only the first
        iteration that has a round is traced. ``title`` names it.
        """
        if self.title:
            yield from rounds
            return
        for number in (1, 2):
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            recorder = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            with recorder, record_function(_MARK + _ROUND):
                item = next(rounds, None)
            if item is None:
                return
            self.title = f"{title}, round {number} of this command"
            recorder.export_chrome_trace(str(self.path))
            yield item
        yield from rounds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase as `exclusive_seconds` counts them."""
        with gzip.open(self.path) as file:
            events = json.load(file)["traceEvents"]
        spans = [
            (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_MARK))
            for event in events
            if event.get("cat") == "user_annotation" and event["name"].startswith(_MARK)
        ]
        return exclusive_seconds(spans)


def exclusive_seconds(spans: list[tuple[float, float, str]]) -> dict[str, float]:
    """Return the seconds of each phase, without those of the phases inside it, from ``spans``:
    (begin, end, name) in microseconds, which nest or follow each other. The time of a span whose
    name is no phase counts as ``other``.

    >>> exclusive_seconds([(0, 9e6, "round"), (1e6, 4e6, "evaluate"), (2e6, 3e6, "forward")])
    {'forward': 1.0, 'evaluate': 2.0, 'other': 6.0}
    """
    microseconds: dict[str, float] = dict.fromkeys((*PHASES, "other"), 0.0)
    open_spans: list[tuple[float, str]] = []  # ends and phases
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        name = name if name in PHASES else "other"
        while open_spans and open_spans[-1][0] <= begin:
            open_spans.pop()
        if open_spans:
            microseconds[open_spans[-1][1]] -= end - begin
        microseconds[name] += end - begin
        open_spans.append((end, name))
    return {name: value / 1e6 for name, value in microseconds.items() if value}
