"""Packing: uploads travel in the form that the method gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..params import Params
from .chain import Link, UploadContext


@dataclass(frozen=True)
class Packing(Link):
    """`Method.pack` at the client, `Method.unpack` at the server."""

    pack: Callable[[Params], Params]
    unpack: Callable[[Params], Params]

    def send(self, upload: Params, at: UploadContext) -> Params:
        return self.pack(upload)

    def receive(self, upload: Params, at: UploadContext) -> Params:
        return self.unpack(upload)
