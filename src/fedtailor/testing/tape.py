"""Recordings on a CPU, operation by operation: what a CUDA graph does on a GPU.

What is played again reads and writes the memory that was used when it was recorded. So all that a
training takes from Python, but for tensors that it is given, stays as it was: a number, a branch on
a value.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..torch_private import leaves, map_leaves

# a GPU is waited for, which a CUDA graph can't do: a value goes to Python, or comes from there
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.", "lift_fresh")
_TORCH = Path(torch.__file__).parent


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that run inside of it, and their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports it, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in str(func) for part in _WAITS):
            raise RuntimeError(f"{_caller()} waits for a value, or makes a tensor of one ({func})")
        given = _views((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, given, _views(result)))
        return result

    def replay(self) -> None:
        """Run all operations again; results go where they were."""
        with torch.no_grad():
            for func, given, result in self._operations:
                args, kwargs = _views(given)
                for old, new in zip(leaves(result), leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def capture(run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
    """As `executors.captured.cuda_graphs` captures. Raises RuntimeError where it could not."""
    with Tape() as tape:
        outcome = run()
    return outcome, tape.replay


def _views(tree: Any) -> Any:
    """The tensors' memory with shapes of their own, which operations in place may change."""
    return map_leaves(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def _caller() -> str:
    """The line of code, outside of PyTorch, that is being run."""
    frames = traceback.extract_stack()[:-2]
    own = [frame for frame in frames if _TORCH not in Path(frame.filename).parents]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}," if own else "it"
