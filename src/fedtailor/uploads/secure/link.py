"""Secure aggregation as a link: a client sends masked whole numbers, and the server gets a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ...params import Params, flat, unflat
from ..chain import Link, UploadContext, Weigh
from .config import SecureAggregationConfig
from .fixed_point import decoded, encoded
from .keys import add_masks
from .messages import Clients, Masks, Setting
from .server import Exchange


@dataclass
class Secure(Link):
    """Uploads travel as int32 tensors of their names and shapes. ``from_update``: a link before
    this one has made an update of the upload already. ``clients``: how the server reaches them."""

    config: SecureAggregationConfig
    clients: Clients
    from_update: bool = False
    exchange: Exchange | None = field(default=None, init=False)

    hides = True

    def open(self, at: UploadContext, present: Sequence[int], weigh: Weigh) -> Mapping[int, Masks]:
        setting = Setting(f"{self.clients.name}/{at.round}", at.clients, self.config)
        self.exchange = Exchange(setting, self.clients)
        return self.exchange.open(present, weigh)

    def send(self, upload: Params, at: UploadContext) -> Params:
        if at.masks is None:  # of no round: what travels has this form, and tells nothing
            return {name: torch.zeros_like(v, dtype=torch.int32) for name, v in upload.items()}
        values = {name: value.detach().cpu().double() for name, value in upload.items()}
        if not self.from_update:
            unchanged = at.unchanged(upload)
            values = {name: value - unchanged[name].cpu() for name, value in values.items()}
        masks, vector = at.masks, flat(values).numpy()
        whole = encoded(vector, masks.weight, self.config.range, masks.clients)
        return _params(_masked(whole, masks), values)

    def total(self, uploads: Params, at: UploadContext) -> Params:
        assert self.exchange is not None
        left = self.exchange.close(at.clients)
        rows = {name: value[0] for name, value in uploads.items()}
        whole = _masked(flat(rows).cpu().numpy().view(np.uint32), left)
        values = decoded(whole, left.weight, self.config.range, left.clients)
        mean = unflat(torch.from_numpy(values), rows)
        if not self.from_update:
            unchanged = at.unchanged(mean)
            mean = {name: value + unchanged[name].cpu() for name, value in mean.items()}
        return {
            name: value.to(at.state[name].dtype if name in at.state else torch.float32)[None]
            for name, value in mean.items()
        }


def _masked(whole: NDArray[np.uint32], masks: Masks) -> NDArray[np.uint32]:
    return add_masks(whole, map(bytes.fromhex, masks.plus), map(bytes.fromhex, masks.minus))


def _params(whole: NDArray[np.uint32], like: Params) -> Params:
    """Whole numbers as int32 tensors of the names and shapes of ``like``."""
    parts = unflat(torch.from_numpy(whole.view(np.int32)), like)
    return {name: parts[name] for name in like}
