"""Secure aggregation over Flower: its steps as messages, and what a site keeps between them.

A site keeps, in the folder of a trial, a file for each client with the secrets of its last round,
until it has told its shares; in that of the run the keys with which other clients sign; and in its
own folder the key with which it signs. It learns the others' when it first hears of them in a run,
and refuses another key for the same client. Who wants to rely on no first message lays a file of
keys into the site's own folder beforehand.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter

from ..errors import InputError, NoiseSpentError
from ..params import Params
from ..store.files import read_json, write_json, write_once
from ..uploads.secure.client import Side
from ..uploads.secure.config import SecureAggregationConfig
from ..uploads.secure.keys import ProtocolError, agreed, private_key
from ..uploads.secure.messages import WEIGHT, Held, Keys, Masks, Order, Sent, Setting, Weighing
from .codec import WireError
from .messages import STEPS, ClientReply, Masking, MaskingReply, RoundRequest
from .schema import check_form

SIGNING_KEY, SIGNERS = "signing.key", "signers.json"
_KEY = re.compile("[0-9a-fA-F]{64}")
_SPENT = "its account has no update left: a round that was run again has counted twice"


@dataclass(frozen=True)
class Listed:
    """The last list that a client has signed: of which round, and whose values it sums."""

    round: int
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """What a client keeps of its last round with masks: which one, who was drawn, its secrets, the
    ``kind`` of message that its masks are for; what it has ``signed``, by kind; how many updates it
    has ``sent``."""

    attempt: int
    clients: tuple[int, ...]
    held: Held | None
    sent: int = 0
    kind: str = ""
    signed: dict[str, Listed] = field(default_factory=dict)


_KEPT = TypeAdapter(Kept)


@dataclass(frozen=True)
class SiteMasks:
    """The sides of a site's clients. ``home`` is the site's own folder, ``folder`` the trial's. A
    round draws ``cohort`` clients, as the site's own experiment says; some may have left before a
    second pass, where the method has ``two_passes``. A client sends ``most`` updates."""

    config: SecureAggregationConfig
    home: Path
    folder: Path
    weighing: Weighing | None  # for clients that send values
    most: float
    cohort: int
    two_passes: bool

    def step(self, message: RoundRequest, client: int, order: Order | None = None) -> Any:
        """Take the step that a message asks of a client: a `MaskingReply`, or with an ``order`` to
        train the client's `Masks`. What it changes is on the disk before anything is told."""
        told = message.masking
        if told is None or not self.config.is_active:
            raise ProtocolError("secure aggregation: the message is not of this experiment")
        step = message.kind if message.kind in STEPS else "mask"
        name = _name(message, told.attempt)
        if step == "mask" and order is None:
            raise ProtocolError("secure aggregation: a request to send values without masks")
        if list(told.clients) != sorted({*told.clients}):
            raise ProtocolError("the clients that were drawn must be in ascending order")
        if (count := len(told.clients)) < self.cohort and not self.two_passes:
            raise ProtocolError(
                f"secure aggregation: a round of {count} clients, and this site's experiment draws "
                f"{self.cohort}"
            )
        side = Side(
            Setting(f"{name}/{message.round}", told.clients, self.config, self.cohort),
            client,
            _signing_key(self.home).sign,
            self._known(told),
            self.weighing,
        )
        path = self.folder / f"masks-{client}.json"
        kept = Kept(0, (), None)
        if path.exists():
            kept = _KEPT.validate_json(read_json(path)["kept"], strict=True)
        if step == "keys":
            if told.attempt <= kept.attempt:
                raise ProtocolError("secure aggregation: a round that was begun before")
            if kept.sent >= self.most:
                return MaskingReply(spent=True)
        elif kept.held is None or (kept.attempt, kept.clients) != (told.attempt, told.clients):
            raise ProtocolError("secure aggregation: no secrets are kept of this round")
        signed = kept.signed
        if step == "sign_list":  # kept before it is told: others alone may be asked for shares
            signed = signed | {kept.kind: _listed(kept, message.round, told.sign_list)}
        value, is_mask = order if step == "mask" else getattr(told, step), step == "mask"
        held, answer = getattr(side, step)(kept.held, value)
        kept = replace(
            kept,
            attempt=told.attempt,
            clients=told.clients,
            held=held,
            sent=kept.sent + is_mask,
            kind=message.kind if is_mask else kept.kind,
            signed=signed,
        )
        write_json(path, {"kept": json.dumps(asdict(kept))})
        if step == "mask":
            return replace(cast(Masks, answer), secret=secrets.token_hex(32))
        return MaskingReply(**{step: answer}, signer=signer(self.home) if step == "keys" else "")

    def _known(self, told: Masking) -> Callable[[int], bytes]:
        """The keys with which clients sign, those that the message has among them. Raises
        ProtocolError where it has another one of a client."""
        path = self.folder.parents[1] / SIGNERS  # of the run
        known = _signers(path) | _signers(self.home / SIGNERS)
        new = {str(client): key for client, key in told.signers}
        for client, key in new.items():
            if known.get(client, key) != key:
                raise ProtocolError(
                    f"client {client} signs with another key than before, or than {SIGNERS} at "
                    "this site says"
                )
        if new.keys() - known.keys():
            write_json(path, {"signers": {**known, **new}})
        return lambda client: bytes.fromhex({**known, **new}.get(str(client), ""))


def _listed(kept: Kept, number: int, clients: tuple[int, ...]) -> Listed:
    """What is signed now. Raises ProtocolError for another list of a round, or of one before: of
    two sums of a round one could tell a client's update."""
    last, new = kept.signed.get(kept.kind, Listed(0, ())), Listed(number, clients)
    if number < last.round or (number == last.round and new != last):
        raise ProtocolError(
            f"another list of clients was signed in round {last.round}: of two sums of a round one "
            "could tell a single update"
        )
    return new


def signer(home: Path) -> str:
    """The public key with which the clients of a site sign, whose own folder is ``home``. Raises
    InputError where a file of keys there is damaged."""
    _signers(home / SIGNERS)
    return _signing_key(home).public_key().public_bytes_raw().hex()


def _signers(path: Path) -> dict[str, str]:
    """The keys with which clients sign, by their numbers as texts; none without the file."""
    if not path.exists():
        return {}
    keys = read_json(path).get("signers")
    if not isinstance(keys, dict) or not all(_KEY.fullmatch(str(key)) for key in keys.values()):
        raise InputError(
            f'{path} must be {{"signers": {{"0": "..."}}}}: by client a key of 64 '
            "hexadecimal digits"
        )
    return {client: key.lower() for client, key in keys.items()}


def _signing_key(home: Path) -> Ed25519PrivateKey:
    """The site's key for signatures, made when it is first needed."""
    path = home / SIGNING_KEY
    if not path.exists():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_once(path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode())
    if not _KEY.fullmatch(text := path.read_text()):
        raise InputError(f"{path} is damaged: restore it from a copy, or others refuse this site")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


class GridClients:
    """The clients' sides at the nodes of a Grid, of a `GridExecutor`: the server's way to them."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._told = Masking(0, ())
        self._spent = set[int]()  # clients whose account has no update left

    @property
    def name(self) -> str:
        """A new one for each round, also for one that is run again."""
        self._told = Masking(max(time.time_ns(), self._told.attempt + 1), ())
        return _name(self._executor.blank, self._told.attempt)

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        self._told, self._spent = replace(self._told, clients=setting.clients), set()
        if step == "mask":  # the orders travel with the requests to train
            self._executor.masking = replace(self._told, signers=())
            return messages
        value: Any = next(iter(messages.values()), ())  # the same for all, but neighbours' keys
        if step == "share":
            keys = {one.client: one for several in messages.values() for one in several}
            value = tuple(keys[client] for client in sorted(keys))
        message = self._message(step, setting, replace(self._told, **{step: value}))
        replies = dict(self._executor.ask(message, sorted(messages), partial(self._read, step)))
        if len(messages) - len(self._spent) < setting.least:
            raise NoiseSpentError(f"the accounts of {len(self._spent)} clients have no update left")
        if step == "keys":
            signers = tuple((client, replies[client].signer) for client in sorted(replies))
            self._told = replace(self._told, signers=signers)
        return {client: getattr(reply, step) for client, reply in replies.items()}

    def _message(self, kind: str, setting: Setting, masking: Masking) -> Any:
        round_ = int(setting.name.rpartition("/")[2])
        return replace(self._executor.blank, round=round_, kind=kind, masking=masking)

    def reweigh(
        self, setting: Setting, masks: Mapping[int, Any], mean: Params, uploads: Sent
    ) -> Sent:
        message = self._message("reweigh", setting, self._executor.masking)
        form = {name: (torch.int32, tuple(value.shape)) for name, value in mean.items()}
        form[WEIGHT] = torch.int32, ()

        def read(client: int, reply: ClientReply, payload: Params) -> Params:
            check_form("its upload", payload, form)
            return payload

        return dict(self._executor.ask(message, sorted(masks), read, mean, masks))

    def _read(self, step: str, client: int, reply: ClientReply, payload: Params) -> MaskingReply:
        """What a reply says. Raises WireError where it is none to this step."""
        told = reply.masking or MaskingReply()
        if step == "keys":
            keys = told.keys
            is_right = keys is not None and keys.client == client and _are_keys(keys)
            is_right = is_right and _is_hex(told.signer, 64)
            if told.spent:
                self._spent.add(client)
                raise WireError(_SPENT)
        elif step == "sign_list":
            is_right = _is_hex(told.sign_list, 128)
        else:
            shares, digits = (told.share, 160) if step == "share" else (told.reveal, 64)
            known = all(k in self._told.clients and _is_hex(text, digits) for k, text in shares)
            is_right = known and bool(shares)
        if not is_right:
            raise WireError(f"its answer to the step {step!r} of secure aggregation is none")
        return told


def _name(message: RoundRequest, attempt: int) -> str:
    return f"{message.run}/{message.label}/{message.seed}/{attempt}"


def _is_hex(text: str, digits: int) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def _are_keys(keys: Keys) -> bool:
    """Whether they are signed somehow, and something can be agreed on with them."""
    try:
        texts = keys.mask, keys.cipher
        agree = all(_is_hex(text, 64) and agreed(private_key("00"), text) for text in texts)
        return agree and _is_hex(keys.signature, 128)
    except InputError:
        return False
