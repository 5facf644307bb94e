"""The parts of a run: every method with every seed, each with a directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.federation import Federation
from ..engine.client_store import PrivateStates
from ..engine.participants import draw_cohort
from ..engine.results import Round
from ..errors import DivergedError, InputError, brief, whole_number
from ..method import Method
from ..report.bounds import changed_bounds
from ..report.read import read_trial
from ..report.select import Metric, headline, selection_metric
from ..run_format import has_commit
from ..uploads.norms import about_norms
from .callbacks import CommittedRound, OnRound, wants_stop
from .committed import START_FILE, StartRecord, model_seed, read_commit
from .directory import RunDirectory, give_id, locked
from .estimate import rounds_left
from .experiment import Experiment
from .extend import bounds_of
from .files import read_record
from .manifest import write_manifest
from .progress import LOG, Progress, Stage
from .summary import StartSummary


@dataclass(frozen=True)
class Part:
    """One method with one seed."""

    label: str
    seed: int
    method: Method
    federation: Federation
    directory: RunDirectory
    select: Metric  # chooses the reported round
    progress: Progress
    bounds: Mapping[str, Any] = field(default_factory=dict)  # the settings in `BOUNDS`
    is_asynchronous: bool = False

    @property
    def model_seed(self) -> int:
        """The seed of the values that the model begins with."""
        return model_seed(self.directory.path, self.seed)

    @property
    def title(self) -> str:
        """What the part is called in a log."""
        return f"{self.label}, seed {self.seed}"


def has_ended(part: Part) -> bool:
    """Whether no round of the part is left to run."""
    return part.directory.commit.finished


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
    k, n = ((whole_number(text) or 0) for text in portion.partition("/")[::2])
    if not 1 <= k <= n:
        raise InputError(f"part {brief(portion)}: must be K/N with 1 <= K <= N, for example 2/5")
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
    summary: StartSummary | None = None,
    scores: bool = True,
) -> Path:
    """Run every part that is not done, into ``out``; returns it. With ``portion``, only the parts
    that are `chosen`.

    A method that diverges ends there with that seed, and the others go on. ``summary`` is printed
    before the first part, and without ``scores`` no part's test result. All that is printed goes
    into ``run.log``, too.

    Raises:
        InputError: ``out`` holds a different run, or another process writes to it.
        DivergedError: every method has diverged with every seed.
    """
    ends: list[str | None] = []
    parts = chosen(experiment.seeds, list(experiment.methods), portion)
    several = len(parts) > 1
    with locked(out):
        bounds, buffer = bounds_of(experiment.as_dict()), experiment.cohort.buffer
        write_manifest(experiment, federations, out, parts)
        give_id(out)
        left = rounds_left(experiment, out, parts)
        expected, once = (summary.expected(), summary.once()) if summary else ({}, {})
        done = len(parts) * experiment.rounds - sum(left.values())
        with Progress(out / LOG, left, expected, once, done) as progress:
            if summary is not None and any(left.values()):
                progress.say_all(summary.lines())
            for seed, label in parts:
                path = out / "methods" / label / f"seed-{seed}"
                federation = federations[seed]
                select = selection_metric(experiment.as_dict(), federation.dataset.objective)
                directory = RunDirectory(
                    path, experiment.rounds, metric=select, names=federation.names
                )
                method = experiment.methods[label]
                part = Part(
                    label, seed, method, federation, directory, select, progress, bounds,
                    is_asynchronous=buffer is not None,
                )  # fmt: skip
                if not is_done(part):
                    progress.begin(_stage(part, experiment), directory.commit.round)
                    _end_well(part, run_part, several=several, scores=scores)
                ends.append(directory.commit.diverged)
    _check_any_converged(ends)
    return out


def nothing_left(experiment: Experiment, out: Path, parts: Iterable[tuple[int, str]]) -> bool:
    """Whether ``parts`` of ``out``, pairs (seed, label), have all finished. The run directory alone
    says so; what a kill left there inside the last clean-up is removed."""
    folders = [out / "methods" / label / f"seed-{seed}" for seed, label in parts]
    if not all(has_commit(folder) for folder in folders):
        return False
    commits = [read_commit(folder) for folder in folders]
    if not all(one.finished and one.rounds >= experiment.rounds for one in commits):
        return False
    with locked(out):
        for folder in folders:
            RunDirectory(folder, experiment.rounds)
    return True


def _check_any_converged(ends: Sequence[str | None]) -> None:
    if all(ends):
        raise DivergedError(ends[0])


def _start(part: Part) -> str:
    """What the part goes on from, and how good that is on its data."""
    about = read_record(StartRecord, part.directory.path / START_FILE)
    trial = read_trial(part.directory.path, part.label, part.method.name, part.seed)
    result = headline(trial, part.select)
    return (
        f"goes on from round {about.round} of {about.method}, seed {about.seed}, in {about.run}, "
        f"with {about.clients} of its clients; before: {result}"
    )


def _stage(part: Part, experiment: Experiment) -> Stage:
    """What the progress has to know of a part."""
    federation, plan = part.federation, experiment.plan
    evaluated = plan.evaluated(federation)
    clients = {
        "train": len(draw_cohort(part.method, federation, plan, 1)),
        "evaluate": len(evaluated),
    }
    return Stage(
        part.label,
        part.title,
        experiment.rounds,
        clients,
        federation.dataset.objective.selects,
        federation.remote,
    )


def _end_well(part: Part, run_part: Callable[[Part], None], *, several: bool, scores: bool) -> None:
    """Run a part to its end, which may be that it diverges. One line says how it ended, so that
    results are seen before the last method has finished."""
    directory, progress = part.directory, part.progress
    try:
        run_part(part)
        trial = read_trial(directory.path, part.label, part.method.name, part.seed)
        if scores and (result := headline(trial, part.select)):
            progress.say(f"{part.title}: {result}", only_log=not several)
    except DivergedError as error:
        directory.diverge(str(error))
        progress.skip(part.label, directory.commit.rounds - directory.commit.round)
        progress.say(f"{part.title} ends here: {error}", only_log=not several)
        best, last = directory.commit.best_round, directory.commit.round
        if best < last and not part.is_asynchronous:
            for line in about_norms({r.round: r.norm_by_client for r in directory.history()}, best):
                progress.say(f"{part.title}: {line}")
            progress.say(
                f"{part.title}: the same command goes on after round {last}; fedtailor rollback "
                f"takes it back to round {best}, the best on validation data"
            )


def commit_rounds(
    part: Part, rounds: Iterable[Round], store: PrivateStates, on_round: OnRound | None = None
) -> None:
    """Commit each of the part's ``rounds`` as it comes, and show the progress. ``on_round`` is
    called after each, and may stop the part there."""
    rounds, before = iter(rounds), part.directory.bounds()
    if not part.directory.has_begun and (part.directory.path / START_FILE).exists():
        part.directory.write(next(rounds), store)
        part.progress.say(f"{part.title}: {_start(part)}")
    for round_ in rounds:
        for change in changed_bounds(before, part.bounds, round_.number):
            part.progress.say(f"{part.title}: {change}")
        part.directory.write(round_, store, part.bounds if part.bounds != before else {})
        for note in round_.notes:
            part.progress.say(f"{part.title}, round {round_.number}: {note}")
        part.progress.round(round_)
        before = part.bounds
        if on_round and _stops(on_round, part, round_):
            store.commit()
            part.directory.stop()
            return
    part.directory.finish()


def _stops(on_round: OnRound, part: Part, round_: Round) -> bool:
    """Whether ``on_round`` stops the part after this round, which is not its last one."""
    folder, total = part.directory.path, part.directory.commit.rounds
    done = CommittedRound(part.label, part.seed, total, folder, part.select, round_)
    if not wants_stop(on_round, done) or round_.number == total:
        return False
    part.progress.skip(part.label, total - round_.number)
    part.progress.say(f"{part.title}: stopped after round {round_.number} of {total}")
    return True
