"""The server's side of the protocol: it hands messages on, and takes off what is left of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import TooFewUploadsError
from . import shamir
from .client import own_seed, pair_seed
from .keys import SECRET, private_key, public_key
from .messages import Clients, Keys, Masks, Order, Setting, Texts, Weighing


@dataclass
class Exchange:
    """One round with the ``clients`` that were drawn. ``weights`` are of those that have shared
    their secrets, by client."""

    setting: Setting
    clients: Clients
    weights: Mapping[int, float] = field(default_factory=dict)

    def open(self, present: Sequence[int], weighing: Weighing) -> Mapping[int, Masks]:
        """Exchange keys and shares with the clients that are ``present``; what goes with the
        request to each client that may train. Raises TooFewUploadsError where they are too few."""
        setting, ask = self.setting, self.clients.ask
        keys: Mapping[int, Keys] = ask("keys", setting, dict.fromkeys(present))
        self._check(len(keys), "keys")
        self._keys = keys
        near = {u: [v for v in setting.neighbours(u) if v in keys] for u in keys}
        asked = {u: tuple(keys[v] for v in near[u]) for u in keys}
        shares: Mapping[int, Texts] = ask("share", setting, asked)
        self._check(len(shares), "shares")
        given: dict[int, list[tuple[int, str]]] = {u: [] for u in shares}
        for u in sorted(shares):
            for v, text in shares[u]:
                if v in given and v in near[u]:
                    given[v].append((u, text))
        sizes = {u: weighing.examples(u) for u in sorted(shares)}
        self._told = total, count = sum(sizes.values()), len(sizes)
        self.weights = {u: weighing.weight(size, total, count) for u, size in sizes.items()}
        orders = {u: Order(total, count, tuple(texts)) for u, texts in given.items()}
        return ask("mask", setting, orders)

    def close(self, there: Sequence[int]) -> Masks:
        """The masks that make the sum of the values of the clients that are ``there`` their sum
        alone: ``plus`` and ``minus`` are still to be added and taken off. Raises
        TooFewUploadsError where too few have stayed."""
        setting, there = self.setting, tuple(sorted(there))
        self._check(len(there), "values")
        ask, lists = self.clients.ask, dict.fromkeys(there, there)
        signed: Mapping[int, str] = ask("sign_list", setting, lists)
        self._check(len(signed), "signatures")
        signatures = dict.fromkeys(signed, tuple(signed.items()))
        told: Mapping[int, Texts] = ask("reveal", setting, signatures)
        shares: dict[int, dict[int, int]] = {}
        for holder in sorted(told):
            for u, share in told[holder]:
                shares.setdefault(u, {})[holder] = int(share, 16)
        plus, minus = list[str](), [own_seed(self._secret(shares, u)) for u in there]
        for gone in sorted(self.weights.keys() - {*there}):
            near = [u for u in setting.neighbours(gone) if u in there]
            if not near:
                continue
            secret = self._secret(shares, gone)
            if public_key(secret) != self._keys[gone].mask:
                raise TooFewUploadsError(f"the shares of client {gone}'s key don't give that key")
            key = private_key(secret)
            for u in near:  # u has added the mask if it comes first
                seed = pair_seed(setting, key, self._keys[u].mask, (u, gone), self._told)
                (minus if u < gone else plus).append(seed)
        weight = sum(self.weights[u] for u in there)
        return Masks(weight, len(setting.clients), tuple(plus), tuple(minus))

    def _secret(self, shares: Mapping[int, Mapping[int, int]], client: int) -> str:
        found, needed = shares.get(client, {}), self.setting.needed
        if len(found) < needed:
            raise TooFewUploadsError(
                f"secure aggregation: {len(found)} shares of client {client}'s masks are there, "
                f"{needed} are needed"
            )
        number = shamir.join(dict(list(found.items())[:needed]))
        return number.to_bytes(SECRET + 1, "big")[1:].hex()

    def _check(self, count: int, what: str) -> None:
        if count < self.setting.least:
            raise TooFewUploadsError(
                f"secure aggregation: {what} of {count} of {self.setting.size} clients are "
                f"there; {self.setting.least} must stay"
            )
