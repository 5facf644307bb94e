"""Small real federations that many tests share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.data.table import Dataset, Images, Partition, Shares
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.private_states import MemoryStates
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.params import Params
from fedtailor.runs.experiment import Experiment, parse
from fedtailor.store.format import CHECKSUMS
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task


def two_methods() -> Experiment:
    """A round of two methods, one step for each of three clients."""
    content = {
        "rounds": 1,
        "methods": {"local": {}, "fedavg": {}},
        "split": {"clients": 3, "max_examples": 12},
        "local": {"steps": 1},
        "engine": {"executor": "sequential"},
    }
    return parse(content)


class DigitsNet(nn.Module):
    """Convolution, batch normalisation, dropout and a head, for 8 x 8 digits."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(6 * 9, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(pixel_values)))
        x = self.pool(x).flatten(1)
        return self.head(torch.relu(self.hidden(self.dropout(x))))


def digits_backbone(dropout: float = 0.2) -> Backbone:
    """One adaptable "block" (the hidden layer), so that LoRA methods run on it, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Backbone(
            DigitsNet(dropout), blocks=(("hidden",),), head=("head",), name="digits net"
        )


def check_all(method: Method, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
    """What the engine asks a method before the first round."""
    method.check_settings(num_clients, cohort_size, rounds)
    method.check(task, num_clients, cohort_size, rounds)


def digits() -> Dataset:
    data = load_digits()
    images = (data.images * 15).astype(np.uint8)[:, None]
    classes = [str(c) for c in range(10)]
    return Dataset(
        Images(images),
        len(images),
        "classification",
        "digits",
        data.target.astype(np.int64),
        classes,
    )


SIZES = (23, 3, 40, 1, 17)  # training examples: ragged, fewer than a batch, a single one


def digits_federation(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Federation:
    """Non-IID clients: client k draws from two neighbouring classes, client 1 from one alone."""
    dataset = digits()
    assert dataset.labels is not None
    rng = np.random.default_rng(0)
    taken: set[int] = set()
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for client, size in enumerate(sizes):
        classes = [client * 2 % 10] if client == 1 else [client * 2 % 10, (client * 2 + 1) % 10]
        pool = [i for i in rng.permutation(np.flatnonzero(np.isin(dataset.labels, classes)))
                if i not in taken]  # fmt: skip
        for name, count in (("train", size), ("validation", 4), ("test", 6)):
            rows, pool = pool[:count], pool[count:]
            taken |= set(rows)
            parts[name].append(np.array(rows, dtype=np.int64))
    shares = {name: Shares.of(lists) for name, lists in parts.items()}
    return Federation(dataset, Partition(**shares, digest="test"), seed, public=digits_public())


def reseeded(federation: Federation, seed: int) -> Federation:
    return replace(federation, seed=seed)


def digits_public() -> Dataset:
    """Forty digits that no client has: the last ones."""
    whole = digits()
    assert whole.labels is not None
    images = Images(whole.inputs.values[-40:])  # type: ignore[union-attr]
    return replace(whole, inputs=images, num_train=40, labels=whole.labels[-40:])


def last_round(
    method: Method, sizes: tuple[int, ...] = SIZES, **plan: Any
) -> tuple[Round, MemoryStates]:
    """The last of a few rounds (2 unless told) of all clients on the digits, in one process unless
    told, and what they keep."""
    task = Task(digits_backbone(), method.adapt)
    federation = digits_federation(sizes)
    store = memory_states(method, task, federation)
    chosen = Plan(
        **{
            "rounds": 2,
            "local": LocalConfig(batch_size=8),
            "engine": EngineConfig("sequential"),
            **plan,
        }
    )
    *_, last = rounds(method, task, federation, chosen, store=store)
    return last, store


def same_bits(a: Params, b: Params) -> bool:
    """Whether two states have the same names and the same values, to the bit."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def without_checksum(path: Path) -> Path:
    """Take the checksum out of a JSON file, so that a test may change the file."""
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content, indent=2))
    return path


def private_rows(path: Path) -> Params:
    """All clients' private states in a run directory, without their checksums."""
    rows = load_file(path)
    del rows[CHECKSUMS]
    return rows
