"""Against every subset, on small problems; then the properties that hold for large ones."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedtailor.layers.block_sparse.blocks import block_sizes
from fedtailor.layers.block_sparse.knapsack import greedy, knapsack
from fedtailor.models.cnn import cnn


def best_value(G: list[float], W: list[int], capacity: int, always: list[bool]) -> float:
    """Over all subsets that hold what is always kept and fit."""
    values = []
    for chosen in product([False, True], repeat=len(G)):
        if any(a and not c for a, c in zip(always, chosen, strict=True)):
            continue
        if sum(w for w, c in zip(W, chosen, strict=True) if c) <= capacity:
            values.append(sum(g for g, c in zip(G, chosen, strict=True) if c))
    return max(values)


problems = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 40).map(lambda g: g / 8), min_size=n, max_size=n),
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.integers(0, 40),
    )
)


@pytest.mark.slow
@given(problems)
@example(([0.0, 0.0, 0.25, 0.375, 0.5], [0, 0, 0, 1, 5], [False] * 5, 5))
@settings(max_examples=150)
def test_no_subset_that_fits_is_worth_more(
    problem: tuple[list[float], list[int], list[bool], int],
) -> None:
    G, W, always, extra = problem
    capacity = sum(w for w, a in zip(W, always, strict=True) if a) + extra
    kept = knapsack(G, W, capacity, always)
    assert kept.dtype == bool
    assert np.array(W)[kept].sum() <= capacity
    assert kept[np.array(always)].all()
    assert np.array(G)[kept].sum() == pytest.approx(best_value(G, W, capacity, always))
    rough = greedy(G, W, capacity, always)
    assert np.array(W)[rough].sum() <= capacity
    assert rough[np.array(always)].all()


def test_exact_where_greedy_is_not() -> None:
    G, W = [7.0, 5.0, 5.0], [4, 3, 3]
    assert greedy(G, W, 6).tolist() == [True, False, False]
    assert knapsack(G, W, 6).tolist() == [False, True, True]


def test_of_equal_solutions_one_of_the_smallest() -> None:
    assert knapsack([1.0, 1.0], [5, 3], 5).tolist() == [False, True]
    assert not knapsack([0.0, -1.0], [0, 1], 5).any()  # worthless


def test_blocks_of_a_network_fit_exactly_and_at_once() -> None:
    """Ten tensors of five blocks, as the two-layer network has: a full budget keeps everything."""
    rng = np.random.default_rng(0)
    sizes = np.repeat([760, 30, 12160, 60, 380000, 400, 48000, 500, 190, 2], 5)
    G = rng.random(len(sizes))
    assert knapsack(G, sizes, int(sizes.sum())).all()
    for share in (0.1, 0.3, 0.5):
        capacity = int(share * sizes.sum())
        kept = knapsack(G, sizes, capacity)
        assert sizes[kept].sum() <= capacity
        assert G[kept].sum() >= G[greedy(G, sizes, capacity)].sum() - 1e-12


@pytest.mark.parametrize(("s", "paper"), [(0.5, 0.43), (0.3, 0.25)])
def test_the_papers_network_reaches_the_papers_sparsity(s: float, paper: float) -> None:
    """Its Table 1 says how much of s is used in the mean; that takes no training."""
    shapes = cnn((1, 28, 28), 10).parameters()
    sizes = [size for p in shapes for size in block_sizes(p.numel(), 5, 0.2)]
    d = sum(sizes)
    assert d == 2_171_786
    rng = np.random.default_rng(0)
    W, always = np.array(sizes), np.arange(len(sizes)) % 5 == 0
    used = [W[knapsack(rng.random(len(W)), W, int(s * d), always)].sum() / d for _ in range(20)]
    assert max(used) <= s
    assert np.mean(used) == pytest.approx(paper, abs=0.03)
