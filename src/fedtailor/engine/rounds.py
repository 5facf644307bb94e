"""The one loop: send, train locally, aggregate, evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..data.federation import Federation
from ..method import Method, Server
from ..objectives.objective import MetricFunction
from ..params import to_device
from ..task.task import Task
from ..uploads.secure.messages import Clients
from .asynchronous import schedule
from .checks import check
from .config import LEAST, Plan
from .costs import forget_peak_memory
from .evaluation import Evaluator
from .executors.choose import executor_for
from .executors.work import Executor, Work, counted
from .loop import Loop
from .malloc import keep_freed_memory
from .metrics import Metrics
from .participants import usual_cohort
from .prepare import as_trained, client_works, first_server, memory_states, time_model, upload_chain
from .private_states import PrivateStates
from .results import Round


def rounds(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    *,
    store: PrivateStates | None = None,
    server: Server | None = None,
    recent_norms: Sequence[Mapping[int, float]] = (),
    clip: float | None = None,
    start: int = 1,
    earlier: Callable[[int], Server | None] | None = None,
    executor: str | None = None,
    make_executor: Callable[[Mapping[str, Work]], Executor] | None = None,
    quorum: float = 1.0,
    on_result: Callable[[str, int], None] | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    masking: Clients | None = None,
    on_aggregate: Callable[[Round], None] | None = None,
    resumed: Round | None = None,
) -> Iterator[Round]:
    """Run ``plan``, one `Round` at a time.

    The cohort's private states are staged in ``store`` when a round is handed out. In memory they
    count at once; the store of a run directory commits the round before the next one is asked for.
    The C library keeps freed memory from then on, in the whole process (`malloc`).

    Args:
        method, task, federation, plan: what to run.
        store: the clients' private states; None: new ones, in memory. To resume a run, the states
            as they were after the last round.
        server: the server's state after the last round; None: its first state.
        recent_norms: to resume a run, the ``norms`` of its last ten rounds, by client.
        clip: to resume a run whose clip moves, the ``next_clip`` of its last round.
        start: the number of the first round to run. 0: ``server`` and what is staged in ``store``
            are evaluated before round 1, and handed out as round 0.
        earlier: to resume asynchronous rounds, the server's state after an earlier round; None for
            its first state.
        executor: to resume a run, the executor that its last round names.
        make_executor: makes what runs the clients' work, instead of what ``plan.engine`` says.
        quorum: the part of a cohort whose updates must be usable, from 0 to 1. The clients without
            such an update leave the cohort before anything is weighted.
        on_result: called after each result of a round's work, with the name of the work ("train",
            "evaluate", "score") and the number of results so far.
        metrics: functions for names in ``plan.evaluate.metrics``.
        masking: how the clients' sides of secure aggregation are reached; None: they are simulated.
        on_aggregate: is told of each round once it is aggregated, before the clients get anything
            of it: the round without its evaluation.
        resumed: to resume a run, what ``on_aggregate`` was told of round ``start``, which is
            evaluated without training anybody again.

    Raises:
        InputError: a client has no data, the method's settings don't fit, too few updates are
            usable (DivergedError: because losses or tensors are not finite).
        ChildProcessError: a process that clients are run in has died.
    """
    keep_freed_memory()
    forget_peak_memory()
    if method.trains_alone:
        plan = plan.alone
    federation.check()
    check(method, task, federation, plan)
    wanted = Metrics(plan.evaluate, metrics or {})
    wanted.check(federation.dataset.objective, remote=federation.remote)
    store = store or memory_states(method, task, federation)
    if server is None:
        server = first_server(method, task, federation)
    server = to_device(server, task.device)
    if resumed is not None:
        clip = resumed.next_clip
        resumed = replace(resumed, server=to_device(resumed.server, task.device))
    if plan.engine.on_divergence == "skip":
        quorum = min(quorum, LEAST)
    if (threshold := plan.secure_aggregation.threshold) is not None:
        quorum = max(quorum, threshold) if federation.remote else threshold
    time = time_model(method, task, federation, plan)
    federation = as_trained(method, task, federation, plan)
    works = client_works(method, task, federation, plan, metrics)
    if make_executor is not None:
        runner = make_executor(works._asdict())
    else:
        size = len(usual_cohort(method, federation, plan))
        runner = executor_for(plan.engine, works._asdict(), task.device, size, executor)
    run = runner.map if on_result is None else partial(counted, runner.map, on_result)
    context = method, task, federation, plan
    evaluator = Evaluator(*context, store, run, works.score, works.write)
    participants, versions = schedule(method, federation, plan, time, start)
    chain = upload_chain(*context, recent_norms, masking, clip)
    loop = Loop(
        *context, chain, store, runner, run, evaluator, quorum, participants, time, on_aggregate,
        resumed,
    )  # fmt: skip
    for version in versions:
        state = earlier(version) if earlier is not None else None
        state = first_server(method, task, federation) if state is None else state
        loop.versions[version] = to_device(state, task.device)
    try:
        for number in range(start, plan.rounds + 1):
            try:
                done = loop.round(server, number) if number else loop.before(server)
            except BaseException:
                store.discard()  # nothing of the round is kept
                raise
            server = done.server
            yield done
    finally:
        runner.close()
