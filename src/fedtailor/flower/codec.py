"""Messages as Flower's records: a head of plain values and payloads of tensors.

A payload travels as the bytes of a safetensors file, the form whose length is counted as a client's
bytes, in one Flower array: any dtype (Flower's own arrays know no bfloat16), any shapes, names in
their order. Beside them stand the version of this layout and a checksum over all that is sent.

Nothing in a message is trusted: sizes are compared with their `Limits` before anything is decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from ..errors import InputError, one_line
from ..params import Params, decode, encode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

SCHEMA = 9  # of messages; other versions are refused
_ABOUT, _PAYLOADS = "about", "payloads"
_FORMAT = "safetensors"
_TEXTS = ("kind", "head", "names", "checksum")  # beside the version
_WORDS = 500

# what work with data or messages may end in beside an InputError
FAULTS = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, OSError, MemoryError)


class WireError(InputError):
    """A message that can't be used. Its words are fit for a log, whatever they quote."""

    def __init__(self, text: str) -> None:
        super().__init__(words(text))


@dataclass(frozen=True)
class Limits:
    """What a message may have: characters of ``text``, ``payloads``, and ``bytes`` of tensors."""

    text: int = 1 << 22
    payloads: int = 0
    bytes: int = 0


def words(text: object, most: int = _WORDS) -> str:
    """What another machine says, fit for a log: one line of printable characters, cut at ``most``.

    >>> words("no\\x1b[2J data" + 600 * "!", 13)
    'no?[2J dat...'
    """
    line = one_line(str(text)[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def pack(head: DataclassInstance, payloads: Sequence[Params] = ()) -> RecordDict:
    """A message's content: a head of plain values, which names payloads of tensors by place."""
    texts = [
        type(head).__name__,
        json.dumps(asdict(head)),
        json.dumps([list(payload) for payload in payloads]),
    ]
    data = [encode(payload) for payload in payloads]
    texts.append(_checksum(texts, data))
    about: Any = {"schema": SCHEMA, **dict(zip(_TEXTS, texts, strict=True))}
    arrays = {str(at): Array("uint8", (len(part),), _FORMAT, part) for at, part in enumerate(data)}
    return RecordDict({_ABOUT: ConfigRecord(about), _PAYLOADS: ArrayRecord(arrays)})


def unpack(
    content: RecordDict, kind: type[T], limits: Limits | Callable[[T], Limits]
) -> tuple[T, list[Params]]:
    """The head, which must be a ``kind``, and the payloads again, bit by bit. ``limits`` say what
    the message may have; a function of the head if they depend on it. Raises WireError where it has
    more, is damaged, or of another schema version."""
    about, arrays = content.get(_ABOUT), content.get(_PAYLOADS)
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        found = list(islice(content, 5))
        raise WireError(f"a message must hold {_ABOUT!r} and {_PAYLOADS!r}, not {found}")
    _check_size(len(content), 2, "records")
    _check_size(len(about), 1 + len(_TEXTS), "words beside its payloads")
    if about.get("schema") != SCHEMA:
        raise WireError(f"schema version {about.get('schema')!r}; version {SCHEMA} is spoken here")
    texts = [text for name in _TEXTS if isinstance(text := about.get(name), str)]
    if len(texts) < len(_TEXTS):
        raise WireError(f"a message of schema version {SCHEMA} without {', '.join(_TEXTS)}")
    known = limits if isinstance(limits, Limits) else Limits()
    _check_size(sum(map(len, texts)), known.text, "characters of text")
    name, head_text, names_text, checksum = texts
    if name != kind.__name__:
        raise WireError(f"a {name[:50]} instead of a {kind.__name__}")
    try:
        head: T = _reader(cast(Any, kind)).validate_json(head_text, strict=True)
        known = limits if isinstance(limits, Limits) else limits(head)
        _check_size(len(arrays), known.payloads, "payloads")
        data = [array.data for array in arrays.values()]
        _check_size(sum(map(len, data)), known.bytes, "bytes of tensors")
        if checksum != _checksum(texts[:-1], data):
            raise WireError("the checksum is wrong: the message was damaged on its way")
        names = _reader(cast(Any, list[list[str]])).validate_json(names_text, strict=True)
        return head, [_ordered(part, n) for part, n in zip(data, names, strict=True)]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, (kind.__name__, *first["loc"])))
        raise WireError(f"{where}: {first['msg']}") from None
    except InputError:
        raise
    except (SafetensorError, *FAULTS) as error:
        raise WireError(f"a message that can't be read: {error}") from None


@lru_cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def named_payload(payloads: Sequence[Params], place: int, by: str) -> Params:
    """The payload at the ``place`` that a part of the message names."""
    if not 0 <= place < len(payloads):
        raise WireError(
            f"the {by} names payload {place}; the message has {len(payloads)}, numbered from 0"
        )
    return payloads[place]


def _check_size(size: int, most: int, what: str) -> None:
    if size > most:
        raise WireError(f"it has {size} {what}; at most {most} are read")


def _checksum(texts: Sequence[str], data: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (*(text.encode() for text in texts), *data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _ordered(data: bytes, names: Sequence[str]) -> Params:
    tensors = decode(data)
    if len(names) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors for {len(names)} names")
    return {name: tensors[name] for name in names}
