"""What FedSQ's caches save: the time of an epoch, against FedAvg that trains the same layers.

    python benchmarks/fedsq_caches.py [--examples N] [--repeats R] [--out FILE]

Every arm trains the same examples from the same state. Arms take turns: a busy machine slows them
all. What is reported is the median over turns of an arm's time divided by that of FedAvg
without a cache in the same turn, and the smallest and largest. Filling a cache is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from fedtailor.data import DataConfig
from fedtailor.data import load as load_data
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsq import FedSQ
from fedtailor.models import ModelConfig, load, load_tokenizer
from fedtailor.optim import Context, Optimiser
from fedtailor.precomputed import Precomputed
from fedtailor.random import key
from fedtailor.task import Backbone, Batch, Task

SGD = Optimiser(lr=1e-3)
LITE0_TOP = ("_conv_head", "_bn1", "_fc")
SCHEDULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Lite0, 2 blocks": ("efficientnet-lite0", ("_blocks.14", "_blocks.15", *LITE0_TOP)),
    "Lite0, 5 blocks": ("efficientnet-lite0", ("_blocks.1[1-5]", *LITE0_TOP)),
    "MiniLM, 2 layers": ("minilm", ("encoder.encoder.layer.[45]", "head")),
}
BASE = "fedavg"
ARMS: dict[str, tuple[type[FedAvg | FedSQ], dict[str, Any], bool]] = {
    BASE: (FedAvg, {}, False),
    "fedavg, features": (FedAvg, {}, True),
    "fedsq": (FedSQ, {}, False),
    "fedsq, masks": (FedSQ, {"cache": "masks"}, True),
    "fedsq, masks+features": (FedSQ, {"cache": "masks+features"}, True),
}


def main() -> None:
    """Run every schedule, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fedsq_caches.json"))
    options = parser.parse_args()
    rows = []
    for name, (model, layers) in SCHEDULES.items():
        for arm, found in measure(model, layers, options).items():
            rows.append({"schedule": name, "arm": arm, **found})
        print(f"{name} done", file=sys.stderr)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "versions": {n: version(n) for n in ("fedtailor", "torch", "numpy")},
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


def measure(model: str, layers: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """By arm: the ratio of its epoch to FedAvg's, and what its cache takes."""
    backbone, batches = prepare(model, options.examples, options.batch_size)
    epochs, filled = {}, {}
    for arm, (kind, fields, cached) in ARMS.items():
        method = kind(layers=layers, optimiser=SGD, **fields)
        task = Task(backbone, method.adapt)
        steps, filled[arm] = batches(method, task) if cached else (batches(None, task)[0], {})
        epochs[arm] = epoch(method, task, steps)
        epochs[arm]()  # warm up
    turns = []
    for _ in range(options.repeats):
        turns.append({arm: seconds(run) for arm, run in epochs.items()})
    found = {}
    for arm in ARMS:
        ratios = [turn[arm] / turn[BASE] for turn in turns]
        found[arm] = {
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "ms an example": 1000 * statistics.median(t[arm] for t in turns) / options.examples,
            **filled[arm],
        }
    return found


def prepare(model: str, examples: int, size: int) -> tuple[Backbone, Callable[..., Any]]:
    """The pretrained model, and a function that makes an epoch's batches with a method's cache."""
    config = ModelConfig(model, batch_norm="frozen" if model == "efficientnet-lite0" else "train")
    image = model == "efficientnet-lite0"
    data = DataConfig("fashion-mnist" if image else "20newsgroups", max_length=32)
    dataset = load_data(data, load_tokenizer(config))
    modality = "image" if image else "text"
    backbone = load(config, "classification", dataset.num_classes, 0, modality)
    parts = np.split(np.arange(examples), range(size, examples, size))

    def batches(method: Method | None, task: Task) -> tuple[list[Batch], dict[str, float]]:
        steps = [dataset.batch(rows) for rows in parts]
        if method is None:
            return steps, {}
        precomputed = Precomputed(lambda batch: method.precompute(task, batch), dataset)
        start = time.perf_counter()
        steps = [precomputed.add_to(batch, rows) for batch, rows in zip(steps, parts, strict=True)]
        spent = time.perf_counter() - start
        kept = [v for batch in steps for n, v in batch.items() if n.startswith("cached.")]
        held = sum(value.numel() * value.element_size() for value in kept)
        return steps, {"kB an example": held / 1e3 / examples, "fill, ms": 1e3 * spent / examples}

    return backbone, batches


def epoch(method: Method, task: Task, steps: list[Batch]) -> Callable[[], object]:
    """A client's local training, from the same state every time."""
    return lambda: method.local(task, task.state, steps, Context(key(0)))


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
