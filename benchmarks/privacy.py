"""What noise and masks cost: CPU seconds of a round as it is, and with each of them.

The rounds of four runs of one experiment take turns in one process; they differ in `[privacy]`
and `[secure_aggregation]` alone. None evaluates. The ratio is that of each round to the plain one
beside it.

    python -m benchmarks.privacy              # quickstart: LoRA on MiniLM, 20 clients
    python -m benchmarks.privacy --rounds 10 --model cnn

writes benchmarks/results/privacy-MODEL.md and .jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from benchmarks.harness import ROOT, circumstances, markdown, software, spread, versions, write

import fedtailor as ft
from fedtailor.engine.rounds import rounds
from fedtailor.methods.fedavg import FedAvg
from fedtailor.runs.build import Inputs

SETTINGS: Mapping[str, list[str]] = {
    "lora": [],
    "cnn": [
        "data.name=digits", "data.limit=none", "data.limit_test=none", "model.name=cnn",
        "model.pretrained=false", "model.image_size=28",
    ],
}  # fmt: skip


def main() -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", choices=SETTINGS, default="lora")
    options = parser.parse_args()
    load, (took, trained) = os.getloadavg()[0], measure(options.model, options.rounds)
    plain, rows, records = took["plain"], [], []
    for name, seconds in took.items():
        ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
        rows.append([name, spread(seconds, 3), spread(ratios, 3)])
        records.append({"run": name, "cpu_s": seconds, "ratio": statistics.median(ratios)})
    notes = circumstances(f"python -m benchmarks.privacy --model {options.model}", load)
    table = markdown(["", "CPU s a round", "of the plain one"], rows)
    text = f"20 clients, {trained:,} values each.\n\n{table}\n" + "\n".join(f"- {n}" for n in notes)
    text += f"\n- {software(versions('torch', 'numpy', 'cryptography'))}\n"
    print(text)
    write(ROOT / "benchmarks/results" / f"privacy-{options.model}", text, records)


def measure(model: str, count: int) -> tuple[dict[str, list[float]], int]:
    """The CPU seconds of ``count`` rounds of each run, after one that is not counted, and how many
    values a client sends."""
    torch.set_num_threads(1)
    experiment = ft.load("quickstart", SETTINGS[model])
    inputs = Inputs.load(experiment, None, None)
    federation = inputs.federations[0]
    method = experiment.methods["fedavg-lora"] if model == "lora" else FedAvg()
    task = inputs.task(method, 0)
    plain = replace(
        experiment.plan,
        rounds=count + 1,
        engine=replace(experiment.plan.engine, executor="sequential", device="cpu"),
        evaluate=replace(experiment.plan.evaluate, every=count + 1),
    )
    noise, masks = ft.PrivacyConfig(noise=1.0, clip=0.5), ft.SecureAggregationConfig(threshold=0.7)
    plans = {
        "plain": plain,
        "noise": replace(plain, privacy=noise),
        "masks": replace(plain, secure_aggregation=masks),
        "both": replace(plain, privacy=noise, secure_aggregation=masks),
    }
    runs = {name: rounds(method, task, federation, plan) for name, plan in plans.items()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(count):
        for name, run in runs.items():
            start = time.process_time()
            done = next(run)
            if number:
                took[name].append(time.process_time() - start)
            assert done.costs is not None
            trained = sum(done.costs.up.values()) // 4
    return took, trained


if __name__ == "__main__":
    main()
