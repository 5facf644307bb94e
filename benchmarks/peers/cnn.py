"""The work of `python -m benchmarks.peers cnn`: FedAvg on a small convolutional network.

1000 clients of 50 examples each, 50 of them a round, one epoch in batches of 10, SGD at 0.1. The
network is that of pfl-research's speed comparison: two convolutions of 3 x 3, one pooling, one
hidden layer of 128, dropout. The pictures are noise around a mean by class, so that there is
something to learn: test losses show whether contenders have done the same work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, EXAMPLES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1
TEST = 1000
_DATA = Path(__file__).parents[1] / ".cache" / "cnn"


def network() -> nn.Sequential:
    """1,626,442 parameters, the same ones at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        for module in model:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
    return model


def make() -> None:
    """Write the data, unless they are there."""
    if (_DATA / "labels.npy").is_file():
        return
    _DATA.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=CLIENTS * EXAMPLES + TEST)
    means = rng.normal(128, 40, (10, 3, 32, 32))
    shape = (len(labels), 3, 32, 32)
    pictures = np.lib.format.open_memmap(_DATA / "pictures.npy", "w+", np.uint8, shape)
    for start in range(0, len(labels), 1000):
        part = labels[start : start + 1000]
        noise = rng.normal(0, 40, (len(part), *shape[1:]))
        pictures[start : start + 1000] = (means[part] + noise).clip(0, 255)
    pictures.flush()
    np.save(_DATA / "labels.npy", labels)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 ``[N, 3, 32, 32]``, memory-mapped, and labels int64 ``[N]``. Client k has the
    rows from ``EXAMPLES * k`` on; the last `TEST` rows are for the test."""
    return np.load(_DATA / "pictures.npy", mmap_mode="r"), np.load(_DATA / "labels.npy")


def client(number: int) -> tuple[Tensor, Tensor]:
    """A client's pictures, scaled to [0, 1], and labels, shuffled anew at every call."""
    pictures, labels = data()
    order = torch.randperm(EXAMPLES)
    rows = slice(EXAMPLES * number, EXAMPLES * (number + 1))
    x = torch.from_numpy(np.array(pictures[rows]))[order] / 255
    return x, torch.from_numpy(labels[rows])[order]


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    """A client's batches of a round."""
    x, y = client(number)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def cohorts(size: int) -> Iterator[list[int]]:
    """The clients of round after round."""
    rng = np.random.default_rng(1)
    while True:
        yield rng.choice(CLIENTS, size, replace=False).tolist()


@torch.no_grad()
def test_loss(parameters: Sequence[np.ndarray]) -> float:
    """The mean cross-entropy on the test pictures of a network with these parameters."""
    model = network().eval()
    for own, value in zip(model.parameters(), parameters, strict=True):
        own.copy_(torch.from_numpy(value))
    pictures, labels = data()
    x = torch.from_numpy(np.array(pictures[-TEST:])) / 255
    return F.cross_entropy(model(x), torch.from_numpy(labels[-TEST:])).item()


def options() -> argparse.Namespace:
    """What `python -m benchmarks.peers` tells a contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--cohort", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--mode", default="", help="executor or pool, where there are several")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Stopwatch:
    """When rounds ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_ended(self) -> None:
        """Note the time."""
        self.ends.append(time.monotonic())


def report(out: Path, ends: Sequence[float], parameters: Sequence[Tensor], package: str) -> None:
    """Write what the driver reads: the times, the versions, and the trained parameters, in the
    order of the network's own."""
    names = [name for name in (package, "torch", "numpy") if name]
    versions = {name: version(name) for name in names}
    out.write_text(json.dumps({"ends": list(ends), "versions": versions}))
    np.savez(out.with_suffix(".npz"), *(value.detach().cpu().numpy() for value in parameters))
