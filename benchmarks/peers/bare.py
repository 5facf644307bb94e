"""FedAvg in plain PyTorch: one model, one client after the other, in one process or several."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from multiprocessing.synchronize import Barrier

import torch
from torch import Tensor, multiprocessing
from torch.nn import functional as F

from . import cnn


def work(
    rank: int,
    options: Namespace,
    server: Sequence[Tensor],
    sums: Sequence[Sequence[Tensor]],
    barrier: Barrier,
    watch: cnn.Stopwatch,
) -> None:
    """Train this worker's clients of each cohort; worker 0 averages."""
    torch.manual_seed(rank)
    model = cnn.network()
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, cnn.LR)
    autocast = (
        torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else nullcontext()
    )
    for cohort in islice(cnn.cohorts(options.cohort), options.rounds):
        barrier.wait()  # the server's parameters are there
        torch._foreach_zero_(sums[rank])
        for client in cohort[rank :: options.workers]:
            with torch.no_grad():
                torch._foreach_copy_(parameters, server)
            for x, y in cnn.batches(client):
                optimiser.zero_grad()
                with autocast:
                    logits = model(x)
                F.cross_entropy(logits.float(), y).backward()
                optimiser.step()
            with torch.no_grad():
                torch._foreach_add_(sums[rank], parameters)
        barrier.wait()  # everybody's sums are there
        if rank == 0:
            for value, *parts in zip(server, *sums, strict=True):
                value.copy_(sum(parts) / len(cohort))
            watch.round_ended()


def main() -> None:
    """Run as the driver says."""
    options = cnn.options()
    context = multiprocessing.get_context("fork")  # no thread has been started yet
    server = [value.detach().share_memory_() for value in cnn.network().parameters()]
    sums = [
        [torch.zeros_like(value).share_memory_() for value in server]
        for _ in range(options.workers)
    ]
    watch, barrier = cnn.Stopwatch(), context.Barrier(options.workers)
    shared = (options, server, sums, barrier, watch)
    others = [context.Process(target=work, args=(i, *shared)) for i in range(1, options.workers)]
    for process in others:
        process.start()
    work(0, *shared)
    for process in others:
        process.join()
    cnn.report(options.out, watch.ends, server, "")


if __name__ == "__main__":
    main()
