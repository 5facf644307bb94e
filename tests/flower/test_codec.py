from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedtailor.errors import InputError
from fedtailor.flower.codec import Limits, WireError, pack, unpack
from fedtailor.params import Params


@dataclass(frozen=True)
class Head:
    round: int
    losses: tuple[float, ...]
    label: str = "ä"


@dataclass(frozen=True)
class Other:
    clients: int


ANY = Limits(1 << 20, 10, 1 << 20)

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bytes as values, NaN among them; scalars and empty tensors, too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(bits, dtype=dtype).view(shape)
    size = count * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.clone().view(shape)


names = st.text("aä._0", min_size=1, max_size=4)
payloads = st.lists(st.dictionaries(names, tensors(), max_size=4), max_size=3)
heads = st.builds(
    Head,
    st.integers(0, 2**53),
    st.lists(st.floats(allow_nan=False)).map(tuple),
    names,
)


def same(a: Params, b: Params) -> bool:
    """To the bit, where NaN is the same as itself, and in the same order."""
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and a[n].contiguous().flatten().view(torch.uint8).equal(b[n].flatten().view(torch.uint8))
        for n in a
    )


@pytest.mark.slow
@settings(max_examples=30)
@given(heads, payloads)
def test_what_is_packed_comes_out_again(head: Head, sent: list[Params]) -> None:
    again, received = unpack(pack(head, sent), Head, ANY)
    assert again == head
    assert len(received) == len(sent)
    assert all(map(same, sent, received))


@settings(max_examples=30)
@given(st.data())
def test_no_damaged_byte_is_missed(data: st.DataObject) -> None:
    sent = {"w": torch.arange(6.0).view(2, 3), "m": torch.tensor([True, False])}
    whole = pack(Head(3, (0.5,)), [sent])
    about, arrays = dict(whole["about"]), whole["payloads"]  # type: ignore[call-overload]
    assert isinstance(arrays, ArrayRecord)
    content = bytearray(arrays["0"].data)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    arrays = ArrayRecord({"0": Array("uint8", (len(content),), "safetensors", bytes(content))})
    with pytest.raises(WireError, match="checksum is wrong"):
        unpack(RecordDict({"about": ConfigRecord(about), "payloads": arrays}), Head, ANY)


def test_tensors_that_share_memory_are_sent_apart() -> None:
    bank = torch.arange(6.0).view(3, 2)
    sent = {"a": bank[0], "b": bank[0], "c": bank.T, "d": torch.ones(1).expand(4)}
    _, (received,) = unpack(pack(Head(1, ()), [sent]), Head, ANY)
    assert same(sent, received)


def test_tensors_arrive_where_pytorch_aligns_memory() -> None:
    sent = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5)}
    _, (received,) = unpack(pack(Head(1, ()), [sent]), Head, ANY)
    assert all(value.data_ptr() % 64 == 0 for value in received.values())


def changed(**about: Any) -> RecordDict:
    whole = pack(Head(1, (1.0,)))
    record = whole["about"]
    assert isinstance(record, ConfigRecord)
    return RecordDict({**whole, "about": ConfigRecord({**record, **about})})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RecordDict(), "must hold 'about' and 'payloads', not []"),
        (changed(schema=1), "schema version 1; version 9 is spoken here"),
        (changed(schema="1"), "schema version '1'; version 9"),
        (changed(head=3), "without kind, head, names, checksum"),
        (changed(head='{"round": 1, "losses": []}'), "checksum is wrong"),
        (changed(names="[[]]"), "checksum is wrong"),
        (changed(checksum=""), "checksum is wrong"),
        (pack(Other(3)), "a Other instead of a Head"),
        (changed(head="{}"), "Head.round: Field required"),
        (changed(head='{"round":' + "[" * 200_000 + "]" * 200_000 + "}"), "recursion limit"),
        (changed(head=" " * 2_000_000), "characters of text; at most 1048576 are read"),
        (pack(Head(1, ()), [{}] * 11), "it has 11 payloads; at most 10 are read"),
        (pack(Head(1, ()), [{"w": torch.zeros(1 << 18)}]), "bytes of tensors; at most 1048576"),
        (pack(Head("3", ())), "Head.round: Input should be a valid integer"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named_in_one_line(content: RecordDict, message: str) -> None:
    with pytest.raises(WireError) as raised:
        unpack(content, Head, ANY)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, InputError)
