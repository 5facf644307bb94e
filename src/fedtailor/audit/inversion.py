"""Gradient inversion: the rows of a small batch, from what a client sends for it.

Deep Leakage from Gradients. L. Zhu, Z. Liu, S. Han. NeurIPS 2019.
Inverting Gradients: How easy is it to break privacy in federated learning? J. Geiping,
H. Bauermeister, H. Droege, M. Moeller. NeurIPS 2020.

The client takes one step of round 1 on one batch. u is its update as it comes out of the chain of
uploads, u(x) that of a client which trains on x instead:

    minimise 1 - <u(x), u> / (|u(x)| |u|) + alpha TV(x)

The attacker knows the server's state, the labels, and the client's first private tensors, which
follow from the seed. Adam's first step is the sign of the gradient, which has no derivative: of a
method that uses Adam u(x) is that of plain descent, g, as g / (|g| + mean |g| / 10).

Differs from the papers: random numbers are known, too; the start is the mean of the data with
noise; x stays in the range of the data; of three starts the one counts that comes closest.

Of tokens nothing is optimised: a table of embeddings that is trained changes in the rows of a
batch's tokens, and the rows that change most are taken for these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from .. import random
from ..data.config import LocalConfig
from ..data.federation import Federation
from ..data.table import Images
from ..engine.client import Training
from ..engine.executors.work import ClientInputs, ClientRequest
from ..engine.participants import usual_cohort
from ..engine.prepare import client_works, first_server, first_states, with_least_batch
from ..optim import Optimiser
from ..params import Batch, Params, flat, pick, row, stack, subtract, to_device
from ..runs.trained import TrainedMethod
from ..units import counted
from .finding import Finding, Floats, interval

_SMOOTH = 1e-6  # alpha
_STARTS, _CLOSE = 3, 1e-4  # the best of so many starts, or the first that is so close
_SAMPLE = 2000  # training rows, for what the data are like


@dataclass(frozen=True)
class Sent:
    """A client's step on one batch, and the ``updates`` that attackers see of it, by what they look
    at. ``training`` has plain descent; ``unchanged`` is an upload that changes nothing."""

    training: Training
    inputs: ClientInputs
    updates: dict[str, Params]
    unchanged: Params
    of_signs: bool

    @property
    def batch(self) -> Batch:
        return self.inputs.batches[0]

    def update(self, x: Tensor) -> Params:
        """u(x) of pictures ``[b, C, H, W]``."""
        batch, given = {**self.batch, "pixel_values": x}, self.inputs
        upload, *_ = self.training.run(given.received, given.private, [batch], given.context)
        update = subtract(pick(upload, self.unchanged), self.unchanged)
        if not self.of_signs:
            return update
        return {n: g / (g.abs() + g.abs().mean() / 10 + 1e-30) for n, g in update.items()}


def by_inversion(
    trained: TrainedMethod,
    size: int,
    count: int,
    steps: int,
    deadline: float,
    say: Callable[[str], object] = lambda _: None,
) -> list[Finding]:
    """The attack on a batch of ``size`` rows, or of as few as the method trains on, of each of
    ``count`` clients, in so many ``steps``; ``say`` as in `audit`."""
    names, plan = ("inversion", "upload", "error left"), trained.experiment.plan
    if trained.method.trains_alone:
        return Finding.none(*names, "nothing is sent")
    if plan.privacy.of_records:
        return Finding.none(*names, "batches are drawn at random, with noise in each step")
    hidden: list[Finding] = []
    if plan.secure_aggregation.is_active:
        hidden = Finding.none(*names, "the server sees sums alone")
        if not plan.privacy.of_clients:
            return hidden
    of_pictures = isinstance(trained.federation.dataset.inputs, Images)
    each = f", {counted(steps, 'step')} each" if of_pictures else ""
    say(f"inversion: up to {count:,} {'batch' if count == 1 else 'batches'}{each}")
    federation = with_least_batch(trained.method, trained.task, trained.federation, max(size, 2))
    size = max(size, federation.least_batch, trained.method.min_batch_size)
    found: dict[str, list[Floats]] = {}
    for sent in _sent(trained, federation, size, count):
        for target, update in sent.updates.items():
            if time.monotonic() > deadline:
                continue
            if of_pictures:
                numbers = _errors(sent, update, federation, steps)
            else:
                numbers = _words(trained, sent, update)
            if not len(numbers):
                why = "no table of the tokens' embeddings is sent"
                return Finding.none("inversion", target, "words found", why)
            found.setdefault(target, []).append(numbers)
    if not found:
        why = "no time was left, or no client has so many rows"
        return hidden or Finding.none(*names, why)
    make = _of_pictures if of_pictures else _of_words
    return hidden + [
        make(
            target,
            np.concatenate(numbers),
            f"{len(numbers)} {'batch' if len(numbers) == 1 else 'batches'} of {size}",
        )
        for target, numbers in found.items()
    ]


def _of_pictures(target: str, errors: Floats, batches: str) -> Finding:
    error = float(errors.mean())
    low, high = _interval(errors, target)
    says = (
        f"of {batches}, the squared error of a row over that of the data's mean: "
        f"{int((errors < 0.1).sum())} of {len(errors)} rows come out with less than a tenth"
    )
    return Finding("inversion", target, "error left", says, error, low, high, 1.0)


def _of_words(target: str, found: Floats, batches: str) -> Finding:
    share, chance = found.mean(0)
    low, high = _interval(found[:, 0], target)
    says = f"{share:.0%} of the different tokens in {batches} are named"
    return Finding("inversion", target, "words found", says, share, low, high, chance)


def _interval(numbers: Floats, target: str) -> tuple[float, float] | tuple[None, None]:
    """None of one number alone."""
    return interval(np.mean, [numbers], target) if len(numbers) > 1 else (None, None)


def _sent(trained: TrainedMethod, federation: Federation, size: int, count: int) -> Iterator[Sent]:
    """What up to ``count`` clients of a cohort send for a batch: to a server that sees single
    uploads, and, where there is noise, to all who know the others' updates."""
    method, task, plan = trained.method, trained.task, trained.experiment.plan
    cohort = usual_cohort(method, federation, plan)
    able = [client for client in cohort if federation.num_examples(client) >= size]
    masked = plan.secure_aggregation.is_active
    privacy, account = plan.privacy, plan.account(federation)
    if privacy.by_clients and account is not None:  # as if the server added it, without masks
        privacy = replace(privacy.endless, epsilon=None, noise=account.noise, noise_by="server")
    no_masks = replace(plan.in_clear, privacy=privacy)
    one_step = replace(no_masks, local=LocalConfig(size, steps=1))
    train = client_works(method, task, federation, one_step).train
    plain = replace(method, optimiser=Optimiser(lr=method.optimiser.lr))
    server = to_device(first_server(method, task, federation), task.device)
    for client in able[:count]:
        private = first_states(method, task, federation)(client)
        scale = plan.schedule.factor(1, plan.rounds)
        request = ClientRequest(client, 1, private, "train", 1, scale, 1)
        inputs = train.inputs(method.send(task, server, client), request)
        upload, *_ = train.run(inputs.received, inputs.private, inputs.batches, inputs.context)
        there = train.chain.at(inputs.received, 1, [client])
        here = train.chain.at(server, 1, cohort)
        seen, still = (
            train.chain.receive(train.chain.send(one, there), here)
            for one in (upload, {**upload, **there.unchanged(upload)})
        )
        names = [name for name in here.updates(seen) if name in upload]  # no bit of a clip
        updates = {} if masked else {"upload": subtract(pick(seen, names), pick(still, names))}
        if plan.privacy.of_clients:
            rows = stack([pick(seen, names), *[pick(still, names)] * (len(cohort) - 1)])
            mean = row(train.chain.total(rows, here), 0)
            updates["release"] = subtract(mean, here.unchanged(mean))
        unchanged = pick(there.unchanged(upload), names)
        of_signs = method.optimiser.name != "sgd"
        yield Sent(replace(train, method=plain), inputs, updates, unchanged, of_signs)


def _errors(sent: Sent, update: Params, federation: Federation, steps: int) -> Floats:
    """The squared error of each row that comes out, over that of the data's mean, ``[b]``."""
    truth = sent.batch["pixel_values"]
    sample = federation.partition.train.shares.rows[:_SAMPLE]
    values = federation.dataset.inputs.batch(sample)["pixel_values"].to(truth)
    mean, spread = values.mean(0), float(values.std())
    low, high = float(values.min()), float(values.max())
    seen = flat(update).double()

    def distance(x: Tensor) -> Tensor:
        made = flat(sent.update(x)).double()
        steps_between = [x.diff(dim=axis).abs().mean() for axis in (2, 3) if x.shape[axis] > 1]
        return 1 - F.cosine_similarity(made, seen, 0) + _SMOOTH * sum(steps_between)

    best, least = mean.expand_as(truth), float("inf")
    for start in range(_STARTS):
        key = random.key(federation.seed, "inversion", start)
        noise = random.normal(key, tuple(truth.shape), 0.5 * spread).to(truth)
        x = (mean + noise).clamp(low, high)
        optimiser = torch.optim.Adam([x], lr=0.3 * spread)
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            slope, value = torch.func.grad_and_value(distance)(x.detach())
            x.grad = slope.nan_to_num()
            optimiser.step()
            x.clamp_(low, high)
            slower.step()
        if (found := float(value)) < least:
            best, least = x, found
        if least < _CLOSE:
            break
    errors = (best[:, None] - truth).square().flatten(2).mean(2)  # [b, b]
    at = linear_sum_assignment(errors.numpy())
    of_mean = (mean - truth).square().flatten(1).mean(1)[at[1]]
    return (errors[at] / of_mean.clamp(min=1e-12)).double().numpy()


def _words(trained: TrainedMethod, sent: Sent, update: Params) -> Floats:
    """The part of the batch's tokens that are named, and that the most frequent ones are,
    ``[1, 2]``; ``[0, 2]`` if their embeddings are not sent."""
    tables = [
        name
        for path, module in trained.task.model.named_modules()
        if isinstance(module, torch.nn.Embedding) and (name := f"{path}.weight") in update
    ]
    if not tables:
        return np.empty((0, 2))
    changes = max((update[name] for name in tables), key=len).double().norm(dim=1)
    batch = sent.batch
    ids = np.unique(batch["input_ids"][batch["attention_mask"] > 0].numpy())
    tokens: np.ndarray = trained.federation.dataset.inputs.values
    frequent = np.argsort(-np.bincount(tokens, minlength=len(changes)), kind="stable")
    changed = changes.argsort(descending=True).numpy()
    return np.array([[np.isin(ids, some[: len(ids)]).mean() for some in (changed, frequent)]])
