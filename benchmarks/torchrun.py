"""What several ranks take, beside one process and its worker processes; and what travels.

The work is that of `python -m benchmarks.peers cnn`: FedAvg on all 1,626,442 parameters of a small
network, clients of 50 pictures, one epoch in batches of 10. Contenders take turns, each repeat in
new processes of one thread each; the first round is left out. All must end with the same bits.

Apart from it: how long one client's upload takes from one rank to the other, as it is gathered
here, and an all-reduce of as many numbers, which could take the place of all uploads of a round
where a method needs but their sum.

    OMP_NUM_THREADS=1 python -m benchmarks.torchrun

writes benchmarks/results/torchrun-cpu.jsonl, a line a process, and the table beside.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .harness import (
    Contender,
    Record,
    circumstances,
    in_turns,
    markdown,
    run,
    software,
    spread,
    versions,
    write,
)

OUT = Path(__file__).parent / "results" / "torchrun-cpu"
ONE = (sys.executable, "-m")
NAMES = {
    "sequential": "one process",
    "processes": "worker processes",
    "ranks": "ranks of torchrun",
    "wire": "what travels",
}
MESSAGES = 20  # of the same kind, timed one by one


def contenders(options: argparse.Namespace) -> list[Contender]:
    """The commands."""
    several = (*ONE, "torch.distributed.run", "--standalone", "--nproc-per-node")
    starts = {"sequential": ONE, "processes": ONE}
    ranks = (*several, str(options.ranks), "-m")
    found = []
    for kind in NAMES:
        work = ("benchmarks.torchrun", "--worker", kind)
        settings = [f"--{name}={getattr(options, name)}" for name in ("rounds", "cohort", "ranks")]
        found.append(Contender(kind, (*starts.get(kind, ranks), *work, *settings)))
    return found


def work(options: argparse.Namespace) -> None:
    """Be one contender, or a rank of it."""
    import torch

    from fedtailor.engine.executors.process_group import init_process_group

    torch.set_num_threads(1)
    with init_process_group() as group:
        found = travel(group) if options.worker == "wire" else train(options, group)
        if group is None or group.is_leader:
            options.out.write_text(json.dumps(found))


def train(options: argparse.Namespace, group: Any) -> Record:
    """When rounds ended, and a digest of what came of them."""
    from fedtailor.data.config import LocalConfig
    from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
    from fedtailor.engine.executors.choose import share_executor
    from fedtailor.engine.executors.ranks import RankExecutor, follow
    from fedtailor.engine.executors.work import Executor, Work
    from fedtailor.engine.prepare import client_works
    from fedtailor.engine.rounds import rounds
    from fedtailor.methods.fedavg import FedAvg
    from fedtailor.models.load import from_module
    from fedtailor.optim import Optimiser
    from fedtailor.params import encode
    from fedtailor.task.task import Task

    from .peers import cnn, ours

    method = FedAvg(optimiser=Optimiser("sgd", lr=cnn.LR))
    task, federation = Task(from_module(cnn.network()), method.adapt), ours.federation()
    executor = "sequential" if options.worker == "ranks" else options.worker
    plan = Plan(
        options.rounds,
        LocalConfig(batch_size=cnn.BATCH),
        CohortConfig(size=options.cohort),
        engine=EngineConfig(executor, processes=options.ranks, device="cpu"),
        evaluate=EvaluateConfig(every=options.rounds, clients=1),  # of no examples
    )

    def share(works: Mapping[str, Work]) -> Executor:
        return share_executor(plan.engine, works, task.device, group.local_size)

    def all_ranks(works: Mapping[str, Work]) -> Executor:
        return RankExecutor(group, share(works))

    if group is not None and not group.is_leader:
        follow(group, share(client_works(method, task, federation, plan)))
        return {}
    watch, aggregate = cnn.Stopwatch(), []
    make_executor = None if group is None else all_ranks
    for done in rounds(method, task, federation, plan, make_executor=make_executor):
        watch.round_ended()
        aggregate.append(done.seconds["aggregate"])
        server = done.server
    digest = blake2b(encode(server), digest_size=8).hexdigest()
    return {"ends": watch.ends, "digest": digest, "aggregate_s": aggregate[1:]}


def travel(group: Any) -> Record:
    """Seconds that messages take between two ranks."""
    import torch
    import torch.distributed as dist

    from .peers import cnn

    upload = {name: value.detach() for name, value in cnn.network().named_parameters()}
    flat = torch.cat([value.flatten() for value in upload.values()])

    def one_upload() -> None:
        if group.is_leader:
            group.receive_from(1)
        elif group.rank == 1:
            group.send_to(0, upload).wait()

    def server() -> None:
        group.broadcast(upload) if group.is_leader else group.receive()

    def timed(step: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(MESSAGES):
            dist.barrier()
            start = time.perf_counter()
            step()
            found.append(time.perf_counter() - start)
        return found

    return {
        "one upload, gathered": timed(one_upload),
        "the server's state, to all": timed(server),
        "all-reduce of a model": timed(lambda: dist.all_reduce(flat)),
        "megabytes": flat.numel() * 4 / 1e6,
    }


def table(records: Sequence[Record], ranks: int) -> str:
    """Rounds by contender, and messages."""
    by = {kind: [r for r in records if r["contender"] == kind] for kind in NAMES}

    def all_of(kind: str, name: str) -> list[float]:
        return [value for record in by[kind] for value in record[name]]

    base = statistics.median(all_of("sequential", "rounds_s"))
    rows = [
        [
            NAMES[kind],
            "1" if kind == "sequential" else str(ranks),
            spread(all_of(kind, "rounds_s")),
            f"{statistics.median(all_of(kind, 'rounds_s')) / base:.2f}",
            spread(all_of(kind, "rounds_cpu_s")),
            spread([record["first_s"] for record in by[kind]], 1),
            spread([record["peak_mb"] for record in by[kind]], 0),
        ]
        for kind in ("sequential", "processes", "ranks")
    ]
    header = (
        "", "processes", "s a round", "of the first", "CPU s a round", "s to the first round's end",
        "peak MB in all",
    )  # fmt: skip
    wire = [
        [name, spread(all_of("wire", name), 1, 1000)]
        for name in ("one upload, gathered", "the server's state, to all", "all-reduce of a model")
    ]
    megabytes = by["wire"][0]["megabytes"]
    header_wire = (f"float32, {megabytes:.1f} MB, {ranks} ranks over gloo", "ms")
    return f"{markdown(header, rows)}\n## What travels\n\n{markdown(header_wire, wire)}"


def main() -> None:
    """Run all in turns, print the tables, and write them with what each process found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs a contender")
    parser.add_argument("--rounds", type=int, default=4, help="of each; the first is left out")
    parser.add_argument("--cohort", type=int, default=20, help="clients a round")
    parser.add_argument("--ranks", type=int, default=2, help="and worker processes")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    from .peers import cnn

    cnn.make()
    load = os.getloadavg()[0]
    records = []
    for repeat, contender in in_turns(contenders(options), options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            found = run(contender, Path(folder))
        records.append({"contender": contender.name, "repeat": repeat, **found})
    digests = {record["digest"] for record in records if "digest" in record}
    command = shlex.join(["python", "-m", "benchmarks.torchrun", *sys.argv[1:]])
    about = (
        *circumstances(f"OMP_NUM_THREADS=1 {command}", load),
        software(versions("fedtailor", "torch", "numpy")),
        f"{options.repeats} runs a contender, in turns, each {options.rounds} rounds of "
        f"{options.cohort} clients without the first; medians (first to third quartile)",
        "the trained parameters are the same bits in all runs" if len(digests) == 1
        else f"the trained parameters DIFFER: {len(digests)} digests",
    )  # fmt: skip
    text = "".join(f"- {line}\n" for line in about) + f"\n{table(records, options.ranks)}"
    print(text)
    write(OUT, f"# Ranks of torchrun\n\n{text}", records)


if __name__ == "__main__":
    main()
