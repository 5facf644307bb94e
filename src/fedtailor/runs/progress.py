"""The progress of a run: a bar in a terminal, else lines on stderr, and the lines in a file."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from tqdm import tqdm

from ..engine.results import Round
from ..engine.scoring import Evaluation
from ..errors import naming
from ..store.metrics import Metric, bare, summary
from ..store.run_directory import log_lines
from ..units import fixed, in_words

_DOING = {"train": "training", "write": "writing"}  # what else an executor does: evaluation
_REFRESH = 0.2  # seconds between two looks of the bar
_FIRST_PAUSE = 10.0  # seconds between two lines within the first minute
_PAUSE = 50.0  # afterwards: a line a minute, also where a client takes some seconds


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar whose time left is set from outside."""

    left = "?"

    @property
    def format_dict(self) -> dict[str, Any]:
        return {**super().format_dict, "left": self.left}


@dataclass(frozen=True)
class Stage:
    """The trial that runs: its method's label, its title, its rounds, and how many clients each of
    an executor's works has in a round. ``metric`` is what models are scored by. ``every_round``: a
    line for each round."""

    label: str
    title: str
    rounds: int
    clients: Mapping[str, int]
    metric: Metric = "accuracy"
    every_round: bool = False


class Progress:
    """Shows how far a run is. ``log`` is the file that gets every line, ``left`` has the rounds
    left of each trial, by label and seed, ``expected`` the seconds of a round by label, as far
    as known, and ``done`` the rounds that the run has from before."""

    def __init__(
        self,
        log: Path,
        left: Mapping[tuple[str, int], int],
        expected: Mapping[str, float],
        done: int = 0,
    ) -> None:
        self._log = log.open("a", encoding="utf-8")
        self._left: dict[str, int] = defaultdict(int)
        for (label, _), rounds in left.items():
            self._left[label] += rounds
        self._pace = dict(expected)  # seconds of a round: as expected, or from the one under way
        self._measured: dict[str, list[float]] = {}  # seconds of rounds, by label
        self._total = done + sum(self._left.values())
        self._begun = self._last_line = self._last_look = self._round_begun = time.monotonic()
        self._stage: Stage | None = None
        self._number = 0
        self._work, self._work_begun, self._last_result = "", self._begun, self._begun
        self._rest = 0.0  # seconds that the work under way still takes
        self._evaluations: Sequence[Evaluation] = ()  # the last ones
        self._shown = ""  # of the last round, in the bar
        self._bar = _Bar(
            total=self._total,
            initial=done,
            disable=None,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rounds "
            "[{elapsed}<{left}{postfix}]",
        )

    def say(self, *lines: str, only_log: bool = False) -> None:
        """Write lines to stderr, above the bar, and into the log."""
        with naming(Path(self._log.name)):
            self._log.write(log_lines(lines))
            self._log.flush()
        self._last_line = time.monotonic()
        if not only_log:
            tqdm.write("\n".join(lines), file=sys.stderr)

    def begin(self, stage: Stage, done: int) -> None:
        """The next trial begins, or goes on after round ``done``."""
        self._stage, self._number = stage, done
        self._evaluations, self._shown = (), ""
        self._round_begun = self._last_result = time.monotonic()
        self._work, self._rest = "", 0.0
        self._bar.set_description_str(stage.title, refresh=False)
        self._bar.set_postfix_str("", refresh=True)
        if done:
            self.say(f"{stage.title}: goes on after round {done} of {stage.rounds}")

    def skip(self, label: str, rounds_left: int) -> None:
        """A trial has ended, ``rounds_left`` rounds before its goal."""
        self._left[label] -= rounds_left
        self._total -= rounds_left
        self._bar.total = self._total

    def on_result(self, work: str, done: int) -> None:
        """An executor has done so many items of a round's work."""
        now = time.monotonic()
        if work != self._work or done == 1:
            self._work, self._work_begun, self._rest = work, self._last_result, 0.0
        self._last_result = now
        if self._stage is None or now - self._last_look < _REFRESH:
            return
        self._last_look = now
        count = self._stage.clients.get(work)
        doing = _DOING.get(work, "evaluation")
        text = f"{doing} {done}/{count}" if count else doing
        if work == "train" and count and done > 1:  # tells more than what one step took
            self._pace[self._stage.label] = (now - self._round_begun) * count / done
        self._rest = (now - self._work_begun) * (count - done) / done if count and done > 1 else 0.0
        if not self._bar.disable:
            self._bar.left = self._time_left(tqdm.format_interval) or "?"
            self._bar.set_postfix_str(", ".join(filter(None, [self._shown, text])), refresh=True)
        if self._is_due(now):
            of = f"{done} of {count} clients, " if count else ""
            number = f"round {self._number + 1} of {self._stage.rounds}"
            self._say_stage(f"{number}, {doing}: {of}{in_words(now - self._round_begun)} so far")

    def round(self, done: Round) -> None:
        """A round is committed."""
        assert self._stage is not None
        now, stage = time.monotonic(), self._stage
        self._measured.setdefault(stage.label, []).append(now - self._round_begun)
        self._round_begun, self._last_result, self._number = now, now, done.number
        self._work, self._rest = "", 0.0
        self._left[stage.label] -= 1
        if done.evaluations:
            self._evaluations = done.evaluations
        is_due = stage.every_round or self._is_due(now)
        if is_due or done.number == stage.rounds or now - self._last_look >= _REFRESH:
            self._last_look = now
            self._show(done, is_due=is_due)
        self._bar.update()

    def _show(self, done: Round, *, is_due: bool) -> None:
        assert self._stage is not None
        stage, loss = self._stage, "-" if done.train_loss is None else fixed(done.train_loss, 3)
        scores = _scores(self._evaluations, stage.metric)
        shown = {"loss": loss, **scores}
        self._shown = ", ".join(f"{name}={value}" for name, value in shown.items())
        self._bar.left = self._time_left(tqdm.format_interval) or "?"
        self._bar.set_postfix_str(self._shown, refresh=False)
        if is_due:
            clients = f", {len(done.cohort.clients)} clients" if stage.every_round else ""
            results = "".join(f", {name} {value}" for name, value in scores.items())
            number = f"round {done.number} of {stage.rounds}"
            self._say_stage(f"{number}{clients}, loss {loss}{results}")

    def _say_stage(self, text: str) -> None:
        assert self._stage is not None
        share = 1 - sum(self._left.values()) / max(1, self._total)
        left = self._time_left(lambda seconds: f", about {in_words(seconds)} left")
        line = f"{self._stage.title}: {text}; {100 * share:.0f} % of the run{left}"
        self.say(line, only_log=not self._bar.disable)

    def _is_due(self, now: float) -> bool:
        pause = _FIRST_PAUSE if now - self._begun < 60 else _PAUSE
        return now - self._last_line >= pause

    def _time_left(self, shown: Callable[[float], str]) -> str:
        return shown(self._seconds_left()) if self._pace or self._measured else ""

    def _seconds_left(self) -> float:
        """The time of all rounds that are left, at each method's own pace, or else at the mean pace
        of the others. A round that takes longer than expected takes nothing from the others: how
        many clients are done tells what is left of it."""
        every = [seconds for of_label in self._measured.values() for seconds in of_label]
        pace = self._pace | {label: mean(of) for label, of in self._measured.items()}
        usual = mean(every) if every else 0.0
        left = sum(count * pace.get(label, usual) for label, count in self._left.items())
        if self._stage is None or not self._left[self._stage.label]:
            return left
        running = time.monotonic() - self._round_begun
        expected = pace.get(self._stage.label, usual)
        return left - expected + max(expected - running, self._rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar, and close the log."""
        self._bar.close()
        self._log.close()


def _scores(evaluations: Sequence[Evaluation], metric: Metric) -> dict[str, str]:
    """The mean validation results over clients of the personal models and the global one."""
    names = {"personal": "validation", "global": "global"}
    return {
        names[one.model]: bare(metric, summary(one, metric).mean)
        for one in evaluations
        if one.split == "validation" and one.model in names and any(one.num_examples)
    }
