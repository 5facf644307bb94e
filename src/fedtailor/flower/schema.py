"""The form that a method's uploads have.

The server finds it out by `blank_upload`, as a client of its own that trains on blank examples. So
it depends on nothing that clients send, and holds for the first one as for the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..params import Params
from .codec import WireError

Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # by name

ANY = -1  # in the shapes of a `Form`: any number of elements along that axis

_HEADER = 1 << 16  # bytes of a safetensors header, beside those of its names
_ENTRY = 200  # bytes of one name's entry, beside the name


@dataclass(frozen=True)
class UploadSchema:
    """``form`` is that of uploads; ``packed`` that of what travels, whose shapes may differ from
    client to client; ``bytes`` is how much travels at most."""

    form: Form
    packed: Form
    bytes: int

    def check_packed(self, packed: Params) -> None:
        """Check what travels, before it is unpacked. Sizes may differ from client to client. Bytes
        limit tensors of one axis; others may be no longer along any axis than here: a shape such as
        (0, 2^31) has no bytes, and unpacking would fill it up. Raises WireError where it has other
        names or types, or is too large."""
        check_form("its upload", packed, any_size(self.packed))
        for name, (dtype, shape) in form_of(packed).items():
            sizes = (self.packed[name][1], self.form.get(name, self.packed[name])[1])
            like = [size for size in sizes if len(size) == len(shape)]
            most = tuple(max(along) for along in zip(*like, strict=True))
            if len(shape) > 1 and any(n > m for n, m in zip(shape, most, strict=True)):
                raise WireError(
                    f"{name} of its upload is {_in_words(dtype, shape)}; it may have at most {most}"
                )

    @classmethod
    def of(cls, upload: Params, packed: Params) -> UploadSchema:
        """The schema of uploads like this one, and of what travels of it."""
        forms = form_of(upload), form_of(packed)
        return cls(*forms, max(map(wire_bytes, forms)))


def form_of(params: Params) -> Form:
    """Type and shape of each tensor."""
    return {name: (value.dtype, tuple(value.shape)) for name, value in params.items()}


def wire_bytes(form: Form) -> int:
    """How many bytes a payload of such tensors takes at most."""
    tensors = sum(dtype.itemsize * math.prod(shape) for dtype, shape in form.values())
    return tensors + _HEADER + sum(len(name.encode()) + _ENTRY for name in form)


def any_size(form: Form) -> Form:
    """The same with any number of elements along each axis."""
    return {name: (dtype, (ANY,) * len(shape)) for name, (dtype, shape) in form.items()}


def check_form(what: str, params: Params, expected: Form) -> None:
    """Raise WireError, which says of ``what``, where tensors have other names, types or shapes."""
    actual = form_of(params)
    for name in sorted(actual.keys() | expected.keys()):
        if name not in actual or name not in expected:
            found, wanted = ("missing", "there") if name in expected else ("there", "left out")
            raise WireError(f"{name} of {what} is {found}; it must be {wanted}")
        (dtype, shape), (type_, size) = actual[name], expected[name]
        fits = dtype == type_ and len(shape) == len(size)
        if not fits or any(b not in (a, ANY) for a, b in zip(shape, size, strict=True)):
            found, wanted = _in_words(dtype, shape), _in_words(type_, size)
            raise WireError(f"{name} of {what} is {found}; it must be {wanted}")


def _in_words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}".replace(str(ANY), "any")
