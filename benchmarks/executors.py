"""What a round takes under each executor, against bare PyTorch in as many processes.

- cnn: 1000 clients x 50 random pictures of 3 x 32 x 32, batches of 10, one epoch, SGD at 0.1, two
  convolutions with dropout (1,626,442 parameters), FedAvg on all of them.
- lora: FedAvg on LoRA (rank 8) in a random model of MiniLM's shape, 4 steps of 8 x 64 tokens, Adam.

Bare PyTorch (with PEFT for LoRA) is one model a process, loaded with the server's parameters for
each client; the trained ones are summed up in shared memory. Every contender runs in a process of
its own, a fresh one each repeat, and the repeats of all take turns; one thread a process. Of a run
the first round is left out. CPU time is that of the whole process tree, and says more than wall
time on a machine with other work. Memory is the tree's proportional set size (Linux's PSS), sampled
from outside.

    OMP_NUM_THREADS=1 python benchmarks/executors.py

writes benchmarks/results/executors-cpu.jsonl, a line a process, and the table beside.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import circumstances, software, spread, versions, write

OUT = Path(__file__).parent / "results" / "executors-cpu"
CONTENDERS = ("bare-1", "sequential", "vectorised", "bare-N", "processes", "auto")
CLIENTS, EXAMPLES, BATCH, LR = 1000, 50, 10, 0.1  # cnn
STEPS, TEXTS, TOKENS, VOCABULARY = 4, 8, 64, 30522  # lora
_TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """A process and all below it that are alive."""
    found = [root]
    for process in found:
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def cpu_seconds() -> float:
    """Of this process and its children, living and dead."""
    times = os.times()
    living = 0
    for process in tree(os.getpid())[1:]:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        living += int(fields[11]) + int(fields[12])
    return sum(times[:4]) + living / _TICKS


def memory_mb(root: int) -> float:
    """The proportional set sizes of a tree, 10^6 bytes."""
    total = 0
    for process in tree(root):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # has just ended
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
    return total * 1024 / 1e6


def cnn() -> Any:
    """The network of the workload `cnn`."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    )  # fmt: skip


def minilm() -> Any:
    """A random model of MiniLM's shape with a head of ten classes."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=10,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def data(workload: str, folder: Path) -> tuple[Any, Any, int]:
    """Inputs, labels, and examples a client."""
    import numpy as np

    rng = np.random.default_rng(0)
    if workload == "lora":
        each, count = STEPS * TEXTS, CLIENTS
        labels = rng.integers(10, size=each * count)
        return rng.integers(1000, VOCABULARY, size=(each * count, TOKENS)), labels, each
    path = folder / "pictures.npy"
    if not path.exists():
        shape = (CLIENTS * EXAMPLES, 3, 32, 32)
        np.save(path, rng.integers(256, size=shape, dtype=np.uint8))
    return np.load(path, mmap_mode="r"), rng.integers(10, size=CLIENTS * EXAMPLES), EXAMPLES


def ours(options: argparse.Namespace, executor: str, folder: Path) -> Iterator[tuple[float, float]]:
    """The time and the CPU time at which each round has ended."""
    import numpy as np

    import fedtailor as ft
    from fedtailor.data.table import Dataset, Images, Partition, Shares, Tokens

    x, y, each = data(options.workload, folder)
    classes = [str(c) for c in range(10)]
    if options.workload == "cnn":
        inputs: Any = Images(x)
        backbone = ft.Backbone(cnn(), prepare=lambda batch: {"input": batch["pixel_values"]})
        method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=LR))
        local = ft.LocalConfig(batch_size=BATCH)
    else:
        inputs = Tokens(x.reshape(-1), np.arange(len(x) + 1) * TOKENS)
        backbone = ft.from_module(minilm())
        adam = ft.Optimiser("adam", lr=1e-3)
        method = ft.FedAvg(trainable="lora", rank=8, alpha=16.0, optimiser=adam)
        local = ft.LocalConfig(batch_size=TEXTS)
    rows = np.arange(each * CLIENTS).reshape(CLIENTS, each)
    none = Shares.of([np.empty(0, dtype=np.int64)] * CLIENTS)
    dataset = Dataset(inputs, len(y), "classification", "random", y, classes)
    federation = ft.Federation(dataset, Partition(Shares.of(list(rows)), none, none, "even"))
    plan = ft.Plan(
        options.rounds,
        local,
        ft.CohortConfig(size=options.cohort),
        engine=ft.EngineConfig(executor, processes=options.processes),  # type: ignore[arg-type]
        evaluate=ft.EvaluateConfig(every=options.rounds, clients=1),
    )
    task = ft.Task(backbone, method.adapt)
    for _ in ft.rounds(method, task, federation, plan):
        yield time.perf_counter(), cpu_seconds()


def bare(
    options: argparse.Namespace, processes: int, folder: Path
) -> Iterator[tuple[float, float]]:
    """The same work, written down at once."""
    import numpy as np
    import torch
    from torch import multiprocessing

    x, y, each = data(options.workload, folder)
    network: Callable[[], Any] = cnn
    if options.workload == "lora":
        from peft import LoraConfig, get_peft_model

        def network() -> Any:
            lora = LoraConfig(
                r=8,
                lora_alpha=16,
                target_modules=r".*output\.dense",
                modules_to_save=["classifier"],
            )
            return get_peft_model(minilm(), lora)

    model = network()
    parameters = [value for value in model.parameters() if value.requires_grad]
    server = [value.detach().clone().share_memory_() for value in parameters]
    sums = [[torch.zeros_like(v).share_memory_() for v in server] for _ in range(processes)]

    def work(rank: int, barrier: Any) -> Iterator[tuple[float, float]]:
        model.train()
        rng = np.random.default_rng(1)
        for _ in range(options.rounds):
            cohort = rng.choice(CLIENTS, options.cohort, replace=False)
            barrier.wait()
            torch._foreach_zero_(sums[rank])
            for client in cohort[rank::processes]:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, server)
                train(rng.permutation(each) + client * each)
                with torch.no_grad():
                    torch._foreach_add_(sums[rank], parameters)
            barrier.wait()
            if rank == 0:
                for value, *parts in zip(server, *sums, strict=True):
                    value.copy_(sum(parts) / len(cohort))
            yield time.perf_counter(), cpu_seconds()

    def train(rows: Any) -> None:
        if options.workload == "cnn":
            optimiser: Any = torch.optim.SGD(parameters, LR)
        else:
            optimiser = torch.optim.Adam(parameters, 1e-3)
        size = BATCH if options.workload == "cnn" else TEXTS
        for at in np.split(rows, len(rows) // size):
            optimiser.zero_grad()
            batch = torch.from_numpy(np.array(x[at]))
            logits = model(batch / 255) if options.workload == "cnn" else model(batch).logits
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[at])).backward()
            optimiser.step()

    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    others = [
        context.Process(target=lambda rank: list(work(rank, barrier)), args=(rank,))
        for rank in range(1, processes)
    ]
    for process in others:
        process.start()
    yield from work(0, barrier)
    for process in others:
        process.join()


def contender(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds and CPU seconds of the rounds after the first, in this process."""
    import torch

    torch.set_num_threads(1)
    kind = options.worker
    folder = Path(options.folder)
    if kind.startswith("bare"):
        ends = bare(options, 1 if kind == "bare-1" else options.processes, folder)
    else:
        ends = ours(options, kind, folder)
    wall, cpu = zip(*ends, strict=True)
    return {
        "round_s": [b - a for a, b in pairwise(wall)],
        "round_cpu_s": [b - a for a, b in pairwise(cpu)],
    }


def run(kind: str, workload: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`contender` in a new process, and the most memory of its tree."""
    command = [sys.executable, __file__, "--worker", kind, "--folder", folder]
    command += ["--workload", workload]
    for name in ("rounds", "cohort", "processes"):
        command += [f"--{name}", str(getattr(options, name))]
    root = Path(__file__).parents[1]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    paths = os.pathsep.join((str(root / "src"), str(root)))
    peak = 0.0
    with tempfile.TemporaryFile("w+") as output:
        environment = os.environ | threads | {"PYTHONPATH": paths}
        process = subprocess.Popen(command, env=environment, stdout=output, text=True)
        while process.poll() is None:
            peak = max(peak, memory_mb(process.pid))
            time.sleep(1.0)  # a sample is costly
        if process.returncode:
            raise SystemExit(f"{kind} on {workload} has failed")
        output.seek(0)
        found: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    return found | {"peak_mb": round(peak, 1)}


def table(results: dict[str, list[dict[str, Any]]], processes: int) -> str:
    """The results of one workload; ratios are to bare PyTorch in as many processes."""
    header = (
        "", "processes", "CPU s a round", "of bare", "wall s a round", "of bare", "peak MB in all",
    )  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for kind, repeats in results.items():
        several = kind in ("bare-N", "processes", "auto")
        cells = ["bare PyTorch" if kind.startswith("bare") else f"`{kind}`"]
        cells.append(str(processes if several else 1))
        for name in ("round_cpu_s", "round_s"):
            values = [x for repeat in repeats for x in repeat[name]]
            cells.append(spread(values, 2))
            base = results.get("bare-N" if several else "bare-1")
            ratio = "-"
            if base:
                middle = statistics.median(x for repeat in base for x in repeat[name])
                ratio = f"{statistics.median(values) / middle:.2f}"
            cells.append(ratio)
        cells.append(spread([repeat["peak_mb"] for repeat in repeats], 0))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all contenders, print the tables, write them and what each process found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="processes a contender")
    parser.add_argument("--rounds", type=int, default=3, help="of each; the first is left out")
    parser.add_argument("--cohort", type=int, default=50, help="clients a round")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--workload", choices=["cnn", "lora"], help="default: both")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(contender(options)))
        return
    load = os.getloadavg()[0]
    workloads = [options.workload] if options.workload else ["cnn", "lora"]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        workload: {kind: [] for kind in options.contenders} for workload in workloads
    }
    with tempfile.TemporaryDirectory() as folder:
        data("cnn", Path(folder))
        for repeat in range(options.repeats):
            for workload, kinds in results.items():
                for kind in kinds:
                    print(f"repeat {repeat}: {workload}, {kind}", file=sys.stderr)
                    found = run(kind, workload, options, folder)
                    kinds[kind].append({"repeat": repeat} | found)
    found_versions = versions("fedtailor", "torch", "numpy")
    command = shlex.join(["python", "benchmarks/executors.py", *sys.argv[1:]])
    about = (
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load),
        software(found_versions),
        f"{options.repeats} runs a contender, in turns, each {options.rounds} rounds of "
        f"{options.cohort} clients without the first; medians (first to third quartile)",
        "of bare: against bare PyTorch in as many processes; CPU time and memory (PSS) are those "
        "of the whole process tree",
    )
    text = "\n".join(f"- {line}" for line in about) + "\n"
    for workload, kinds in results.items():
        text += f"\n## {workload}\n\n{table(kinds, options.processes)}"
    print(text)
    records = [
        {"workload": workload, "contender": kind, **found_versions, **found}
        for workload, kinds in results.items()
        for kind, repeats in kinds.items()
        for found in repeats
    ]
    write(OUT, f"# Executors against bare PyTorch\n\n{text}", records)


if __name__ == "__main__":
    main()
