"""Conversations are learned as TRL's SFTTrainer learns them: `make test-oracles` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.engine.rounds import rounds
from fedtailor.models import load_model
from fedtailor.models.chat import TEMPLATES
from tests.models.small import CAUSAL, save
from tests.oracles import LONG

WORDS = "a ward has bed for each patient who came in by night and left at noon".split()  # noqa: SIM905
ROLES = ["system", "user", "assistant"]
UNMARKED = TEMPLATES["chatml"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
LR, ROUNDS, BATCH = 0.5, 3, 8


def tokenizer(template: str) -> Any:
    """One that knows the words above; a new line is a token, too."""
    special = ["[PAD]", "<|im_start|>", "<|im_end|>", "[UNK]"]
    vocabulary = {word: at for at, word in enumerate([*special, "\n", *ROLES, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="<|im_end|>", unk_token="[UNK]",
        additional_special_tokens=["<|im_start|>"], chat_template=template,
    )  # fmt: skip


def conversations(most_turns: int) -> list[list[dict[str, str]]]:
    """Of one turn or several, half of them with a system prompt."""
    draw = np.random.default_rng(0)

    def say(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choice(WORDS, draw.integers(1, 6)))}

    return [
        [
            say(one)
            for one in (ROLES[:1] * (number % 2) + ROLES[1:] * draw.integers(1, most_turns + 1))
        ]
        for number in range(60)
    ]


class InOrder(SFTTrainer):
    """TRL's trainer, which takes the examples as they come and keeps the loss of each batch."""

    losses: list[float]

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


def trained(ids: Any, labels: Any) -> tuple[tuple[int, ...], dict[int, int]]:
    """The tokens of an example up to the last that is trained, and the trained ones by place."""
    of = {at: int(label) for at, label in enumerate(labels) if label != -100}
    return tuple(map(int, ids[: max(of) + 1])), of


@pytest.mark.parametrize("kind", ["messages", "prompt and completion"])
def test_the_loss_of_each_batch_and_the_weights_are_those_of_trl(kind: str, tmp_path: Path) -> None:
    by_marks = kind == "messages"
    words = tokenizer(TEMPLATES["chatml"] if by_marks else UNMARKED)
    chats = conversations(3 if by_marks else 1)
    rows = [
        {"messages": one} if by_marks else {"prompt": one[:-1], "completion": one[-1:]}
        for one in chats
    ]
    folder = save(tmp_path / "model", LONG, CAUSAL)
    words.save_pretrained(folder)
    source = ft.Data.from_pandas(datasets.Dataset.from_list(rows).to_pandas(), task="instruct")
    dataset = source.load(source.config(ft.DataConfig(max_length=64)), words)
    federation = ft.Federation(dataset, partition(dataset, ft.SplitConfig(1), 0))
    backbone = load_model(ft.ModelConfig(str(folder)), dataset.objective, dataset.num_classes, 0)
    local = ft.LocalConfig(batch_size=BATCH, epochs=None, steps=1)
    method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=LR))
    task = ft.Task(backbone, method.adapt)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    trainer = InOrder(
        model,
        SFTConfig(
            str(tmp_path / "out"), assistant_only_loss=by_marks, max_length=64, max_steps=ROUNDS,
            per_device_train_batch_size=BATCH, max_grad_norm=0.0, optim="sgd", learning_rate=LR,
            lr_scheduler_type="constant", bf16=False, use_cpu=True, report_to=[], disable_tqdm=True,
            gradient_checkpointing=None, save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words,
    )  # fmt: skip
    line_end = words.convert_tokens_to_ids("\n")

    def as_ours(one: dict[str, Any]) -> dict[str, Any]:  # the line end behind a turn is not learned
        *labels, last = one["labels"]
        return {**one, "labels": [*labels, -100 if last == line_end else last]}

    trainer.train_dataset = trainer.train_dataset.map(as_ours)
    theirs = [trained(one["input_ids"], one["labels"]) for one in trainer.train_dataset]
    drawn = [one for n in range(1, ROUNDS + 1) for one in federation.batches(0, n, local)]
    ours = [
        trained(*one)
        for batch in drawn
        for one in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    trainer.train_dataset = trainer.train_dataset.select([theirs.index(one) for one in ours])
    trainer.losses = []
    trainer.train()
    done = list(rounds(method, task, federation, ft.Plan(ROUNDS, local)))
    assert [one.train_loss for one in done] == pytest.approx(trainer.losses, abs=1e-5)
    after = model.state_dict()
    for name, value in done[-1].server.items():
        torch.testing.assert_close(value, after[name].cpu(), atol=1e-5, rtol=0)
