"""A client's side of the protocol: five messages, in order, each answered once.

What it keeps, `Held`, goes in and comes out. Each step refuses, by a ProtocolError, what an honest
server does not ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from secrets import token_bytes

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from . import shamir
from .keys import (
    SECRET,
    ProtocolError,
    agreed,
    derived,
    is_signed,
    opened,
    private_key,
    public_key,
    sealed,
)  # fmt: skip
from .messages import Held, Keys, Masks, Order, Setting, Texts, Weighing, keys_text, list_text

_HALF = 32  # bytes of a share


@dataclass(frozen=True)
class Side:
    """One client in a round. ``sign`` signs with its own key, and ``known`` has the others' keys of
    Ed25519, by client."""

    setting: Setting
    client: int
    sign: Callable[[bytes], bytes]
    known: Callable[[int], bytes]
    weighing: Weighing | None = None  # for its values

    def keys(self, held: None, message: None) -> tuple[Held, Keys]:
        """Make the round's secrets; its public keys."""
        if self.client not in self.setting.clients:
            raise ProtocolError(f"client {self.client} was not drawn for this round")
        if (count := len(self.setting.clients)) < self.setting.least:
            raise ProtocolError(
                f"a round of {count} clients, of {self.setting.size} that are drawn; "
                f"{self.setting.least} must stay"
            )
        mask, cipher, own = (token_bytes(SECRET).hex() for _ in range(3))
        unsigned = Keys(self.client, public_key(mask), public_key(cipher), "")
        signature = self.sign(keys_text(self.setting, unsigned).encode()).hex()
        return Held(self.client, mask, cipher, own), replace(unsigned, signature=signature)

    def share(self, held: Held, message: tuple[Keys, ...]) -> tuple[Held, Texts]:
        """Take the neighbours' keys, among others; for each of them, and itself, a share of the
        secret behind its masks with them and one of its own mask's seed, sealed."""
        setting, near = self.setting, self.setting.neighbours(self.client)
        others = {keys.client: keys for keys in message if keys.client in near}
        if held.keys:
            raise ProtocolError("keys a second time")
        if len(others) + 1 < setting.needed:
            raise ProtocolError(f"{len(others)} neighbours are too few to hold shares")
        told = {key for keys in others.values() for key in (keys.mask, keys.cipher)}
        if len(told) < 2 * len(others):
            raise ProtocolError("two clients have the same key")
        for client, keys in others.items():
            text = keys_text(setting, keys)
            if not is_signed(self.known(client), text, keys.signature):
                raise ProtocolError(f"the keys of client {client} are not signed by it")
        holders, own = [*others, self.client], self.client
        masks, seeds = (
            shamir.split(int(secret, 16), setting.needed, holders)
            for secret in (held.mask, held.own)
        )
        shares = {k: _bytes(masks[k]) + _bytes(seeds[k]) for k in holders}
        cipher, sent, opens = private_key(held.cipher), [], []
        for client, keys in others.items():
            shared = agreed(cipher, keys.cipher)
            key = derived(shared, setting.pair("share", own, client))
            sent.append((client, sealed(key, shares[client]).hex()))
            opens.append((client, derived(shared, setting.pair("share", client, own)).hex()))
        kept, neighbours = ((own, shares[own].hex()),), tuple(others.values())
        held = replace(held, keys=neighbours, opens=tuple(opens), shares=kept)
        return held, tuple(sent)

    def mask(self, held: Held, message: Order) -> tuple[Held, Masks]:
        """Take the shares of the others; the masks of the values that it will send."""
        keys, senders = {one.client: one for one in held.keys}, [u for u, _ in message.shares]
        if len(held.shares) != 1 or len({*senders}) < len(senders) or not {*senders} <= keys.keys():
            raise ProtocolError("shares of the wrong clients")
        if len(senders) + 1 < self.setting.needed:
            raise ProtocolError(f"shares of {len(senders)} neighbours are too few")
        total, count, weighing = message.total, message.count, self.weighing
        assert weighing is not None
        own = weighing.examples(self.client)
        if not own <= total or not self.setting.least <= count <= len(self.setting.clients):
            raise ProtocolError(f"{total} examples of {count} clients can't be")
        key, plus, minus = private_key(held.mask), [own_seed(held.own)], list[str]()
        for other in senders:
            pair = self.client, other
            seed = pair_seed(self.setting, key, keys[other].mask, pair, (total, count))
            (plus if self.client < other else minus).append(seed)
        weight = weighing.weight(own, total, count)
        masks = Masks(weight, len(self.setting.clients), tuple(plus), tuple(minus))
        return replace(held, shares=(*held.shares, *message.shares)), masks

    def sign_list(self, held: Held, message: tuple[int, ...]) -> tuple[Held, str]:
        """Sign the list of those whose values are there: one list a round."""
        setting, there = self.setting, {*message}
        if held.signed or not held.shares:
            raise ProtocolError("a second list of clients, or one before its time")
        if list(message) != sorted(there) or not {self.client} <= there <= {*setting.clients}:
            raise ProtocolError("a list of clients that can't be")
        if len(there) < setting.least:
            raise ProtocolError(f"{len(there)} clients are left; {setting.least} must stay")
        near = there.intersection(setting.neighbours(self.client))
        if not near <= {client for client, _ in held.shares}:
            raise ProtocolError("the list has clients that have shared no secrets")
        signature = self.sign(list_text(setting, message).encode())
        return replace(held, signed=message), signature.hex()

    def reveal(self, held: Held, message: Texts) -> tuple[None, Texts]:
        """With enough signatures under the same list: of each neighbour, and of itself, one of the
        two shares. The secrets are forgotten with that."""
        setting, text = self.setting, list_text(self.setting, held.signed)
        signers = {
            client for client, signature in message
            if client in held.signed and is_signed(self.known(client), text, signature)
        }  # fmt: skip
        if not held.signed or len(signers) < setting.least:
            raise ProtocolError(
                f"{len(signers)} clients have signed the same list as client {self.client}; "
                f"{setting.least} must"
            )
        opens, told = dict(held.opens), []
        for client, share in held.shares:
            both = bytes.fromhex(share)
            if client != self.client:
                try:
                    both = opened(bytes.fromhex(opens[client]), both)
                except ProtocolError:
                    continue  # what one client has spoiled does not keep the others' back
            half = slice(_HALF, None) if client in held.signed else slice(_HALF)
            told.append((client, both[half].hex()))
        return None, tuple(told)


def pair_seed(
    setting: Setting,
    key: X25519PrivateKey,
    other: str,
    pair: tuple[int, int],
    told: tuple[int, int],
) -> str:
    """The seed of the mask in common of two clients that were ``told`` the same total and count."""
    purpose = setting.pair(f"mask {told[0]} {told[1]}", min(pair), max(pair))
    return derived(agreed(key, other), purpose).hex()


def own_seed(own: str) -> str:
    """The seed of a client's own mask."""
    return derived(bytes.fromhex(own), "fedtailor own mask").hex()


def _bytes(share: int) -> bytes:
    return share.to_bytes(_HALF, "big")
