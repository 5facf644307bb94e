"""Memory and time of a training step of a language model, with each setting switched on.

SmolLM2-135M-Instruct with LoRA of rank 8 on one thread; Adam. Each contender is a process of its
own: a step on few tokens warms it up, then one step is measured: CPU time, and the memory that it
adds to what is held before it. The first batch has 4 rows of 256 tokens. The ragged one has 8 rows,
a third of whose 8 x 256 cells are tokens. Its packed rows are beside the same batch unpacked. In
conversations the last quarter of each row of the first batch is learned.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--at-once 2]

writes benchmarks/results/memory-cpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import circumstances, markdown, software, versions, write

from fedtailor.data.federation import pad_and_stack
from fedtailor.engine.costs import forget_peak_memory, peak_memory_mb
from fedtailor.methods.fedlora import FedLoRA
from fedtailor.models import ModelConfig, load_model
from fedtailor.objectives.objective import IGNORED
from fedtailor.optim import ClientContext
from fedtailor.params import PACKED, Batch
from fedtailor.random import key
from fedtailor.task.packing import Packing, places
from fedtailor.task.task import Task

OUT = Path(__file__).parent / "results" / "memory-cpu"
CONTENDERS: dict[str, dict[str, Any]] = {  # settings of the model, the task and the step
    "plain: eager attention, whole logits": {"attention": "eager", "whole": True},
    "fused attention, whole logits": {"whole": True},
    "the default: fused attention, logits in pieces": {},
    "the default, bf16": {"dtype": "bf16"},
    "the default, int8": {"quantise": "int8"},
    "the default, nf4": {"quantise": "nf4"},
    "the default, checkpointing": {"checkpointing": True},
    "the default, micro_batch = 1": {"micro_batch": 1},
    "bf16, checkpointing": {"dtype": "bf16", "checkpointing": True},
    "nf4, bf16, checkpointing, micro_batch = 1": {
        "quantise": "nf4", "dtype": "bf16", "checkpointing": True, "micro_batch": 1,
    },
    "conversations, whole logits": {"answers": True, "whole": True},
    "conversations, the default": {"answers": True},
    "PEFT, fused attention": {"peft": "float32"},
    "PEFT, fused attention, bf16": {"peft": "bfloat16"},
    "ragged, the default": {"ragged": True},
    "ragged, packed": {"ragged": True, "pack": True},
    "ragged, bf16, packed": {"ragged": True, "pack": True, "dtype": "bf16"},
    "PEFT, ragged": {"peft": "float32", "ragged": True},
    "PEFT, ragged, packed": {"peft": "float32", "ragged": True, "pack": True},
    "PEFT, ragged, bf16, packed": {"peft": "bfloat16", "ragged": True, "pack": True},
}  # fmt: skip


def batch_of(lengths: list[int]) -> Batch:
    """Random tokens in rows of these lengths, padded on the right."""
    draw = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = torch.from_numpy(draw.integers(100, 40_000, length))
        rows.append([{"input_ids": ids[None], "attention_mask": torch.ones(1, length)}])
    return {name: value[:, 0] for name, value in pad_and_stack(rows)[0].items() if name != "weight"}


def ours(settings: dict[str, Any]) -> tuple[Callable[[Batch], float], float]:
    """A step of fedtailor: from a batch to its loss; and the model's bytes."""
    config = {n: settings[n] for n in ("attention", "dtype", "quantise") if n in settings}
    kind = "instruct" if settings.get("answers") else "causal-lm"
    backbone = load_model(ModelConfig("smollm2-135m", **config), kind, 0, 0)
    method = FedLoRA(rank=8)
    task = Task(backbone, method.adapt, checkpointing=settings.get("checkpointing", False))
    if settings.get("whole"):
        task._head = None
    micro = settings.get("micro_batch")

    def step(batch: Batch) -> float:
        if settings.get("answers"):
            labels = batch["input_ids"].clone()
            labels[:, : labels.shape[1] * 3 // 4] = IGNORED
            batch = {**batch, "labels": labels}
        if settings.get("pack"):
            lengths = batch["attention_mask"].sum(1).long().numpy()
            batch = {**batch, PACKED: places(lengths, micro)}
        context = ClientContext(key(0), micro_batch=micro)
        return float(method.local(task, task.state, [batch], context)[1])

    tensors = [*task.model.parameters(), *task.model.buffers()]
    return step, sum(x.numel() * x.element_size() for x in tensors) / 1e6


def packed(batch: Batch) -> Batch:
    """The rows of the batch's examples, as transformers takes them: positions that restart say
    where an example begins; none of them predicts the first token of the next."""
    packing = Packing({**batch, PACKED: places(batch["attention_mask"].sum(1).long().numpy())})
    rows = packing.inputs(batch)
    is_learned = (rows["attention_mask"] > 0) & (rows["position_ids"] > 0)
    labels = rows["input_ids"].where(is_learned, IGNORED)
    return {"labels": labels, **{name: rows[name] for name in ("input_ids", "position_ids")}}


def theirs(dtype: str, *, pack: bool) -> tuple[Callable[[Batch], float], float]:
    """A step of a plain loop with PEFT; trained weights in float32."""
    import peft

    model: Any = load_model(ModelConfig("smollm2-135m"), "causal-lm", 0, 0).model
    model.set_attn_implementation("sdpa")
    model.config.use_cache = False  # with a cache rows are not seen to be packed
    model = model.to(getattr(torch, dtype))
    options = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["o_proj", "down_proj"])
    model = peft.get_peft_model(model, options).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-3)

    def step(batch: Batch) -> float:
        labels = batch["input_ids"].where(batch["attention_mask"] > 0, IGNORED)
        given = packed(batch) if pack else {**batch, "labels": labels}
        with torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16"):
            loss = model(**given).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    return step, sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def measure(name: str) -> dict[str, Any]:
    """One contender, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # PEFT's first weights
    settings = CONTENDERS[name]
    peft, pack = settings.get("peft"), "pack" in settings
    step, megabytes = theirs(peft, pack=pack) if peft else ours(settings)
    lengths = [256, 128, 96, 64, 48, 40, 32, 24] if settings.get("ragged") else [256] * 4
    step(batch_of([16, 12]))
    forget_peak_memory()
    held, start = peak_memory_mb(), time.process_time()
    loss = step(batch_of(lengths))
    seconds = time.process_time() - start
    return {
        "contender": name, "model_mb": megabytes, "added_mb": peak_memory_mb() - held,
        "cpu_s": seconds, "tokens_per_cpu_s": sum(lengths) / seconds, "loss": loss,
    }  # fmt: skip


def main() -> None:
    """Measure every contender in a process of its own, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at-once", type=int, default=1, help="processes at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    load = os.getloadavg()[0]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # else glibc keeps the pieces

    def alone(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(options.at_once) as pool:
        found = {one["contender"]: one for one in pool.map(alone, CONTENDERS)}
    rows = []
    for name, one in found.items():
        like = "ragged, the default" if CONTENDERS[name].get("ragged") else next(iter(CONTENDERS))
        first = found[like]
        rows.append(
            [
                name, f"{one['model_mb']:.0f}", f"{one['added_mb']:.0f}",
                f"{one['added_mb'] / first['added_mb']:.2f}", f"{one['cpu_s']:.1f}",
                f"{one['cpu_s'] / first['cpu_s']:.2f}", f"{one['tokens_per_cpu_s']:.0f}",
                f"{one['loss']:.4f}",
            ]
        )  # fmt: skip
    command = shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]])
    used = versions("fedtailor", "torch", "transformers", "peft")
    about = [
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load),
        software(used),
        "one step each; ratios are to the first row, and of ragged batches to the first of these",
    ]
    header = [
        "", "model MB", "added MB", "ratio", "CPU s", "ratio", "tokens a CPU s", "loss",
    ]  # fmt: skip
    text = "\n".join(f"- {line}" for line in about) + "\n\n" + markdown(header, rows)
    print(text)
    write(OUT, f"# A training step's memory and time\n\n{text}", [*found.values()])


if __name__ == "__main__":
    main()
