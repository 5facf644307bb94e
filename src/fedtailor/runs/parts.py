"""The parts of a run: every method with every seed, each with a directory of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..data.federation import Federation
from ..engine.client_store import PrivateStates
from ..engine.rounds import Round
from ..errors import DivergedError, InputError
from ..method import Method
from ..report.read import read_trial
from ..report.select import Metric, headline, selection_metric
from .callbacks import CommittedRound, OnRound, wants_stop
from .directory import RunDirectory, locked
from .experiment import Experiment
from .manifest import write_manifest


@dataclass(frozen=True)
class Part:
    """One method with one seed."""

    label: str
    seed: int
    method: Method
    federation: Federation
    directory: RunDirectory
    select: Metric  # chooses the reported round

    @property
    def title(self) -> str:
        """What the part is called in a log."""
        return f"{self.label}, seed {self.seed}"


def has_ended(part: Part) -> bool:
    """Whether no round of the part is left to run."""
    return part.directory.commit.ended


def chosen(
    seeds: Sequence[int], labels: Sequence[str], portion: str | None = None
) -> list[tuple[int, str]]:
    """The (seed, label) of all parts, or of a ``portion`` of them: ``"2/5"`` is every fifth one
    from the second on.

    For portions they stand method by method, so that each portion gets its share of every method,
    whatever it costs.

    Raises:
        InputError: ``portion`` is not K/N with 1 <= K <= N, or is empty.

    >>> [chosen((0, 1), ("a", "b"), portion) for portion in ("1/2", "2/2")]
    [[(0, 'a'), (0, 'b')], [(1, 'a'), (1, 'b')]]
    """
    if portion is None:
        return [(seed, label) for seed in seeds for label in labels]
    numbers = re.fullmatch(r"(\d+)/(\d+)", portion)
    k, n = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= k <= n:
        raise InputError(f"part {portion!r}: must be K/N with 1 <= K <= N, for example 2/5")
    parts = [(seed, label) for label in labels for seed in seeds]
    if k > len(parts):
        raise InputError(
            f"part {portion!r} is empty: methods x seeds are {len(parts)} parts; allowed: K up to "
            f"{len(parts)}"
        )
    return parts[k - 1 :: n]


def run_parts(
    experiment: Experiment,
    federations: Mapping[int, Federation],
    out: Path,
    run_part: Callable[[Part], None],
    is_done: Callable[[Part], bool] = has_ended,
    portion: str | None = None,
) -> Path:
    """Run every part that is not done, into ``out``; returns it. With ``portion``, only the parts
    that are `chosen`.

    A method that diverges ends there with that seed, and the others go on.

    Raises:
        InputError: ``out`` holds a different run, or another process writes to it.
        DivergedError: every method has diverged with every seed.
    """
    ends: list[str | None] = []
    parts = chosen(experiment.seeds, list(experiment.methods), portion)
    several = len(parts) > 1
    with locked(out):
        write_manifest(experiment, federations, out)
        for seed, label in parts:
            path = out / "methods" / label / f"seed-{seed}"
            federation = federations[seed]
            is_lm = federation.dataset.task == "causal-lm"
            select = selection_metric(experiment.as_dict(), is_language_modelling=is_lm)
            directory = RunDirectory(path, experiment.rounds, metric=select, names=federation.names)
            part = Part(label, seed, experiment.methods[label], federation, directory, select)
            if not is_done(part):
                try:
                    run_part(part)
                    if several:
                        _print_result(part)
                except DivergedError as error:
                    directory.diverge(str(error))
                    if several:
                        print(f"{part.title} ends here: {error}", file=sys.stderr)
            ends.append(directory.commit.diverged)
    if all(ends):
        raise DivergedError(ends[0])
    return out


def _print_result(part: Part) -> None:
    """One line, so that results are seen before the last method has finished."""
    trial = read_trial(part.directory.path, part.label, part.method.name, part.seed)
    if result := headline(trial, part.select):
        print(f"{part.title}: {result}", file=sys.stderr)


def commit_rounds(
    part: Part,
    rounds: Iterable[Round],
    store: PrivateStates,
    total: int,
    on_round: OnRound | None = None,
) -> None:
    """Commit each of the part's ``rounds`` as it comes, and show the progress towards ``total``:
    a bar in a terminal; else a line for each round that is evaluated or lost clients. ``on_round``
    is called after each, and may stop the part there."""
    done = part.directory.commit.round
    if done:
        print(f"{part.title}: goes on after round {done} of {total}", file=sys.stderr)
    progress = tqdm(rounds, desc=part.title, total=total, initial=done, unit="round", disable=None)
    for round_ in progress:
        part.directory.write(round_, store)
        loss = f"{sum(round_.losses) / len(round_.losses):.3f}"
        progress.set_postfix(loss=loss)
        if progress.disable and (round_.evaluations or part.federation.remote):
            size = f", {len(round_.cohort.clients)} clients" if part.federation.remote else ""
            number = f"round {round_.number} of {total}{size}"
            print(f"{part.title}: {number}, loss {loss}", file=sys.stderr)
        if on_round and _stops(on_round, part, round_, total):
            store.commit()
            part.directory.stop()
            return
    part.directory.finish()


def _stops(on_round: OnRound, part: Part, round_: Round, total: int) -> bool:
    """Whether ``on_round`` stops the part after this round, which is not its last one."""
    folder = part.directory.path
    done = CommittedRound(part.label, part.seed, total, folder, part.select, round_)
    if not wants_stop(on_round, done) or round_.number == total:
        return False
    print(f"{part.title}: stopped after round {round_.number} of {total}", file=sys.stderr)
    return True
