"""Messages between ranks, and what a rank must have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from fedtailor.engine.executors.process_group import ProcessGroup, init_process_group
from fedtailor.errors import InputError
from tests import forked
from tests.small import same_bits


@pytest.mark.slow
def test_any_tensor_gets_across(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4, generator=torch.manual_seed(0)).t(),
        "b": torch.tensor(True),
        "c": torch.empty(0, 5),
        "d": torch.arange(6, dtype=torch.float64).view(2, 3)[:, 1],
        "e": torch.arange(7).bfloat16(),
        "f": torch.tensor(2**62),
        "g": torch.arange(5_000_000),
    }
    message = {"tensors": tensors, "more": [1, "two", None]}

    def work() -> None:
        with init_process_group() as group:
            assert group is not None
            if group.is_leader:
                group.broadcast(message)
                group.send_to(1, message).wait()
                assert group.receive_from(1) is None
                return
            for back in (group.receive(), group.receive_from(0)):
                assert back["more"] == message["more"]
                assert same_bits(back["tensors"], tensors)
                assert all(back["tensors"][name].dtype == tensors[name].dtype for name in tensors)
            group.send_to(0, None).wait()

    said = tmp_path / "said"
    assert forked.run(2, work, said) == [0, 0], said.read_text()


@pytest.mark.parametrize(
    ("device", "local_size", "message"),
    [
        ("cuda:1", 1, "engine.device = 'cuda:1' is one GPU for 4 ranks; allowed: auto, cpu, cuda"),
        ("cuda", 4, r"4 ranks on .*, which has 0 GPUs; start 0 there|or set engine.device to cpu"),
    ],
)
def test_every_rank_needs_a_gpu_of_its_own(device: str, local_size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProcessGroup(0, 4, local_size, HashStore()).check_device(torch.device(device))


def test_one_process_has_no_link() -> None:
    with init_process_group() as group:
        assert group is None
