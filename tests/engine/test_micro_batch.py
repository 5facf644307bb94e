"""Steps that are computed on a few examples at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.checks import check
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.pfedme import PFedMe
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.task.task import Task
from tests import kinds
from tests.small import digits_backbone, digits_federation

FEDAVG = FedAvg(trainable="lora", optimiser=Optimiser("adam", lr=1e-2, eps=1e-3))


def _trained(kind: str, **settings: Any) -> Params:
    """The server's state after two rounds on clients of 9, 3 and 12 examples."""
    local = LocalConfig(batch_size=8, micro_batch=settings.pop("micro_batch", None))
    plan = Plan(2, local=local, engine=EngineConfig(**settings))
    task = Task(kinds.backbone(kind), FEDAVG.adapt)
    *_, last = rounds(FEDAVG, task, kinds.federation(kind, (9, 3, 12)), plan)
    return last.server


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal-lm", "question-answering", "token-classification"])
def test_every_token_counts_as_much_as_in_the_whole_batch(kind: str) -> None:
    whole = _trained(kind, executor="sequential")
    for executor in ("sequential", "vectorised"):
        parts = _trained(kind, executor=executor, micro_batch=3)
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=2e-6)


def test_what_needs_whole_batches_is_refused() -> None:
    with pytest.raises(InputError, match=r"micro_batch = 16 has no effect on .*batch_size = 16"):
        LocalConfig(micro_batch=16)
    plan = Plan(2, local=LocalConfig(micro_batch=2))
    federation, backbone = digits_federation(), digits_backbone()
    with pytest.raises(InputError, match="a step of pfedme needs its whole batch"):
        check(PFedMe(), Task(backbone, PFedMe().adapt), federation, plan)
    with pytest.raises(InputError, match=r"batch normalisation needs whole batches.*'frozen'"):
        check(FedAvg(), Task(backbone, FedAvg().adapt), federation, plan)
    frozen = Task(replace(backbone, batch_norm="frozen"), FedAvg().adapt)
    check(FedAvg(), frozen, federation, plan)
