"""Sums, products and distances of a cohort's tensors, stacked ``[c, ...]``.

Every function reads its tensors a few columns at a time, where they lie. Memory then doesn't grow
with the cohort, and what one pass has read is in cache for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from .params import Params

GROUP = 64  # rows that are added up in `accumulation_dtype` before a sum goes on in float64

# values of so many rows of a chunk: long runs, few calls; fewer where a chunk is a copy; on a GPU
# as many as keep it busy
_VALUES, _VALUES_COPIED, _VALUES_GPU = 1 << 22, 1 << 20, 1 << 25

# a squared distance that is so small beside the squared norms has lost six digits of sixteen
_LOST = 1e-6

_TILE = 16, 8192  # rows and columns that stay in cache for the second of two products


def column_chunks(stacked: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The columns of ``[c, ...]`` a few at a time, as ``[c, columns]``.

    Float32 and float64 keep their type and are not copied. Other types become the one that can add
    them up, unless ``dtype`` says which.

    >>> [chunk.shape[1] for chunk in column_chunks(torch.zeros(64, 400, 400))]
    [53334, 53333, 53333]
    """
    table = stacked.flatten(1) if stacked.dim() > 1 else stacked[:, None]
    dtype = dtype or accumulation_dtype(table.dtype)
    values = _VALUES if table.dtype == dtype else _VALUES_COPIED
    values = values if stacked.device.type == "cpu" else _VALUES_GPU
    number = -(-table.shape[1] * min(len(table), GROUP) // values)
    return (chunk.to(dtype) for chunk in torch.tensor_split(table, max(1, number), dim=1))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a few values of ``dtype`` are added up.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.int64)
    (torch.float32, torch.float64)
    """
    narrow = dtype.is_floating_point and dtype.itemsize <= 4
    return torch.float32 if narrow else torch.float64


def combine(weights: Tensor, chunk: Tensor) -> Tensor:
    """``weights @ chunk``, float64 ``[..., columns]``; ``weights`` is ``[..., c]``.

    >>> combine(torch.tensor([0.5, 0.5]), torch.tensor([[1.0], [3.0]]))
    tensor([2.], dtype=torch.float64)
    """
    shape = (*weights.shape[:-1], chunk.shape[1])
    total = torch.zeros(shape, dtype=torch.float64, device=chunk.device)
    parts = torch.split(weights.to(chunk), GROUP, dim=-1), torch.split(chunk, GROUP)
    for w, rows in zip(*parts, strict=True):
        total += w @ rows
    return total


def weighted_sum(stacked: Params, weights: Tensor) -> Params:
    """``sum_c weights[c] * stacked[c]`` in one read; ``weights`` is ``[c]``.

    >>> weighted_sum({"x": torch.tensor([[1.0], [3.0]])}, torch.tensor([0.5, 0.5]))
    {'x': tensor([2.])}
    """
    return {name: weighted_sums(value, weights) for name, value in stacked.items()}


def weighted_sums(stacked: Tensor, weights: Tensor) -> Tensor:
    """The sums of a tensor's rows ``[c, ...]`` by each row of ``weights`` ``[..., c]``.

    The values of 64 clients are added up in float32 (those of float64 in float64), and these sums
    in float64; the result is of the type of ``stacked``.

    >>> weighted_sums(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    tensor([[2.],
            [3.]])
    """
    summed = [combine(weights, chunk).to(stacked.dtype) for chunk in column_chunks(stacked)]
    return torch.cat(summed, -1).view((*weights.shape[:-1], *stacked.shape[1:]))


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and 0 where ``b`` is 0.

    >>> ratio(torch.ones(2), torch.tensor([0.0, 4.0]))
    tensor([0.0000, 0.2500])
    """
    return torch.where(b > 0, a / b, 0.0)


def products_with_mean(
    updates: Tensor | Params, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The inner product of every update with the updates' mean, and the norms of both: <update,
    mean> ``[c]``, ||update|| ``[c]`` and ||mean|| (scalar), all float64.

    ``updates`` are ``[c, P]``, one flat update a client, or tensors ``[c, ...]`` by name. The mean
    of a chunk is worked out, then the products while the chunk is in cache. Products are of
    ``dtype`` (None: the updates' own), their sums over the chunks float64.

    >>> dots, norms, mean_norm = products_with_mean(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    >>> dots.tolist(), norms.tolist(), round(mean_norm.item(), 4)
    ([14.0, 2.0], [5.0, 1.0], 2.8284)
    """
    tables = [updates] if isinstance(updates, Tensor) else [updates[n] for n in sorted(updates)]
    c, device = len(tables[0]), tables[0].device
    dots, squares = torch.zeros(2, c, dtype=torch.float64, device=device)
    mean_square = dots.new_zeros(())
    share = torch.full_like(dots, 1 / c)
    for chunk in (chunk for table in tables for chunk in column_chunks(table, dtype)):
        mean = combine(share, chunk)  # [columns]
        mean_square += mean @ mean
        dot, square = _products_and_squares(chunk, mean.to(chunk.dtype))
        dots += dot
        squares += square
    return dots, squares.sqrt(), mean_square.sqrt()


def _products_and_squares(chunk: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """``chunk @ vector`` and the squared norms of the rows, float64 ``[c]``."""
    if chunk.device.type != "cpu":
        return (chunk @ vector).double(), torch.linalg.vecdot(chunk, chunk).double()
    rows, columns = _TILE
    table, by = chunk.numpy(), vector.numpy()  # BLAS by NumPy, whose calls take less time
    starts = range(0, table.shape[1], columns)
    sums = np.empty((2, len(starts), len(table)), table.dtype)
    for (dots, squares), start in zip(sums.swapaxes(0, 1), starts, strict=True):
        part, by_part = table[:, start : start + columns], by[start : start + columns]
        for row in range(0, len(table), rows):
            tile = part[row : row + rows]
            np.matmul(tile, by_part, out=dots[row : row + rows])
            np.vecdot(tile, tile, out=squares[row : row + rows])
    dot, square = torch.from_numpy(sums.sum(1, dtype=np.float64))
    return dot, square


def products_with_offsets(updates: Tensor, models: Tensor) -> Tensor:
    """The inner products <models[j] - models[0], updates[i]>, float64 ``[m, d]``, of ``updates``
    ``[m, P]`` and ``models`` ``[d, P]``.

    Models that were trained from one start have a large part in common, whose products would round
    away what tells the models apart. So the first model is subtracted; the first column is 0.

    >>> products_with_offsets(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 5.0], [6.0, 7.0]]))
    tensor([[0., 5.]], dtype=torch.float64)
    """
    products = torch.zeros(len(updates), len(models), dtype=torch.float64, device=updates.device)
    start = 0
    for chunk in column_chunks(updates, torch.float64):
        part = models[:, start : start + chunk.shape[1]].double()
        products.addmm_(chunk, (part - part[:1]).T)
        start += chunk.shape[1]
    return products


def squared_distances(stacked: Params) -> Tensor:
    """||stacked[i] - stacked[j]||^2 over all tensors, float64 ``[c, c]``.

    They come from the inner products of the rows minus their mean, in one read, so that a large
    part that all rows share doesn't round the distances away. A row that is far from all others
    still does, since it moves the mean: then the median takes its place, in a second read. What is
    rounded away even so, as between two rows that are both far, is a sum of squared differences.

    >>> squared_distances({"x": torch.tensor([[1.0, 0.0], [1.0, 3.0]])})
    tensor([[0., 9.],
            [9., 0.]], dtype=torch.float64)
    """
    d2, lost = _distances_by_products(stacked, lambda chunk: chunk.mean(0))
    if lost.any():
        d2, lost = _distances_by_products(stacked, lambda chunk: chunk.median(0).values)
    for i, j in lost.triu(1).nonzero().tolist():
        rows = (torch.stack((value[i], value[j])) for value in stacked.values())
        parts = [
            (a - b).square().sum() for row in rows for a, b in column_chunks(row, torch.float64)
        ]
        d2[i, j] = d2[j, i] = torch.stack(parts).sum()
    return d2


def _distances_by_products(
    stacked: Params, centre: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The squared distances ``[c, c]`` from products of the rows minus their ``centre``, and which
    of them are rounded away; those are wrong."""
    first = next(iter(stacked.values()))
    gram = torch.zeros(len(first), len(first), dtype=torch.float64, device=first.device)
    for chunk in (chunk for v in stacked.values() for chunk in column_chunks(v, torch.float64)):
        centred = chunk - centre(chunk)  # [c, columns]
        gram.addmm_(centred, centred.T)
    squares = gram.diagonal()
    sums = squares[:, None] + squares
    d2 = (sums - 2 * gram).clamp(min=0).fill_diagonal_(0)
    return d2, ~(d2 >= _LOST * sums).fill_diagonal_(True)  # NaN is lost, too


def squared_distances_from(uploads: Params, centre: Params) -> Tensor:
    """||u_i - centre||^2, float64 ``[c]``; ``centre`` has tensors ``[...]`` by name."""
    first = next(iter(uploads.values()))
    total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for difference in _differences(uploads, centre):
        total += torch.linalg.vecdot(difference, difference)
    return total


def directions_from(uploads: Params, centre: Params) -> tuple[Tensor, Tensor]:
    """How far ``uploads``, stacked ``[c, ...]``, are from ``centre``, tensors ``[...]`` by name:
    r_i = ||u_i - centre||, float64 ``[c]``; and the products of their directions: <e_i, e_j> for
    e_i = (u_i - centre) / r_i (0 where r_i is 0), float64 ``[c, c]``."""
    r = squared_distances_from(uploads, centre).sqrt()
    products = torch.zeros(len(r), len(r), dtype=torch.float64, device=r.device)
    scale = torch.where(r > 0, 1 / r, 0.0)[:, None]
    for difference in _differences(uploads, centre):
        unit = scale * difference
        products.addmm_(unit, unit.T)
    return r, products


def _differences(uploads: Params, centre: Params) -> Iterator[Tensor]:
    """The uploads minus a centre, a few columns at a time. Differences are taken before they are
    squared or scaled: products of the uploads themselves would round away what is small beside an
    upload of 1e20 times the others."""
    for name, value in uploads.items():
        row, start = centre[name].reshape(-1), 0
        for chunk in column_chunks(value, torch.float64):
            stop = start + chunk.shape[1]
            yield chunk - row[start:stop].to(chunk)
            start = stop
