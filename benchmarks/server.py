"""What the server does in a round, on one thread of a CPU: aggregation, Krum, recompression.

- alignment: FedSDG's weights and weighted sum over 1,000 updates of 1,000,000 parameters in 20
  tensors, against one read of the same data (their sum); over a tenth of the clients also against
  a loop over tensors and clients, a plain form over one flat matrix that is there already, and
  laying the tensors side by side first.
- weighted sum: FedAvg's aggregation of the same, against float64 copies of the tensors.
- krum: the scores of 20 of them, against differences of all pairs.
- fedmerge: 20 clients, 10 models: merge, inner products, update, against loops over clients.
- fedhft: the best rank 32 of a cluster's adapter and c updates, B ``[1024, (1 + c) 32]`` times
  A ``[(1 + c) 32, 1024]``: dense SVD of B A, exact and randomised through the factors. The
  updates share a part and differ in the rest, as those of clients with related data do. The error
  is the distance from B A relative to that of the best approximation.
- disk (``--disk C``, alone): FedAvg over C models of 11,000,000 parameters on disk, and the memory.

The contenders of a workload take turns. Times are CPU time of the process; wall time beside them.

    OMP_NUM_THREADS=1 python benchmarks/server.py

writes benchmarks/results/server-cpu.jsonl and .md; ``--only NAME`` writes server-NAME-cpu.*, and
``--disk`` server-disk-cpu.*.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import circumstances, software, spread, versions, write
from tabulate import tabulate
from torch import Tensor

from fedtailor import random
from fedtailor.layers.low_rank import recompress
from fedtailor.methods.fedmerge import merge, merge_backward
from fedtailor.methods.fedsdg import alignment_weights
from fedtailor.params import Params, flat
from fedtailor.stacked import weighted_sum
from fedtailor.uploads.collected import UploadStack
from fedtailor.uploads.rules import krum_scores

RESULTS = Path(__file__).parent / "results"
TENSORS = 20
READ, OURS = "one read", "fedtailor"


@dataclass(frozen=True)
class Workload:
    """``contenders`` by name, the first being what the others are compared with; ``notes`` are
    what else is known of each."""

    name: str
    contenders: dict[str, Callable[[], Any]]
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)


def uploads(clients: int, size: int) -> Params:
    """Updates ``[clients, size / TENSORS]`` a tensor: a shared part, and each client's own."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number in range(TENSORS):
        value = torch.empty(clients, size // TENSORS).normal_(std=1e-3, generator=generator)
        value += 1e-4 * torch.randn(size // TENSORS, generator=generator)
        found[f"block.{number:02}.weight"] = value
    return found


def one_read(stacked: Params) -> float:
    """Every value once."""
    return sum(value.sum().item() for value in stacked.values())


def aligned(stacked: Params) -> Params:
    """Equations 10 and 11 of FedSDG."""
    return weighted_sum(stacked, alignment_weights(stacked))


def aligned_flat(table: Tensor) -> Tensor:
    """The same in plain float32 on one matrix ``[c, P]``."""
    mean = table.mean(0)
    alpha = (table @ mean / (table.norm(dim=1) * mean.norm() + 1e-8)).clamp(min=0)
    return alpha / (alpha.sum() + 1e-8) @ table


def aligned_loop(stacked: Params) -> Params:
    """The same tensor by tensor and client by client."""
    clients = len(next(iter(stacked.values())))
    means = {name: value.mean(0) for name, value in stacked.items()}
    norm = sum(mean.square().sum() for mean in means.values()) ** 0.5
    alpha = []
    for k in range(clients):
        dot = sum((value[k] * means[name]).sum() for name, value in stacked.items())
        own = sum(value[k].square().sum() for value in stacked.values()) ** 0.5
        alpha.append(max(0.0, float(dot / (own * norm + 1e-8))))
    total = sum(alpha) + 1e-8
    moved = {name: torch.zeros_like(mean) for name, mean in means.items()}
    for k in range(clients):
        for name, value in stacked.items():
            moved[name] += alpha[k] / total * value[k]
    return moved


def weighted_copies(stacked: Params, weights: Tensor) -> Params:
    """A float64 copy of every tensor, then the product."""
    return {name: (weights @ value.double()).float() for name, value in stacked.items()}


def pair_scores(stacked: Params, attackers: int) -> Tensor:
    """Krum's scores from the difference of every pair."""
    table = flat(stacked, leading=1)
    c = len(table)
    d2 = torch.full((c, c), torch.inf, dtype=torch.float64)
    for i in range(c):
        for j in range(i):
            d2[i, j] = d2[j, i] = (table[i] - table[j]).double().square().sum()
    return d2.sort(1).values[:, : c - attackers - 2].sum(1)


def merged_loop(models: Tensor, logits: Tensor, updates: Tensor, shares: Tensor) -> None:
    """Equations 4, 8 and 9 of FedMerge, client by client."""
    w = torch.softmax(logits, 1)
    total = (shares[:, None] * w).sum(0)
    moved, g = torch.zeros_like(models, dtype=torch.float64), torch.zeros_like(logits)
    for i, Delta in enumerate(updates):
        theta = w[i].float() @ models
        moved += (shares[i] * w[i] / total)[:, None] * Delta
        g[i] = shares[i] * w[i] * ((models - theta) @ Delta)


def stacked_factors(d: int, clients: int, rank: int) -> tuple[Tensor, Tensor]:
    """B ``[d, R]`` and A ``[R, d]`` with R = (1 + clients) rank."""
    key = random.key(0, d, d, clients, rank)
    draw = [random.fold_in(key, i) for i in range(4)]
    R = (1 + clients) * rank
    shared = random.normal(draw[0], (d, rank)) @ random.normal(draw[1], (rank, R))
    B = shared / rank + 0.5 * random.normal(draw[2], (d, R))
    return B, random.normal(draw[3], (R, d), rank**-0.5)


def dense(B: Tensor, A: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The yardstick of recompression: form B A and take its SVD."""
    u, s, v = torch.linalg.svd(B.double() @ A.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).float(), v[:rank].float()


def recompression(clients: int, d: int, rank: int) -> Workload:
    """FedHFT's equation 8 for one layer and cluster."""
    B, A = stacked_factors(d, clients, rank)
    contenders = {
        "dense SVD of B A": lambda: dense(B, A, rank),
        f"{OURS}, exact": lambda: recompress(B, A, rank, exact=True),
        f"{OURS}, randomised": lambda: recompress(B, A, rank),
    }

    def distance(found: tuple[Tensor, Tensor]) -> float:
        new_B, new_A = (part.double() for part in found)
        return float(torch.linalg.matrix_norm(B.double() @ A.double() - new_B @ new_A))

    distances = {name: distance(contender()) for name, contender in contenders.items()}
    best = distances["dense SVD of B A"]
    notes = {name: {"error": found / best} for name, found in distances.items()}
    return Workload(f"fedhft, {d} x {d}, c = {clients}, R = {B.shape[1]}", contenders, notes)


def aggregations(clients: int, size: int) -> list[Workload]:
    """All over stacked uploads."""
    stacked = uploads(clients, size)
    few = {name: value[: clients // 10] for name, value in stacked.items()}
    twenty = {name: value[:20] for name, value in stacked.items()}
    weights = torch.rand(clients, dtype=torch.float64)
    weights /= weights.sum()
    updates, shares = flat(few, leading=1), torch.full((clients // 10,), 10 / clients).double()
    models, logits = torch.randn(10, size), torch.randn(20, 10, dtype=torch.float64)
    given = models, logits, updates[:20], torch.full((20,), 1 / 20, dtype=torch.float64)

    def three_products() -> None:
        merge(models, torch.softmax(logits, 1))
        merge_backward(*given)

    shape = f"{clients} x {size:,}"
    return [
        Workload(
            f"alignment, {shape}",
            {
                READ: lambda: one_read(stacked),
                OURS: lambda: aligned(stacked),
            },
        ),
        Workload(
            f"alignment, {len(updates)} x {size:,}",
            {
                READ: lambda: one_read(few),
                OURS: lambda: aligned(few),
                "loop over tensors and clients": lambda: aligned_loop(few),
                "flat matrix, float32": lambda: aligned_flat(updates),
                "laid side by side first": lambda: aligned_flat(flat(few, leading=1)),
            },
        ),
        Workload(
            f"weighted sum, {shape}",
            {
                READ: lambda: one_read(stacked),
                OURS: lambda: weighted_sum(stacked, weights),
            },
        ),
        Workload(
            f"weighted sum, {len(updates)} x {size:,}",
            {
                READ: lambda: one_read(few),
                OURS: lambda: weighted_sum(few, shares),
                "float64 copies": lambda: weighted_copies(few, shares),
            },
        ),
        Workload(
            f"krum, {len(twenty['block.00.weight'])} x {size:,}",
            {
                READ: lambda: one_read(twenty),
                OURS: lambda: krum_scores(twenty, 4),
                "differences of all pairs": lambda: pair_scores(twenty, 4),
            },
        ),
        Workload(
            f"fedmerge, {len(logits)} clients, 10 models x {size:,}",
            {
                READ: lambda: one_read(twenty),
                OURS: three_products,
                "loops over clients": lambda: merged_loop(*given),
            },
        ),
    ]


def timed(workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """Every contender ``repeats`` times, in turns, after one call to warm up: a line each."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in workload.contenders}
    for repeat in range(repeats + 1):
        for name, contender in workload.contenders.items():
            print(f"{workload.name}, {name}", file=sys.stderr)
            cpu, wall = time.process_time(), time.perf_counter()
            contender()
            took = time.process_time() - cpu, time.perf_counter() - wall
            if repeat:
                seconds[name].append(took)
    return [
        {
            "workload": workload.name,
            "contender": name,
            "cpu_s": [cpu for cpu, _ in both],
            "wall_s": [wall for _, wall in both],
            **workload.notes.get(name, {}),
        }
        for name, both in seconds.items()
    ]


def table(found: list[dict[str, Any]]) -> str:
    """The results as Markdown; ratios are those within a repeat, their median."""
    first: dict[str, list[float]] = {}
    rows = []
    for line in found:
        base = first.setdefault(line["workload"], line["cpu_s"])
        ratios = [own / other for own, other in zip(line["cpu_s"], base, strict=True)]
        rows.append(
            {
                "workload": line["workload"],
                "contender": line["contender"],
                "CPU ms": spread(line["cpu_s"], 1, 1e3),
                "wall ms": spread(line["wall_s"], 1, 1e3),
                "of the first": f"{statistics.median(ratios):.3f}",
                "error": f"{line['error']:.4f}" if "error" in line else "",
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


class _Memory:
    """The most resident memory (MB) while the block runs, over what there was at its start: of
    its own, and of files, which the kernel takes back when it needs it."""

    def __enter__(self) -> _Memory:
        self.own = self.files = 0.0
        self._start = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            own, files = self._now()
            self.own = max(self.own, own - self._start[0])
            self.files = max(self.files, files - self._start[1])

    @staticmethod
    def _now() -> tuple[float, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        own, files = (int(status[f].split()[0]) * 1024 / 1e6 for f in ("RssAnon", "RssFile"))
        return own, files


def on_disk(clients: int, size: int) -> dict[str, Any]:
    """FedAvg's aggregation of uploads that lie on disk: seconds and megabytes."""
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64)
    base = {f"{number:02}": torch.rand(size // TENSORS) for number in range(TENSORS)}
    stack, start = UploadStack(clients, 0.0), time.perf_counter()
    with _Memory() as put:
        for client in range(clients):
            stack.put(client, {name: value + client for name, value in base.items()})
    written = time.perf_counter()
    with _Memory() as aggregate:
        mean = weighted_sum(stack.params, weights)
    done = time.perf_counter()
    for name, value in base.items():
        torch.testing.assert_close(mean[name], value + (clients - 1) / 2)
    return {
        "clients": clients,
        "parameters": size,
        "GB on disk": clients * size * 4 / 1e9,
        "put s": written - start,
        "put, own MB": put.own,
        "put, file MB": put.files,
        "aggregate s": done - written,
        "aggregate, own MB": aggregate.own,
        "aggregate, file MB": aggregate.files,
    }


def _write(title: str, name: str, lines: list[dict[str, Any]], text: str, load: float) -> None:
    found_versions = versions("fedtailor", "torch", "numpy")
    command = shlex.join(["python", "benchmarks/server.py", *sys.argv[1:]])
    about = (
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load),
        software(found_versions),
        "one run" if "disk" in name else "medians (first to third quartile)",
    )
    text = "\n".join((f"# {title}\n", *(f"- {line}" for line in about), "", text, ""))
    print(text)
    write(RESULTS / name, text, [{**found_versions, **line} for line in lines])


def main() -> None:
    """Run all workloads, print the table, write it and every time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("alignment", "weighted sum", "krum", "fedmerge"))
    parser.add_argument("--disk", type=int, metavar="C", help="FedAvg over C models on disk, alone")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if options.disk:
        lines = [on_disk(clients, 11_000_000) for clients in (options.disk // 4, options.disk)]
        text = tabulate(lines, headers="keys", tablefmt="github", floatfmt=".1f")
        _write("FedAvg over uploads on disk", "server-disk-cpu", lines, text, load)
        return
    chosen = aggregations(options.clients, options.parameters)
    if options.only is None:
        chosen += [recompression(10, 1024, 32), recompression(50, 1024, 32)]
    else:
        chosen = [workload for workload in chosen if workload.name.startswith(options.only)]
    found = [line for workload in chosen for line in timed(workload, options.repeats)]
    name = "server-cpu" if options.only is None else f"server-{options.only.replace(' ', '-')}-cpu"
    _write("The server's work in a round", name, found, table(found), load)


if __name__ == "__main__":
    main()
