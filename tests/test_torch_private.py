"""What stands in for PyTorch's private functions gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedtailor import random, torch_private


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool])
def test_words_are_the_same_without_a_view(dtype: torch.dtype) -> None:
    words = random.fold_in(random.key(3), torch.arange(35)).view(5, 7)
    if dtype == torch.bool:
        words = (words.view(torch.int8) & 1).view(torch.int64)
    expected = words.view(dtype)
    assert torch.equal(torch_private._shifted(words, dtype), expected)
    alike = torch.func.vmap(lambda x: torch_private.view_words(x, dtype))(words)
    assert torch.equal(alike, expected)


def test_a_transform_is_noticed_without_the_private_function() -> None:
    noticed = torch_private._leaves_are_refused
    assert not noticed()
    assert torch.func.vmap(lambda x: x + int(noticed()))(torch.zeros(2)).tolist() == [1, 1]
    assert torch.func.grad(lambda x: x * int(noticed()))(torch.tensor(2.0)) == 1


@pytest.mark.parametrize("fused", [torch._foreach_mul_, None])
def test_all_tensors_at_once(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_mul_", fused)
    out = [torch.ones(2), torch.full((1,), 4.0)]
    torch_private.in_each("mul", out, [2.0, 0.5])
    assert [value.tolist() for value in out] == [[2.0, 2.0], [2.0]]
