"""Secure aggregation over Flower: its steps as messages, and what a site keeps between them.

A site keeps, in the folder of a trial, a file for each client with the secrets of its last round,
until it has told its shares; in that of the run the keys with which other clients sign; and in its
own folder the key with which it signs. It learns the others' when it first hears of them in a run,
and refuses another key for the same client. Who wants to rely on no first message lays a file of
keys into the site's own folder beforehand.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter

from ..errors import InputError
from ..params import Params
from ..store.files import read_json, write_json
from ..uploads.secure.client import Side
from ..uploads.secure.config import SecureAggregationConfig
from ..uploads.secure.keys import ProtocolError, agreed, private_key
from ..uploads.secure.messages import WEIGHT, Held, Masks, Order, Setting, Weighing
from .codec import WireError
from .messages import STEPS, ClientReply, Masking, MaskingReply, RoundRequest
from .schema import check_form

SIGNING_KEY, SIGNERS = "signing.key", "signers.json"
_DIGITS = {"keys": 64, "share": 160, "sign_list": 128, "reveal": 64}  # hexadecimal


@dataclass(frozen=True)
class Kept:
    """What a client keeps of its last round with masks: which one, who was drawn, its secrets; and
    how many updates it has ``sent``."""

    attempt: int
    clients: tuple[int, ...]
    held: Held | None
    sent: int = 0


_KEPT = TypeAdapter(Kept)


@dataclass(frozen=True)
class SiteMasks:
    """The sides of a site's clients. ``home`` is the site's own folder, ``folder`` the trial's. A
    client sends ``most`` updates."""

    config: SecureAggregationConfig
    home: Path
    folder: Path
    weighing: Weighing | None = None  # for clients that send values
    most: float = math.inf

    def step(self, message: RoundRequest, client: int, order: Order | None = None) -> Any:
        """Take the step that a message asks of a client: a `MaskingReply`, or with an ``order`` to
        train the client's `Masks`. What it changes is on the disk before anything is told."""
        told = message.masking
        if told is None or not self.config.is_active:
            raise ProtocolError("secure aggregation: the message is not of this experiment")
        step, name = _step(message), _name(message, told.attempt)
        if step == "mask" and order is None:
            raise ProtocolError("secure aggregation: a request to send values without masks")
        if list(told.clients) != sorted({*told.clients}):
            raise ProtocolError("the clients that were drawn must be in ascending order")
        side = Side(
            Setting(f"{name}/{message.round}", told.clients, self.config),
            client,
            self._key.sign,
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
                raise ProtocolError(
                    f"the client has sent {kept.sent} updates with noise, and its account has no "
                    "more: a round that is run again counts twice"
                )
        elif kept.held is None or (kept.attempt, kept.clients) != (told.attempt, told.clients):
            raise ProtocolError("secure aggregation: no secrets are kept of this round")
        near = side.setting.neighbours(client) if client in told.clients else ()
        value = {
            "keys": None,
            "share": tuple(keys for keys in told.keys if keys.client in near),
            "mask": order,
            "sign_list": told.there,
            "reveal": told.texts,
        }[step]
        held, answer = getattr(side, step)(kept.held, value)
        kept = Kept(told.attempt, told.clients, held, kept.sent + (step == "mask"))
        write_json(path, {"kept": json.dumps(asdict(kept))})
        if step == "mask":
            return replace(cast(Masks, answer), secret=secrets.token_hex(32))
        if step == "keys":
            signer = self._key.public_key().public_bytes_raw().hex()
            return MaskingReply(keys=answer, signer=signer)
        return MaskingReply(signature=answer) if step == "sign_list" else MaskingReply(texts=answer)

    @property
    def _key(self) -> Ed25519PrivateKey:
        """The site's key for signatures, made when it is first needed."""
        path = self.home / SIGNING_KEY
        if not path.exists():
            fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            fresh.touch(mode=0o600)
            fresh.write_text(Ed25519PrivateKey.generate().private_bytes_raw().hex())
            with suppress(FileExistsError):  # of two nodes that make one, the first one's counts
                os.link(fresh, path)
            fresh.unlink()
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text()))

    def _known(self, told: Masking) -> Any:
        """The keys with which clients sign, those that the message has among them. Raises
        ProtocolError where it has another one of a client."""
        path = self.folder.parents[1] / SIGNERS  # of the run
        known: dict[str, str] = {}
        for one in (path, self.home / SIGNERS):
            known |= read_json(one)["signers"] if one.exists() else {}
        new = {str(client): key for client, key in told.signers}
        for client, key in new.items():
            if known.get(client, key) != key:
                raise ProtocolError(
                    f"client {client} signs with another key than before, or than {SIGNERS} at "
                    "this site says"
                )
        if new.keys() - known.keys():
            write_json(path, {"signers": {**known, **new}})

        def key_of(client: int) -> bytes:
            return bytes.fromhex({**known, **new}.get(str(client), ""))

        return key_of


class GridClients:
    """The clients' sides at the nodes of a Grid, of a `GridExecutor`: the server's way to them."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._told = Masking(0, ())

    @property
    def name(self) -> str:
        """A new one for each round, also for one that is run again."""
        self._told = Masking(max(time.time_ns(), self._told.attempt + 1), ())
        return _name(self._executor.blank, self._told.attempt)

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        self._told = replace(self._told, clients=setting.clients)
        if step == "mask":  # the orders travel with the requests to train
            self._executor.masking = replace(self._told, signers=())
            return messages
        first: Any = next(iter(messages.values()), ())
        told = self._told
        if step == "share":
            keys = {one.client: one for several in messages.values() for one in several}
            told = replace(told, keys=tuple(keys[client] for client in sorted(keys)))
        elif step == "sign_list":
            told = replace(told, there=first)
        elif step == "reveal":
            told = replace(told, texts=first)
        round_ = int(setting.name.rpartition("/")[2])
        message = replace(self._executor.blank, round=round_, kind=step, masking=told)
        told_by = self._executor.ask(message, sorted(messages), self._checked)
        replies = {client: reply.masking for client, reply in told_by}
        if step == "keys":
            signers = tuple((client, replies[client].signer) for client in sorted(replies))
            self._told = replace(self._told, signers=signers)
            return {client: reply.keys for client, reply in replies.items()}
        if step == "sign_list":
            return {client: reply.signature for client, reply in replies.items()}
        return {client: reply.texts for client, reply in replies.items()}

    def keep(self, client: int, upload: Params) -> None:
        """Nothing: uploads are at the sites."""

    def reweigh(
        self, setting: Setting, masks: Mapping[int, Any], mean: Params
    ) -> Mapping[int, Params]:
        blank, round_ = self._executor.blank, int(setting.name.rpartition("/")[2])
        message = replace(blank, round=round_, kind="reweigh", masking=self._executor.masking)
        form = {name: (torch.int32, tuple(value.shape)) for name, value in mean.items()}
        form[WEIGHT] = torch.int32, ()
        sent = dict[int, Params]()

        def check(message: RoundRequest, client: int, reply: ClientReply, payload: Params) -> None:
            check_form("its upload", payload, form)
            sent[client] = payload

        for _ in self._executor.ask(message, sorted(masks), check, mean, masks):
            pass
        return sent

    def _checked(
        self, message: RoundRequest, client: int, answer: ClientReply, payload: Params
    ) -> None:
        """Raise WireError where a reply is none to this step."""
        reply = answer.masking
        step, texts, is_right = message.kind, list[str](), reply is not None
        if reply is not None and step == "keys":
            keys = reply.keys
            is_right = keys is not None and keys.client == client
            if keys is not None:
                half = len(keys.signature) // 2
                texts = [keys.signature[:half], keys.signature[half:], reply.signer]
                is_right &= _is_key(keys.mask) and _is_key(keys.cipher)
        elif reply is not None:
            texts = [reply.signature] if step == "sign_list" else [t for _, t in reply.texts]
            is_right = {one for one, _ in reply.texts} <= {*self._told.clients}
        if not is_right or not texts or not all(_is_hex(text, _DIGITS[step]) for text in texts):
            raise WireError(f"its answer to the step {step!r} of secure aggregation is none")


def _step(message: RoundRequest) -> str:
    return message.kind if message.kind in STEPS else "mask"


def _name(message: RoundRequest, attempt: int) -> str:
    return f"{message.run}/{message.label}/{message.seed}/{attempt}"


def _is_hex(text: str, digits: int) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def _is_key(text: str) -> bool:
    """Whether a text is a public key with which something can be agreed on."""
    try:
        return _is_hex(text, 64) and bool(agreed(private_key("00"), text))
    except InputError:
        return False
