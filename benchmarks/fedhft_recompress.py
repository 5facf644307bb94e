"""FedHFT's recompression: dense SVD, exact SVD through the factors, randomised SVD through them.

Each case is what a round brings to one layer and one cluster: the cluster's adapter of rank r and
the updates of c clients, so B is [d_out, (1 + c) r] and A [(1 + c) r, d_in]. The updates share a
part and differ in the rest, as those of clients with related data do. Prints the median time of
a call and the distance from B A, relative to that of the best approximation of rank r.

    python benchmarks/fedhft_recompress.py [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from fedtailor import random
from fedtailor.methods.fedhft import recompress

CASES = [  # layer, d_out, d_in, clients, rank
    ("MiniLM, attention output", 384, 384, 10, 8),
    ("MiniLM, feed-forward output", 384, 1536, 10, 8),
    ("MiniLM, feed-forward output", 384, 1536, 50, 8),
    ("BERT-large, attention output", 1024, 1024, 10, 32),
    ("BERT-large, feed-forward output", 1024, 4096, 10, 32),
    ("Llama 7B, feed-forward output", 4096, 11008, 5, 16),
]

Factors = tuple[Tensor, Tensor]


def stacked_factors(d_out: int, d_in: int, clients: int, rank: int) -> Factors:
    """B ``[d_out, R]`` and A ``[R, d_in]`` with R = (1 + clients) rank."""
    key = random.key(0, d_out, d_in, clients, rank)
    draw = [random.fold_in(key, i) for i in range(4)]
    R = (1 + clients) * rank
    shared = random.normal(draw[0], (d_out, rank)) @ random.normal(draw[1], (rank, R))
    B = shared / rank + 0.5 * random.normal(draw[2], (d_out, R))
    return B, random.normal(draw[3], (R, d_in), rank**-0.5)


def dense(B: Tensor, A: Tensor, rank: int) -> Factors:
    """The yardstick: form B A and take its SVD."""
    u, s, v = torch.linalg.svd(B.double() @ A.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).float(), v[:rank].float()


def distance(B: Tensor, A: Tensor, found: Factors) -> float:
    """||B A - B' A'||, computed in float64 by blocks of rows."""
    new_B, new_A = (part.double() for part in found)
    squares = 0.0
    for rows in range(0, len(B), 512):
        block = B[rows : rows + 512].double() @ A.double() - new_B[rows : rows + 512] @ new_A
        squares += block.square().sum().item()
    return squares**0.5


def timed(function: Callable[[], Factors], repeats: int) -> tuple[float, Factors]:
    """Median milliseconds of a call, and its result."""
    found = function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds), found


def measure(case: tuple[str, int, int, int, int], repeats: int, max_dense: int) -> dict[str, Any]:
    """One row of the table; ``dense`` is left out where d_out d_in is above ``max_dense``."""
    layer, d_out, d_in, clients, rank = case
    B, A = stacked_factors(d_out, d_in, clients, rank)
    row: dict[str, Any] = {"layer": layer, "shape": f"{d_out} x {d_in}", "R": B.shape[1], "r": rank}
    exact_ms, exact = timed(lambda: recompress(B, A, rank, exact=True), repeats)
    random_ms, randomised = timed(lambda: recompress(B, A, rank), repeats)
    best = distance(B, A, exact)
    row |= {"dense ms": None, "exact ms": exact_ms, "randomised ms": random_ms}
    row |= {"dense error": None, "exact error": 1.0, "randomised error": None}
    if d_out * d_in <= max_dense:
        row["dense ms"], found = timed(lambda: dense(B, A, rank), min(repeats, 3))
        best = distance(B, A, found)
        row["dense error"] = 1.0
    row["exact error"] = distance(B, A, exact) / best
    row["randomised error"] = distance(B, A, randomised) / best
    return row


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-dense", type=int, default=5_000_000, help="largest d_out d_in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        print(f"{case[0]}, {case[3]} clients", file=sys.stderr)
        rows.append(measure(case, options.repeats, options.max_dense))
    if options.json:
        print(json.dumps(rows))
        return
    print(tabulate(rows, headers="keys", floatfmt=(*[""] * 4, *[".1f"] * 3, *[".4f"] * 3)))
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


if __name__ == "__main__":
    main()
