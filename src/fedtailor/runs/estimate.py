"""Works out what a run is going to cost, from a step of every method and the clients' sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.federation import Federation
from ..data.table import Dataset, Tokens
from ..engine.client import ClientUpdate, Training
from ..engine.config import Plan
from ..engine.costs import Costs, peak_memory_mb
from ..engine.executors.choose import at_once
from ..engine.executors.processes import cores
from ..engine.executors.sequential import Sequential
from ..engine.executors.work import ClientRequest
from ..engine.participants import usual_cohort
from ..engine.prepare import as_trained, first_steps
from ..engine.scoring import SPLITS, Scoring, by_length
from ..errors import FEW
from ..method import FineTuning, Method, Server
from ..store.committed import commit_of
from ..store.format import trial_folder
from ..store.records import KNOWN_NOISE
from ..task.backbone import Backbone
from ..task.quantised import num_parameters
from ..task.writing import window_of
from ..units import si
from ..user_code import portable
from .build import Inputs, device_of
from .experiment import Experiment
from .summary import MethodSummary, Sizes, StartSummary, TrialSummary
from .unused import unused

_WEAK = 0.01  # a delta above which little is promised
_WEAK_WORDS = "delta is the chance that the promise fails; privacy.delta sets a smaller one"
_MANY = 100  # clients, whose evaluation may take long
_LONG_STEP = 30.0  # seconds; a step that takes longer is not repeated without its warm-up
_LARGE = 1_000_000  # parameters; all of a smaller model train in little time
_FORWARD = 1 / 3  # of a training step's time

Left = Mapping[tuple[str, int], int]  # rounds that are left, by label and seed


def start_summary(inputs: Inputs, left: Left, ranks: int = 1) -> StartSummary:
    """Describe a run that has so many rounds ``left``, on so many ``ranks`` of torchrun. Every
    method trains one client for two steps, whose results are dropped."""
    experiment = inputs.experiment
    federation = inputs.federations[experiment.seeds[0]]
    dataset, plan, data = federation.dataset, experiment.plan, experiment.data
    cohort = plan.cohort_size(federation)
    backbone = inputs.backbone(experiment.seeds[0])
    labels = [k for k in experiment.methods if any(left.get((k, s)) for s in experiment.seeds)]
    names = federation.names or ()
    device = str(device_of(plan.engine))
    targets = None if federation.remote else dataset.targets(np.arange(len(dataset.inputs)))
    parameters = num_parameters(backbone.model)
    here = () if federation.remote else labels
    methods = [_method(inputs, label, left, ranks) for label in here]
    return StartSummary(
        name=experiment.name,
        data="at the clients' sites" if federation.remote else str(data.name or data.path),
        rows=dataset.num_train,
        test_rows=len(dataset.inputs) - dataset.num_train,
        client_rows=len(federation.partition.rows),
        pair=dataset.pair,
        targets="" if targets is None else dataset.objective.summary(targets, dataset.classes),
        tokens=None if federation.remote else _tokens(dataset),
        max_length=min(dataset.max_length, window_of(backbone) or dataset.max_length),
        clients=federation.num_clients,
        client_names=names if len(names) <= FEW else (),
        train=_size_summary(federation.partition.train.sizes()),
        test=_size_summary(federation.partition.test.sizes()),
        cohort=cohort,
        evaluated=len(experiment.plan.evaluated_and_novel(federation)),
        omissions=[one.short or one.text for one in federation.omissions],
        model=portable(experiment.model.factory or experiment.model.name),
        parameters=parameters,
        device=device,
        executor=_executor(plan, cohort, device, ranks, remote=federation.remote),
        rounds=experiment.rounds,
        seeds=experiment.seeds,
        trials=[TrialSummary(label, seed, rounds) for (label, seed), rounds in left.items()],
        methods=methods,
        hints=[
            *unused(experiment, labels, dataset.objective),
            *_whole_models(experiment, labels, backbone, parameters),
            *_undefined(experiment, federation),
            *_short_batches(methods),
            *_long_evaluation(experiment, labels, federation),
        ],
        memory_mb=peak_memory_mb(),
        processes=1 if federation.remote or ranks > 1 else at_once(plan.engine, cohort),
        texts=_texts(plan, federation, backbone),
        privacy=_privacy(inputs),
        masks=plan.secure_aggregation.words(cohort),
    )


def _privacy(inputs: Inputs) -> str:
    """What the run spends of privacy with the seed that spends the most; empty where nothing is."""
    plan, asked = inputs.experiment.plan, inputs.asked or inputs.experiment.rounds
    federations = inputs.federations.values() if inputs.spends else ()
    accounts = [
        (one, federation) for federation in federations if (one := plan.account(federation))
    ]
    if not accounts:
        return ""
    account, federation = max(accounts, key=lambda pair: pair[0].spent(plan.rounds).epsilon)
    cut = f"; {asked} rounds would spend more: privacy.stop" if asked > plan.rounds else ""
    usual = f"; {account.usual_delta}" if plan.privacy.delta is None else ""
    weak = f"; {_WEAK_WORDS}" if account.delta > _WEAK else ""
    known = "" if plan.privacy.secret else f"; {KNOWN_NOISE}"
    return plan.privacy_words(federation) + cut + usual + weak + known


def _texts(plan: Plan, federation: Federation, backbone: Backbone) -> str:
    """Say what models write in the evaluations of a method with a seed, at most."""
    config = plan.evaluate
    if not config.generate.examples:
        return ""
    times = sum(config.writes(number, plan.rounds) for number in range(1, plan.rounds + 1))
    clients = plan.evaluated_and_novel(federation)
    held_out = (federation.num_rows(client, split) for client in clients for split in SPLITS)
    answers = sum(min(config.generate.examples, rows) for rows in held_out)
    models = 2 if config.global_model else 1
    tokens = _most_written(backbone, config.generate.tokens)
    most = times * models * answers * tokens
    return (
        f"{answers:,} answers for {len(clients):,} clients, of at most {tokens} tokens, "
        f"by {'own and global models' if models > 1 else 'own models'}, after {times} of "
        f"{plan.rounds} rounds: at most {si(most)} tokens for each method and seed"
    )


def _most_written(backbone: Backbone, tokens: int) -> int:
    """The most tokens of an answer that may have so many; a prompt takes one or more of a decoder's
    window."""
    window = window_of(backbone)
    in_prompt = 0 if backbone.objective.has_decoder else 1
    return tokens if window is None else min(tokens, window - in_prompt)


def _whole_models(
    experiment: Experiment, labels: Sequence[str], backbone: Backbone, parameters: int
) -> list[str]:
    """Point out the methods that train all of a large model that could have an adapter."""
    methods = [(label, experiment.methods[label]) for label in labels]
    tuned = [(label, one) for label, one in methods if isinstance(one, FineTuning)]
    whole = [label for label, one in tuned if (one.trainable, one.layers) == ("full", ())]
    if not (whole and backbone.pretrained and backbone.blocks) or parameters < _LARGE:
        return []
    return [
        f"the whole model is trained by {', '.join(whole)}; a small adapter is trained with "
        f'methods.{whole[0]}.trainable = "lora"'
    ]


def _long_evaluation(
    experiment: Experiment, labels: Sequence[str], federation: Federation
) -> list[str]:
    """Say where evaluating the clients takes most of the time, and what shortens it."""
    if not labels or federation.remote:
        return []
    methods = [experiment.methods[label] for label in labels]
    steps = [_round_steps(experiment, method, federation) for method in methods]
    training, scoring = (sum(values) for values in zip(*steps, strict=True))
    clients = len(experiment.plan.evaluated_and_novel(federation))
    if clients < _MANY or scoring < training:
        return []
    share = scoring / (training + scoring)
    return [
        f"about {share:.0%} of the time goes into evaluating {clients:,} clients; a larger "
        "evaluate.every, or evaluate.clients = 100 (a sample), shortens it"
    ]


def _short_batches(methods: Sequence[MethodSummary]) -> list[str]:
    if not (labels := [one.label for one in methods if one.short_batches]):
        return []
    count = max(one.short_batches for one in methods)
    return [
        f"{', '.join(labels)}: the last batch of each epoch is left out at {count} clients, since "
        "it has one example, too few for batch normalisation"
    ]


def _undefined(experiment: Experiment, federation: Federation) -> list[str]:
    """Say for how many clients a metric will be undefined, whatever a model predicts."""
    dataset, asked = federation.dataset, experiment.evaluate.metrics
    if not asked or federation.remote:
        return []
    objective, lines = dataset.objective, []
    clients = experiment.plan.evaluated_and_novel(federation)
    chosen = experiment.evaluate.select or objective.selects
    for split in SPLITS:
        each = (dataset.targets(federation.rows(client, split)) for client in clients)
        counts = Counter(
            name for targets in each for name in objective.undefined(targets, dataset.classes)
        )
        for count in dict.fromkeys(counts[name] for name in asked if counts[name]):
            names = [name for name in asked if counts[name] == count]
            every = count == len(clients)
            line = (
                f"{', '.join(names)}: undefined for {count} of {len(clients)} clients, whose "
                f"{split} rows have all the same label, or none; "
                f"{'there is no mean' if every else 'the mean is that of the others'}"
            )
            if every and split == "validation" and chosen in names:
                line += f"; evaluate.select = {chosen!r} can choose no round: the last is reported"
            lines.append(line)
    return lines


def rounds_left(
    experiment: Experiment, out: Path | None, trials: Sequence[tuple[int, str]] | None = None
) -> Left:
    """Return how many rounds each trial of a run has left, in the order in which they run: of all,
    or of ``trials``, each (seed, label). Without ``out`` none has begun."""
    left = {}
    every = ((seed, label) for seed in experiment.seeds for label in experiment.methods)
    for seed, label in every if trials is None else trials:
        commit = None if out is None else commit_of(trial_folder(out, label, seed))
        left[label, seed] = max(0, experiment.rounds - (commit.round if commit else 0))
    return left


def _method(inputs: Inputs, label: str, left: Left, ranks: int) -> MethodSummary:
    experiment = inputs.experiment
    method, plan = experiment.methods[label], experiment.plan
    federation = inputs.federations[experiment.seeds[0]]
    costs, step, cached, short = _step(inputs, method, federation)
    rounds = sum(left.get((label, seed), 0) for seed in experiment.seeds)
    cohort = len(usual_cohort(method, federation, plan))
    down, up = sum(costs.down.values()), sum(costs.up.values())
    seconds = step * sum(_round_steps(experiment, method, federation))
    seconds /= min(ranks, cohort) if ranks > 1 else at_once(plan.engine, cohort)
    return MethodSummary(
        label=label,
        trained=costs.trained,
        communicated=costs.communicated,
        private=costs.private,
        bytes_down=down,
        bytes_up=up,
        step_seconds=step,
        round_seconds=seconds,
        rounds=rounds,
        cache_seconds=cached * (rounds > 0),
        bytes_total=float(rounds * cohort * (down + up)),
        upload_bytes=float(up if method.needs_only_mean else cohort * up),
        short_batches=short,
        private_bytes=4.0 * costs.private * federation.num_clients * len(experiment.seeds),
    )


def _step(
    inputs: Inputs, method: Method, federation: Federation
) -> tuple[Costs, float, float, int]:
    """Return what a client's round costs, the seconds of one of its steps, those of what is worked
    out once an example, and how many clients have a batch that is too small to train on. The first
    step also warms up, so it is the second one that is timed. Of a language model the first is on
    the longest texts, and an evaluation follows, since these take the most memory."""
    plan = inputs.experiment.plan
    task = inputs.task(method, federation.seed)
    federation = as_trained(method, task, federation, plan)
    works, server, request = first_steps(method, task, federation, plan)
    # one thread, as `processes` has it: a pool of threads would not survive a fork
    threads = 1 if task.device.type == "cpu" and plan.engine.executor != "sequential" else None
    longest = _Longest(works.train, Scoring(method, task, federation), plan)
    runner = Sequential({**works._asdict(), "longest": longest}, threads)

    def timed(work: str) -> tuple[Costs, float]:
        start = time.perf_counter()
        ((_, update),) = runner.map(work, server, [request])
        return update.costs, time.perf_counter() - start

    costs, seconds = timed("longest" if task.most_tokens else "train")
    if seconds <= _LONG_STEP:
        costs, seconds = timed("train")
    cache = federation.example_cache
    rest = federation.partition.train.sizes() % plan.local.batch_size
    short = int(((rest > 0) & (rest < federation.least_batch)).sum())
    return costs, seconds, 0.0 if cache is None else cache.seconds, short


@dataclass(frozen=True)
class _Longest:
    """A training step on the longest rows of a client, and an evaluation of a batch of the longest
    held-out ones."""

    train: Training
    score: Scoring
    plan: Plan

    def one(self, server: Server, request: ClientRequest) -> ClientUpdate:
        train, federation, task = self.train, self.train.federation, self.train.task
        lengths = federation.dataset.inputs.lengths
        rows = federation.partition.train[request.client]
        rows = rows[np.argsort(-lengths(rows), kind="stable")][: train.local.batch_size]
        received = train.method.send(task, server, request.client)
        inputs = train.inputs(received, request, [federation.batch(np.sort(rows))])
        update: ClientUpdate = train.complete(request, inputs)
        clients = self.plan.evaluated(federation)[:_MANY]
        held_out = np.concatenate([federation.rows(k, split) for k in clients for split in SPLITS])
        sizes = lengths(held_out)
        batches = [*by_length(sizes, self.plan.evaluate.batch_size, task.most_tokens)]
        if batches:
            most = max(batches, key=lambda at: len(at) * int(sizes[at[-1]]))
            self.score.scores({**inputs.received, **inputs.private}, held_out[most], len(most))
        return update


def _round_steps(
    experiment: Experiment, method: Method, federation: Federation
) -> tuple[float, float]:
    """Steps of training in a round, and how many its share of the evaluations is worth."""
    plan, parts = experiment.plan, federation.partition
    local, evaluate = plan.local, plan.evaluate
    sizes = parts.train.sizes()
    steps = float(local.steps or np.mean(local.epochs * -(-sizes // local.batch_size)))
    cohort = len(usual_cohort(method, federation, plan))
    evaluated = len(experiment.plan.evaluated_and_novel(federation))
    held_out = float(np.mean(parts.validation.sizes() + parts.test.sizes()))
    models = 1 + evaluate.global_model
    batches = models * held_out / plan.local.batch_size
    scoring = evaluated * (batches * _FORWARD + method.finetune_passes * steps)
    return cohort * steps, scoring / evaluate.every


def _tokens(dataset: Dataset) -> Sizes | None:
    inputs = dataset.inputs
    if not isinstance(inputs, Tokens):
        return None
    return _size_summary(np.diff(inputs.offsets) if inputs.sizes is None else inputs.sizes.values)


def _size_summary(sizes: np.ndarray) -> Sizes:
    return Sizes(int(sizes.min()), float(np.median(sizes)), int(sizes.max()))


def _executor(plan: Plan, cohort: int, device: str, ranks: int, *, remote: bool) -> str:
    if remote:
        return "flower"
    if ranks > 1:
        return f"{ranks} ranks"
    name, most = plan.engine.executor, plan.engine.processes or cores()
    if name == "auto" and device == "cpu" and at_once(plan.engine, cohort) == 1:
        return "auto (one client at a time)"
    if name == "auto" and device != "cpu":
        return "auto (finds out on 15 clients how many to train at once)"
    return {
        "auto": "auto (times one client at a time against several, goes on with the faster; "
        f"{most} cores)",
        "processes": f"up to {most} processes",
    }.get(name, name)
