import mmap
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import Plan
from fedtailor.engine.costs import forget_peak_memory, peak_memory_mb, wire_bytes
from fedtailor.engine.prepare import first_costs
from fedtailor.layers.activations import tangent
from fedtailor.methods.fedavg import FedAvg
from fedtailor.params import encode
from fedtailor.task.task import Task
from fedtailor.torch_private import count_flops
from tests.small import digits_backbone, digits_federation

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(
            st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), min_size=1
        ),
        st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=5,
    )
)
def test_bytes_are_those_of_the_encoding(entries: dict) -> None:
    params = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in entries.items()}
    assert sum(wire_bytes(params).values()) == len(encode(params))


def test_nothing_costs_nothing() -> None:
    assert wire_bytes({}) == {}


def test_bytes_are_told_apart_by_dtype() -> None:
    found = wire_bytes({"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bool)})
    assert (found["float32"], found["bool"]) == (12, 5)


class Tangent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gelu = nn.GELU()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        value, slope = tangent(self.gelu, z)
        return value * slope


def test_operations_are_counted_where_a_forward_pass_takes_a_gradient() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Tangent()), nn.Linear(4, 5))
    x = torch.ones(2, 3)
    forward = 2 * (2 * 3 * 4 + 2 * 4 * 5)
    backward = 2 * 2 * (2 * 4 * 5) + 2 * (2 * 3 * 4)  # x itself needs no gradient
    assert count_flops(lambda: network(x).sum().backward()) == forward + backward


def test_the_peak_is_the_most_memory_that_was_resident_since_it_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / 1e6
    before = peak_memory_mb()
    assert before >= resident - 1
    block = mmap.mmap(-1, int((before - resident + 100) * 1e6))  # not from what malloc has kept
    np.frombuffer(block, np.uint8)[:] = 1
    after = peak_memory_mb()
    assert before + 90 < after < before + 150
    block.close()
    assert peak_memory_mb() >= after - 1
    forget_peak_memory()
    assert peak_memory_mb() < after - 90


def test_operations_of_a_step_are_a_mean_over_full_and_short_batches() -> None:
    task, local = Task(digits_backbone(), FedAvg().adapt), LocalConfig(batch_size=8)

    def flops(*sizes: int) -> int | None:
        return first_costs(FedAvg(), task, digits_federation(sizes), Plan(1, local)).flops

    assert flops(3, 12, 20) == flops(6)  # batches of 8 and of 4
    assert flops(3, 6, 20) == flops(6)
