"""The private state of K clients: one tensor ``[K, ...]`` a name, in memory or in a sparse file.

The file is a valid safetensors file at every moment: its header is written first, and only the rows
of clients that have trained take room on disk. What a round has changed is staged, and reaches the
file in `commit`, after the caller has made the round durable elsewhere (see ``history``).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .params import Params, row

SEEN = "__seen__"  # uint8 [K]: 1 for a client whose row has been written
_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Store:
    """Private states by client number; a client that has none yet gets ``initial(client)``."""

    def __init__(
        self, num_clients: int, initial: Callable[[int], Params], path: Path | None = None
    ) -> None:
        """Open ``path``, made if it is not there; without one the states live in memory."""
        self._initial = initial
        self._path = path
        self._staged: dict[int, Params] = {}
        example = initial(0)
        self.has_states = bool(example)
        if path is not None and example:
            self._rows = _open(path, num_clients, example)
        else:
            self._rows = {
                name: value.new_zeros((num_clients, *value.shape), device="cpu")
                for name, value in example.items()
            }
            self._rows[SEEN] = torch.zeros(num_clients, dtype=torch.uint8)

    def read(self, client: int) -> Params:
        """The client's private tensors, staged ones included; not to be changed in place."""
        if not self.has_states:
            return {}
        if client in self._staged:
            return self._staged[client]
        if not self._rows[SEEN][client]:
            return self._initial(client)
        stored = row(self._rows, client)
        del stored[SEEN]
        return {name: value.clone() for name, value in stored.items()}

    def stage(self, clients: Sequence[int], states: Sequence[Params]) -> None:
        """Let `read` see new states before they are committed."""
        self._staged = dict(zip(clients, states, strict=True))

    @property
    def staged(self) -> dict[int, Params]:
        """What the round has changed, by client."""
        return self._staged

    def commit(self) -> None:
        """Write the staged states into their rows and, with a file, through to the disk."""
        for client, state in self._staged.items():
            for name, value in state.items():
                self._rows[name][client].copy_(value)
            self._rows[SEEN][client] = 1
        if self._path is not None and any(self._staged.values()):
            descriptor = os.open(self._path, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)
        self._staged = {}


def _open(path: Path, num_clients: int, example: Params) -> dict[str, Tensor]:
    header, offset = {}, 0
    tensors = {**example, SEEN: torch.zeros((), dtype=torch.uint8)}
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    for name, value in tensors.items():
        end = offset + num_clients * value.numel() * value.element_size()
        shape = [num_clients, *value.shape]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    if not path.exists():
        fresh = path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(start + offset)
        fresh.replace(path)
    data = torch.from_file(str(path), shared=True, size=start + offset, dtype=torch.uint8)
    opened = {}
    for name, value in tensors.items():
        begin, end = (start + at for at in header[name]["data_offsets"])
        opened[name] = data[begin:end].view(value.dtype).view(num_clients, *value.shape)
    return opened
