"""Blocks are numbered over all parameters; their values are taken out and put back."""

from itertools import product

import torch

from fedtailor.layers.block_sparse.blocks import Blocks, block_sizes


def test_a_parameter_is_cut_as_the_paper_says() -> None:
    assert block_sizes(100, 5, 0.1) == [10, 23, 23, 23, 21]
    assert block_sizes(7, 5, 0.1) == [0, 2, 2, 2, 1]
    assert block_sizes(1, 4, 0.5) == [0, 1, 0, 0]
    assert block_sizes(0, 3, 0.5) == [0, 0, 0]
    for numel, blocks, share in product(range(0, 60, 7), (2, 5, 10), (0.0, 0.05, 0.3, 1.0)):
        sizes = block_sizes(numel, blocks, share)
        assert (len(sizes), sum(sizes)) == (blocks, numel)
        assert sizes[0] == int(numel * share)


def test_blocks_are_numbered_over_all_parameters() -> None:
    blocks = Blocks(("a", "b"), ((2, 3), (0, 4)))
    assert blocks.W.tolist() == [2, 3, 0, 4]
    assert blocks.always.tolist() == [True, False, True, False]
    assert blocks.d == 9
    assert blocks.places == (
        ("a", slice(0, 2)),
        ("a", slice(2, 5)),
        ("b", slice(0, 0)),
        ("b", slice(0, 4)),
    )


def test_blocks_are_taken_out_and_put_back() -> None:
    blocks = Blocks(("a", "b"), ((1, 2, 3), (0, 2, 2)))
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(10.0, 14.0)}
    kept = (0, 2, 3, 4)
    joined = blocks.join(kept, state, {4: torch.tensor([-1.0, -2.0])})
    assert joined.tolist() == [0.0, 3.0, 4.0, 5.0, -1.0, -2.0]
    moved = blocks.split(kept, 10 * joined)
    whole = blocks.whole(state, moved)
    assert whole["a"].tolist() == [[0.0, 1.0, 2.0], [30.0, 40.0, 50.0]]
    assert whole["b"].tolist() == [-10.0, -20.0, 12.0, 13.0]
    across = {**state, "a": state["a"].mT.contiguous().mT}  # rows don't lie side by side
    assert blocks.whole(across, moved)["a"].equal(whole["a"])
    assert state["b"].tolist() == [10.0, 11.0, 12.0, 13.0]
    assert len(blocks.join((), state, {})) == 0


def test_each_block_has_weights_of_its_own_in_a_sum() -> None:
    blocks = Blocks(("a", "b"), ((1, 3), (0, 2)))
    a, b = torch.arange(8.0).view(2, 2, 2), torch.arange(4.0).view(2, 2)
    weights = torch.tensor([[1.0, 0.5, 9.0, 0.0], [2.0, 0.5, 9.0, 3.0]])
    sums = blocks.weighted_sum({"a": a, "b": b}, weights)
    assert sums["a"].tolist() == [[8.0, 3.0], [4.0, 5.0]]
    assert sums["b"].tolist() == [6.0, 9.0]
