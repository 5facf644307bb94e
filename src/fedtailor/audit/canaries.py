"""A lower bound of epsilon from canaries, beside the epsilon that a run's account claims.

Privacy Auditing with One (1) Training Run. T. Steinke, M. Nasr, M. Jagielski. NeurIPS 2023.

The run's rounds are run again, with its cohorts, its chain of uploads and its server, but clients
don't train: each is a canary, with a fixed random direction v_k of the length of ``privacy.clip``
that no other one touches. In every round it sends s_k v_k, where a fair coin has chosen s_k: 1 or
-1, as another client's data would change all of it; or 1 or 0 where a neighbour leaves it out. The
attacker ranks canaries by <v_k, what the server's state has changed by>, and guesses 1 for the
first and the other value for the last r / 2. If epsilon, delta hold for each client, then of r
guesses on m canaries more than

    P[v or more are right] <= P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i,
    W ~ Binomial(r, e^epsilon / (1 + e^epsilon))

are right that often. The bound is the largest epsilon at which this is at most 5 %, divided among
three numbers r. Repeated runs are one mechanism on all of their canaries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

from .. import random
from ..data.federation import Federation
from ..engine.client import ClientUpdate, Training
from ..engine.config import EvaluateConfig, Plan
from ..engine.executors.sequential import Sequential
from ..engine.executors.work import ClientInputs, ClientRequest
from ..engine.prepare import first_server, first_steps, with_least_batch
from ..engine.rounds import rounds
from ..errors import InputError
from ..method import Method, Server
from ..optim import ClientContext
from ..params import Params, flat, pick, unflat
from ..runs.trained import TrainedMethod
from ..task.task import Task
from ..units import counted
from ..uploads.accounting import Account
from .finding import Finding, Floats

_DELTA = 1e-6  # at a larger one few guesses say nothing
_ERROR = 0.05
_GUESSED = (0.1, 1 / 3, 1.0)  # of the canaries
_MOST = 100.0  # epsilon


@dataclass(frozen=True)
class Bound:
    """What ``right`` of ``guesses`` on ``canaries`` say of ``epsilon`` at ``delta``: it is no
    smaller, with 95 % confidence. ``most`` is what it would be if all guesses were right."""

    epsilon: float
    most: float
    canaries: int
    guesses: int
    right: int


@dataclass(frozen=True)
class Canaries:
    """The canaries of one run: by client its values ``[n]`` at ``places`` of the flat upload
    ``like``, and whether it sends them (``heads``) or their opposite, or nothing."""

    like: Params
    places: NDArray[np.int64]  # [k, n]
    values: Floats  # [k, n]
    heads: NDArray[np.bool_]  # [k]
    tails: float  # what a canary sends instead of 1 time its direction

    @classmethod
    def drawn(cls, like: Params, clients: int, plan: Plan, *key: int | str) -> Canaries:
        """As many canaries as clients, or as values in an upload."""
        clip, size = plan.privacy.bound, len(flat(like))
        draws = random.generator("canaries", *key)
        count = min(clients, size)
        each = size // count
        places = draws.permutation(size)[: count * each].reshape(count, each)
        values = draws.choice([-1.0, 1.0], (count, each)) * clip / np.sqrt(each)
        heads = draws.random(count) < 0.5
        tails = -1.0 if plan.privacy.neighbours == "replace" else 0.0
        return cls(like, places, values, heads, tails)

    def update(self, client: int) -> Params:
        """What a client adds to an upload that changes nothing."""
        vector = torch.zeros(len(flat(self.like)), dtype=torch.float64)
        if client < len(self.places):
            times = 1.0 if self.heads[client] else self.tails
            vector[self.places[client]] = torch.from_numpy(times * self.values[client])
        return unflat(vector, self.like)

    def scores(self, before: Server, after: Server) -> Floats:
        """<v_k, change> ``[k]``."""
        names = self.like.keys()
        change = flat(pick(after, names)).double() - flat(pick(before, names)).double()
        return cast(Floats, (change.cpu().numpy()[self.places] * self.values).sum(1))


@dataclass(frozen=True)
class _Sends:
    """Instead of training, clients send their canaries, beside what an ``upload`` has."""

    train: Training
    canaries: Canaries
    upload: Params

    def one(self, server: Server, request: ClientRequest) -> ClientUpdate:
        """What one client sends."""
        train, private = self.train, request.private or {}
        received = train.method.send(train.task, server, request.client)
        unchanged = train.chain.at(received, request.round, [request.client]).unchanged(self.upload)
        update = self.canaries.update(request.client)
        upload = {
            name: (value + update[name]).to(value.dtype) if name in update else value
            for name, value in unchanged.items()
        }
        inputs = ClientInputs(received, private, [], ClientContext(random.key(0)), 0.0)
        outcome = upload, private, torch.zeros(()), torch.tensor(True)
        return train.finish(request, inputs, outcome, 0.0)


def _sending(canaries: Canaries, upload: Params, works: Mapping[str, Any]) -> Sequential:
    return Sequential({**works, "train": _Sends(works["train"], canaries, upload)})


def audited(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    runs: int,
    delta: float,
    deadline: float,
) -> Bound | None:
    """The bound from so many ``runs`` of a plan with noise, of which none begins after the
    ``deadline`` of `time.monotonic`; None without a run. Raises InputError where the server's state
    does not have what clients send."""
    quiet = EvaluateConfig(every=plan.rounds, clients=1, global_model=False)
    plan = replace(plan, evaluate=quiet, engine=replace(plan.engine, cache_mb=0.0))
    scores, heads = list[Floats](), list[NDArray[np.bool_]]()
    for number in range(runs):
        if time.monotonic() > deadline:
            break
        other = int(random.key(federation.seed, "canaries", number)) % 2**32
        again = replace(federation, seed=other, secret=None)
        upload, before = _upload(method, task, again, plan), first_server(method, task, again)
        like = {name: value for name, value in upload.items() if name in before}
        if not like:
            raise InputError(
                f"{method.name}: nothing that clients send stands in the server's state"
            )
        canaries = Canaries.drawn(like, federation.num_clients, plan, federation.seed, number)
        executor = partial(_sending, canaries, upload)
        *_, last = rounds(method, task, again, plan, server=before, make_executor=executor)
        scores.append(canaries.scores(before, last.server))
        heads.append(canaries.heads)
    return bound(np.concatenate(scores), np.concatenate(heads), delta) if scores else None


def _upload(method: Method, task: Task, federation: Federation, plan: Plan) -> Params:
    """An upload of the method, before the chain."""
    federation = with_least_batch(method, task, federation, plan.local.batch_size)
    works, server, request = first_steps(method, task, federation, plan)
    inputs = works.train.prepare(server, request)
    return works.train.run(*works.train.arguments(inputs))[0]


def bound(scores: Floats, heads: NDArray[np.bool_], delta: float) -> Bound:
    """The best bound from guesses on canaries with these ``scores``, higher for ``heads``.

    >>> found = bound(np.arange(100.0), np.arange(100) >= 50, 0.0)
    >>> found.right, found.guesses, round(found.epsilon, 1)
    (100, 100, 3.2)
    """
    order, found = np.argsort(scores, kind="stable"), list[Bound]()
    for share in _GUESSED:
        half = max(1, int(share * len(scores) / 2))
        right = int((~heads[order[:half]]).sum() + heads[order[-half:]].sum())
        epsilon, most = (_epsilon(len(scores), 2 * half, v, delta) for v in (right, 2 * half))
        found.append(Bound(epsilon, most, len(scores), 2 * half, right))
    return max(found, key=lambda one: one.epsilon)


def _epsilon(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The largest epsilon at which so many right guesses are too many."""

    def excess(epsilon: float) -> float:
        return _chance(canaries, guesses, right, epsilon, delta) - _ERROR / len(_GUESSED)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, _MOST)) if excess(_MOST) > 0 else _MOST


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """At most how often so many guesses are right."""
    p = 1 / (1 + np.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, p))  # P[v - i <= W < v]
    slope = (below / np.arange(1, right + 1)).max(initial=0.0)
    return float(binom.sf(right - 1, guesses, p) + 2 * canaries * delta * slope)


def by_canaries(
    trained: TrainedMethod, runs: int, deadline: float, say: Callable[[str], object]
) -> list[Finding]:
    """The bound beside the account of a run's rounds, at the same delta; ``say`` as in `audit`."""
    method, federation, plan = trained.method, trained.federation, trained.experiment.plan
    account = plan.account(federation) if plan.privacy.of_clients else None
    attack = "canaries", "release", "epsilon at least"
    if method.trains_alone:
        return Finding.none(*attack, "nothing is sent")
    if not isinstance(account, Account):
        return Finding.none(*attack, "without [privacy] for clients nothing is claimed of them")
    say(f"canaries: {counted(runs, 'run')} without training")
    strict = replace(account, delta=min(_DELTA, account.delta))
    try:
        strict.check()
    except InputError:  # rounds of nobody have a part of delta
        strict = account
    claimed = strict.spent(plan.rounds).epsilon
    found = audited(method, trained.task, federation, plan, runs, strict.delta, deadline)
    if found is None:
        return Finding.none(*attack, "no time was left")
    says = (
        f"the account says {claimed:.3g} at delta {strict.delta:.2g}; {found.right} of "
        f"{found.guesses} guesses were right, and all right would show {found.most:.3g}"
    )
    return [Finding(*attack, says, found.epsilon, found.epsilon, None, 0.0)]
