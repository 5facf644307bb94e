"""Membership inference by the likelihood ratio of shadow runs.

Membership Inference Attacks From First Principles. N. Carlini, S. Chien, M. Nasr, S. Song,
A. Terzis, F. Tramer. S&P 2022.

A shadow is the same experiment with another seed, in which each client's rows are dealt anew into
training and held-out ones, of the same numbers. phi is how sure a model is of a row, mu_in its mean
over the shadows that were trained on the row, mu_out over the others. The likelihood ratio of
N(mu_in, sigma^2) to N(mu_out, sigma^2) at phi grows with

    phi - (mu_in + mu_out) / 2

Differs from the paper: sigma and mu_in - mu_out are the same for all rows, since few shadows can't
tell them for one; rows are dealt so that each is held out equally often; inputs are not augmented.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..data.federation import Federation
from ..data.table import Indices, Shares
from ..engine.config import EvaluateConfig
from ..engine.executors.work import ClientRequest
from ..engine.prepare import as_trained, client_works, memory_states
from ..engine.rounds import rounds
from ..errors import InputError
from ..method import Server
from ..params import Params
from ..runs.trained import TrainedMethod
from .finding import Finding, Floats
from .membership import Attacked, confidences, held_out, told_apart

Shadow = tuple[NDArray[np.bool_], Floats]
"""Of the rows that are told apart: those that a model of a shadow run was trained on; how sure it
is of each."""


def check_shadows(trained: TrainedMethod, count: int) -> None:
    """Raise InputError where the run has no shadows, or so few hold no row out twice."""
    experiment, federation = trained.experiment, trained.federation
    for name, value in (
        ("cohort.novel", experiment.cohort.novel),
        ("start_from.run", experiment.start_from.run),
    ):
        if value:
            raise InputError(f"--shadows: a run with {name} = {value!r} can't be repeated")
    sizes = [
        (federation.num_examples(client), len(held_out(federation, client)))
        for client in range(federation.num_clients)
    ]
    share = np.median([min(one) / sum(one) for one in sizes])
    least = int(np.ceil(2 / max(share, 1e-3)))
    if count < least:
        raise InputError(
            f"--shadows {count}: each row must be both held out and trained on in two of them; "
            f"allowed: {least} or more"
        )


def by_likelihood(
    trained: TrainedMethod, models: dict[str, Attacked], count: int, deadline: float
) -> list[Finding]:
    """The attack on each of the ``models``, by up to ``count`` shadow runs."""
    shadows = list[dict[str, Shadow]]()
    for number in range(count):
        if time.monotonic() > deadline:
            break
        federation = _dealt(trained.federation, trained.seed, number)
        shadows.append(_trained(trained, federation, models))
    if not shadows:
        return Finding.none("shadows", "all", "AUC", "no time was left for a shadow run")
    tail = f"; {len(shadows)} of {count} shadows" if len(shadows) < count else ""
    findings = []
    for name, model in models.items():
        phi = confidences(trained, model.rows, model.states)
        is_in, shadow = (
            np.stack(parts) for parts in zip(*(one[name] for one in shadows), strict=True)
        )
        told = np.minimum(is_in.sum(0), (~is_in).sum(0)) >= 1  # rows that were both
        if len({*model.rows.is_member[told]}) < 2:
            why = "too few rows were trained on in one shadow run and held out in another"
            findings += Finding.none("shadows", name, "AUC", why)
            continue
        means = [np.where(side, shadow, 0).sum(0) / side.sum(0).clip(1) for side in (is_in, ~is_in)]
        score = phi - (means[0] + means[1]) / 2
        found = told_apart("shadows", name, score[told], model.rows.is_member[told])
        findings += [replace(one, says=one.says + tail) for one in found]
    return findings


def _dealt(federation: Federation, seed: int, number: int) -> Federation:
    """The federation of shadow ``number``, in which a window of each client's rows is held out."""
    parts: list[list[Indices]] = [[], [], []]
    for client in range(federation.num_clients):
        pool = np.concatenate([federation.rows(client, "train"), held_out(federation, client)])
        pool = random.generator(seed, "audit", "pool", client).permutation(pool)
        held = len(pool) - federation.num_examples(client)
        pool = np.roll(pool, -number * held)
        ends = held - federation.num_rows(client, "test"), held
        for part, some in zip(parts, np.split(pool, ends), strict=True):
            part.append(some)
    validation, test, train = map(Shares.of, parts)
    partition = replace(federation.partition, train=train, validation=validation, test=test)
    other = int(random.key(seed, "shadow", number)) % 2**32
    return replace(federation, partition=partition, seed=other)


def _trained(
    trained: TrainedMethod, federation: Federation, models: dict[str, Attacked]
) -> dict[str, Shadow]:
    """Train a shadow up to the round of each model; what it tells about each."""
    method, task, plan = trained.method, trained.task, trained.experiment.plan
    size = plan.evaluate.batch_size
    quiet = EvaluateConfig(every=plan.rounds, clients=1, batch_size=size, global_model=False)
    plan = replace(plan, evaluate=quiet)
    store, found = memory_states(method, task, federation), dict[str, Shadow]()
    works = client_works(method, task, as_trained(method, task, federation, plan), plan)

    def personal(server: Server, number: int, client: int) -> Params:
        passes = method.finetune_passes
        private = store.read(client)
        request = ClientRequest(client, number, private, "personalise", passes, 1.0, 0)
        return works.evaluate.used(method.send(task, server, client), request)

    def shared(server: Server, number: int, client: int) -> Params:
        state = method.global_state(task, server)
        assert state is not None
        return state

    states, took_part = {"personal": personal, "global": shared}, set[int]()
    with closing(rounds(method, task, federation, plan, store=store)) as todo:  # type: ignore[type-var]
        for done in todo:
            took_part.update(done.cohort.clients)
            for name, model in models.items():
                if done.number == model.round:
                    used = partial(states[name], done.server, done.number)
                    own = name == "personal" and method.finetune_passes > 0
                    is_in = [
                        np.isin(some, federation.rows(client, "train"))
                        & (own or client in took_part)
                        for client, some in model.rows.rows.items()
                    ]
                    found[name] = np.concatenate(is_in), confidences(trained, model.rows, used)
            if found.keys() >= models.keys():
                break
    return found
