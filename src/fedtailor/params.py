"""The algebra of states: flat dicts of tensors, keyed by dotted module names.

Every function is pure. "Stacked" params carry one more leading axis, usually the cohort's ``[c]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

Params = dict[str, Tensor]

GROUP = 64  # rows that are added up in `sums_in` before a sum goes on in float64
# values of so many rows of a panel: long runs, few calls; fewer where a panel is a copy; on a GPU
# as many as keep it busy
_VALUES, _VALUES_COPIED, _VALUES_GPU = 1 << 22, 1 << 20, 1 << 25


def split(params: Params, predicate: Callable[[str], bool]) -> tuple[Params, Params]:
    """Split by name into (those where ``predicate`` holds, the others).

    >>> kept, shared = split({"a.x": torch.zeros(1), "b.x": torch.zeros(1)}, lambda n: n[0] == "a")
    >>> list(kept), list(shared)
    (['a.x'], ['b.x'])
    """
    chosen = {name: value for name, value in params.items() if predicate(name)}
    return chosen, {name: value for name, value in params.items() if name not in chosen}


def tree_map(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply ``function`` to the tensors of the same name in all ``trees``.

    >>> tree_map(torch.add, {"x": torch.ones(1)}, {"x": torch.ones(1)})
    {'x': tensor([2.])}
    """
    first, *others = trees
    for other in others:
        if other.keys() != first.keys():
            raise KeyError(f"trees differ in {sorted(other.keys() ^ first.keys())}")
    return {name: function(*(tree[name] for tree in trees)) for name in first}


def add(a: Params, b: Params) -> Params:
    """``a + b``, name by name."""
    return tree_map(torch.add, a, b)


def subtract(a: Params, b: Params) -> Params:
    """``a - b``, name by name."""
    return tree_map(torch.sub, a, b)


def scale(a: Params, factor: float | Tensor) -> Params:
    """``factor * a``, name by name."""
    return {name: value * factor for name, value in a.items()}


def stack(trees: Sequence[Params]) -> Params:
    """Stack c trees of equal shapes along a new leading axis.

    >>> stack([{"x": torch.zeros(2)}, {"x": torch.ones(2)}])["x"].shape
    torch.Size([2, 2])
    """
    return tree_map(lambda *values: torch.stack(values), *trees)


def row(stacked: Params, index: int) -> Params:
    """The tree at ``index`` of the leading axis (views, no copy)."""
    return {name: value[index] for name, value in stacked.items()}


def panels(stacked: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The columns of ``[c, ...]`` a few at a time, as ``[c, columns]``, where they lie.

    What has been read of a panel once is in cache for a second look. Float32 and float64 stay what
    they are, other types become the one that holds them, if ``dtype`` doesn't say otherwise.

    >>> [panel.shape[1] for panel in panels(torch.zeros(64, 400, 400))]
    [53334, 53333, 53333]
    """
    table = stacked.flatten(1) if stacked.dim() > 1 else stacked[:, None]
    dtype = dtype or sums_in(table.dtype)
    values = _VALUES if table.dtype == dtype else _VALUES_COPIED
    values = values if stacked.device.type == "cpu" else _VALUES_GPU
    number = -(-table.shape[1] * min(len(table), GROUP) // values)
    return (panel.to(dtype) for panel in torch.tensor_split(table, max(1, number), dim=1))


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of ``dtype`` are added up, a few of them."""
    narrow = dtype.is_floating_point and dtype.itemsize <= 4
    return torch.float32 if narrow else torch.float64


def combine(weights: Tensor, panel: Tensor) -> Tensor:
    """``weights @ panel``, float64 ``[..., columns]``, ``weights`` being ``[..., c]``.

    >>> combine(torch.tensor([0.5, 0.5]), torch.tensor([[1.0], [3.0]]))
    tensor([2.], dtype=torch.float64)
    """
    shape = (*weights.shape[:-1], panel.shape[1])
    total = torch.zeros(shape, dtype=torch.float64, device=panel.device)
    parts = torch.split(weights.to(panel), GROUP, dim=-1), torch.split(panel, GROUP)
    for w, rows in zip(*parts, strict=True):
        total += w @ rows
    return total


def weighted_sum(stacked: Params, weights: Tensor) -> Params:
    """``sum_c weights[c] * stacked[c]`` in one read; ``weights`` is ``[c]``.

    Sums of 64 clients in float32 (float64 for float64), added up in float64.

    >>> weighted_sum({"x": torch.tensor([[1.0], [3.0]])}, torch.tensor([0.5, 0.5]))
    {'x': tensor([2.])}
    """

    def one(value: Tensor) -> Tensor:
        summed = [combine(weights, panel).to(value.dtype) for panel in panels(value)]
        return torch.cat(summed).view(value.shape[1:])

    return {name: one(value) for name, value in stacked.items()}


def flat(params: Params, leading: int = 0) -> Tensor:
    """All values as one vector ``[P]``, or ``[..., P]`` with ``leading`` axes, by sorted name.

    Numbers therefore never depend on the order in which a dict was filled.

    >>> flat({"x": torch.zeros(3, 2), "y": torch.zeros(3)}, leading=1).shape
    torch.Size([3, 3])
    """
    values = [params[name] for name in sorted(params)]
    return torch.cat(
        [v.flatten(leading) if v.dim() > leading else v[..., None] for v in values], dim=-1
    )


def unflat(vector: Tensor, like: Params) -> Params:
    """Views of ``vector`` ``[P]`` with the names and shapes of ``like``: the inverse of `flat`."""
    names = sorted(like)
    parts = torch.split(vector, [like[name].numel() for name in names], dim=-1)
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def clone(params: Params) -> Params:
    """Copies of the tensors."""
    return {name: value.clone() for name, value in params.items()}


def to_device(params: Params, device: torch.device) -> Params:
    """The same tensors on ``device``; not copied where they are there."""
    return {name: value.to(device) for name, value in params.items()}


def same_tensors(a: Params, b: Params) -> bool:
    """Whether two trees hold the very same tensors by name, not only equal ones.

    >>> x = torch.zeros(1)
    >>> same_tensors({"x": x}, {"x": x}), same_tensors({"x": x}, {"x": x.clone()})
    (True, False)
    """
    return a is b or (a.keys() == b.keys() and all(a[name] is b[name] for name in a))


def count(params: Params) -> int:
    """The number of scalars.

    >>> count({"x": torch.zeros(3, 2)})
    6
    """
    return sum(value.numel() for value in params.values())


def prefixed(params: Params, prefix: str) -> Params:
    """The same tensors under ``prefix + name``."""
    return {prefix + name: value for name, value in params.items()}


def under(params: Params, prefix: str) -> Params:
    """The tensors whose name starts with ``prefix``, without it: the inverse of `prefixed`."""
    return {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}


def encode(params: Params) -> bytes:
    """The wire form: safetensors bytes, any dtype that safetensors knows."""
    data: bytes = save({name: value.contiguous() for name, value in params.items()})
    return data


def decode(data: bytes) -> Params:
    """The inverse of `encode`, names sorted as in the file."""
    params: Params = load(data)
    return params
