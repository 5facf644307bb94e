"""The local step against a bare PyTorch loop, FedSDG against FedAvg, bf16 against fp32.

Everything is one client's `Method.local` on the same batches from the same state, on one thread.
The contenders of a part take turns in one process; time is CPU time of the process (on a busy
machine wall time says little), and a ratio is taken within a turn.

    OMP_NUM_THREADS=1 python benchmarks/local_step.py

writes benchmarks/results/local_step-cpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import NO_BF16, circumstances, has_bf16, software, spread, versions, write
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.engine.malloc import keep_freed_memory
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.models import ModelConfig, load_model
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Batch, Params, flat, subtract
from fedtailor.random import key
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Precision, Task

OUT = Path(__file__).parent / "results" / "local_step-cpu"
SGD, ADAM = Optimiser(lr=0.1), Optimiser("adam", lr=1e-3, eps=1e-3)
Run = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """Contenders by name, the first the one that the others are measured by."""

    title: str
    runs: dict[str, Run]
    steps: int


@dataclass(frozen=True)
class Result:
    """CPU seconds a step of every turn, and their ratios to the first contender's."""

    part: str
    contender: str
    cpu_s: list[float]
    ratios: list[float]


def measure(part: Part, repeats: int) -> list[Result]:
    """Let the contenders take turns."""
    for run in part.runs.values():
        run()
    names = list(part.runs)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            start = time.process_time()
            part.runs[name]()
            spent[name].append((time.process_time() - start) / part.steps)
    ratios = {
        name: [own / base for own, base in zip(spent[name], spent[names[0]], strict=True)]
        for name in names
    }
    return [Result(part.title, name, spent[name], ratios[name]) for name in names]


def local(method: Method, task: Task, steps: list[Batch]) -> Run:
    """A client's local training, from the same state every time."""
    return lambda: method.local(task, task.state, steps, ClientContext(key(0)))


def bare(
    model: nn.Module, forward: Callable[[Batch], Tensor], steps: list[Batch], adam: bool
) -> Run:
    """What one writes without a library: ``model``, trained in place."""
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]

    def run() -> None:
        with torch.no_grad():
            for parameter, value in zip(trained, start, strict=True):
                parameter.copy_(value)
        kind = torch.optim.Adam if adam else torch.optim.SGD
        optimiser = kind(trained, lr=1e-3 if adam else 0.1, foreach=True)
        for batch in steps:
            model.zero_grad()
            F.cross_entropy(forward(batch), batch["labels"]).backward()
            optimiser.step()

    return run


def pictures(count: int, size: int, shape: tuple[int, ...], classes: int = 10) -> list[Batch]:
    """Random pictures."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.rand(size, *shape, generator=draw),
            "labels": torch.randint(classes, (size,), generator=draw),
        }
        for _ in range(count)
    ]


def texts(lengths: list[list[int]], longest: int, padded: bool) -> list[Batch]:
    """Random tokens; batches of the longest text's length, or all of ``longest``."""
    draw = torch.Generator().manual_seed(0)
    steps = []
    for own in lengths:
        length = longest if padded else max(own)
        ids = torch.randint(1000, 20000, (len(own), longest), generator=draw)[:, :length]
        mask = (torch.arange(length) < torch.tensor(own)[:, None]).float()
        labels = torch.randint(20, (len(own),), generator=draw)
        steps.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return steps


def small_network() -> nn.Module:
    """Two convolutions, dropout, two linear layers: 1,625,866 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    )  # fmt: skip


def from_pictures(model: nn.Module) -> Backbone:
    """A module whose input is the picture."""
    return Backbone(model, prepare=lambda batch: {"input": batch["pixel_values"]})


def network_part() -> Part:
    """A network trained whole."""
    steps, model = pictures(5, 10, (3, 32, 32)), small_network().train()
    method = FedAvg(optimiser=SGD)
    return Part(
        "CNN, 1.6 M parameters, batch 10 of 3 x 32 x 32, SGD",
        {
            "bare PyTorch": bare(model, lambda b: model(b["pixel_values"]), steps, adam=False),
            "fedavg": local(method, Task(from_pictures(small_network()), method.adapt), steps),
        },
        len(steps),
    )


def adapter_part(backbone: Backbone) -> Part:
    """LoRA: a bare loop, FedAvg, FedSDG."""
    steps = texts([[64] * 8], 64, padded=True)
    fedavg = FedAvg(trainable="lora", optimiser=ADAM)
    fedsdg = FedSDG(optimiser=ADAM)
    tasks = [Task(backbone, method.adapt) for method in (fedavg, fedavg, fedsdg)]
    for name, parameter in tasks[0].model.named_parameters():
        parameter.requires_grad_(name in tasks[0].trained)

    def forward(batch: Batch) -> Tensor:
        inputs = backbone.prepare({n: v for n, v in batch.items() if n != "labels"})
        return backbone.logits(tasks[0].model(**inputs))

    return Part(
        "MiniLM with LoRA of rank 8, batch 8 of 64 tokens, Adam",
        {
            "fedavg": local(fedavg, tasks[1], steps),
            "bare PyTorch": bare(tasks[0].model, forward, steps, adam=True),
            "fedsdg": local(fedsdg, tasks[2], steps),
        },
        len(steps),
    )


def precision_part(backbone: Backbone) -> tuple[Part, list[str]]:
    """LoRA on texts of ragged lengths: padded fp32, trimmed, trimmed bf16; the deviations."""
    lengths = [[8, 12, 16, 20, 24, 30, 41, 64], [6, 10, 14, 20, 24, 28, 34, 40]]  # 38% real
    fedavg = FedAvg(trainable="lora", optimiser=ADAM)
    padded, trimmed = texts(lengths, 64, padded=True), texts(lengths, 64, padded=False)
    fp32, bf16 = (Task(backbone, fedavg.adapt, precision=p) for p in ("fp32", "bf16"))
    short = texts([[16, 12], [9, 14], [11, 16], [16, 7]], 16, padded=True)
    notes = [deviation("MiniLM LoRA, 4 steps of Adam", fedavg, fp32, bf16, short)]
    sgd = FedAvg(optimiser=SGD)
    precisions: tuple[Precision, Precision] = ("fp32", "bf16")
    tasks = [Task(from_pictures(small_network()), sgd.adapt, precision=p) for p in precisions]
    notes.append(deviation("CNN, 3 steps of SGD", sgd, *tasks, pictures(3, 10, (3, 32, 32))))
    runs = {
        "fp32, padded": local(fedavg, fp32, padded),
        "fp32, trimmed": local(fedavg, fp32, trimmed),
    }
    if has_bf16():
        runs["bf16, trimmed"] = local(fedavg, bf16, trimmed)
    else:
        notes.append(NO_BF16)
    return Part("MiniLM with LoRA, ragged lengths up to 64, batch 8", runs, len(lengths)), notes


def deviation(what: str, method: Method, fp32: Task, bf16: Task, steps: list[Batch]) -> str:
    """How far an update in bf16 is from that in fp32."""
    moved = []
    for task in (fp32, bf16):
        state, _ = method.local(task, task.state, steps, ClientContext(key(0)))
        own: Params = {name: state[name] for name in task.trained}
        moved.append(flat(subtract(own, {name: task.state[name] for name in own})).double())
    distance = float((moved[1] - moved[0]).norm() / moved[0].norm())
    cosine = float(F.cosine_similarity(*moved, dim=0))
    return f"{what}: bf16's update differs from fp32's by {distance:.3f} of it, cosine {cosine:.4f}"


def table(results: list[Result], about: list[str]) -> str:
    """The results as Markdown."""
    lines = [*(f"- {line}" for line in about)]
    for title in dict.fromkeys(result.part for result in results):
        lines += ["", f"## {title}", "", "| | CPU ms a step | ratio |", "|---|---:|---:|"]
        lines += [
            f"| {r.contender} | {spread(r.cpu_s, 1, 1e3)} | {spread(r.ratios, 3)} |"
            for r in results
            if r.part == title
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every part, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns; of the CNN thrice as many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # for the bare loops as well
    load_before = os.getloadavg()[0]
    minilm = load_model(ModelConfig("minilm"), "classification", 20, 0)
    precision, notes = precision_part(minilm)
    parts = [
        (network_part(), 3 * options.repeats),
        (adapter_part(minilm), options.repeats),
        (precision, options.repeats),
    ]
    results = []
    for part, repeats in parts:
        results += measure(part, repeats)
        print(f"{part.title} done", file=sys.stderr)
    report(results, OUT, "The local step", load_before, notes)


def report(
    results: Sequence[Result], out: Path, title: str, load_before: float, notes: Sequence[str] = ()
) -> None:
    """Print the table of this script's results, and write it and them."""
    found_versions = versions("fedtailor", "torch", "numpy")
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = [
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load_before),
        software(found_versions),
        "medians of turns (first to third quartile); ratios are to the first line of a table, "
        "taken within a turn",
        *notes,
    ]
    text = table(results, about)
    print(text)
    records = [{**found_versions, **asdict(result)} for result in results]
    write(out, f"# {title}\n\n{text}", records)


if __name__ == "__main__":
    main()
