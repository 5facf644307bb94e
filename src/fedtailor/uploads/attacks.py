"""Attacks in simulation: what some clients train on or send instead of the truth.

A client's update is its upload minus an upload that changes nothing. mu is the mean of the honest
members' updates, and sigma their sample standard deviation; s is ``strength``. Instead of
its own update an attacker sends
    sign-flip: -s mu (s = 1)
    scaling: s times its own update (s = 10)
    gaussian: values from N(0, s^2) (s = 1)
    inner-product: -s mu (s = 2)
    little-is-enough: mu + s sigma (s = 1.5)
    mimic: the update of the first honest member
    free-rider: no change
or it trains on labels C - 1 - y instead of y, of C classes (label-flip), or on batches of which a
share has a trigger and the label that attackers want (backdoor, see `engine.backdoor`). A backdoor
may be boosted: then s times its own update is sent (s = 1).

Where the server adds products B A (`Method.products`), s counts once: A is sent as trained (mimic:
that of the first honest member), and only B is changed. The mean of products has no such factors,
so in B the attacker's own update stands for mu.

Sources:
- sign-flip: Z. Allen-Zhu et al. Byzantine-Resilient Non-Convex SGD. ICLR 2021.
- inner-product: C. Xie et al. Fall of Empires. UAI 2019.
- little-is-enough: M. Baruch et al. A Little Is Enough. NeurIPS 2019.
- backdoor: E. Bagdasaryan et al. How To Backdoor Federated Learning. arXiv 1807.00459. The paper
  scales an attacker's model up so that it replaces the joint one (model replacement).
- mimic: S. P. Karimireddy et al. Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing.
  ICLR 2022.

Attackers know all honest updates, as these papers assume. They leave tensors that are not of
floats, running statistics and what is no part of an update (`Method.beside_update`) as they trained
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from .. import random
from ..errors import InputError
from ..params import Batch, Params
from .chain import Link, UploadContext
from .collected import Uploads

Kind = Literal[
    "none", "label-flip", "sign-flip", "scaling", "gaussian", "inner-product", "little-is-enough",
    "mimic", "free-rider", "backdoor",
]  # fmt: skip
STRENGTHS = {
    "sign-flip": 1.0, "scaling": 10.0, "gaussian": 1.0, "inner-product": 2.0,
    "little-is-enough": 1.5, "backdoor": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class AttackConfig:
    """Which clients attack, how, and in which rounds: ``fraction`` of all clients, drawn by key, or
    ``clients`` by number."""

    kind: Kind = "none"
    fraction: Annotated[float, Gt(0), Le(1)] = 0.2
    clients: tuple[Annotated[int, Ge(0), Le(1_000_000_000)], ...] = ()
    strength: Annotated[float, Ge(-1e6), Le(1e6)] | None = None  # None: by the kind
    first_round: Annotated[int, Gt(0), Le(1_000_000)] = 1
    last_round: Annotated[int, Gt(0), Le(1_000_000)] | None = None
    target: Annotated[int, Ge(0), Le(1_000_000)] = 0  # backdoor: the class that attackers want
    poisoned: Annotated[float, Gt(0), Le(1)] = 0.5  # backdoor: the share of an attacker's batch

    def check(self, num_clients: int, num_classes: int, *, rounds: int, batch_size: int) -> None:
        """Raise InputError if the settings don't fit each other, the federation or the rounds, or
        if nobody would attack."""
        is_set = (self.target, self.poisoned) != (AttackConfig.target, AttackConfig.poisoned)
        if is_set and self.kind not in ("none", "backdoor"):
            raise InputError(
                "attack.target and attack.poisoned are for the kind 'backdoor'; attack.kind is "
                f"{self.kind!r}"
            )
        if self.kind == "backdoor" and 0 < num_classes <= self.target:
            raise InputError(
                f"attack.target = {self.target}; the {num_classes} classes are 0 to "
                f"{num_classes - 1}"
            )
        if self.strength is not None and self.kind not in STRENGTHS:
            raise InputError(
                f"attack.strength = {self.strength} is for the kinds {', '.join(STRENGTHS)}; "
                f"attack.kind is {self.kind!r}"
            )
        if unknown := [client for client in self.clients if client >= num_clients]:
            raise InputError(
                f"attack.clients has {unknown[0]}; the {num_clients} clients are 0 to "
                f"{num_clients - 1}"
            )
        if twice := [client for client, times in Counter(self.clients).items() if times > 1]:
            raise InputError(f"attack.clients lists client {twice[0]} twice; list each client once")
        if self.kind == "none":
            return
        if not self.attackers(0, num_clients):
            raise InputError(
                f"attack.fraction = {self.fraction} of {num_clients} clients is nobody; one client "
                f"is {1 / num_clients:.3g} of them"
            )
        if self.first_round > rounds and self.kind != "backdoor":  # it is measured all the same
            raise InputError(
                f"attack.first_round = {self.first_round}, but there are {rounds} rounds; "
                f"allowed: 1 to {rounds}"
            )
        if self.last_round is not None and self.last_round < self.first_round:
            raise InputError(
                f"attack.last_round = {self.last_round} is before attack.first_round; allowed: "
                f"{self.first_round} and more"
            )
        if self.kind == "backdoor" and not self.marked(batch_size):
            raise InputError(
                f"attack.poisoned = {self.poisoned} of a batch of {batch_size} is no example; one "
                f"example is {1 / batch_size:.3g} of it"
            )

    def marked(self, batch_size: int) -> int:
        """How many examples of an attacker's batch get the backdoor's trigger."""
        return round(self.poisoned * batch_size)

    def attackers(self, seed: int, num_clients: int) -> frozenset[int]:
        """The clients that attack; fractions are rounded."""
        if self.kind == "none":
            return frozenset()
        if self.clients:
            return frozenset(self.clients)
        order = random.generator(seed, "attackers").permutation(num_clients)
        return frozenset(order[: round(self.fraction * num_clients)].tolist())

    def is_on(self, number: int) -> bool:
        """Whether round ``number`` is attacked."""
        last = number if self.last_round is None else self.last_round
        return self.kind != "none" and self.first_round <= number <= last

    @property
    def on_data(self) -> bool:
        """Whether attackers train on wrong data, and send what they trained."""
        return self.kind in ("label-flip", "backdoor")

    @property
    def on_uploads(self) -> bool:
        """Whether attackers change what they send."""
        if self.kind == "backdoor":
            return self.strength not in (None, STRENGTHS["backdoor"])
        return self.kind not in ("none", "label-flip")


def flipped(batch: Batch, num_classes: int) -> Batch:
    """The batch of an attacker whose labels y become C - 1 - y.

    >>> flipped({"labels": torch.tensor([0, 1, 3])}, 4)
    {'labels': tensor([3, 2, 0])}
    """
    return {**batch, "labels": num_classes - 1 - batch["labels"]}


def attack_uploads(
    attack: AttackConfig,
    uploads: Params,
    unchanged: Sequence[Params],
    attackers: Sequence[int],
    key: Tensor,
    products: Sequence[tuple[str, str]] = (),
) -> None:
    """Put what the members in the rows ``attackers`` send into the cohort's ``uploads``
    ``[c, ...]``, in place. Where all attack, each knows only its own update.

    ``unchanged`` are each member's upload that changes nothing, by name ``[...]``; ``products`` the
    names of factors A and B whose product the server adds; ``key`` is for the values of gaussian.
    """
    factors_A, factors_B = ({pair[which] for pair in products} for which in (0, 1))
    honest = [row for row in range(len(unchanged)) if row not in attackers]
    for at, (name, value) in enumerate(sorted(uploads.items())):
        if name in factors_A and attack.kind != "mimic":
            continue
        base = torch.stack([own[name] for own in unchanged]).to(value.device, torch.float64)
        updates = value.double() - base  # [c, ...]
        for row in attackers:
            own, known = updates[row], updates[honest or [row]]
            mu = own if name in factors_B else known.mean(0)
            place = random.fold_in(random.fold_in(key, at), row)
            sent = _sent(attack, own, known, mu, place)
            value[row] = (base[row] + sent).to(value.dtype)


def _sent(attack: AttackConfig, own: Tensor, known: Tensor, mu: Tensor, key: Tensor) -> Tensor:
    """What an attacker sends instead of its ``own`` update ``[...]``, from those that it knows,
    ``[k, ...]``, and ``mu``."""
    strength = STRENGTHS.get(attack.kind, 0.0) if attack.strength is None else attack.strength
    if attack.kind in ("sign-flip", "inner-product"):
        return -strength * mu
    if attack.kind in ("scaling", "backdoor"):
        return strength * own
    if attack.kind == "little-is-enough":
        return mu + strength * known.std(0, correction=1 if len(known) > 1 else 0)
    if attack.kind == "mimic":
        return known[0]
    if attack.kind == "gaussian":
        return strength * random.normal(key, own.shape).to(own)
    return torch.zeros_like(own)


@dataclass(frozen=True)
class Attack(Link):
    """Changes what ``attackers`` send, once all honest uploads are there for them to know."""

    config: AttackConfig
    attackers: frozenset[int]

    needs = "stack"

    def gather(self, uploads: Uploads, at: UploadContext) -> dict[int, str | None]:
        rows = [row for row, client in enumerate(at.clients) if client in self.attackers]
        if rows and self.config.is_on(at.round):
            attacked = at.updates(uploads.params)
            unchanged = [at.unchanged(uploads.upload(row)) for row in range(len(at.clients))]
            key = random.key(at.seed, at.round, "attack")
            attack_uploads(self.config, attacked, unchanged, rows, key, at.products)
        return {}
