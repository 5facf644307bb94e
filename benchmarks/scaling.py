"""How memory and time grow with the number of clients K, at a fixed cohort.

K = 10^2 ... 10^6 clients hold four rows each of one memory-mapped array of random 8 x 8 pictures
with random labels (the numbers learned mean nothing). A cohort of 10 trains a small network;
FedAvg keeps nothing of a client, Ditto a model each, on disk. Every run has a process of its own,
divides the rows (IID), opens the store and the run folder, and then trains, evaluates a sample of
clients and commits, round after round, as `fedtailor run` does; the repeats of all take turns.
A round's time is from one commit to the next, without the first round. Memory is the highest
resident set of the process (Linux's VmHWM), in all and less that after the imports.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py

writes benchmarks/results/scaling-cpu.jsonl, a line a process, the table beside, and
docs/figures/scaling.svg.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import circumstances, megabytes, software, versions, write

METHODS = {"fedavg": "FedAvg", "ditto": "Ditto, private models on disk"}
ROWS = 4  # of the data a client
BASE = 1000  # the number of clients that others are compared with
HERE = Path(__file__).parent
OUT = HERE / "results" / "scaling-cpu"
FIGURE = HERE.parent / "docs" / "figures" / "scaling.svg"


def make_data(folder: Path, clients: int) -> None:
    """Write the rows of so many clients; those of fewer clients are the first of them."""
    import numpy as np

    rng, count = np.random.default_rng(0), clients * ROWS
    shape = (count, 1, 8, 8)
    pictures = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.uint8, shape=shape)
    for start in range(0, count, 1 << 16):
        part = pictures[start : start + (1 << 16)]
        part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)
    pictures.flush()
    np.save(folder / "y.npy", rng.integers(0, 10, count, dtype=np.uint8))


def work(method_name: str, clients: int, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in this process: seconds and megabytes."""
    import numpy as np
    import torch
    from torch import nn

    from fedtailor.data import Dataset, SplitConfig, partition
    from fedtailor.data.config import LocalConfig
    from fedtailor.data.federation import Federation
    from fedtailor.data.table import Images
    from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
    from fedtailor.engine.rounds import rounds
    from fedtailor.methods import METHODS as CLASSES
    from fedtailor.params import count
    from fedtailor.store.trial import TrialStore
    from fedtailor.task.backbone import Backbone
    from fedtailor.task.task import Task

    torch.set_num_threads(1)
    imports = megabytes("VmHWM")
    total = clients * ROWS
    pictures = np.load(data / "x.npy", mmap_mode="r")[:total]
    labels = np.load(data / "y.npy", mmap_mode="r")[:total]
    classes = tuple("0123456789")
    dataset = Dataset(Images(pictures), total, "classification", "random", labels, classes)
    start = time.perf_counter()
    federation = Federation(dataset, partition(dataset, SplitConfig(clients), seed=0))
    dealing = time.perf_counter() - start

    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    backbone = Backbone(network, prepare=lambda batch: {"input": batch["pixel_values"]})
    method = CLASSES[method_name]()
    task = Task(backbone, method.adapt)
    plan = Plan(
        options.rounds,
        local=LocalConfig(batch_size=2, steps=options.steps),
        cohort=CohortConfig(size=options.cohort),
        evaluate=EvaluateConfig(clients=options.cohort),
        engine=EngineConfig("sequential"),  # all in the process whose time is taken
    )
    with tempfile.TemporaryDirectory(prefix="fedtailor-scaling-") as out:
        path = Path(out) / "private.safetensors"
        folder = TrialStore(Path(out), plan.rounds)
        states = folder.open_states(method, task, federation)
        folder.restore(states)
        wall, cpu = [time.perf_counter()], [time.process_time()]
        for done in rounds(method, task, federation, plan, store=states):
            folder.commit(done)
            wall.append(time.perf_counter())
            cpu.append(time.process_time())
        file = path.stat() if path.exists() else None
    seconds = {name: np.diff(at)[1:].tolist() for name, at in (("wall_s", wall), ("cpu_s", cpu))}
    return {
        **seconds, "dealing_s": dealing, "imports_mb": imports, "peak_mb": megabytes("VmHWM"),
        "parameters": count(task.state), "file_mb": file.st_size / 1e6 if file else 0.0,
        "disk_mb": file.st_blocks * 512 / 1e6 if file else 0.0,
    }  # fmt: skip


def run(method: str, clients: int, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`work` in a new process."""
    command = [sys.executable, __file__, "--worker", method, str(clients), str(data)]
    for name in ("rounds", "steps", "cohort"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def middle(repeats: Sequence[dict[str, Any]], name: str) -> float:
    """The median over all repeats and, of what is by round, over all rounds."""
    found = [each[name] for each in repeats]
    values = [x for value in found for x in (value if isinstance(value, list) else [value])]
    return statistics.median(values)


def spread(repeats: Sequence[dict[str, Any]], name: str) -> str:
    """Median milliseconds, and from the first to the third quartile."""
    values = [x * 1e3 for found in repeats for x in found[name]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{statistics.median(values):.1f} ({low:.1f}-{high:.1f})"


Results = dict[tuple[str, int], list[dict[str, Any]]]


def table(results: Results, about: Sequence[str]) -> str:
    """The results by method and K as Markdown, with ``about`` above."""
    lines = [*(f"- {line}" for line in about), ""]
    header = (
        "", "clients", "peak MB in all", f"of K = {BASE:,}", "less imports", "CPU ms a round",
        f"of K = {BASE:,}", "wall ms a round", f"of K = {BASE:,}", "dealing the rows, s",
        "private file, MB", "on disk, MB",
    )  # fmt: skip
    lines += ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for (method, clients), repeats in results.items():
        base = results.get((method, BASE), repeats)

        def ratio(name: str, repeats=repeats, base=base) -> str:
            return f"{middle(repeats, name) / middle(base, name):.2f}"

        own = statistics.median(found["peak_mb"] - found["imports_mb"] for found in repeats)
        cells = (
            METHODS[method], f"{clients:,}", f"{middle(repeats, 'peak_mb'):.0f}", ratio("peak_mb"),
            f"{own:.0f}", spread(repeats, "cpu_s"), ratio("cpu_s"), spread(repeats, "wall_s"),
            ratio("wall_s"), f"{middle(repeats, 'dealing_s'):.2f}",
            f"{middle(repeats, 'file_mb'):,.1f}", f"{middle(repeats, 'disk_mb'):.1f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(results: Results) -> str:
    """Peak memory and seconds a round over K, as SVG."""
    from fedtailor.report.drawing import svg

    rows = [
        {"method": METHODS[method], "clients": clients, "peak memory (MB)": middle(of, "peak_mb"),
         "CPU time a round (ms)": 1e3 * middle(of, "cpu_s")}
        for (method, clients), of in results.items()
    ]  # fmt: skip
    x = {"field": "clients", "type": "quantitative", "scale": {"type": "log"},
         "axis": {"grid": False, "format": "~s"}}  # fmt: skip
    legend = {"orient": "bottom", "title": None, "labelLimit": 300}
    look = {"field": "method", "type": "nominal", "sort": None, "legend": legend}
    mark = {"type": "line", "point": {"size": 40, "strokeWidth": 0}}
    panels = [
        {"width": 270, "height": 210, "mark": mark,
         "encoding": {"x": x, "y": {"field": field, "type": "quantitative"},
                      "color": look, "strokeDash": look}}
        for field in ("peak memory (MB)", "CPU time a round (ms)")
    ]  # fmt: skip
    return svg({"data": {"values": rows}, "hconcat": panels})


def main() -> None:
    """Run all, print the table, write it, the figure, and what each process found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=6, help="clients: up to 10 to this power")
    parser.add_argument("--repeats", type=int, default=1, help="processes a contender")
    parser.add_argument("--rounds", type=int, default=12, help="rounds a process")
    parser.add_argument("--steps", type=int, default=2, help="local steps")
    parser.add_argument("--cohort", type=int, default=10, help="clients a round")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        method, clients, folder = options.worker
        print(json.dumps(work(method, int(clients), Path(folder), options)))
        return
    load = os.getloadavg()[0]
    scales = [10**power for power in range(2, options.most + 1)]
    results: Results = {(method, clients): [] for method in METHODS for clients in scales}
    with tempfile.TemporaryDirectory(prefix="fedtailor-scaling-") as folder:
        make_data(Path(folder), scales[-1])
        for repeat in range(options.repeats):
            for method, clients in results:
                print(f"repeat {repeat}: {method}, {clients:,} clients", file=sys.stderr)
                found = run(method, clients, Path(folder), options)
                milliseconds = statistics.median(found["cpu_s"]) * 1e3
                print(f"  {found['peak_mb']:.0f} MB, {milliseconds:.0f} ms", file=sys.stderr)
                results[method, clients].append({"repeat": repeat} | found)
    found_versions = versions("fedtailor", "torch", "numpy")
    command = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
    one = next(iter(results.values()))[0]
    about = (
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load),
        software(found_versions),
        f"a network of {one['parameters']:,} parameters; {ROWS} rows a client, dealt IID; cohort "
        f"{options.cohort}, {options.steps} steps; {options.cohort} clients evaluated every round",
        f"{options.repeats} processes a contender, in turns, each {options.rounds} rounds, the "
        "first left out; medians (first to third quartile)",
        f"imports alone take {one['imports_mb']:.0f} MB",
    )
    text = table(results, about)
    print(text)
    records = [
        {"method": method, "clients": clients, **found_versions, **found}
        for (method, clients), repeats in results.items()
        for found in repeats
    ]
    write(OUT, f"# Memory and time by the number of clients\n\n{text}", records)
    FIGURE.write_text(draw(results) + "\n")


if __name__ == "__main__":
    main()
