"""The algebra of states: flat dicts of tensors, keyed by dotted module names.

Every function is pure. "Stacked" params carry one more leading axis, usually the cohort's ``[c]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from .torch_private import in_each, leaves, map_leaves

Params = dict[str, Tensor]
Batch = dict[str, Tensor]

CACHED = "cached."  # in a batch, the names of the results of `Method.precompute` begin so
EXAMPLE_WEIGHT = f"{CACHED}example_weight"  # in a batch, what each example counts in the loss [b]

DRAWN = f"{CACHED}drawn"  # in a sampled batch, 0 for an example that stands in for none, else 1 [b]

PACKED = f"{CACHED}packed"  # in a batch, where its examples go if they share rows [b, rows]

DTYPES = {  # what safetensors calls them, in the order in which a file has them
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

ALIGNMENT = 64  # bytes; PyTorch's allocator aligns its memory to as many
_ALIGNED = 512  # the same on a GPU


def split(params: Params, predicate: Callable[[str], bool]) -> tuple[Params, Params]:
    """Split by name: return the tensors whose name fulfils ``predicate``, and the others.

    >>> a, b = split({"a.x": torch.zeros(1), "b.x": torch.zeros(1)}, lambda n: n[0] == "a")
    >>> list(a), list(b)
    (['a.x'], ['b.x'])
    """
    matching = {name: value for name, value in params.items() if predicate(name)}
    return matching, {name: value for name, value in params.items() if name not in matching}


def pick(params: Params, names: Iterable[str]) -> Params:
    """The tensors of these names, in the order of ``names``.

    >>> pick({"x": torch.zeros(1), "y": torch.ones(1)}, ["y"])
    {'y': tensor([1.])}
    """
    return {name: params[name] for name in names}


def tree_map(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply ``function`` to the tensors of the same name in all ``trees``.

    Raises:
        KeyError: the trees don't have the same names.

    >>> tree_map(torch.add, {"x": torch.ones(1)}, {"x": torch.ones(1)})
    {'x': tensor([2.])}
    """
    first, *others = trees
    for other in others:
        if other.keys() != first.keys():
            raise KeyError(f"trees differ in {sorted(other.keys() ^ first.keys())}")
    return {name: function(*(tree[name] for tree in trees)) for name in first}


def add(a: Params, b: Params) -> Params:
    """Return ``a + b``, name by name."""
    return tree_map(torch.add, a, b)


def subtract(a: Params, b: Params) -> Params:
    """Return ``a - b``, name by name."""
    return tree_map(torch.sub, a, b)


def scale(a: Params, factor: float | Tensor) -> Params:
    """Return ``factor * a``, name by name."""
    return {name: value * factor for name, value in a.items()}


@cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of numbers that is made once: what a GPU copies from memory it has to wait for."""
    return torch.tensor(values, dtype=dtype, device=device)


def stack(trees: Sequence[Params]) -> Params:
    """Stack c trees of equal shapes along a new leading axis.

    >>> stack([{"x": torch.zeros(2)}, {"x": torch.ones(2)}])["x"].shape
    torch.Size([2, 2])
    """
    return tree_map(lambda *values: torch.stack(values), *trees)


def row(stacked: Params, index: int) -> Params:
    """Return the tree at ``index`` of the leading axis, as views."""
    return {name: value[index] for name, value in stacked.items()}


def flat(params: Params) -> Tensor:
    """Concatenate all values to one vector ``[P]``.

    The values stand in the order of their sorted names, so that no result depends on the order in
    which a dict was filled.

    >>> flat({"y": torch.ones(1), "x": torch.zeros(1, 2)})
    tensor([0., 0., 1.])
    """
    return torch.cat([params[name].flatten() for name in sorted(params)])


def unflat(vector: Tensor, like: Params) -> Params:
    """Return views of ``vector`` ``[P]`` with the names and shapes of ``like``: `flat` undone."""
    names = sorted(like)
    parts = torch.split(vector, [like[name].numel() for name in names], dim=-1)
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def clone(params: Params) -> Params:
    """Copy every tensor."""
    return {name: value.clone() for name, value in params.items()}


def to_device(params: Params, device: torch.device) -> Params:
    """Return the tensors on ``device``; one that is there already is not copied."""
    return {**moved(params, device)}


def moved(tree: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and dicts to another kind of device, all by one
    copy: a GPU takes about as long for a small one as for a large one."""
    away = [x for x in leaves(tree) if isinstance(x, Tensor) and x.device.type != device.type]
    if not away:
        return tree
    is_host = away[0].device.type == "cpu"
    source: Any = {"pin_memory": True} if is_host else {"device": away[0].device}
    buffer = torch.empty(_ends(away)[-1], dtype=torch.uint8, **source)
    in_each("copy", apart(buffer, away), away)
    there = iter(apart(buffer.to(device, non_blocking=is_host), away))
    left = {id(x) for x in away}
    return map_leaves(lambda x: next(there) if id(x) in left else x, tree)


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """Where the bytes of each end, if each begins where a GPU's allocator would place it."""
    sizes = (-(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED for x in tensors)
    return list(accumulate(sizes))


def apart(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a ``buffer`` of bytes, of the types and shapes of the tensors ``like``.

    >>> one, two = torch.ones(3), torch.tensor(True)
    >>> views = apart(torch.zeros(1024, dtype=torch.uint8), [one, two])
    >>> views[1].copy_(two), views
    (tensor(True), [tensor([0., 0., 0.]), tensor(True)])
    """
    starts = (0, *_ends(like))
    return [
        buffer[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for start, x in zip(starts, like, strict=False)
    ]


def same_tensors(a: Params, b: Params) -> bool:
    """Say whether two trees hold the very same tensors by name, not only equal ones.

    >>> x = torch.zeros(1)
    >>> same_tensors({"x": x}, {"x": x}), same_tensors({"x": x}, {"x": x.clone()})
    (True, False)
    """
    return a is b or (a.keys() == b.keys() and all(a[name] is b[name] for name in a))


def count(params: Params) -> int:
    """Return the number of scalars.

    >>> count({"x": torch.zeros(3, 2)})
    6
    """
    return sum(value.numel() for value in params.values())


def not_finite(params: Params) -> str | None:
    """Return the first name whose tensor holds a value that is not finite; None if all are.

    >>> not_finite({"x": torch.ones(2), "y": torch.tensor([0.0, torch.inf])})
    'y'
    """
    return too_large(params, sys.float_info.max)


def too_large(params: Params, most: float) -> str | None:
    """Return the first name whose tensor holds a value above ``most`` in size, or one that is not
    finite; None if none does. Whole numbers, such as keys, may be of any size.

    >>> too_large({"x": torch.ones(2), "y": torch.tensor([0.0, -30.0])}, 20.0)
    'y'
    """
    if within(params, most):
        return None
    floats = {n: v for n, v in params.items() if v.is_floating_point() and v.numel()}
    return next((n for n, v in floats.items() if not (v.double().abs() <= most).all()), None)


def within(params: Params, most: float = sys.float_info.max) -> Tensor:
    """Return whether all norms are at most ``most``, a bool scalar; then all values are, and they
    are finite. It takes a twentieth of the time that a look at each value takes.

    >>> within({"x": torch.ones(2), "y": torch.tensor([0.0, torch.inf])})
    tensor(False)
    """
    norms = [
        torch.linalg.vector_norm(value).double()
        for value in params.values()
        if value.is_floating_point() and value.numel()
    ]
    return (torch.stack(norms) <= most).all() if norms else torch.ones((), dtype=torch.bool)


def add_prefix(params: Params, prefix: str) -> Params:
    """Put ``prefix`` before every name."""
    return {prefix + name: value for name, value in params.items()}


def strip_prefix(params: Params, prefix: str) -> Params:
    """Return the tensors whose name begins with ``prefix``, under the rest of their name."""
    return {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}


def encode(params: Params) -> bytes:
    """Return the wire form: safetensors bytes, for any dtype that safetensors knows."""
    memory: set[int] = set()
    separate: Params = {}
    for name, value in params.items():
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share their memory
        separate[name] = tensor.clone() if place in memory else tensor
        memory.add(place)
    data: bytes = save(separate)
    return data


def decode(data: bytes) -> Params:
    """Undo `encode`: names are sorted as in the file, and tensors are `aligned`."""
    return aligned(load(data))


def aligned(params: Params) -> Params:
    """Return the tensors, a copy of each that is not contiguous or doesn't begin at a multiple of
    64 bytes.

    PyTorch's allocator gives such memory. A view of a file, of a message or of another tensor may
    lie in memory in another way; on some processors the kernels then round differently. A resumed
    run, or one on several ranks, would not end with the same bits.
    """

    def one(value: Tensor) -> Tensor:
        is_plain = value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        return value if is_plain else value.clone(memory_format=torch.contiguous_format)

    return {name: one(value) for name, value in params.items()}
