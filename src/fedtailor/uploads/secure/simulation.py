"""The clients' sides of the protocol in one process, with signing keys made for the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...params import Params
from .client import Side
from .link import reweighed
from .messages import Held, OwnWeight, Sent, Setting, Weighing


class Simulation:
    """All clients."""

    name = "simulation"

    def __init__(self, weighing: Weighing, own_weight: OwnWeight | None = None) -> None:
        self._weighing, self._own_weight = weighing, own_weight
        self._held: dict[int, Held | None] = {}
        self._key = lru_cache(None)(lambda client: Ed25519PrivateKey.generate())

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        answers = {}
        for client, message in messages.items():
            side = Side(setting, client, self._key(client).sign, self._public, self._weighing)
            held = None if step == "keys" else self._held[client]
            self._held[client], answers[client] = getattr(side, step)(held, message)
        return answers

    def reweigh(
        self, setting: Setting, masks: Mapping[int, Any], mean: Params, uploads: Sent
    ) -> Sent:
        assert self._own_weight is not None
        how = self._own_weight, setting.config.range
        return {k: reweighed(uploads[k], mean, one, *how) for k, one in masks.items()}

    def _public(self, client: int) -> bytes:
        return self._key(client).public_key().public_bytes_raw()
