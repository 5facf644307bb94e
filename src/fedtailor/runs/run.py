"""From an experiment to a run directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ..data.table import Dataset
from ..engine.executors.process_group import ProcessGroup
from ..engine.executors.work import Executor, Work
from ..engine.metrics import MetricFunction
from ..engine.rounds import new_store, rounds
from ..errors import DivergedError
from ..profiling import Trace
from ..task.backbone import Backbone
from .build import Inputs, named, with_metrics
from .callbacks import OnRound
from .directory import PRIVATE_FILE, check_removable, remove_run
from .experiment import Experiment
from .manifest import check_same
from .parts import Part, chosen, commit_rounds, run_parts
from .ranks import LeadingRank, check_ranks, follow_parts
from .trained import check_private_states

MakeExecutor = Callable[[Mapping[str, Work]], Executor]

_MANY = 10_000  # clients; to evaluate them all takes far longer than a round


def run(
    experiment: Experiment,
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    backbone: Backbone | None = None,
    trace: Trace | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    part: str | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    on_round: OnRound | None = None,
) -> Path:
    """Run every method of ``experiment`` with every seed into the directory ``out``; returns it.

    What ``out`` already holds of the same experiment is kept: finished parts are not run again, an
    unfinished one goes on after its last committed round and ends as if it had never stopped. The
    experiment may have more methods, seeds or rounds than before: they are added. A method whose
    loss is no longer finite ends there with that seed, and the others go on.

    Args:
        experiment: what to run.
        out: the run directory.
        dataset: instead of what ``experiment.data`` names.
        backbone: instead of what ``experiment.model`` names, e.g. from `fedtailor.from_module`.
        trace: writes the profile of one round.
        group: the ranks that torchrun has started, from `fedtailor.init_process_group`: all of them
            call this, and share the clients' work. Only the first one reads and writes ``out``.
        overwrite: remove the run in ``out`` first, if the input is good.
        part: ``"2/5"`` runs the second of five portions of the (method, seed) pairs, one on each of
            five machines; `runs.merge.merge` puts their directories together.
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
    out = Path(out)
    experiment = with_metrics(experiment, metrics or {})
    chosen(experiment.seeds, list(experiment.methods), part)
    is_leader = group is None or group.is_leader
    if is_leader and overwrite:
        check_removable(out)
    elif is_leader:
        check_same(named(experiment, dataset, backbone), out)
    inputs = replace(Inputs.load(experiment, dataset, backbone), metrics=metrics or {})
    device = inputs.check()  # bad input shows before anything is written
    if is_leader and overwrite:
        remove_run(out)
    if group is None:
        return _run_parts(inputs, out, trace, on_round, part)
    check_ranks(inputs, group, device)
    if not group.is_leader:
        follow_parts(inputs, group)
        return out
    leader = LeadingRank(group, inputs.experiment.plan, device)
    try:
        _run_parts(inputs, out, trace, on_round, part, leader.executor, leader.begin)
    except DivergedError:  # every part has ended, so the other ranks wait for the next one
        leader.end()
        raise
    leader.end()
    return out


def _run_parts(
    inputs: Inputs,
    out: Path,
    trace: Trace | None,
    on_round: OnRound | None,
    portion: str | None,
    make_executor: MakeExecutor | None = None,
    begin: Callable[[Part], None] = lambda part: None,
) -> Path:
    """Run every part of the portion; ``begin`` is called before each."""
    _advise(inputs)

    def run_part(part: Part) -> None:
        begin(part)
        _run_part(inputs, part, trace, on_round, make_executor)

    return run_parts(inputs.experiment, inputs.federations, out, run_part, portion=portion)


def _run_part(
    inputs: Inputs,
    part: Part,
    trace: Trace | None,
    on_round: OnRound | None,
    make_executor: MakeExecutor | None,
) -> None:
    plan, directory = inputs.experiment.plan, part.directory
    task = inputs.task(part.method, part.seed)
    if directory.commit.round:
        check_private_states(part.method, task, directory.path, directory.commit)
    store = new_store(part.method, task, part.federation, directory.path / PRIVATE_FILE)
    server = directory.restore(store)
    todo = rounds(
        part.method,
        task,
        part.federation,
        plan,
        store=store,
        server=server,
        start=directory.commit.round + 1,
        executor=directory.executor,
        make_executor=make_executor,
        metrics=inputs.metrics,
    )
    followed = trace.follow(todo, part.title) if trace else todo
    commit_rounds(part, followed, store, plan.rounds, on_round)


def _advise(inputs: Inputs) -> None:
    """Point out an evaluation that takes far longer than the training."""
    experiment = inputs.experiment
    federation = inputs.federations[experiment.seeds[0]]
    evaluated = federation.num_clients - experiment.cohort.novel
    if evaluated > _MANY and experiment.evaluate.clients is None:
        print(
            f"all {evaluated:,} clients are evaluated each time; evaluate.clients = 1000 takes a "
            f"fixed sample of them",
            file=sys.stderr,
        )
