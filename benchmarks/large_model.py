"""The memory of a training step of an 8 B model, worked out from 1 and 3 of its layers.

The shapes are Qwen3-8B's, with random weights; LoRA of rank 16 on all linear layers of the blocks.
A step on one text of so many tokens takes this much more for each layer, so the whole takes that of
one layer and 35 times the difference. Each contender is a process of its own, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/large_model.py [--tokens 512]

writes benchmarks/results/large-model-cpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import circumstances, markdown, software, versions, write
from memory import batch_of

from fedtailor.engine.costs import forget_peak_memory, peak_memory_mb
from fedtailor.methods.fedlora import FedLoRA
from fedtailor.models import ModelConfig, load_model
from fedtailor.optim import ClientContext
from fedtailor.random import key
from fedtailor.task.task import Task

OUT = Path(__file__).parent / "results" / "large-model-cpu"
LAYERS = 36
FEW, MORE = 1, 3
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "bf16, checkpointing": {"dtype": "bf16", "checkpointing": True},
    "int8, bf16, checkpointing": {"dtype": "bf16", "quantise": "int8", "checkpointing": True},
    "nf4, bf16, checkpointing": {"dtype": "bf16", "quantise": "nf4", "checkpointing": True},
}


def measure(name: str, layers: int, tokens: int) -> dict[str, float]:
    """The bytes of a model with so many layers, and what one step adds, in MB."""
    from transformers import Qwen3Config

    torch.set_num_threads(1)
    settings = dict(CONTENDERS[name])
    checkpointing = settings.pop("checkpointing", False)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**SHAPE, num_hidden_layers=layers).save_pretrained(folder)  # type: ignore[arg-type]
        config = ModelConfig(folder, pretrained=False, targets=("all-linear",), **settings)
        backbone = load_model(config, "causal-lm", 0, 0)
    method = FedLoRA(rank=16)
    task = Task(backbone, method.adapt, checkpointing=checkpointing)
    context = ClientContext(key(0))
    method.local(task, task.state, [batch_of([8])], context)
    forget_peak_memory()
    held = peak_memory_mb()
    method.local(task, task.state, [batch_of([tokens])], context)
    tensors = [*task.model.parameters(), *task.model.buffers()]
    weights = sum(x.numel() * x.element_size() for x in tensors) / 1e6
    return {"weights": weights, "step": peak_memory_mb() - held}


def main() -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="of the text; default: 512")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.tokens)))
        return
    load = os.getloadavg()[0]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    found, rows = [], []
    for name in CONTENDERS:
        sizes = []
        for layers in (FEW, MORE):
            given = ["--tokens", str(options.tokens), "--one", name, str(layers)]
            command = [sys.executable, __file__, *given]
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=True
            )
            sizes.append(json.loads(done.stdout.splitlines()[-1]))
        few, more = sizes
        rest = (LAYERS - FEW) / (MORE - FEW)
        whole = {n: (few[n] + rest * (more[n] - few[n])) / 1e3 for n in few}
        found.append({"contender": name, "tokens": options.tokens, "measured_mb": sizes, **whole})
        print(found[-1], file=sys.stderr, flush=True)
        rows.append([name, *(f"{value:.1f}" for value in (*whole.values(), sum(whole.values())))])
    about = [
        *circumstances("OMP_NUM_THREADS=1 python benchmarks/large_model.py", load),
        software(versions("fedtailor", "torch", "transformers")),
        f"one text of {options.tokens} tokens, LoRA of rank 16 on all linear layers",
        f"measured with {FEW} and {MORE} layers of {LAYERS}; the rest is worked out",
    ]
    table = markdown(["", "weights GB", "step GB", "together GB"], rows)
    text = "\n".join(f"- {line}" for line in about) + f"\n\n{table}"
    print(text)
    write(OUT, f"# The memory of an 8 B model\n\n{text}", found)


if __name__ == "__main__":
    main()
