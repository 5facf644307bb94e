"""From an experiment to a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..data import Data, Dataset
from ..data.sources import objective_of_data, read_columns
from ..engine.executors.process_group import ProcessGroup
from ..engine.metrics import Metrics
from ..engine.prepare import first_costs
from ..engine.rounds import rounds
from ..errors import DivergedError, InputError, say
from ..objectives.objective import MetricFunction
from ..profiling import Trace
from ..store.committed import model_seed
from ..store.run_directory import check_removable, remove_run
from ..task.backbone import Backbone
from .build import Inputs, device_of, named
from .callbacks import OnRound
from .estimate import rounds_left, start_summary
from .experiment import Experiment, checked, load
from .extend import unused_bounds
from .held_out import Before, leave_out, rows_trained_before
from .manifest import check_data, check_same, copies, is_as_it_was, open_run, write_copies
from .ranks import begin_trial, check_ranks, follow_trials, leading_executor
from .settings import Settings
from .start import check_old_trials, check_starts, open_start
from .summary import StartSummary
from .trained import check_private_states
from .trials import TrialRun, chosen, commit_rounds, nothing_left, run_trials


def run(
    experiment: Experiment | Path | str,
    out: Path | str | None = None,
    *,
    settings: Settings = (),
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
    trace: Trace | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    part: str | None = None,
    summary: bool = True,
    scores: bool = True,
    metrics: Mapping[str, MetricFunction] | None = None,
    on_round: OnRound | None = None,
) -> Path:
    """Run every method of ``experiment`` with every seed into the directory ``out``; returns it.

    What ``out`` already holds of the same experiment is kept: finished trials are not run again, an
    unfinished one goes on after its last committed round and ends as if it had never stopped. The
    experiment may have more methods, seeds or rounds than before: they are added. A method whose
    loss is no longer finite ends there with that seed, and the others go on.

    Args:
        experiment: what to run: an `Experiment`, an experiment file, or a run directory, which goes
            on as it is.
        out: the run directory; None: ``runs/NAME``.
        settings: change an experiment file, as ``--set`` does: ``"rounds=3"``, several of them, or
            a mapping from dotted keys to values.
        data: instead of what ``experiment.data`` names: a `Data`, e.g. from `Data.from_pandas`, or
            a `Dataset`, which is tokenised already.
        backbone: instead of what ``experiment.model`` names, e.g. from `fedtailor.from_module`.
        trace: writes the profile of one round.
        group: the ranks that torchrun has started, from `fedtailor.init_process_group`: all of them
            call this, and share the clients' work. Only the first one reads and writes ``out``.
        overwrite: remove the run in ``out`` first, if the input is good.
        part: ``"2/5"`` runs the second of five portions of the (method, seed) pairs, one on each of
            five machines; `fedtailor.merge` puts their directories together.
        summary: print what the run is going to do before anything trains.
        scores: print the test result of each method with each seed when it ends.
        metrics: functions by name, beside those of ``experiment.evaluate``: of a client's labels
            ``[n]`` and the probabilities of the classes ``[n, classes]``, a number each. The higher
            the better.
        on_round: called after each committed round; `fedtailor.STOP` as its result stops the method
            with this seed there, and the same call goes on later. Of several ranks only the first
            one calls it.

    Raises:
        InputError: bad input, or a different run in ``out``.
        DivergedError: no method with any seed kept a finite loss.
    """
    is_leader = group is None or group.is_leader
    metrics = metrics or {}
    experiment, out = open_experiment(experiment, out, settings)
    experiment = named(experiment, data, backbone, metrics)
    trials = chosen(experiment.seeds, list(experiment.methods), part)
    if is_leader:
        _check_place(experiment, data, out, overwrite=overwrite)
    in_files = data is None and backbone is None and not metrics and group is None
    in_files = in_files and experiment.privacy.stop is None  # which needs the data
    may_end = in_files and not overwrite and is_as_it_was(experiment, out, trials)
    if may_end and nothing_left(experiment, out, trials):
        if summary:
            _say_finished(experiment, out)
        return out
    # bad input shows before anything is written
    inputs = _load(experiment, out, trials, data, backbone, metrics, group, anew=overwrite)
    if is_leader and overwrite:
        files = copies(inputs.experiment)  # perhaps those in ``out``
        remove_run(out)
        write_copies(files, out)
    if group is not None:
        check_ranks(inputs, group)
        if not is_leader:
            follow_trials(inputs, group)
            return out
    left = rounds_left(inputs.experiment, out, trials)
    about = None
    if summary and any(left.values()):
        about = start_summary(inputs, left, 1 if group is None else group.size)
    elif summary:
        _say_finished(inputs.experiment, out)
    run_trial = partial(_run_trial, inputs, trace=trace, on_round=on_round, group=group)
    try:
        run_trials(
            inputs.experiment, inputs.federations, out, run_trial,
            left=left, summary=about, scores=scores,
        )  # fmt: skip
    except DivergedError:  # every trial has ended, so the other ranks wait for the next one
        if group is not None:
            group.broadcast(None)
        raise
    if group is not None:
        group.broadcast(None)  # no trial is left
    return out


def _say_finished(experiment: Experiment, out: Path) -> None:
    say(f"{out} is finished: nothing is left to run")
    for line in unused_bounds(experiment.as_dict(), out):
        say(line)


def _check_place(
    experiment: Experiment, data: Data | Dataset | None, out: Path, *, overwrite: bool
) -> None:
    """Raise InputError if ``out`` can't be used; a missing file of data is said instead. How many
    rounds a budget allows is known only when the data are loaded."""
    if overwrite:
        check_removable(out)
    if overwrite or experiment.privacy.stop is not None:
        return
    try:
        check_same(experiment, out)
    except InputError:
        if data is None and experiment.data.path is not None:
            read_columns(experiment.data)
        raise


def _load(
    experiment: Experiment,
    out: Path,
    trials: Sequence[tuple[int, str]],
    data: Data | Dataset | None,
    backbone: Backbone | None,
    metrics: Mapping[str, MetricFunction],
    group: ProcessGroup | None,
    *,
    anew: bool,
) -> Inputs:
    is_leader = group is None or group.is_leader
    device_of(experiment.engine)
    objective = data.objective if isinstance(data, Dataset) else objective_of_data(experiment.data)
    Metrics(experiment.evaluate, metrics).check(objective)
    if is_leader:
        check_old_trials(experiment, out, trials, anew=anew)
    inputs = replace(Inputs.load(experiment, data, backbone), metrics=metrics).within_budget()
    if is_leader and not anew and experiment.privacy.stop is not None:
        check_same(inputs.experiment, out)
    if experiment.start_from.run is not None:
        if is_leader:
            before: Before = rows_trained_before(experiment, out, anew=anew)
            if group is not None:
                group.broadcast(before)
        elif group is not None:
            before = group.receive()
        inputs = leave_out(inputs, before)
    inputs.check()
    if is_leader:
        check_starts(inputs, out, trials, anew=anew)
    return inputs


def open_experiment(
    source: Experiment | Path | str, out: Path | str | None, settings: Settings = ()
) -> tuple[Experiment, Path]:
    """Return the experiment, which may be a file or a run directory, changed by ``settings``, and
    its run directory ``out``, by default ``runs/NAME``."""
    if isinstance(source, Experiment):
        if settings:
            raise InputError("settings are for files; change an Experiment by dataclasses.replace")
        source = checked(source)
        return source, Path(out or Path("runs") / source.name)
    source = Path(source)
    if not (source / "experiment.json").is_file():
        experiment = load(source, settings)
        return experiment, Path(out or Path("runs") / experiment.name)
    if out:
        raise InputError(f"{source} is a run directory: it goes on there, without --out")
    return open_run(source, settings), source


def dry_run(
    experiment: Experiment | Path | str,
    out: Path | str | None = None,
    *,
    settings: Settings = (),
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
    overwrite: bool = False,
    part: str | None = None,
) -> StartSummary:
    """Return what `run` would do; nothing is written or removed. The arguments are those of `run`.

    Raises:
        InputError: bad input, or a different run in ``out``.
    """
    experiment, out = open_experiment(experiment, out, settings)
    experiment = named(experiment, data, backbone)
    trials = chosen(experiment.seeds, list(experiment.methods), part)
    _check_place(experiment, data, out, overwrite=overwrite)
    inputs = _load(experiment, out, trials, data, backbone, {}, None, anew=overwrite)
    if not overwrite:
        check_data(inputs.federations, out)
    left = rounds_left(inputs.experiment, None if overwrite else out, trials)
    return start_summary(inputs, left)


def _run_trial(
    inputs: Inputs,
    trial: TrialRun,
    *,
    trace: Trace | None,
    on_round: OnRound | None,
    group: ProcessGroup | None,
) -> None:
    plan, method, federation = inputs.experiment.plan, trial.method, trial.federation
    store, start = trial.store, None
    if inputs.experiment.start_from.run is not None and not store.has_begun:
        start = open_start(inputs, trial.label, trial.seed)
        start.describe(store.path)
    if group is not None:
        begin_trial(group, trial)
    task = inputs.task(method, model_seed(store.path, trial.seed))
    if store.has_begun:
        check_private_states(method, task, store.path, store.last)
    states = store.open_states(method, task, federation)
    server, number = store.restore(states), store.last.round + 1
    if start is not None:
        server, number = start.server(), 0
        start.stage(states)
    lead = None if group is None else partial(leading_executor, group, plan.engine, task.device)
    todo = rounds(
        method,
        task,
        federation,
        plan,
        store=states,
        server=server,
        recent_norms=store.recent_norms(),
        clip=store.next_clip(),
        start=number,
        earlier=store.earlier,
        executor=store.executor,
        make_executor=lead,
        on_result=trial.progress.on_result,
        metrics=inputs.metrics,
    )
    if not store.has_costs and not federation.remote:
        first = first_costs(method, task, federation, plan)  # stand in where nobody has trained
        todo = (replace(r, costs=replace(r.costs or first, flops=first.flops)) for r in todo)
    commit_rounds(trial, trace.follow(todo, trial.title) if trace else todo, on_round)
