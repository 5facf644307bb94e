"""The parts of a run: every method with every seed, each with a directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..data.federation import Federation
from ..engine.client_store import PrivateStates
from ..engine.rounds import Round
from ..errors import DivergedError
from ..method import Method
from ..report.read import read_trial
from ..report.select import Metric, headline
from .directory import RunDirectory, locked
from .experiment import Experiment
from .manifest import check_same, write_manifest
from .progress import LOG, Progress, Stage
from .summary import StartSummary, rounds_left


@dataclass(frozen=True)
class Part:
    """One method with one seed."""

    label: str
    seed: int
    method: Method
    federation: Federation
    directory: RunDirectory
    progress: Progress

    @property
    def title(self) -> str:
        """What the part is called in a log."""
        return f"{self.label}, seed {self.seed}"


def has_ended(part: Part) -> bool:
    """Whether no round of the part is left to run."""
    return part.directory.commit.ended


def run_parts(
    experiment: Experiment,
    federations: Mapping[int, Federation],
    out: Path,
    run_part: Callable[[Part], None],
    is_done: Callable[[Part], bool] = has_ended,
    summary: StartSummary | None = None,
) -> Path:
    """Run every part that is not done, into ``out``; returns it.

    A method that diverges ends there with that seed, and the others go on. ``summary`` is printed
    before the first part, and all that is printed goes into ``run.log``, too.

    Raises:
        InputError: ``out`` holds a different run, or another process writes to it.
        DivergedError: every method has diverged with every seed.
    """
    ends: list[str | None] = []
    several = len(federations) * len(experiment.methods) > 1
    with locked(out):
        check_same(experiment, out)
        write_manifest(experiment, federations, out)
        left = rounds_left(experiment, out)
        with Progress(out / LOG, left, summary.expected() if summary else {}) as progress:
            if summary is not None and any(left.values()):
                progress.say_all(summary.lines())
            for seed, federation in federations.items():
                for label, method in experiment.methods.items():
                    path = out / "methods" / label / f"seed-{seed}"
                    directory = RunDirectory(path, experiment.rounds, federation.names)
                    part = Part(label, seed, method, federation, directory, progress)
                    if not is_done(part):
                        progress.begin(_stage(part, experiment), directory.commit.round)
                        _end_well(part, run_part, several=several)
                    ends.append(directory.commit.diverged)
    if all(ends):
        raise DivergedError(ends[0])
    return out


def _stage(part: Part, experiment: Experiment) -> Stage:
    """What the progress has to know of a part."""
    federation, cohort = part.federation, experiment.cohort
    evaluated = federation.evaluation_clients(experiment.evaluate.clients, cohort.novel)
    clients = {
        "train": cohort.count(federation.num_clients - cohort.novel),
        "evaluate": len(evaluated),
    }
    metric: Metric = "loss" if federation.dataset.task == "causal-lm" else "accuracy"
    return Stage(part.label, part.title, experiment.rounds, clients, metric, federation.remote)


def _end_well(part: Part, run_part: Callable[[Part], None], *, several: bool) -> None:
    """Run a part to its end, which may be that it diverges. One line says how it ended, so that
    results are seen before the last method has finished."""
    directory, progress = part.directory, part.progress
    try:
        run_part(part)
        trial = read_trial(directory.path, part.label, part.method.name, part.seed)
        metric: Metric = "loss" if part.federation.dataset.task == "causal-lm" else "accuracy"
        if result := headline(trial, metric):
            progress.say(f"{part.title}: {result}", only_log=not several)
    except DivergedError as error:
        directory.diverge(str(error))
        progress.skip(part.label, directory.commit.rounds - directory.commit.round)
        progress.say(f"{part.title} ends here: {error}", only_log=not several)


def commit_rounds(part: Part, rounds: Iterable[Round], store: PrivateStates) -> None:
    """Commit each of the part's ``rounds`` as it comes, and show the progress."""
    for round_ in rounds:
        part.directory.write(round_, store)
        part.progress.round(round_)
    part.directory.finish()
