"""What a method costs: parameters, and bytes on the wire as they are encoded."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..method import Method
from ..params import DTYPES, Params, count
from ..task.quantised import num_parameters
from ..task.task import Task
from ..uploads.secure.messages import WEIGHT
from .malloc import give_back_freed_memory


def wire_bytes(params: Params) -> dict[str, int]:
    """The length of ``len(params.encode(...))`` without encoding: bytes by dtype, and ``header``.

    Nothing is sent, and nothing counted, for no tensors.

    >>> wire_bytes({"w": torch.zeros(2, 3)})
    {'float32': 24, 'header': 72}
    """
    return dict(_wire_bytes(tuple((n, v.dtype, tuple(v.shape)) for n, v in params.items())))


@lru_cache(maxsize=64)  # clients that are alike send alike
def _wire_bytes(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> dict[str, int]:
    if not tensors:
        return {}
    sizes: dict[str, int] = {}
    header: dict[str, Any] = {}
    offset = 0
    # the order of a safetensors file: by dtype, then by name; it decides how long offsets are
    for name, dtype, shape in sorted(tensors, key=lambda one: ([*DTYPES].index(one[1]), one[0])):
        nbytes, called = math.prod(shape) * dtype.itemsize, str(dtype).removeprefix("torch.")
        sizes[called] = sizes.get(called, 0) + nbytes
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return {**dict(sorted(sizes.items())), "header": 8 + text + -text % 8}


@dataclass(frozen=True)
class Costs:
    """Scalars a client trains, exchanges and keeps to itself; bytes a client a round, by dtype;
    ``flops``, the floating-point operations of training on one batch, None if not counted;
    ``has_row``, whether the server learns a row for the client alone."""

    trained: int
    communicated: int
    private: int
    model: int
    down: dict[str, int]
    up: dict[str, int]
    flops: int | None = None
    has_row: bool = False


def measure(
    method: Method, task: Task, received: Params, private: Params, sent: Params, *, masked: bool
) -> Costs:
    """The costs of a client that got ``received``, holds ``private`` and sent ``sent``; ``masked``:
    as one of a sum, whose second pass, if the method has one, is counted with it."""
    down, up = wire_bytes(received), wire_bytes(sent)
    if masked and method.weighs_by_mean and sent:
        mean = {name: value.float() for name, value in sent.items()}
        weight = torch.zeros((), dtype=torch.int32)
        down = dict(Counter(down) + Counter(wire_bytes(mean)))
        up = dict(Counter(up) + Counter(wire_bytes({**sent, WEIGHT: weight})))
    return Costs(
        trained=method.num_trained(task),
        communicated=count(sent),
        private=count(private),
        model=num_parameters(task.model),
        down=down,
        up=up,
        has_row=type(method).fit_row is not Method.fit_row,
    )


def forget_peak_memory() -> None:
    """Begin `peak_memory_mb` anew: what was held before, and is free now, doesn't count. Only CUDA
    and Linux can do so; elsewhere the peak remains that of the process."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        give_back_freed_memory()
        with suppress(OSError):  # some sandboxes forbid it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """The most memory that this process has held since `forget_peak_memory`, in MB (10^6 bytes):
    resident memory, or with a CUDA device what PyTorch has reserved there."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 1e6  # a graph's is not allocated
    unit = 1 if sys.platform == "darwin" else 1024
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * unit / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
