"""Messages as Flower's records: a head of plain values and payloads of tensors.

A payload travels as the bytes of a safetensors file, the form whose length is counted as a client's
bytes, in one Flower array: any dtype (Flower's own arrays know no bfloat16), any shapes, names in
their order. Beside them stand the version of this layout and a checksum over all that is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from ..errors import InputError
from ..params import Params, decode, encode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

SCHEMA = 3  # of messages; other versions are refused
_ABOUT, _PAYLOADS = "about", "payloads"
_FORMAT = "safetensors"


class WireError(InputError):
    """A message that can't be used."""


def pack(head: DataclassInstance, payloads: Sequence[Params] = ()) -> RecordDict:
    """A message's content.

    Args:
        head: a dataclass of plain values.
        payloads: tensors, for the head to name by their place.
    """
    text = json.dumps({"head": asdict(head), "names": [list(payload) for payload in payloads]})
    data = [encode(_separate(payload)) for payload in payloads]
    about: Any = {"schema": SCHEMA, "text": text, "checksum": _checksum(text, data)}
    arrays = {str(at): Array("uint8", (len(part),), _FORMAT, part) for at, part in enumerate(data)}
    return RecordDict({_ABOUT: ConfigRecord(about), _PAYLOADS: ArrayRecord(arrays)})


def unpack(content: RecordDict, kind: type[T]) -> tuple[T, list[Params]]:
    """The head, a ``kind``, and the payloads again, bit by bit.

    Raises:
        WireError: another schema version, damaged bytes, or a head that is no ``kind``.
    """
    about, arrays = content.get(_ABOUT), content.get(_PAYLOADS)
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise WireError(f"a message must hold {_ABOUT!r} and {_PAYLOADS!r}, not {list(content)}")
    if about.get("schema") != SCHEMA:
        raise WireError(f"schema version {about.get('schema')!r}; version {SCHEMA} is spoken here")
    text = about.get("text")
    if not isinstance(text, str) or list(arrays) != [str(at) for at in range(len(arrays))]:
        raise WireError(f"a message of schema version {SCHEMA} without its text or its payloads")
    data = [array.data for array in arrays.values()]
    if about.get("checksum") != _checksum(text, data):
        raise WireError("the checksum is wrong: the message was damaged on its way")
    try:
        whole = json.loads(text)
        head = TypeAdapter(kind).validate_json(json.dumps(whole["head"]), strict=True)
        payloads = [_ordered(part, n) for part, n in zip(data, whole["names"], strict=True)]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(f"{kind.__name__}.{where}: {first['msg']}") from None
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise WireError(f"a message that can't be read: {error}".splitlines()[0]) from None
    return head, payloads


def holds(content: RecordDict, kind: type[DataclassInstance]) -> bool:
    """Whether the head of a message has the fields of ``kind``; nothing else is checked."""
    about = content.get(_ABOUT)
    text = about.get("text") if isinstance(about, ConfigRecord) else None
    try:
        head = json.loads(text)["head"] if isinstance(text, str) else None
        return isinstance(head, dict) and head.keys() == {field.name for field in fields(kind)}
    except (ValueError, LookupError, TypeError):
        return False


def _checksum(text: str, data: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (text.encode(), *data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _separate(params: Params) -> Params:
    """On the CPU, each in memory of its own: safetensors refuses tensors that share theirs."""
    memory: set[int] = set()
    separate: Params = {}
    for name, value in params.items():
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in memory else tensor
        memory.add(place)
    return separate


def _ordered(data: bytes, names: Sequence[str]) -> Params:
    tensors = decode(data)
    if len(names) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors for {len(names)} names")
    return {name: tensors[name] for name in names}
