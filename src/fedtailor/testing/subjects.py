"""What methods are checked on: small models, and ragged clients with made-up examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import random
from ..data.config import LocalConfig
from ..data.federation import Federation
from ..data.table import Dataset, Images, Partition, Shares, Tokens
from ..engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
from ..objectives import DEFAULT
from ..params import Batch
from ..task.backbone import Backbone

SIZES = (23, 3, 40, 1, 17)  # training examples: ragged, fewer than a batch, a single one
EQUAL = (16, 16, 16)  # of clients that are easy to learn from
_HELD_OUT = {"validation": 4, "test": 6}  # examples of each client
_CLASSES = 6
_VOCABULARY = 200

Make = Callable[[np.random.Generator, int], Any]


@dataclass(frozen=True)
class Subject:
    """A model, and clients of different sizes, on which a method runs ``plan``.

    The ``easy`` model has no dropout and the ``easy`` clients are of one size: there the loss must
    fall to ``falls_to`` of the first round's.
    """

    name: str
    backbone: Backbone
    federation: Federation
    plan: Plan
    easy_backbone: Backbone
    easy_federation: Federation
    falls_to: float = 0.95


def plan_of(rounds: int) -> Plan:
    """Return the plan of a check: ``rounds`` rounds of four clients, batches of 20, and one
    evaluation at the end."""
    return Plan(
        rounds,
        local=LocalConfig(batch_size=20),
        cohort=CohortConfig(size=4),
        engine=EngineConfig("sequential"),
        evaluate=EvaluateConfig(every=rounds),
    )


class SmallNet(nn.Module):
    """Convolution, batch normalisation, dropout and a head, for 8 x 8 pictures."""

    def __init__(self, num_classes: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(6 * 9, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits ``[b, classes]``."""
        x = torch.relu(self.norm(self.conv(pixel_values)))
        x = self.pool(x).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(self.dropout(x))))
        return logits


def small_net(num_classes: int, dropout: float = 0.2) -> Backbone:
    """Return `SmallNet` with random weights; its hidden layer is its one adaptable block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = SmallNet(num_classes, dropout)
    return Backbone(net, blocks=(("hidden",),), head=("head",), name="small network")


def small_bert(num_classes: int, vocabulary: int, dropout: float = 0.1) -> Backbone:
    """Return a BERT of two layers of width 32 with random weights. Token ids count modulo
    ``vocabulary``."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, num_labels=num_classes, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=dropout, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)

    def prepare(batch: Batch) -> dict[str, Any]:
        mask = (1 - batch["attention_mask"])[:, None, None] * torch.finfo(torch.float32).min
        return {"input_ids": batch["input_ids"] % vocabulary, "attention_mask": mask}

    blocks = tuple(
        (f"bert.encoder.layer.{i}.attention.output.dense", f"bert.encoder.layer.{i}.output.dense")
        for i in range(2)
    )
    return Backbone(model, DEFAULT, prepare, blocks=blocks, head=("classifier",), name="small BERT")


@cache
def pictures() -> Subject:
    """Return a convolutional network, and pictures of 8 x 8."""
    patterns = random.generator("testing", "patterns").integers(0, 256, (_CLASSES, 8, 8))

    def picture(rng: np.random.Generator, label: int) -> Any:
        return np.clip(patterns[label] + rng.normal(0, 40, (8, 8)), 0, 255).astype(np.uint8)

    def stack(examples: Sequence[Any]) -> Images:
        return Images(np.stack(examples)[:, None])

    return Subject(
        "pictures",
        small_net(_CLASSES),
        _federation(picture, stack, SIZES),
        plan_of(3),
        small_net(_CLASSES, dropout=0.0),
        _federation(picture, stack, EQUAL),
    )


@cache
def texts() -> Subject:
    """Return a transformer, and sequences of 4 to 24 tokens."""

    def text(rng: np.random.Generator, label: int) -> Any:
        own = np.arange(1, 9) + 8 * label  # eight tokens stand for each class
        return rng.choice(own, int(rng.integers(4, 25)))

    def pack(examples: Sequence[Any]) -> Tokens:
        offsets = np.cumsum([0, *map(len, examples)], dtype=np.int64)
        return Tokens(np.concatenate(examples).astype(np.uint16), offsets)

    return Subject(
        "texts",
        small_bert(_CLASSES, _VOCABULARY),
        _federation(text, pack, SIZES),
        plan_of(2),
        small_bert(_CLASSES, _VOCABULARY, dropout=0.0),
        _federation(text, pack, EQUAL),
        falls_to=0.98,
    )


def _federation(
    make: Make, pack: Callable[[Sequence[Any]], Images | Tokens], sizes: tuple[int, ...]
) -> Federation:
    """Clients with ``sizes`` training examples, of two neighbouring classes; client 1 of one."""
    rng = random.generator("testing", "examples")
    labels: list[int] = []
    parts: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    for client, size in enumerate(sizes):
        classes = [client, (client + 1) % _CLASSES][: 1 if client == 1 else 2]
        for name, count in {"train": size, **_HELD_OUT}.items():
            parts[name].append(np.arange(len(labels), len(labels) + count))
            labels += [classes[at % len(classes)] for at in range(count)]
    dataset = _dataset(make, pack, labels, rng)
    public = _dataset(make, pack, [at % _CLASSES for at in range(30)], rng)
    train, validation, test = (Shares.of(lists) for lists in parts.values())
    return Federation(dataset, Partition(train, validation, test, "testing"), public=public)


def _dataset(
    make: Make,
    pack: Callable[[Sequence[Any]], Images | Tokens],
    labels: Sequence[int],
    rng: np.random.Generator,
) -> Dataset:
    return Dataset(
        pack([make(rng, label) for label in labels]),
        len(labels),
        DEFAULT.name,
        labels=np.array(labels, np.int64),
        classes=tuple(map(str, range(_CLASSES))),
    )
