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
    solutions: list[NDArray[np.bool_]] = []
    choice: Any = _Choice
    run = choice.apply if under_vmap() else choice.forward
    kept: Tensor = run(importance, budget, solve, solutions)
    return Choice(kept, tuple(solutions[0].tolist()) if solutions else None)


def is_single_client(value: Tensor) -> bool:
    """Whether a tensor of a state is one client's, and not several clients' under vmap."""
    nothing = np.zeros(0, dtype=bool)
    return choose(lambda *_: nothing, value.double(), value).known is not None


class _Choice(torch.autograd.Function):
    """`choose`; the solution is appended to ``solutions`` if it is one client's."""

    @staticmethod
    def forward(
        importance: Tensor, budget: Tensor, solve: Solver, solutions: list[NDArray[np.bool_]]
    ) -> Tensor:
        rounded = (importance.detach().double() * 2**20).round().cpu().numpy()
        solutions.append(solve(rounded, int(budget)))
        return torch.from_numpy(solutions[-1]).to(importance.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        return None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, importance: Tensor, budget: Tensor, solve: Solver, solutions: Any
    ) -> tuple[Tensor, int]:
        importances, budgets = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((importance, in_dims[0]), (budget, in_dims[1]))
        )
        rows = zip(importances, budgets, strict=True)
        return torch.stack([_Choice.forward(G, s, solve, []) for G, s in rows]), 0
