"""What clients and the server tell each other in a round of secure aggregation, and what a client
keeps in between. Keys, seeds and shares are hexadecimal texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from ... import random
from ...params import Params
from .config import SecureAggregationConfig

Texts = tuple[tuple[int, str], ...]  # by client
Sent = Mapping[int, Params]
OwnWeight = Callable[[Params, Params], Tensor]
WEIGHT = "own weight"  # beside the tensors of an update, in a second pass


@dataclass(frozen=True)
class Setting:
    """What both sides know of a round: its ``name``, which no other round has, and the ``clients``
    that were drawn; of a second pass those that are left of as many as were ``drawn`` for the
    round. Each side takes ``config`` from its own experiment."""

    name: str
    clients: tuple[int, ...]
    config: SecureAggregationConfig
    drawn: int = 0

    @property
    def size(self) -> int:
        """How many clients were drawn."""
        return max(self.drawn, len(self.clients))

    @property
    def least(self) -> int:
        """How many of those that were drawn must stay, to the end of the last pass."""
        return self.config.least(self.size)

    @property
    def needed(self) -> int:
        """How many shares rebuild a secret."""
        return self.config.needed(len(self.clients))

    @cached_property
    def _ring(self) -> list[int]:
        generator = random.generator(self.name, "neighbours")
        return [self.clients[at] for at in generator.permutation(len(self.clients))]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self._ring)}

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Those with whom a client has a mask in common: the nearest on a ring in random order."""
        degree = self.config.degree(len(self.clients))
        if degree == len(self.clients) - 1:
            return tuple(one for one in self.clients if one != client)
        place, size = self._places[client], len(self.clients)
        ways = (way for half in range(1, degree // 2 + 1) for way in (half, -half))
        return tuple(sorted(self._ring[(place + way) % size] for way in ways))

    def pair(self, purpose: str, u: int, v: int) -> str:
        """The purpose of what two clients agree on in this round."""
        return f"fedtailor {purpose} {self.name} {u} {v}"


@dataclass(frozen=True)
class Keys:
    """A client's public keys of a round, for masks and for shares on their way, signed."""

    client: int
    mask: str
    cipher: str
    signature: str


@dataclass(frozen=True)
class Order:
    """What a client works out its own weight from, the ``total`` of the examples of so many
    clients, ``count``; and the shares for it, by who has sealed them."""

    total: int
    count: int
    shares: Texts


@dataclass(frozen=True)
class Weighing:
    """How many examples a client has, and its weight in the mean by that number, the total and the
    count. Each client weighs itself: were weights the server's to say, it could let one client
    count alone. Masks depend on total and count, so that all must have been told the same."""

    examples: Callable[[int], int]
    weight: Callable[[int, int, int], float]


@dataclass(frozen=True)
class Masks:
    """What a client does with its values: they have this ``weight`` among so many ``clients``, and
    the masks of seeds are added and taken off. Noise follows from the ``secret`` of a site; in
    simulation, where there is none, from what the server's noise does."""

    weight: float
    clients: int
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    secret: str = ""


@dataclass(frozen=True)
class Held:
    """What a client keeps between the messages of a round, and forgets at its end: the secrets
    behind its two public keys and its own mask; its neighbours' keys, and what ``opens`` their
    shares; the shares that they have sealed for it; and the list of clients that it has signed."""

    client: int
    mask: str
    cipher: str
    own: str
    keys: tuple[Keys, ...] = ()
    opens: Texts = ()
    shares: Texts = ()
    signed: tuple[int, ...] = ()


class Clients(Protocol):
    """How the server reaches the clients' sides. ``name`` is that of the run."""

    @property
    def name(self) -> str: ...

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        """The answers to one message for each client, of those that answer: a method of
        `client.Side` by name."""

    def reweigh(
        self, setting: Setting, masks: Mapping[int, Any], mean: Params, uploads: Sent
    ) -> Sent:
        """Tell the clients the mean of their ``uploads``, which are known where they are simulated:
        what `link.reweighed` gives, of those that answer. ``masks`` as the step "mask" gave them.
        """


def list_text(setting: Setting, clients: Collection[int]) -> str:
    """What a client signs who knows the list of those whose values are there."""
    return f"fedtailor list {setting.name} {','.join(map(str, clients))}"


def keys_text(setting: Setting, keys: Keys) -> str:
    """What a client signs of its keys."""
    return f"fedtailor keys {setting.name} {keys.client} {keys.mask} {keys.cipher}"
