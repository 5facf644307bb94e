"""One GPU: our executors against plain PyTorch and PEFT loops and against centralised training.

Workloads, all weights random, nothing is downloaded:

- a: the network `cnn` on 32 x 32 colour pictures, 50 clients x 5 steps of 10, SGD, all of it, fp32
- d-bert, d-vit: BERT-base on 128 tokens and ViT-B/16 on 224 x 224, LoRA of rank 8 and the head,
  32 clients x 4 steps of 8, Adam, bf16 autocast
- e-smollm2, e-1b, e-llama: SmolLM2-135M on 16 clients x 4 steps of 4 x 256 tokens, and models of
  the shapes of Llama-3.2-1B on 8 clients x 2 steps of 4 x 256 and Llama-3-8B on 4 clients x 2 steps
  of 1 x 512; LoRA, frozen weights and arithmetic in bf16

Contenders, one after the other: one client after the other in plain PyTorch + PEFT with SDPA,
eagerly (``sequential loop``) and with a step's kernels recorded once (``CUDA-graph loop``);
``centralised``, one model on all clients' batches at once; and fedtailor's `rounds` without
evaluation, by executor and clients a step: with CUDA graphs, all clients at once also without, and
FedSDG, too. The rounds in which kernels are recorded are not timed. A contender that doesn't fit
the memory is left out.

Utilisation is the model's floating-point operations (forward and backward as PyTorch counts them
in the plain loop, frozen weights' gradients not among them) over time and the chip's dense peak.

    python benchmarks/gpu.py --seconds 20

takes under 5 minutes by design (a workload stops after so many seconds, once what is fast has three
times), and writes benchmarks/results/gpu.jsonl, a line a contender, and the table beside.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, LlamaConfig, PretrainedConfig, ViTConfig

from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.data.table import Dataset, Images, Partition, Shares, Tokens
from fedtailor.engine.config import EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.models import ModelConfig, load_model
from fedtailor.optim import Optimiser
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task

OUT = Path(__file__).parent / "results" / "gpu"
CLASSES = 10
UNTIMED = (
    3  # rounds in which ours starts up and records; four more find out how many clients to run
)
SLOW = 2.0  # seconds a round: one time is enough where there are not enough seconds
PEAK_TFLOPS = {  # dense, without sparsity: (float32, bfloat16)
    "H200": (67, 989), "H100": (67, 989), "A100": (19.5, 312), "L40S": (91.6, 362),
    "L4": (30.3, 121), "A10": (31.2, 125), "B200": (80, 2250),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model and how much of it a round is. ``length`` is of token sequences; ``config`` None:
    the built-in `cnn`."""

    name: str
    config: PretrainedConfig | None
    clients: int
    steps: int
    batch: int
    length: int = 0
    half: bool = False  # frozen weights in bfloat16

    @property
    def kind(self) -> str:
        return "causal-lm" if isinstance(self.config, LlamaConfig) else "classification"

    @property
    def bf16(self) -> bool:
        return self.config is not None


def _llama(layers: int, width: int, ffn: int, heads: int, kv: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=ffn,
        num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocabulary,
        tie_word_embeddings=width < 4096, use_cache=False,
    )  # fmt: skip


WORKLOADS = [
    Workload("a", None, 50, 5, 10),
    Workload("d-bert", BertConfig(), 32, 4, 8, 128),
    Workload("d-vit", ViTConfig(), 32, 4, 8),
    Workload("e-smollm2", _llama(30, 576, 1536, 9, 3, 49152), 16, 4, 4, 256, half=True),
    Workload("e-1b", _llama(16, 2048, 8192, 32, 8, 128256), 8, 2, 4, 256, half=True),
    Workload("e-llama", _llama(32, 4096, 14336, 32, 8, 128256), 4, 2, 1, 512, half=True),
]
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
TINY = [
    Workload("a", None, 2, 2, 2),
    Workload("d-bert", BertConfig(vocab_size=100, **_SMALL), 2, 2, 2, 8),
    Workload("d-vit", ViTConfig(image_size=32, patch_size=16, **_SMALL), 2, 2, 2),
    Workload("e-llama", _llama(1, 16, 16, 2, 1, 100), 2, 2, 2, 8, half=True),
]


def backbone_of(workload: Workload, device: torch.device) -> Backbone:
    """The model with random weights, made on the device."""
    modality = "text" if workload.length else "image"
    with tempfile.TemporaryDirectory() as folder, torch.device(device):
        name = "cnn" if workload.config is None else folder
        if workload.config is not None:
            workload.config.save_pretrained(folder)
        config = ModelConfig(name, pretrained=False)
        made = load_model(config, workload.kind, CLASSES, 0, modality, picture=(3, 32, 32))  # type: ignore[arg-type]
    if workload.half:
        made.model.to(torch.bfloat16)
    return made


def federation_of(workload: Workload) -> Federation:
    """Clients of equal size, random examples."""
    rng = np.random.default_rng(0)
    own = workload.steps * workload.batch
    total = workload.clients * own
    if workload.length:
        assert workload.config is not None
        values = rng.integers(5, workload.config.vocab_size, total * workload.length)
        inputs: Tokens | Images = Tokens(values, np.arange(total + 1) * workload.length)
    else:
        side = 32 if workload.config is None else workload.config.image_size
        inputs = Images(rng.random((total, 3, side, side), dtype=np.float32))
    generative = workload.kind == "causal-lm"
    labels = None if generative else rng.integers(0, CLASSES, total)
    classes = [] if generative else [str(c) for c in range(CLASSES)]
    dataset = Dataset(inputs, total, workload.kind, "random", labels, classes)  # type: ignore[arg-type]
    rows = np.arange(total).reshape(workload.clients, own)
    none = Shares.of([rows[0, :0]] * workload.clients)
    return Federation(dataset, Partition(Shares.of(list(rows)), none, none, "random"))


def method_of(workload: Workload, gated: bool = False) -> Method:
    """FedAvg: all of the small network, LoRA and the head of a transformer; or FedSDG."""
    if gated:
        return FedSDG(rank=8, optimiser=Optimiser("adam", lr=1e-3))
    if workload.config is None:
        return FedAvg(optimiser=Optimiser("sgd", lr=0.1))
    return FedAvg(trainable="lora", rank=8, optimiser=Optimiser("adam", lr=1e-3))


def adapted(workload: Workload, backbone: Backbone, gated: bool = False) -> nn.Module:
    """What is trained stays in float32 where frozen weights are in bfloat16."""
    model = method_of(workload, gated).adapt(backbone)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


class Plain:
    """The loops that one writes without a library, on one model."""

    def __init__(self, workload: Workload, backbone: Backbone, federation: Federation) -> None:
        self.workload = workload
        own = replace(backbone, model=copy.deepcopy(backbone.model))
        self.model = adapted(workload, own).eval()
        if workload.config is not None:
            own.model.set_attn_implementation("sdpa")
        self.device = next(self.model.parameters()).device
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.trained]
        self.batches = []  # by client
        for client in range(workload.clients):
            made = federation.batches(client, 1, LocalConfig(batch_size=workload.batch))
            self.batches.append([{n: v.to(self.device) for n, v in b.items()} for b in made])

    def optimiser(self) -> torch.optim.Optimizer:
        """A new one, on what is trained."""
        if self.workload.config is None:
            return torch.optim.SGD(self.trained, lr=0.1)
        return torch.optim.Adam(self.trained, lr=1e-3, capturable=self.device.type == "cuda")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy; no mask, as all sequences have the same length."""
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.workload.bf16, cache_enabled=False
        ):
            if self.workload.config is None:
                logits: Tensor = self.model(batch["pixel_values"])
            else:
                name = "input_ids" if self.workload.length else "pixel_values"
                logits = self.model(**{name: batch[name]}).logits
        if self.workload.kind == "causal-lm":
            ids = batch["input_ids"]
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return F.cross_entropy(logits.float(), batch["labels"])

    def step(self, optimiser: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
        """Forward, backward, update."""
        optimiser.zero_grad(set_to_none=True)
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def _restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.start)

    def _averaged(self, train: Callable[[list[dict[str, Tensor]]], None]) -> None:
        total = [torch.zeros_like(p) for p in self.start]
        for steps in self.batches:
            self._restore()
            train(steps)
            torch._foreach_add_(total, [p.detach() for p in self.trained])
        torch._foreach_div_(total, float(len(self.batches)))

    def sequential(self) -> None:
        """A round, one client after the other."""

        def train(steps: list[dict[str, Tensor]]) -> None:
            optimiser = self.optimiser()
            for batch in steps:
                self.step(optimiser, batch)

        self._averaged(train)

    def graph(self) -> Callable[[], None]:
        """A round whose steps replay one recorded step."""
        optimiser, batch = self.optimiser(), {n: v.clone() for n, v in self.batches[0][0].items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(optimiser, batch)
        torch.cuda.current_stream().wait_stream(side)
        optimiser.zero_grad(set_to_none=True)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        moments = [v for s in optimiser.state.values() for v in s.values() if v is not None]

        def train(steps: list[dict[str, Tensor]]) -> None:
            for moment in moments:
                moment.zero_()
            for given in steps:
                for name, value in given.items():
                    batch[name].copy_(value)
                recorded.replay()

        return lambda: self._averaged(train)

    def centralised(self) -> None:
        """As many steps, each on all clients' batches."""
        self._restore()
        optimiser = self.optimiser()
        for together in zip(*self.batches, strict=True):
            self.step(optimiser, {n: torch.cat([b[n] for b in together]) for n in together[0]})

    def flops(self) -> int:
        """Of a round."""
        counter, transformer = FlopCounterMode(display=False), self.workload.config is not None
        if transformer:  # the counter can't count fused attention with grouped queries
            self.model.set_attn_implementation("eager")  # type: ignore[operator]
        with counter:
            self.loss(self.batches[0][0]).backward()  # type: ignore[no-untyped-call]
        if transformer:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        return int(counter.get_total_flops()) * self.workload.clients * self.workload.steps


def ours(
    workload: Workload,
    task: Task,
    federation: Federation,
    engine: EngineConfig,
    gated: bool = False,
) -> Iterator[Any]:
    """Rounds without end or evaluation."""
    plan = Plan(
        10**6,
        LocalConfig(batch_size=workload.batch),
        engine=engine,
        evaluate=EvaluateConfig(every=10**6),
    )
    return rounds(method_of(workload, gated), task, federation, plan)


Make = Callable[[], Callable[[], Any]]  # makes what runs a round


def contenders(workload: Workload, device: torch.device) -> tuple[dict[str, Make], int]:
    """The contenders by name, and a round's model FLOPs."""
    backbone, federation = backbone_of(workload, device), federation_of(workload)
    plain = Plain(workload, backbone, federation)
    found: dict[str, Make] = {"sequential loop": lambda: plain.sequential}
    if device.type == "cuda":
        found["CUDA-graph loop"] = plain.graph
    found["centralised"] = lambda: plain.centralised
    precision = "bf16" if workload.bf16 else "fp32"
    engine = EngineConfig(precision=precision, device=str(device))  # type: ignore[arg-type]
    stacked = replace(engine, executor="vectorised", clients_per_step=workload.clients)

    def made(engine: EngineConfig, gated: bool = False) -> Make:
        adapt = partial(adapted, workload, gated=gated)

        def make() -> Callable[[], Any]:
            task = Task(backbone, adapt, precision=precision, device=device)  # type: ignore[arg-type]
            iterator = ours(workload, task, federation, engine, gated)
            return lambda: next(iterator)

        return make

    found["fedtailor, sequential"] = made(replace(engine, executor="sequential"))
    found["fedtailor, stacked"] = made(stacked)
    found["fedtailor, stacked, no graph"] = made(replace(stacked, capture=False))
    if device.type == "cuda":  # on a CPU it takes processes
        found["fedtailor, as found"] = made(engine)
    if workload.config is not None:
        found["fedtailor, stacked, FedSDG"] = made(stacked, gated=True)
    return found, plain.flops()


def measured(
    workload: Workload, device: torch.device, repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """A line a contender, one after the other, so that none holds memory that another lacks:
    seconds of every round after the first ones, and the most memory that was reserved."""
    makes, flops = contenders(workload, device)
    examples = workload.clients * workload.steps * workload.batch
    lines = []
    for name, make in makes.items():
        print(f"{workload.name}, {name}", file=sys.stderr)
        line: dict[str, Any] = {"workload": workload.name, "contender": name}
        line |= {"seconds": [], "peak_mb": None, "left_out": None}
        try:
            untimed = UNTIMED if name.startswith("fedtailor") else 1
            untimed += 4 if name.endswith("as found") else 0
            line |= timed(make, device, untimed, repeats, seconds / len(makes))
        except torch.cuda.OutOfMemoryError:
            line["left_out"] = "out of memory"
        line |= {"examples": examples, "clients": workload.clients, "flops": flops}
        lines.append(line | {"tokens": examples * workload.length, "bf16": workload.bf16})
    return lines


def timed(
    make: Make, device: torch.device, untimed: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """The seconds of at most so many rounds, and of at least three, or one that is slow; after
    ``untimed`` ones."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    function, took, begun = make(), list[float](), time.perf_counter()
    for number in range(untimed):
        before = time.perf_counter()
        function()
        if number and time.perf_counter() - before > SLOW:
            break
    while len(took) < repeats:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        is_over = time.perf_counter() - begun > seconds
        if is_over and (len(took) > 2 or took[-1] > SLOW):
            break
    peak = torch.cuda.max_memory_reserved() / 1e6 if device.type == "cuda" else None
    return {"seconds": took, "peak_mb": peak}


def table(lines: Sequence[dict[str, Any]], device: str, peaks: tuple[float, float] | None) -> str:
    """The results as Markdown."""
    rows = []
    base: dict[tuple[str, str], float] = {}
    for line in lines:
        row = {"workload": line["workload"], "contender": line["contender"]}
        if not line["seconds"]:
            rows.append(row | {"s a round": line["left_out"] or "no time"})
            continue
        low, middle, high = np.quantile(line["seconds"], (0.25, 0.5, 0.75))
        base[line["workload"], line["contender"]] = middle
        rate = line["flops"] / middle / 1e12
        peak = None if peaks is None else peaks[line["bf16"]]
        sequential = base.get((line["workload"], "sequential loop"))
        centralised = base.get((line["workload"], "centralised"))
        rows.append(
            row
            | {
                "s a round": f"{middle:.3f} ({low:.3f}-{high:.3f})",
                "clients/s": f"{line['clients'] / middle:.0f}",
                "tokens/s": f"{line['tokens'] / middle:.0f}" if line["tokens"] else "",
                "x sequential loop": f"{sequential / middle:.2f}" if sequential else "",
                "of centralised": f"{centralised / middle:.2f}" if centralised else "",
                "TFLOP/s": f"{rate:.3g}",
                "utilisation": "" if peak is None else f"{rate / peak:.1%}",
                "peak MB": "" if line["peak_mb"] is None else f"{line['peak_mb']:.0f}",
            }
        )
    return f"{device}\n\n" + tabulate(
        rows, headers="keys", tablefmt="github", disable_numparse=True
    )


def main() -> None:
    """Run the workloads, print the table, write it and every time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds a contender")
    parser.add_argument("--seconds", type=float, default=20, help="for a workload's rounds")
    parser.add_argument("--only", nargs="*", choices=[w.name for w in WORKLOADS])
    parser.add_argument("--tiny", action="store_true", help="on the CPU; nothing is written")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no GPU here; --tiny runs everything on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    chip = platform.processor() if options.tiny else torch.cuda.get_device_name()
    peaks = next((peak for name, peak in PEAK_TFLOPS.items() if name in chip), None)
    lines: list[dict[str, Any]] = []
    for workload in TINY if options.tiny else WORKLOADS:
        if options.only is None or workload.name in options.only:
            lines += measured(workload, device, options.repeats, options.seconds)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                write(lines, chip, table(lines, chip, peaks))  # a later workload may fail
    print(table(lines, chip, peaks))


def write(lines: Sequence[dict[str, Any]], chip: str, text: str) -> None:
    """Write the table and every time, with versions and the command."""
    versions = {name: version(name) for name in ("fedtailor", "torch", "transformers", "peft")}
    now = datetime.datetime.now(datetime.UTC)
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    about = f"- {now:%Y-%m-%d %H:%M} UTC, `{command}`\n- " + ", ".join(
        f"{name} {number}" for name, number in versions.items()
    )
    OUT.parent.mkdir(exist_ok=True)
    OUT.with_suffix(".md").write_text(f"# One GPU\n\n{about}\n- {text}\n")
    with OUT.with_suffix(".jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps({"date": f"{now:%Y-%m-%d}", "chip": chip, **versions, **line}))
            file.write("\n")


if __name__ == "__main__":
    main()
