"""The length of what a client changes, and the length above which an upload doesn't count as sent.

An upload's norm is ||u - u_0|| over all of its float tensors, where u_0 is the upload that changes
nothing (`Method.unchanged`). The bound is a fixed number, or follows the norms of recent rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import TooFewLeftError
from ..params import Params
from ..stacked import accumulation_dtype
from .chain import Link, Needs, UploadContext
from .collected import Uploads

RECENT = 10  # rounds whose norms count
USUAL_FACTOR, USUAL_QUANTILE = 1000.0, 0.5
_FIRST = 1_000_000  # times the norm of the server's state
_FAR = 10  # times the median


@dataclass
class NormBound(Link):
    """The bound of a round, and what becomes of an upload ``above`` it: it is left out ("refuse"),
    or its difference from the server's state is scaled down to the bound ("clip").

    ``largest`` is a fixed bound. None: ``factor`` times a ``quantile`` of the norms of the
    ``recent`` rounds, by client, or of the round itself where that is more. Two uploads don't show
    which of them is false. So in a round of fewer than three each client has one vote, its last
    norm; of an even number the larger one counts, and with fewer than two the bound is a million
    times the norm of the server's state, or a million where that is less than 1. Uploads that
    change nothing don't count.
    """

    above: Literal["refuse", "clip"]
    largest: float | None
    factor: float
    quantile: float
    recent: Sequence[Mapping[int, float]] = ()
    norms: dict[int, float] = field(default_factory=dict)  # of the round, by client
    first: float = math.inf

    @property
    def needs(self) -> Needs:
        """Where the bound is so high that honest uploads stay below it, sums until one is above."""
        high = self.factor >= USUAL_FACTOR and self.quantile >= USUAL_QUANTILE
        rarely = self.above == "refuse" and self.largest is None and high
        return "sums" if rarely and not self.above_limit(list(self.norms.values())) else "uploads"

    def watch(self, upload: Params, at: UploadContext) -> None:
        if not self.norms:
            known = {k for norms in self.recent for k, norm in norms.items() if norm > 0}
            if len(known) < 2:  # else ``first`` never counts
                self.first = _FIRST * max(1.0, norm(at.state.values()))
        (client,) = at.clients
        self.norms[client] = update_norm(upload, at.unchanged(upload))

    def gather(self, uploads: Uploads, at: UploadContext) -> dict[int, str | None]:
        if not uploads.keeps:
            return {}  # those that are added up are below the bound
        self.norms = {}
        for row, client in enumerate(at.clients):
            self.watch(uploads.upload(row), replace(at, clients=(client,)))
        norms = list(self.norms.values())
        rows, limit = self.above_limit(norms), self.limit(norms)
        if self.above == "clip":
            for row in rows:
                upload = uploads.upload(row)
                clip(at.scaled(upload), at.unchanged(upload), limit / norms[row])
            return {}
        size = len(at.clients)
        if rows and size - len(rows) < max(1, at.least):
            raise TooFewLeftError(
                f"the norms of {len(rows)} of {size} uploads are above {limit:.3g} "
                f"(cohort.max_norm, norm_factor), {size - len(rows)} are left and {at.least} needed"
            )
        reason = "the norm of its upload, {:.3g}, is above the bound of {:.3g}"
        return {row: reason.format(norms[row], limit) for row in rows}

    def close(self, clients: Sequence[int]) -> tuple[float, ...]:
        counted = {client: self.norms[client] for client in clients}
        self.recent, self.norms = [*self.recent, counted][-RECENT:], {}
        return tuple(counted.values())

    def limit(self, norms: Sequence[float]) -> float:
        """The bound of a round whose uploads have these ``norms``.

        >>> NormBound("refuse", None, 100.0, 0.5, ({3: 2.0, 5: 1.0, 8: 9.0},)).limit([0.5, 1e6])
        200.0
        >>> NormBound("refuse", None, 100.0, 0.5).limit([1.0, 3.0, 1e6])
        300.0
        """
        if self.largest is not None:
            return self.largest
        recent = [(k, norm) for round_ in self.recent for k, norm in round_.items() if norm > 0]
        now = [norm for norm in norms if norm > 0]
        if len(now) < 3:
            last = list(dict(recent).values())
            return self.factor * self._usual(last, "higher") if len(last) > 1 else self.first
        pools = [now, [norm for _, norm in recent]]
        return self.factor * max(self._usual(pool, "lower") for pool in pools if pool)

    def above_limit(self, norms: Sequence[float]) -> list[int]:
        """The places of the norms above the bound, ascending."""
        limit = self.limit(norms)
        return [at for at, norm in enumerate(norms) if not norm <= limit]

    def _usual(self, norms: Sequence[float], side: Literal["lower", "higher"]) -> float:
        return float(np.quantile(norms, self.quantile, method=side))


def about_norms(rounds: Mapping[int, Mapping[int, float]], best: int) -> list[str]:
    """What the norms of uploads, by round and client, say of a method that was spoiled after its
    ``best`` round: how large they were up to then, and a line for each client with an update of
    more than ten times the median norm of a later round, the first one first.

    >>> early, late = {0: 1.0, 1: 2.0, 4: 1.5}, {0: 1.0, 1: 2.0, 4: 900.0}
    >>> for line in about_norms({1: early, 2: late, 3: late}, best=1):
    ...     print(line)
    the median norm of an update was 1.5 up to round 1, the largest 2
    client 4, from round 2 on, sent updates of up to 450 times the median norm of a round
    """
    early = [norm for number, norms in rounds.items() if number <= best for norm in norms.values()]
    lines = []
    if early:
        usual, most = statistics.median(early), max(early)
        lines = [
            f"the median norm of an update was {usual:.3g} up to round {best}, the largest "
            f"{most:.3g}"
        ]
    first, largest = dict[int, int](), dict[int, float]()
    for number in sorted(number for number in rounds if number > best):
        norms = rounds[number]
        usual = statistics.median_low([norm for norm in norms.values() if norm > 0] or [0.0])
        for client, norm in norms.items():
            if usual and norm > _FAR * usual:
                first.setdefault(client, number)
                largest[client] = max(largest.get(client, 0.0), norm / usual)
    return lines + [
        f"client {client}, from round {number} on, sent updates of up to {largest[client]:.3g} "
        "times the median norm of a round"
        for client, number in first.items()
    ]


def norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean length of all float tensors together, to nine digits: how many threads add it
    up changes the others.

    >>> norm([torch.tensor([3.0, 4.0]), torch.tensor(7)])
    5.0
    """
    norms = [
        torch.linalg.vector_norm(value, dtype=torch.float64)
        for value in tensors
        if value.is_floating_point()
    ]
    return float(f"{math.hypot(*torch.stack(norms).tolist()):.9g}") if norms else 0.0


def update_norm(upload: Params, unchanged: Params) -> float:
    """||u - u_0|| over the float tensors of an upload.

    >>> update_norm({"w": torch.tensor([4.0, 5.0])}, {"w": torch.tensor([1.0, 1.0])})
    5.0
    """
    return norm(
        value.to(accumulation_dtype(value.dtype))
        - unchanged[name].to(value.device, accumulation_dtype(value.dtype))
        for name, value in upload.items()
        if value.is_floating_point()
    )


def clip(upload: Params, unchanged: Params, share: float) -> None:
    """Bring an upload to ``share`` of its norm, in place.

    >>> upload = {"w": torch.tensor([5.0])}
    >>> clip(upload, {"w": torch.tensor([1.0])}, 0.5)
    >>> upload
    {'w': tensor([3.])}
    """
    for name, value in upload.items():
        if value.is_floating_point():
            base = unchanged[name].to(value.device, torch.float64)
            value.copy_(base + share * (value.double() - base))
