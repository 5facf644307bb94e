"""The most probable tokens, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.inference.generation import generate
from fedtailor.params import Batch

END = 9


def counting(batch: Batch) -> Tensor:
    """After token n comes n + 1."""
    return torch.nn.functional.one_hot((batch["input_ids"] + 1).clamp(max=END), 10).float()


def test_each_prompt_goes_on_from_its_own_end() -> None:
    prompts = [[1], [4, 5, 6], [2, 2]]
    assert generate(counting, prompts, 4, {END}, None) == [[2, 3, 4, 5], [7, 8], [3, 4, 5, 6]]
    assert generate(counting, prompts, 4, {END}, 4) == [[2, 3, 4], [7], [3, 4]]
    assert generate(counting, prompts, 0, {END}, None) == [[], [], []]


def test_a_prompt_as_long_as_the_model_reads_stays_as_it_is() -> None:
    def short(batch: Batch) -> Tensor:
        assert batch["input_ids"].shape[1] <= 3
        return counting(batch)

    assert generate(short, [[1, 2, 3], [1, 2]], 4, {END}, 3) == [[], [3]]
    assert generate(short, [[1, 2, 3]], 4, {END}, 3) == [[]]
