"""Preferences are learned as TRL's DPOTrainer learns them: `make test-oracles` runs this."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from trl import DPOConfig, DPOTrainer

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.engine.rounds import rounds
from fedtailor.models import load_model
from fedtailor.models.chat import TEMPLATES
from tests.models.small import CAUSAL, save
from tests.oracles import LONG
from tests.oracles.test_trl import BATCH, LR, ROUNDS, UNMARKED, WORDS, conversations, tokenizer

# TRL calls what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is dep:FutureWarning")
BETA = 0.3
Pair = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]


class InOrder(DPOTrainer):
    """TRL's trainer, which takes the rows as they come and keeps the loss of each batch."""

    losses: list[float]

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


def rows(kind: str) -> list[dict[str, Any]]:
    """Prompts of one turn or several, and two answers to each."""
    draw = np.random.default_rng(1)
    found = []
    for number, chat in enumerate(conversations(3)):
        other = {"role": "assistant", "content": f"ward {draw.choice(WORDS)} {number % 7 * 'bed '}"}
        *before, chosen = chat
        if kind == "the prompt apart":
            found.append({"prompt": before, "chosen": [chosen], "rejected": [other]})
        else:
            found.append({"chosen": chat, "rejected": [*before, other]})
    return found


def theirs(row: Any) -> Pair:
    """Both sequences of a row of TRL's, and where the answers begin."""
    prompt = row["prompt_ids"]
    both = (tuple(prompt + row[name]) for name in ("chosen_ids", "rejected_ids"))
    return *both, (len(prompt), len(prompt))  # type: ignore[return-value]


def ours(batch: Any, row: int) -> Pair:
    sizes = batch["attention_mask"][row].sum(1).int().tolist()
    ids = [tuple(batch["input_ids"][row, side, :n].tolist()) for side, n in enumerate(sizes)]
    return ids[0], ids[1], tuple(batch["labels"][row].tolist())


@pytest.mark.parametrize("reference", ["base", "received"])
@pytest.mark.parametrize("kind", ["the prompt apart", "the prompt within"])
def test_the_loss_of_each_batch_and_the_weights_are_those_of_trl(
    kind: str, reference: str, tmp_path: Path
) -> None:
    """With the received model as the reference, each round is a training of its own."""
    words = tokenizer(TEMPLATES["chatml"] if kind == "the prompt apart" else UNMARKED)
    table = datasets.Dataset.from_list(rows(kind))
    folder = save(tmp_path / "model", LONG, CAUSAL)
    words.save_pretrained(folder)
    source = ft.Data.from_pandas(table.to_pandas(), task="preference")
    config = ft.DataConfig(max_length=96, beta=BETA, reference=reference)  # type: ignore[arg-type]
    dataset = source.load(source.config(config), words)
    federation = ft.Federation(dataset, partition(dataset, ft.SplitConfig(1), 0))
    backbone = load_model(ft.ModelConfig(str(folder)), dataset.objective, dataset.num_classes, 0)
    local = ft.LocalConfig(batch_size=BATCH, epochs=None, steps=2)
    method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=LR))
    task = ft.Task(backbone, method.adapt)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    def trainer(steps: int) -> InOrder:
        made = InOrder(
            model, copy.deepcopy(model), args=DPOConfig(
                str(tmp_path / "out"), beta=BETA, max_length=96, max_steps=steps,
                per_device_train_batch_size=BATCH, max_grad_norm=0.0, optim="sgd",
                learning_rate=LR, lr_scheduler_type="constant", bf16=False, use_cpu=True,
                report_to=[], disable_tqdm=True, gradient_checkpointing=None, save_strategy="no",
            ),
            train_dataset=table, processing_class=words,
        )  # fmt: skip
        made.losses = []
        return made

    drawn = [list(federation.batches(0, n, local)) for n in range(1, ROUNDS + 1)]
    if reference == "base":
        drawn = [[batch for of_round in drawn for batch in of_round]]
    losses = []
    for batches in drawn:
        one = trainer(len(batches))
        known = [theirs(row) for row in one.train_dataset]
        order = [
            known.index(ours(batch, row))
            for batch in batches
            for row in range(len(batch["labels"]))
        ]
        one.train_dataset = one.train_dataset.select(order)
        one.train()
        losses += one.losses
    done = list(rounds(method, task, federation, ft.Plan(ROUNDS, local)))
    of_rounds = np.array(losses).reshape(ROUNDS, 2).mean(1)
    assert [one.train_loss for one in done] == pytest.approx(of_rounds.tolist(), abs=1e-5)
    assert abs(of_rounds - np.log(2)).max() > 0.01
    after = model.state_dict()
    for name, value in done[-1].server.items():
        torch.testing.assert_close(value, after[name].cpu(), atol=1e-5, rtol=0)
