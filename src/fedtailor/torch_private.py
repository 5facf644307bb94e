"""The one home of what PyTorch keeps to itself, or has only lately; each has a fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_BITS = {torch.int16: 16, torch.bool: 8}
_peek: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_profiler_enabled: Any = getattr(
    getattr(torch._C, "_autograd", None), "_profiler_enabled", lambda: True
)
_use_count: Any = getattr(Tensor, "_use_count", None)


def under_vmap() -> bool:
    """Whether this code runs under ``torch.func.vmap``, or another transform of ``torch.func``.

    There a tensor may stand for those of several clients, and none can be a leaf of autograd.

    >>> under_vmap()
    False
    >>> torch.func.vmap(lambda x: x + int(under_vmap()))(torch.zeros(2))
    tensor([1., 1.])
    """
    return _peek() is not None if _peek else _leaves_are_refused()


def _leaves_are_refused() -> bool:
    """The same by what every version refuses under a transform.

    >>> torch.func.vmap(lambda x: x + int(_leaves_are_refused()))(torch.zeros(2))
    tensor([1., 1.])
    """
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        return True
    return False


def profiler_enabled() -> bool:
    """Whether PyTorch's profiler writes a trace now; True where that can't be known."""
    return bool(_profiler_enabled())


def use_count(tensor: Tensor) -> int:
    """How many hold the tensor: Python, as one, and each holder in C++; 1 where that isn't known.

    >>> use_count(torch.zeros(2))
    1
    """
    return int(_use_count(tensor)) if _use_count else 1


def view_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """View int64 ``[..., n]`` as smaller numbers, from the lowest bits on, also under vmap.

    PyTorch before 2.13 has no such view under vmap; there it is a copy.

    Args:
        words: contiguous.
        dtype: int16, or bool where every byte is 0 or 1.

    Returns:
        ``[..., 4 n]`` for int16, ``[..., 8 n]`` for bool.

    >>> view_words(torch.tensor([1 << 16]), torch.int16)
    tensor([0, 1, 0, 0], dtype=torch.int16)
    """
    try:
        return words.view(dtype)
    except RuntimeError:
        return _shifted(words, dtype)


def _shifted(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The same without a view.

    >>> _shifted(torch.tensor([1 << 16]), torch.int16)
    tensor([0, 1, 0, 0], dtype=torch.int16)
    """
    bits = _BITS[dtype]
    parts = words[..., None] >> torch.arange(0, 64, bits, device=words.device)
    return (parts.to(torch.uint8) if dtype == torch.bool else parts).to(dtype).flatten(-2)


def in_each(name: str, out: Sequence[Tensor], *others: Sequence[Any], **options: Any) -> None:
    """Do in all tensors of ``out`` what a tensor's method of that ``name`` does in place, each with
    its own arguments of ``others``: on a GPU in few kernels.

    >>> sums = [torch.ones(2), torch.ones(1)]
    >>> in_each("add", sums, [torch.ones(2), torch.zeros(1)], alpha=0.5)
    >>> sums
    [tensor([1.5000, 1.5000]), tensor([1.])]
    """
    if fused := getattr(torch, f"_foreach_{name}_", None):
        fused(out, *others, **options)
        return
    for target, *given in zip(out, *others, strict=True):
        getattr(target, f"{name}_")(*given, **options)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists and dicts hold.

    >>> list(leaves((1, [2, {"a": 3}], ())))
    [1, 2, 3]
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for branch in tree:
        yield from leaves(branch)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to what nested tuples, lists and dicts hold; the nest stays as it is.

    >>> map_leaves(abs, (-1, [-2, {"a": -3}]))
    (1, [2, {'a': 3}])
    """
    if isinstance(tree, dict):
        return {name: map_leaves(function, branch) for name, branch in tree.items()}
    if not isinstance(tree, tuple | list):
        return function(tree)
    branches = [map_leaves(function, branch) for branch in tree]
    return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)


def count_flops(train: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products and convolutions in ``train()``,
    forward and backward, two for each multiplication with its addition.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    with _FlopCounter() as counter:  # type: ignore[no-untyped-call]
        train()
    return int(counter.total)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts as `torch.utils.flop_counter.FlopCounterMode`, without its hooks on modules, which
    fail where a forward pass takes a gradient, and without dynamo, whose import takes a second."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True is what imports it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        self.total += count(*args, **kwargs, out_val=result) if count else 0
        return result
