"""Texts that a model writes: fedtailor beside transformers' generate, and without keys and values.

SmolLM2-135M-Instruct with LoRA of rank 8 on one thread; transformers has the same weights merged,
eager attention or PyTorch's. The contenders take turns in one process; time is CPU time of the
process, and a ratio is taken within a turn. All must write the same tokens.

    OMP_NUM_THREADS=1 python benchmarks/generation.py

writes benchmarks/results/generation-cpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch
from harness import circumstances, markdown, software, spread, versions, write

from fedtailor.engine.malloc import keep_freed_memory
from fedtailor.methods.fedlora import FedLoRA
from fedtailor.models import ModelConfig, load_model
from fedtailor.task.task import Task
from fedtailor.task.writing import write as write_texts

OUT = Path(__file__).parent / "results" / "generation-cpu"
TOPICS = ["river", "winter", "bread", "music", "harbour", "engine", "garden", "letter"]


def main() -> None:
    """Let the contenders take turns, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    load_before = os.getloadavg()[0]
    backbone = load_model(ModelConfig("smollm2-135m"), "instruct", 0, 0)
    method = FedLoRA(rank=8)
    task = Task(backbone, method.adapt)
    prompts = [
        backbone.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Tell me about the {topic}. " * (1 + at)}],
            add_generation_prompt=True, return_dict=False,
        )
        for at, topic in enumerate(TOPICS)
    ]  # fmt: skip
    logits = partial(method.predict, task, task.state)
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs = load_model(ModelConfig("smollm2-135m"), "instruct", 0, 0).model
    theirs.config.use_cache = True

    def generate(attention: str) -> list[list[int]]:
        theirs.set_attn_implementation(attention)
        found = theirs.generate(
            input_ids=ids, attention_mask=real, max_new_tokens=options.tokens, do_sample=False,
            eos_token_id=[*backbone.ends], pad_token_id=0,
        )[:, length:].tolist()  # fmt: skip
        return [
            row[: next((at for at, token in enumerate(row) if token in backbone.ends), len(row))]
            for row in found
        ]

    most = options.tokens
    contenders = {
        "transformers, SDPA": partial(generate, "sdpa"),
        "transformers, eager": partial(generate, "eager"),
        "fedtailor": partial(write_texts, task, logits, prompts, most),
        "fedtailor, the whole text for each token": partial(
            write_texts, task, logits, prompts, most, keeps=False
        ),
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    texts = {}
    slow = "fedtailor, the whole text for each token"  # one turn is enough
    with torch.no_grad():
        for repeat in range(options.repeats):
            names = [name for name in contenders if name != slow or repeat == 0]
            at = repeat % len(names)
            for name in names[at:] + names[:at]:
                start = time.process_time()
                texts[name] = contenders[name]()
                spent[name].append(time.process_time() - start)
    first = spent["transformers, SDPA"]
    rows, records = [], []
    found_versions = versions("fedtailor", "torch", "transformers")
    for name, seconds in spent.items():
        ratios = [own / base for own, base in zip(seconds, first, strict=False)]
        same = sum(a == b for a, b in zip(texts[name], texts["transformers, SDPA"], strict=True))
        rows.append([name, spread(seconds), spread(ratios), f"{same} of {len(prompts)}"])
        records.append({**found_versions, "contender": name, "cpu_s": seconds, "ratios": ratios})
    command = shlex.join(["python", "benchmarks/generation.py", *sys.argv[1:]])
    about = [
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load_before),
        software(found_versions),
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {length} tokens, at most {most} "
        "tokens each; medians of turns (first to third quartile)",
    ]
    header = ["", "CPU s", "of the first", "same texts"]
    text = "\n".join(f"- {line}" for line in about) + "\n\n" + markdown(header, rows)
    print(text)
    write(OUT, f"# Texts that a model writes\n\n{text}", records)


if __name__ == "__main__":
    main()
