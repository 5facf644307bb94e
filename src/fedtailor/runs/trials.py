"""The trials of a run: every method with every seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..data.federation import Federation
from ..engine.participants import usual_cohort
from ..engine.results import Round
from ..errors import DivergedError, InputError, announce, brief, whole_number
from ..method import Method
from ..store.bounds import BOUNDS, changed_bounds
from ..store.committed import START_FILE, StartRecord, commit_of
from ..store.files import read_record
from ..store.format import trial_folder
from ..store.metrics import Metric
from ..store.read import read_trial
from ..store.run_directory import LOG, locked
from ..store.secret import secret_of
from ..store.selection import headline
from ..store.trial import TrialStore
from ..uploads.norms import about_norms
from .callbacks import STOP, CommittedRound, OnRound
from .estimate import Left
from .experiment import Experiment
from .manifest import write_manifest
from .progress import Progress, Stage
from .summary import StartSummary


@dataclass(frozen=True)
class TrialRun:
    """A trial, one method with one seed, and what it runs with."""

    experiment: Experiment
    label: str
    seed: int
    federation: Federation
    store: TrialStore
    select: Metric  # chooses the reported round
    progress: Progress

    @property
    def method(self) -> Method:
        """The method with its settings."""
        return self.experiment.methods[self.label]

    @property
    def title(self) -> str:
        """What the trial is called in a log."""
        return f"{self.label}, seed {self.seed}"


def chosen(
    seeds: Sequence[int], labels: Sequence[str], portion: str | None = None
) -> list[tuple[int, str]]:
    """The (seed, label) of all trials, or of a ``portion`` of them: ``"2/5"`` is every fifth one
    from the second on. For portions they stand method by method, so that each gets its share of
    every method, whatever it costs. Raises InputError where ``portion`` is not K/N with 1 <= K <=
    N, or is empty.

    >>> [chosen((0, 1), ("a", "b"), portion) for portion in ("1/2", "2/2")]
    [[(0, 'a'), (0, 'b')], [(1, 'a'), (1, 'b')]]
    """
    if portion is None:
        return [(seed, label) for seed in seeds for label in labels]
    k, n = ((whole_number(text) or 0) for text in portion.partition("/")[::2])
    if not 1 <= k <= n:
        raise InputError(f"part {brief(portion)}: must be K/N with 1 <= K <= N, for example 2/5")
    trials = [(seed, label) for label in labels for seed in seeds]
    if k > len(trials):
        raise InputError(f"part {portion!r} is empty: methods x seeds are {len(trials)} parts")
    return trials[k - 1 :: n]


def run_trials(
    experiment: Experiment,
    federations: Mapping[int, Federation],
    out: Path,
    run_trial: Callable[[TrialRun], None],
    is_done: Callable[[TrialRun], bool] = lambda trial: trial.store.last.finished,
    *,
    left: Left,
    summary: StartSummary | None = None,
    scores: bool = True,
) -> None:
    """Run every trial that is not done, into ``out``; ``left`` has the rounds that are left of
    each, in the order in which they run. One that diverges ends, and the others go on;
    DivergedError if all do. ``summary`` is printed before, and each test result after, where
    ``scores`` are wanted; all that is printed goes into ``run.log``, too."""
    ends: list[str | None] = []
    todo = [(seed, label) for label, seed in left]
    with locked(out):
        write_manifest(experiment, federations, out, todo)
        methods = summary.methods if summary else ()
        expected = {one.label: one.round_seconds for one in methods}
        done = len(todo) * experiment.rounds - sum(left.values())
        with Progress(out / LOG, left, expected, done) as progress:
            if summary is not None and any(left.values()):
                progress.say(*summary.lines())
            for seed, label in todo:
                federation = federations[seed]
                select = experiment.evaluate.select or federation.dataset.objective.selects
                place = trial_folder(out, label, seed)
                store = TrialStore(place, experiment.rounds, select, federation.names)
                if experiment.privacy.is_active and experiment.privacy.secret:
                    federation = replace(federation, secret=secret_of(place))
                trial = TrialRun(experiment, label, seed, federation, store, select, progress)
                if not is_done(trial):
                    progress.begin(_stage(trial), store.last.round)
                    _end_well(trial, run_trial, several=len(todo) > 1, scores=scores)
                ends.append(store.last.diverged)
    if all(ends):
        raise DivergedError(ends[0])


def nothing_left(experiment: Experiment, out: Path, trials: Iterable[tuple[int, str]]) -> bool:
    """Whether ``trials`` of ``out``, pairs (seed, label), have all finished. The run directory
    alone says so; what a kill left there inside the last clean-up is removed."""
    folders = [trial_folder(out, label, seed) for seed, label in trials]
    commits = map(commit_of, folders)
    if not all(one and one.finished and one.rounds >= experiment.rounds for one in commits):
        return False
    with locked(out):
        for folder in folders:
            TrialStore(folder, experiment.rounds)
    return True


def _result(trial: TrialRun) -> str:
    found = read_trial(trial.store.path, trial.label, trial.method.name, trial.seed)
    return headline(found, trial.select)


def _stage(trial: TrialRun) -> Stage:
    federation, plan = trial.federation, trial.experiment.plan
    cohort = len(usual_cohort(trial.method, federation, plan))
    evaluated = len(plan.evaluated(federation))
    clients = {"train": cohort, "evaluate": evaluated, "write": evaluated}
    metric = federation.dataset.objective.selects
    return Stage(trial.label, trial.title, plan.rounds, clients, metric, federation.remote)


def _end_well(
    trial: TrialRun, run_trial: Callable[[TrialRun], None], *, several: bool, scores: bool
) -> None:
    """Run a trial to its end, and say in one line how it ended; it may diverge."""
    store, progress, experiment = trial.store, trial.progress, trial.experiment
    try:
        run_trial(trial)
        if scores and (result := _result(trial)):
            progress.say(f"{trial.title}: {result}", only_log=not several)
    except DivergedError as error:
        store.diverge(str(error))
        best, last = store.last.best_round, store.last.round
        progress.skip(trial.label, store.last.rounds - last)
        progress.say(f"{trial.title} ends here: {error}", only_log=not several)
        if best < last and experiment.cohort.buffer is None:
            for line in about_norms({r.round: r.norm_by_client for r in store.history()}, best):
                progress.say(f"{trial.title}: {line}")
            said = f"the same command goes on after round {last}"
            if not (experiment.privacy.is_active or experiment.secure_aggregation.is_active):
                said += f"; fedtailor rollback takes it back to round {best}, the best on "
                said += "validation data"
            progress.say(f"{trial.title}: {said}")


def commit_rounds(
    trial: TrialRun, rounds: Iterable[Round], on_round: OnRound | None = None
) -> None:
    """Commit each of the trial's ``rounds``, and show the progress; ``on_round`` may stop it."""
    store, say, title = trial.store, trial.progress.say, trial.title
    bounds = {name: getattr(trial.experiment.cohort, name) for name in BOUNDS}
    rounds, before = iter(rounds), store.bounds()
    if not store.has_begun and (store.path / START_FILE).exists():
        store.commit(next(rounds))
        about = read_record(StartRecord, store.path / START_FILE)
        say(
            f"{title}: goes on from round {about.round} of {about.method}, seed {about.seed}, in "
            f"{about.run}, with {about.clients} of its clients; before: {_result(trial)}"
        )
    for round_ in rounds:
        for change in changed_bounds(before, bounds, round_.number):
            say(f"{title}: {change}")
        store.commit(round_, bounds if bounds != before else {})
        for note in round_.notes:
            say(f"{title}, round {round_.number}: {note}")
        if round_.unchanged:
            names = ", ".join(trial.federation.name(client) for client in round_.unchanged)
            announce(
                f"{title}, round {round_.number}: under [privacy] these clients send that they "
                f"change nothing, since their numbers are no longer finite: {names}"
            )
        trial.progress.round(round_)
        before = bounds
        if on_round and _stops(on_round, trial, round_):
            store.stop()
            return
    store.finish()


def _stops(on_round: OnRound, trial: TrialRun, round_: Round) -> bool:
    """Whether ``on_round`` stops the trial after this round, which is not its last one."""
    folder, total = trial.store.path, trial.store.last.rounds
    done = CommittedRound(trial.label, trial.seed, total, folder, trial.select, round_)
    answer: object = on_round(done)
    if answer is not None and answer is not STOP:
        raise InputError(f"on_round returned {answer!r}; allowed: None, or fedtailor.STOP to stop")
    if answer is None or round_.number == total:
        return False
    trial.progress.skip(trial.label, total - round_.number)
    trial.progress.say(f"{trial.title}: stopped after round {round_.number} of {total}")
    return True
