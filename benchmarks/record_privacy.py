"""What differential privacy of records costs a local step: DP-SGD beside plain training.

One client's `Method.local` on the same batches from the same state, on one thread; CPU time as in
`local_step.py`.

    OMP_NUM_THREADS=1 python benchmarks/record_privacy.py

writes benchmarks/results/record_privacy-cpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from local_step import (
    ADAM,
    SGD,
    Part,
    Run,
    from_pictures,
    local,
    measure,
    pictures,
    report,
    small_network,
    texts,
)

from fedtailor.engine.malloc import keep_freed_memory
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.models import ModelConfig, load_model
from fedtailor.optim import ClientContext
from fedtailor.params import DRAWN, Batch
from fedtailor.random import key
from fedtailor.task.records import RecordNoise, SampledBatch
from fedtailor.task.task import Task

OUT = Path(__file__).parent / "results" / "record_privacy-cpu"


def noised(method: Method, task: Task, steps: list[Batch], rows: int | None = None) -> Run:
    """The same as `local` by DP-SGD."""
    size = len(steps[0]["labels"])
    noise = RecordNoise(key(1), torch.tensor(float(size), dtype=torch.float64), 0.5, 0.4)
    context = ClientContext(key(0), micro_batch=rows, noise=noise)
    drawn = [{**batch, DRAWN: torch.ones(size)} for batch in steps]

    def run() -> object:
        batches: list[Batch] = [SampledBatch(b, at, 1) for at, b in enumerate(drawn)]
        return method.local(task, task.state, batches, context)

    return run


def parts() -> list[Part]:
    """LoRA in a transformer, and a whole network."""
    minilm = load_model(ModelConfig("minilm"), "classification", 20, 0)
    found = []
    for method, size in (
        (FedAvg(trainable="lora", optimiser=ADAM), 8),
        (FedAvg(trainable="lora", optimiser=ADAM), 32),
        (FedSDG(optimiser=ADAM), 8),
    ):
        task, steps = Task(minilm, method.adapt), texts([[64] * size], 64, padded=True)
        title = f"MiniLM, {method.name} with LoRA of rank 8, batch {size} of 64 tokens, Adam"
        runs = {"plain": local(method, task, steps), "DP-SGD": noised(method, task, steps)}
        found.append(Part(title, runs, len(steps)))
    method = FedAvg(optimiser=SGD)
    task, steps = Task(from_pictures(small_network()), method.adapt), pictures(5, 10, (3, 32, 32))
    runs = {"plain": local(method, task, steps), "DP-SGD": noised(method, task, steps)}
    return [*found, Part("CNN, 1.6 M parameters, batch 10 of 3 x 32 x 32, SGD", runs, len(steps))]


def main() -> None:
    """Run every part, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    load_before, results = os.getloadavg()[0], []
    for part in parts():
        results += measure(part, options.repeats)
        print(f"{part.title} done", file=sys.stderr)
    report(results, OUT, "DP-SGD beside a plain step", load_before)


if __name__ == "__main__":
    main()
