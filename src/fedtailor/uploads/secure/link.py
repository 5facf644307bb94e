"""Secure aggregation as a link: a client sends masked whole numbers, and the server gets a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch

from ... import random
from ...errors import TooFewUploadsError
from ...params import Params, add, clone, flat, row, unflat
from ..chain import Link, UploadContext
from .config import SecureAggregationConfig
from .fixed_point import FixedPoint
from .keys import add_masks
from .messages import WEIGHT, Clients, Masks, OwnWeight, Setting, Weighing
from .server import Exchange


@dataclass
class Secure(Link):
    """Uploads travel as int32 tensors of their names and shapes. ``from_update``: a link before
    this one has made an update of the upload already. ``clients``: how the server reaches them.
    ``own_weight``: the weight of a client in a second pass, from 0 to 1, of its upload and the mean
    of all, which are updates. ``noise``: the standard deviation of what clients add to the sum of
    updates, where the fewest are left; drawn for a ``method``."""

    config: SecureAggregationConfig
    clients: Clients
    weighing: Weighing
    from_update: bool = False
    own_weight: OwnWeight | None = None
    noise: float = 0.0
    method: str = ""
    exchange: Exchange | None = field(default=None, init=False)
    kept: dict[int, Params] = field(default_factory=dict, init=False)  # where clients are simulated

    hides = True

    def open(self, at: UploadContext, present: Sequence[int]) -> Mapping[int, Masks]:
        self.exchange = self._exchange(at, len(at.clients))
        return self.exchange.open(present, self.weighing)

    def watch(self, upload: Params, at: UploadContext) -> None:
        if at.kept is not None:
            self.kept[at.clients[0]] = clone(at.kept)

    def send(self, upload: Params, at: UploadContext) -> Params:
        if at.masks is None:  # of no round: what travels has this form, and tells nothing
            return {name: torch.zeros_like(v, dtype=torch.int32) for name, v in upload.items()}
        values = {name: value.detach().cpu().double() for name, value in upload.items()}
        if not self.from_update:
            unchanged = at.unchanged(upload)
            values = {name: value - unchanged[name].cpu() for name, value in values.items()}
        known = at.seed, at.round, "privacy", self.method, *at.clients
        draws = random.generator(*([at.masks.secret] if at.masks.secret else known))
        return _sent(values, at.masks, self._numbers(at.masks.clients), draws)

    def _numbers(self, clients: int) -> FixedPoint:
        return FixedPoint(self.config.range, clients, self.noise, self.config.least(clients))

    def total(self, uploads: Params, at: UploadContext) -> Params:
        assert self.exchange is not None
        mean = self._mean(self.exchange, row(uploads, 0), at.clients)
        if self.own_weight is not None:
            mean = self._weighed(mean, at, self.exchange.setting.size)
        if not self.from_update:
            unchanged = at.unchanged(mean)
            mean = {name: value + unchanged[name].cpu() for name, value in mean.items()}
        return {
            name: value.to(at.state[name].dtype if name in at.state else torch.float32)[None]
            for name, value in mean.items()
        }

    def _weighed(self, mean: Params, at: UploadContext, drawn: int) -> Params:
        """The mean by the clients' own weights, from sums of a second pass of those that are there,
        of ``drawn``: of weights, and of updates times these; 0 if all weights are."""
        exchange = self._exchange(at, drawn)
        masks = exchange.open(at.clients, self.weighing)
        mean = {name: value.float() for name, value in mean.items()}
        kept, self.kept = self.kept, {}
        sent = self.clients.reweigh(exchange.setting, masks, mean, kept)
        if not sent:
            raise TooFewUploadsError("secure aggregation: no client has sent its weight")
        sums = self._mean(exchange, reduce(add, sent.values()), sorted(sent))
        weight = float(sums.pop(WEIGHT)) / self.config.range
        return {name: value / weight if weight > 0 else 0 * value for name, value in sums.items()}

    def _exchange(self, at: UploadContext, drawn: int) -> Exchange:
        setting = Setting(f"{self.clients.name}/{at.round}", at.clients, self.config, drawn)
        return Exchange(setting, self.clients)

    def _mean(self, exchange: Exchange, total: Params, there: Sequence[int]) -> Params:
        """The mean, float64, of those whose values have the sum ``total``, modulo 2^32."""
        left = exchange.close(there)
        masked = flat(total).cpu().numpy().view(np.uint32)
        whole = add_masks(masked, left.plus, left.minus)
        values = self._numbers(left.clients).decoded(whole, left.weight)
        return unflat(torch.from_numpy(values), total)


def reweighed(
    upload: Params, mean: Params, masks: Masks, own_weight: OwnWeight, largest: float
) -> Params:
    """What a client sends in a second pass: its upload times its own weight, and the weight."""
    weight = own_weight(upload, mean).double().cpu()
    values = {name: weight * value.cpu().double() for name, value in upload.items()}
    return _sent(values | {WEIGHT: weight * largest}, masks, FixedPoint(largest, masks.clients))


def _sent(
    values: Params, masks: Masks, numbers: FixedPoint, draws: np.random.Generator | None = None
) -> Params:
    """float64 values as masked whole numbers, int32 of their names and shapes."""
    whole = numbers.encoded(flat(values).numpy(), masks.weight, draws)
    masked = add_masks(whole, masks.plus, masks.minus)
    parts = unflat(torch.from_numpy(masked.view(np.int32)), values)
    return {name: parts[name] for name in values}
