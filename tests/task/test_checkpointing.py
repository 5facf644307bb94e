"""Blocks that keep their inputs alone."""

from typing import Any

import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.checks import check
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from fedtailor.random import key
from fedtailor.task.task import Task
from tests import kinds
from tests.small import digits_backbone, digits_federation


def _server(kind: str, method: Any, executor: Any, precision: Any, checkpointing: bool) -> Any:
    plan = Plan(2, local=LocalConfig(batch_size=8), engine=EngineConfig(executor))
    backbone = kinds.backbone(kind)
    task = Task(backbone, method.adapt, precision=precision, checkpointing=checkpointing)
    *_, last = rounds(method, task, kinds.federation(kind, (9, 3, 12)), plan)
    return last.server


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("kind", "method", "precision"),
    [
        ("causal-lm", "fedsdg", "fp32"),
        ("instruct", "fedlora", "bf16"),
        ("seq2seq", "fedlora", "fp32"),
    ],
)
def test_a_run_gives_the_same(kind: str, method: str, precision: str, executor: str) -> None:
    plain, again = (
        _server(kind, METHODS[method](), executor, precision, checkpointing)
        for checkpointing in (False, True)
    )
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-7)


def _kept(task: Task, batch: Any) -> int:
    """Bytes of the tensors that a step's forward pass keeps, the model's own aside."""
    own = {v.data_ptr() for v in [*task.model.parameters(), *task.state.values()]}
    found: dict[int, int] = {}

    def keep(x: Any) -> Any:
        if x.data_ptr() not in own:
            found[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    theta = {name: task.state[name].clone().requires_grad_() for name in task.trained}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        task.loss(theta, batch, key(0))
    return sum(found.values())


def test_a_step_keeps_less() -> None:
    backbone, batch = (
        kinds.backbone("causal-lm"),
        kinds.data("causal-lm").batch(torch.arange(8).numpy()),
    )
    adapt = METHODS["fedlora"]().adapt
    plain, again = (_kept(Task(backbone, adapt, checkpointing=on), batch) for on in (False, True))
    assert again < 0.4 * plain


def test_what_can_not_run_twice_is_refused() -> None:
    plan = Plan(1, engine=EngineConfig(checkpointing=True))
    method = METHODS["fedsq"]()
    with pytest.raises(InputError, match="fedsq remembers what is computed inside"):
        check(method, Task(digits_backbone(), method.adapt), digits_federation(), plan)
    with pytest.raises(InputError, match="has no recognised transformer blocks"):
        Task(digits_backbone(), METHODS["fedavg"]().adapt, checkpointing=True)
