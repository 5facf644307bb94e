"""What a hostile site answers when it is asked to train, and the words that its refusal has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedtailor.flower import codec
from fedtailor.flower.codec import pack, unpack
from fedtailor.flower.messages import ClientReply, NodeQuery, RoundReply
from fedtailor.params import Params
from tests.flower.grid import ANY

Spoil = Callable[[RecordDict], RecordDict]
WILD = "\x1b[2J\x1b]0;owned\x07 \u202e\r\nround 1: all is well\n" + "x" * 30_000


def sends(change: Callable[[Params], Params]) -> Spoil:
    """A reply with another upload."""

    def spoil(content: RecordDict) -> RecordDict:
        reply, (sent,) = unpack(content, RoundReply, ANY)
        return pack(reply, [change(sent)])

    return spoil


def first(change: Callable[[Tensor], Tensor]) -> Spoil:
    """A reply with another first tensor of the upload."""

    def changed(sent: Params) -> Params:
        name = next(iter(sent))
        return {**sent, name: change(sent[name])}

    return sends(changed)


def filled(value: float) -> Spoil:
    """A reply with this value in all places of the first tensor."""
    return first(lambda tensor: torch.full_like(tensor, value))


def replies(change: Callable[[RoundReply], RoundReply]) -> Spoil:
    """Another report with the same upload."""

    def spoil(content: RecordDict) -> RecordDict:
        reply, sent = unpack(content, RoundReply, ANY)
        return pack(change(reply), sent)

    return spoil


def report(**changes: Any) -> Spoil:
    """Another report on the round."""
    return replies(lambda reply: replace(reply, **changes))


def result(**changes: Any) -> Spoil:
    """Another result of the client."""
    return replies(lambda reply: replace(reply, results=(replace(reply.results[0], **changes),)))


def payloads(number: int) -> Spoil:
    """The upload so many times."""

    def spoil(content: RecordDict) -> RecordDict:
        reply, (sent,) = unpack(content, RoundReply, ANY)
        return pack(reply, [sent] * number)

    return spoil


def about(right_checksum: bool = True, **changes: Callable[[str], str] | int) -> Spoil:
    """Other words beside the upload."""

    def spoil(content: RecordDict) -> RecordDict:
        before, arrays = content["about"], content["payloads"]
        assert isinstance(before, ConfigRecord)
        assert isinstance(arrays, ArrayRecord)
        changed: dict[str, Any] = {
            name: change(str(before[name])) if callable(change) else change
            for name, change in changes.items()
        }
        now = {**before, **changed}
        if right_checksum:
            texts = [str(now[name]) for name in ("kind", "head", "names")]
            now["checksum"] = codec._checksum(texts, [array.data for array in arrays.values()])
        return RecordDict({"about": ConfigRecord(now), "payloads": arrays})

    return spoil


def head(change: Callable[[str], str]) -> Spoil:
    """A report in another text."""
    return about(head=change)


def cut(content: RecordDict) -> RecordDict:
    """The upload ends in the middle, of which the checksum is right."""
    arrays = content["payloads"]
    assert isinstance(arrays, ArrayRecord)
    for array in arrays.values():
        array.data = array.data[: len(array.data) // 2]
    return about()(content)


def flood(content: RecordDict) -> RecordDict:
    """The reply, and 50,000 tiny records beside it."""
    return RecordDict({**content, **{str(k): ConfigRecord({"k": k}) for k in range(50_000)}})


FLOOD = "it has 50002 records; at most 2"
HOSTILE: tuple[tuple[Spoil, str], ...] = (
    (head(lambda text: "[" * 30_000 + "]" * 30_000), "recursion limit"),
    (head(lambda text: text + " " * 10_000_000), "characters of text; at most"),
    (head(lambda text: text.replace('"round": ', '"round": 1' + "0" * 4000)), "a report on train"),
    (head(lambda text: ""), "RoundReply: Invalid JSON"),
    (head(lambda text: "null"), "RoundReply: "),
    (head(lambda text: f"[{text}]"), "RoundReply: "),
    (head(lambda text: text.replace('"loss": ', '"loss": NaN, "x": ')), "x: Unexpected keyword"),
    (about(names=lambda text: "[]"), "zip()"),
    (about(names=lambda text: text.replace('["', '["x", "')), "tensors for"),
    (about(kind=lambda text: WILD), "instead of a RoundReply"),
    (about(right_checksum=False, checksum=lambda text: "0" * 32), "the checksum is wrong"),
    (about(schema=999), "schema version 999"),
    (about(more="x"), "it has 6 words beside its payloads; at most 5"),
    (lambda content: RecordDict(), "a message must hold 'about'"),
    (flood, FLOOD),
    (lambda content: pack(NodeQuery("x")), "a NodeQuery instead of a RoundReply"),
    (cut, "can't be read"),
    (payloads(0), "names payload 0; the message has 0"),
    (payloads(500), "500 payloads; at most 1"),
    (sends(lambda sent: {**sent, "more": torch.zeros(2_000_000)}), "bytes of tensors; at most"),
    (sends(lambda sent: {}), "of its upload is missing"),
    (sends(lambda sent: dict(list(sent.items())[1:])), "of its upload is missing"),
    (sends(lambda sent: {f"{n}\x1b[2J": v for n, v in sent.items()}), "of its upload is missing"),
    (first(lambda value: value.to(torch.float8_e4m3fn)), "of its upload is float8"),
    (first(lambda value: value.to(torch.complex64)), "of its upload is complex64"),
    (first(lambda value: value.to(torch.int32)), "of its upload is int32"),
    (first(lambda value: value > 0), "of its upload is bool"),
    (first(lambda value: value[..., None]), "it must"),
    (first(lambda value: value.flatten()), "it must"),
    (first(lambda value: value[:0]), "it must"),
    (first(lambda value: value.new_zeros(0, 1 << 31, *value.shape[2:])), "it may have at most"),
    (filled(float("nan")), "values that are not finite"),
    (filled(float("-inf")), "values that are not finite"),
    (result(loss=1e308), "its loss is 1e+308"),
    (result(loss=float("nan")), "its loss is nan"),
    (result(loss=None), "its loss is None"),
    (result(loss=float("inf")), "its loss is inf"),
    (result(loss=-0.5), "its loss is -0.5; allowed: a finite number, 0 or more"),
    (result(payload=7), "names payload 7; the message has 1"),
    (result(client=-1), "client -1 was not asked for"),
    (result(error=WILD), "?[2J?]0;owned"),
    (report(round=10**9), "round 1000000000"),
    (report(run="another"), "a report on train"),
    (report(kind="keep"), "a report on keep"),
    (replies(lambda reply: replace(reply, results=3 * reply.results)), "3 results for 1 c"),
    (
        report(results=tuple(ClientReply(k, error=WILD[:40]) for k in range(20_000))),
        "characters of text; at most",
    ),
)
