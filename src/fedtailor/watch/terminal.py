"""A run in a terminal: what runs, how far it is, a table of methods, the last lines of its log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import one_line
from ..units import fixed, seconds_text, si
from .state import Points, RunState, State, TrialState, thinned

_BARS = "▁▂▃▄▅▆▇█"
# columns of a terminal that has room for all of the table, and for all but two columns of it
_WIDE, _USUAL = 110, 96
_LOG = 5  # lines
_DAY = re.compile(r"^\d+-\d+-\d+ (\d+:\d+:\d+)\S*")  # of a line of the log, and its time
_COLOURS = {
    State.RUNNING: "bold cyan",
    State.FINISHED: "green",
    State.STOPPED: "yellow",
    State.DIVERGED: "bold red",
    State.INTERRUPTED: "bold red",
}


def sparkline(points: Points, width: int) -> str:
    """A curve as a row of bars, thinned out to ``width``.

    >>> sparkline(((1, 0.0), (2, 0.5), (3, 1.0)), 10), sparkline(((1, 2.0),), 10)
    ('▁▅█', '▁')
    """
    values = [value for _, value in thinned(points, width)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale + 0.5)] for value in values)


class View:
    """A run's state; unless it ``is_last``, rows that the terminal has no room for are left out."""

    def __init__(self, state: RunState, *, is_last: bool = True) -> None:
        self._state, self._is_last = state, is_last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width, others = self._state, options.max_width, 9 + _LOG
        room = len(state.trials) if self._is_last else max(3, options.size.height - others)
        trials = _around(state.trials, room)
        yield Text.assemble((state.name, "bold"), " ", (state.note, _COLOURS.get(state.state, "")))
        if state.rounds:
            bar = Table.grid(padding=(0, 1))
            done = ProgressBar(state.rounds, state.round, min(40, width // 2))
            done.complete_style, done.finished_style = "cyan", "green"
            bar.add_row(done, state.share)
            yield bar
            yield _table(state, trials, width)
        if hidden := len(state.trials) - len(trials):
            yield Text(f"and {hidden} more", style="dim")
        for trial in state.trials:
            for text in (*trial.lately[-1:], trial.reason):
                if text:
                    yield _line(f"{trial.title}: {text}", "yellow")
        yield from _written(state)
        for text in state.log[-_LOG:]:
            yield _line(_DAY.sub(r"\1", text), "dim")
        if state.is_over and state.report:
            yield Text(f"report: {state.report}")


def _written(state: RunState) -> Iterator[Text]:
    """The first prompt that models of the last trial with texts have answered, a line an answer."""
    trial = next((one for one in reversed(state.trials) if one.samples), None)
    if trial is not None:
        sample = trial.samples[0]
        title = f"{trial.title}, after round {trial.written}: {one_line(sample.prompt)}"
        yield _line(title, "bold")
        for model, text in sample.answers:
            yield _line(f"  {model}: {one_line(text)}", "")


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _around(trials: Sequence[TrialState], room: int) -> Sequence[TrialState]:
    """So many of the trials, with the one that runs among them."""
    at = next((k for k, trial in enumerate(trials) if trial.state == State.RUNNING), 0)
    first = min(max(0, at - room // 2), max(0, len(trials) - room))
    return trials[first : first + room]


def _table(state: RunState, trials: Sequence[TrialState], width: int) -> Table:
    is_wide, is_usual = width >= _WIDE, width >= _USUAL
    has_refused = any(trial.refused for trial in state.trials)
    has_seeds = len({trial.seed for trial in state.trials}) > 1
    rows = [_row(state, trial, 24 if is_wide else 10) for trial in trials]
    left_out = {
        *(() if is_wide else ("global", "training loss")),
        *(() if is_usual else ("after", "curve")),
        *(() if has_refused else ("refused",)),
        *(() if has_seeds or is_usual else ("seed",)),
        *(("s/round",) if has_refused and not is_usual else ()),
    }
    table = Table(box=None, padding=(0, 1), header_style="dim", caption_style="dim")
    table.title, table.title_justify = Text(state.measure, style="dim"), "left"
    shown = [name for name in rows[0] if name not in left_out] if rows else []
    for name in shown:
        if name == "method":
            table.add_column(name, overflow="ellipsis", min_width=8)
        else:
            is_text = name in ("curve", "state")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        cells = (row[name] for name in shown)  # rich would read [bold] in a text, Text doesn't
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def _row(state: RunState, trial: TrialState, bars: int) -> dict[str, RenderableType]:
    return {
        "method": trial.method,
        "seed": str(trial.seed),
        "round": f"{trial.round}/{trial.rounds}",
        "latest": state.score(trial.latest),
        "best": state.score(trial.best),
        "after": "-" if trial.best is None else str(trial.best.round),
        "global": state.score(trial.latest_global),
        "curve": sparkline(trial.curve, bars),
        "training loss": "-" if trial.train_loss is None else fixed(trial.train_loss, 3),
        "s/round": "-" if trial.seconds_a_round is None else seconds_text(trial.seconds_a_round),
        "bytes": si(trial.bytes, "B") if trial.round else "-",
        "refused": str(trial.refused),
        "state": Text(trial.state, style=_COLOURS.get(trial.state, "dim")),
    }
