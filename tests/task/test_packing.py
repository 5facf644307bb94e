"""Batches whose examples share rows of tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from fedtailor.data.config import LocalConfig
from fedtailor.engine.checks import check
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from fedtailor.models import ModelConfig, from_module, load_model
from fedtailor.params import PACKED
from fedtailor.task.packing import Packing, check_packing, places
from fedtailor.task.task import Task
from tests import kinds
from tests.models.small import save

FEDLORA = METHODS["fedlora"]()


def _server(kind: str, executor: Any, pack: bool, **settings: Any) -> Any:
    local = LocalConfig(batch_size=8, pack=pack, micro_batch=settings.pop("micro_batch", None))
    plan = Plan(2, local=local, engine=EngineConfig(executor))
    task = Task(kinds.backbone(kind), FEDLORA.adapt, **settings)
    *_, last = rounds(FEDLORA, task, kinds.federation(kind, (9, 3, 12)), plan)
    return last.server


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("instruct", {}), ("causal-lm", {"micro_batch": 3, "checkpointing": True})],
)
def test_a_packed_run_gives_the_same(kind: str, settings: Any, executor: str) -> None:
    plain, packed = (_server(kind, executor, False), _server(kind, executor, True, **settings))
    for name, value in plain.items():
        torch.testing.assert_close(packed[name], value, rtol=0, atol=1e-7)


def test_tokens_of_an_example_stay_together() -> None:
    lengths = np.array([4, 2, 5, 1, 3])
    batch = {
        "input_ids": torch.arange(1, 26).view(5, 5),
        "attention_mask": (torch.arange(5) < torch.tensor(lengths)[:, None]).float(),
    }
    packing = Packing({**batch, PACKED: places(lengths)})
    rows = packing.inputs(batch)
    assert rows["input_ids"].tolist() == [
        [11, 12, 13, 14, 15],
        [1, 2, 3, 4, 16],
        [21, 22, 23, 6, 7],
    ]
    assert rows["segments"].tolist() == [[3] * 5, [1] * 4 + [4], [5] * 3 + [2] * 2]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    real = batch["attention_mask"] > 0
    assert torch.equal(packing.unpack(rows["input_ids"])[real], batch["input_ids"][real])
    apart = places(lengths, part=2)  # 4 and 2, 5 and 1, 3
    assert [int(apart[rows].any(0).sum()) for rows in (slice(0, 2), slice(2, 4))] == [2, 2]
    assert places(lengths, part=5).shape == (5, 3)


class _NoPositions(nn.Module):
    """A model whose word depends on those before it, in the next text, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 40)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        result: torch.Tensor = self.out(self.embed(input_ids).cumsum(1))
        return result


def test_a_model_that_reads_texts_together_is_refused(tmp_path: Path) -> None:
    batch = kinds.data("causal-lm").batch(np.arange(2))
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=40, vocab_size=40, attn_pdrop=0.0
    )
    save(tmp_path / "gpt2", config, "AutoModelForCausalLM")
    for settings in ({}, {"attention": "eager"}, {"dtype": "bf16"}):
        model = ModelConfig(str(tmp_path / "gpt2"), **settings)
        task = Task(load_model(model, "causal-lm", 0, 0), FEDLORA.adapt)
        check_packing(partial(task.logits, task.state), batch, "gpt2")
    own = Task(from_module(_NoPositions(), "causal-lm"))
    with pytest.raises(InputError, match="model 'own' doesn't read several texts in a row"):
        check_packing(partial(own.logits, own.state), batch, "own")


def test_a_kind_without_texts_to_go_on_from_is_refused() -> None:
    plan = Plan(1, local=LocalConfig(pack=True))
    task = Task(kinds.backbone("classification"), METHODS["fedavg"]().adapt)
    with pytest.raises(InputError, match=r"'classification' can't share a row .* causal-lm, inst"):
        check(METHODS["fedavg"](), task, kinds.federation("classification", (4, 4)), plan)
    with pytest.raises(InputError, match="no effect on one example at a time"):
        LocalConfig(pack=True, micro_batch=1)
