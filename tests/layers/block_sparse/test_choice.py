"""A solver's choice, for one client and for several at once."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.layers.block_sparse.choice import Choice, choose


def largest(G: NDArray[np.float64], budget: int) -> NDArray[np.bool_]:
    return np.sort(G)[-budget] <= G


G = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.3]])
BUDGETS = torch.tensor([1, 2])
KEPT = [[False, True, False], [True, False, True]]


def test_one_clients_choice_is_known_in_python() -> None:
    for importance, budget, kept in zip(G, BUDGETS, KEPT, strict=True):
        choice = choose(largest, importance, budget)
        assert choice.kept.tolist() == kept
        assert choice.known == tuple(kept)


def test_several_clients_choose_each_for_themselves() -> None:
    choices: list[Choice] = []

    def kept(importance: Tensor, budget: Tensor) -> Tensor:
        choices.append(choose(largest, importance, budget))
        return choices[0].kept

    assert torch.func.vmap(kept)(G, BUDGETS).tolist() == KEPT
    assert choices[0].known is None
    one_budget = torch.func.vmap(lambda g: choose(largest, g, torch.tensor(1)).kept)(G)
    assert one_budget.tolist() == [[False, True, False], [True, False, False]]


def test_importances_that_differ_by_rounding_are_equal() -> None:
    def is_equal(G: NDArray[np.float64], budget: int) -> NDArray[np.bool_]:
        return G[0] == G

    importance = torch.tensor([0.5, 0.5 + 1e-7, 0.5 + 1e-5])
    assert choose(is_equal, importance, torch.tensor(1)).known == (True, True, False)
