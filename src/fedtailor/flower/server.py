"""The server's side: the methods of an experiment over a Grid, into a run directory.

No data are needed here: the clients are counted at the start. A run that was stopped goes on after
its last committed round, and tells every client which of its private states that is.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import ExitCode

from .. import random
from ..engine.executors.work import Refusal, client_requests
from ..engine.metrics import Metrics
from ..engine.prepare import blank_upload, upload_chain
from ..engine.rounds import rounds
from ..errors import DivergedError, InputError, one_line, say
from ..params import to_device
from ..runs.base_model import fingerprint
from ..runs.build import Inputs, backbone_of, named, public_of
from ..runs.estimate import rounds_left, start_summary
from ..runs.experiment import Experiment
from ..runs.manifest import check_same
from ..runs.trials import TrialRun, commit_rounds, run_trials
from ..store.aggregated import read_aggregated, write_aggregated
from ..store.committed import read_server
from ..store.files import read_record, record, write_json
from ..store.format import FLOWER_FILE, damaged
from ..store.trial import TrialStore
from ..task.backbone import Backbone
from ..task.task import Task
from .executor import GridExecutor, RemoteStates
from .joining import ClientsOfRound, FlowerRecord, NovelClients, has_ended
from .masking import GridClients
from .messages import RoundRequest, digest
from .nodes import Nodes, Timeouts, remote_federation
from .schema import UploadSchema


def server_app(experiment: Experiment, out: Path | str, **options: Any) -> ServerApp:
    """What Flower runs at the server: `serve`, with its ``options``."""
    app = ServerApp()
    expected_errors_in_one_line()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, experiment, out, **options)

    return app


def expected_errors_in_one_line() -> None:
    """Let Flower's log have the words of an expected error, without a traceback."""
    logging.getLogger("flwr").addFilter(_in_one_line)


def _in_one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InputError | OSError):
        file = error.filename if isinstance(error, OSError) else None
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        record.msg, record.args = "%s", (one_line(f"{file}: {said}" if file else said),)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"  # Flower has it as the run's status
    # what follows says that there was an error, and where Flower's documentation is
    return not str(record.msg).startswith(f"Exit Code: {ExitCode.SERVERAPP_EXCEPTION}")


def serve(
    grid: Grid,
    experiment: Experiment,
    out: Path | str,
    *,
    backbone: Backbone | None = None,
    timeouts: Timeouts = Timeouts(),
    names: tuple[str, ...] | None = None,
    new_clients: range = range(0),
    sites: Mapping[int, range] | None = None,
) -> Path:
    """Run every method of ``experiment`` with every seed over ``grid``; returns ``out``.

    Args:
        grid: Flower's way to the nodes, each with a `client_app` of the same experiment.
        experiment: what to run; its data are at the clients' sites.
        out: the run directory. What it already holds of the same experiment is kept.
        backbone: instead of what ``experiment.model`` names.
        timeouts: how long to wait, and for how many.
        names: what the clients are called in the run directory, by number; None: numbers alone.
        new_clients: the numbers, from K on, of clients that join when the training is over. If it
            is over already and some of them have not joined yet, nothing else is done.
        sites: the clients that each node may serve, and no other node takes part; None: any node
            may serve any client, and of several that say so the one that was there first does.

    A method that diverges ends there with that seed, and the others go on.

    Raises:
        InputError: bad input; a different run in ``out``; too few clients, or replies, in time.
        DivergedError: every method has diverged with every seed.
    """
    out = Path(out)
    experiment = named(experiment, None, backbone)
    check_remote(experiment)
    check_same(experiment, out)
    with closing(Nodes(grid, timeouts, experiment, sites, names)) as nodes:
        nodes.model = fingerprint(experiment.model, out)
        joining = NovelClients(nodes, experiment, out, new_clients, timeouts, backbone)
        if has_ended(experiment, out) and joining.join_all():
            return out
        nodes.wait_for_clients()
        federations = {
            seed: remote_federation(nodes.infos, seed, names) for seed in experiment.seeds
        }
        dataset = federations[experiment.seeds[0]].dataset
        if experiment.has_public:
            public = public_of(experiment, dataset, backbone)
            federations = {seed: replace(f, public=public) for seed, f in federations.items()}
        backbones = lru_cache(1)(partial(backbone_of, experiment, dataset, backbone))
        inputs = Inputs(experiment, dataset, federations, backbones)
        inputs.check()  # bad input shows before anything is written
        if nodes.model is None:  # it was fetched from the hub since
            nodes.model = fingerprint(experiment.model)
            nodes.wait_for_clients()

        def is_done(trial: TrialRun) -> bool:
            return trial.store.last.finished and not clients_without_model(trial)

        run_trial = partial(_run_trial, inputs, nodes, timeouts)
        left = rounds_left(experiment, out)
        summary = start_summary(inputs, left)
        run_trials(experiment, federations, out, run_trial, is_done, left=left, summary=summary)
        joining.join_all()
        return out


def check_remote(experiment: Experiment) -> None:
    """Raise InputError if an experiment is for runs in one process alone."""
    why = "is for runs in one process"
    if experiment.cohort.novel:
        raise InputError(f"cohort.novel = {experiment.cohort.novel} {why}; set it to 0")
    if experiment.start_from.run is not None:
        raise InputError(f"start_from = {experiment.start_from.run!r} {why}; leave it out")
    if experiment.evaluate.by_client:
        raise InputError(f"evaluate.by_client {why}; leave it out")
    if experiment.privacy.stop is not None:
        raise InputError(
            f"privacy.stop = 'budget' {why}: sites know their rounds before "
            "they train; leave it out, and the server says how many are allowed"
        )


def _run_trial(inputs: Inputs, nodes: Nodes, timeouts: Timeouts, trial: TrialRun) -> None:
    method, federation, store = trial.method, trial.federation, trial.store
    plan, task = inputs.experiment.plan, inputs.task(trial.method, trial.seed)
    first = method.init_client(task, 0, random.key(trial.seed, "client", 0))
    best = store.last.best_round if store.last.best else 0
    cohorts = [(line.round, list(line.cohort)) for line in store.history()]
    states = RemoteStates.after(cohorts, best, bool(first))
    chain = upload_chain(method, task, federation, plan)
    names, experiment = _names(store), digest(inputs.experiment)
    before = tuple(zip(names.before, names.up_to, strict=True))
    executor = GridExecutor(
        method=method,
        task=task,
        federation=federation,
        chain=chain,
        states=states,
        first_private=first,
        schema=UploadSchema.of(*blank_upload(method, task, federation, chain)),
        nodes=nodes,
        timeouts=timeouts,
        blank=RoundRequest(experiment, names.run, trial.label, trial.seed, 0, "train", (), before),
        folder=store.path,
        metrics=Metrics(plan.evaluate),
    )
    if not store.last.finished:
        start = store.last.round + 1
        repeats = not (plan.privacy.of_clients or plan.secure_aggregation.is_active)
        todo = rounds(
            method,
            task,
            federation,
            plan,
            store=states,
            server=store.restore(states),
            recent_norms=store.recent_norms(),
            clip=store.next_clip(),
            start=start,
            make_executor=lambda works: executor,
            quorum=timeouts.least,
            on_result=trial.progress.on_result,
            masking=GridClients(executor),
            on_aggregate=None if repeats else partial(write_aggregated, store.path),
            resumed=None if repeats else read_aggregated(store.path, start, federation),
        )
        try:
            commit_rounds(trial, todo)
        except DivergedError as error:
            store.diverge(str(error))
            _hand_over(trial, task, executor)
            raise
    _hand_over(trial, task, executor)


def _hand_over(trial: TrialRun, task: Task, executor: GridExecutor) -> None:
    clients = clients_without_model(trial)
    if not clients:
        return
    executor.nodes.refresh()
    folder, commit = trial.store.path, trial.store.last
    server = to_device(read_server(folder, commit, commit.best_round), task.device)
    sizes = dict.fromkeys(clients, 0)
    read = executor.states.read
    requests = client_requests(clients, commit.best_round, "personalise", 0, sizes, read)
    results = executor.map("keep", server, requests)
    kept = {request.client for request, result in results if not isinstance(result, Refusal)}
    everyone = sorted({*_clients_with_model(trial), *kept})
    models = ClientsOfRound(commit.best_round, everyone)
    path = folder / FLOWER_FILE
    found = replace(read_record(FlowerRecord, path), models=asdict(models))
    write_json(path, asdict(found))
    without = [client for client in clients if client not in kept]
    if without:
        say(
            f"{trial.title}: without a model of their own: clients "
            f"{', '.join(map(str, without))}; the same command asks them again"
        )


def clients_without_model(trial: TrialRun) -> list[int]:
    """The clients that have not kept a model of their own of a trial that has ended."""
    commit = trial.store.last
    if not commit.ended or not commit.round or not (trial.store.path / FLOWER_FILE).exists():
        return []
    kept = _clients_with_model(trial)
    return [client for client in range(trial.federation.num_clients) if client not in kept]


def _clients_with_model(trial: TrialRun) -> set[int]:
    path = trial.store.path / FLOWER_FILE
    about = read_record(FlowerRecord, path).models
    if not about:
        return set()
    models = record(ClientsOfRound, about, f"{path}: models")
    return set(models.clients if models.round == trial.store.last.best_round else ())


def _names(store: TrialStore) -> FlowerRecord:
    """The names under which clients keep the private states of the trial in this folder. If it
    was rolled back, there is a new one from now on: the states that the sites have are neither
    overwritten nor taken for those of rounds that are run again."""
    path, commit = store.path / FLOWER_FILE, store.last
    if not path.exists():
        if commit.round:
            raise InputError(f"{store.path} was not begun over Flower; choose another --out")
        write_json(path, {"run": uuid.uuid4().hex})
    names = read_record(FlowerRecord, path)
    if len(names.before) != len(names.up_to):
        raise damaged(path, "before and up_to must have one entry for each earlier name")
    if len(names.before) < len(commit.rolled_back):
        before, up_to = (names.run, *names.before), (commit.round, *names.up_to)
        names = FlowerRecord(uuid.uuid4().hex, before=before, up_to=up_to)
        write_json(path, asdict(names))
    return names
