"""Several examples in a row of tokens, so that less of a batch is padding.

A batch says where its examples go (`places`), and stays as it is otherwise: the model alone sees
packed rows, in which a token attends to its own example and has its position there. What the model
makes of a token goes back to its place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError, brief
from ..params import PACKED, Batch

_CHECKED = 8  # tokens of each text, at most
_CLOSE = 2e-2  # of the largest logit: rounding of bfloat16; another text in sight is far more


def places(lengths: NDArray[np.int64], part: int | None = None, width: int | None = None) -> Tensor:
    """Find few rows of a ``width`` (None: that of the longest) for examples of these ``lengths``.

    The longest goes first, and each into the first row that has room. Examples of another ``part``,
    so many after each other, share no rows.

    Returns:
        int64 ``[b, rows]``: one more than the column at which an example begins in its row, 0 in
        the others.

    >>> places(np.array([3, 5, 2]))
    tensor([[0, 1],
            [1, 0],
            [0, 4]])
    """
    size, width = len(lengths), width or int(lengths.max())
    found = torch.zeros(size, size, dtype=torch.int64)
    for start in range(0, size, part or size):
        ends = [0] * size
        some = np.arange(start, min(start + (part or size), size))
        for example in some[np.argsort(-lengths[some], kind="stable")]:
            row = next(r for r, end in enumerate(ends) if end + lengths[example] <= width)
            found[example, row] = ends[row] + 1
            ends[row] += int(lengths[example])
    return found[:, : int((found.any(0)).sum())]


class Packing:
    """The rows of a batch that says its examples' places."""

    def __init__(self, batch: Batch) -> None:
        real, at = batch["attention_mask"], batch[PACKED]
        size, self._width = real.shape
        self._rows = at.shape[1]
        none = self._rows * self._width
        cells = torch.arange(self._width, device=at.device)
        first = at.argmax(1) * self._width + at.amax(1) - 1
        is_there = (real > 0) & (at.amax(1) > 0)[:, None]
        self._cell = torch.where(is_there, first[:, None] + cells, none)  # of each token, [b, L]
        numbers = torch.arange(1, size * self._width + 1, device=at.device)
        of_cells = torch.zeros(none + 1, dtype=torch.int64, device=at.device)
        of_cells = of_cells.scatter(0, self._cell.flatten(), numbers)[:-1]
        self._token = of_cells.view(self._rows, self._width)  # in each cell; 0: none

    def inputs(self, batch: Batch) -> Batch:
        """Return the rows as a batch; ``segments`` are the numbers of the examples, 0: none."""
        real = (self._token > 0).to(batch["attention_mask"])
        before = (self._token - 1).clamp(min=0)
        return {
            "input_ids": self.pack(batch["input_ids"]),
            "attention_mask": real,
            "segments": (self._token + self._width - 1).div(self._width, rounding_mode="floor"),
            "position_ids": before.remainder(self._width),
        }

    def pack(self, values: Tensor, filler: int = 0) -> Tensor:
        """Return the ``[b, L, ...]`` values of the tokens in rows ``[rows, L, ...]``."""
        flat = values.flatten(0, 1)
        return torch.cat([torch.full_like(flat[:1], filler), flat])[self._token]

    def unpack(self, values: Tensor) -> Tensor:
        """Return ``[rows, L, ...]`` as ``[b, L, ...]``; what stands in padding means nothing."""
        return values.flatten(0, 1)[self._cell.clamp(max=self._rows * self._width - 1)]


def check_packing(logits: Callable[[Batch], Tensor], batch: Batch, name: str) -> None:
    """Check that a model reads two texts in a row as it reads each alone.

    Args:
        logits: of a batch, ``[b, L, outputs]``.
        batch: two examples.
        name: the model's.

    Raises:
        InputError: it does not, or takes no positions or no mask.
    """
    short = {n: batch[n][:2, :_CHECKED] for n in ("input_ids", "attention_mask")}
    real = short["attention_mask"] > 0
    wide = {n: F.pad(value, (0, real.shape[1])) for n, value in short.items()}
    at = places(np.full(2, real.shape[1]), width=2 * real.shape[1])
    why = ""
    try:
        with torch.no_grad():
            alone = logits(short)[real]
            together = logits({**wide, PACKED: at.to(real.device)})[:, : real.shape[1]][real]
    except (InputError, RuntimeError, TypeError, ValueError) as error:
        why = f" ({brief(str(error), 80)})"
    else:
        if (together - alone).abs().max() <= _CLOSE * alone.abs().max():
            return
    raise InputError(
        f"local.pack = true: model {name!r} doesn't read several texts in a row as it reads each "
        f"alone{why}; leave local.pack out"
    )
