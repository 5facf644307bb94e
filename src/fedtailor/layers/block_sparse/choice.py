"""Which blocks of a model are kept: a solver's choice, for one client or for several under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...torch_private import under_vmap

Solver = Callable[[NDArray[np.float64], int], NDArray[np.bool_]]
"""From importances ``[L]`` and a budget to the blocks that are kept, bool ``[L]``."""


class Choice(NamedTuple):
    """Which blocks are kept, bool ``[L]``; ``known`` is the same in Python, or None."""

    kept: Tensor
    known: tuple[bool, ...] | None


def choose(solve: Solver, importance: Tensor, budget: Tensor) -> Choice:
    """The blocks that ``solve`` keeps, by importances rounded to 2^-20.

    Python knows them for one client alone. Under ``torch.func.vmap`` the clients of a chunk keep
    different blocks, and products can't leave out the dropped ones.
    """
    if under_vmap():
        choice: Any = _Choice
        return Choice(choice.apply(importance, budget, solve), None)
    kept = _Choice.forward(importance, budget, solve)
    return Choice(kept, tuple(kept.tolist()))


class _Choice(torch.autograd.Function):
    """`choose` for several clients."""

    @staticmethod
    def forward(importance: Tensor, budget: Tensor, solve: Solver) -> Tensor:
        rounded = (importance.detach().double() * 2**20).round().cpu().numpy()
        return torch.from_numpy(solve(rounded, int(budget))).to(importance.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, importance: Tensor, budget: Tensor, solve: Solver
    ) -> tuple[Tensor, int]:
        importances, budgets = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((importance, in_dims[0]), (budget, in_dims[1]))
        )
        rows = zip(importances, budgets, strict=True)
        return torch.stack([_Choice.forward(G, s, solve) for G, s in rows]), 0
