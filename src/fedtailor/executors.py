"""How clients' work is run: one after the other, or several at once, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch.utils import _pytree as pytree

from .federation import pad_and_stack
from .optim import Context
from .params import Params, same_tensors, stack
from .task import Batch, Precision


@dataclass(frozen=True)
class EngineConfig:
    """How clients are run. Executors give the same numbers, up to rounding."""

    executor: Literal["sequential", "vectorised"] = "sequential"
    clients_per_step: Annotated[int, Gt(0)] = 5  # vectorised: clients trained at once
    precision: Precision = "fp32"  # bf16: autocast; parameters stay float32
    device: str = "auto"
    upload_memory_mb: Annotated[float, Gt(0)] = 2000.0  # a cohort's uploads beyond it go to disk
    # for what a method works out once an example, if all examples' results fit; 0: never
    cache_mb: Annotated[float, Ge(0)] = 2000.0


@dataclass(frozen=True)
class Job:
    """One client's work: what a client function is called with. ``position`` tells jobs apart."""

    position: int
    received: Params
    private: Params
    steps: list[Batch]
    context: Context


ClientFunction = Callable[[Params, Params, Sequence[Batch], Context], Any]


def execute(
    engine: EngineConfig, work: ClientFunction, jobs: Iterable[Job]
) -> Iterator[tuple[Job, Any]]:
    """Run ``work(received, private, steps, context)`` for every job by the configured executor."""
    if engine.executor == "sequential":
        return _sequential(work, jobs)
    return _vectorised(work, jobs, engine.clients_per_step)


def _sequential(work: ClientFunction, jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
    for job in jobs:
        yield job, work(job.received, job.private, job.steps, job.context)


def _vectorised(
    work: ClientFunction, jobs: Iterable[Job], clients_per_step: int
) -> Iterator[tuple[Job, Any]]:
    for chunk in _alike(jobs, clients_per_step):
        first = chunk[0]
        same = all(same_tensors(job.received, first.received) for job in chunk)
        in_dims = (None if same else 0, 0, 0, Context(0, None, None, None))  # type: ignore[arg-type]
        results = torch.func.vmap(work, in_dims=in_dims)(
            first.received if same else stack([job.received for job in chunk]),
            stack([job.private for job in chunk]),
            pad_and_stack([job.steps for job in chunk]),
            first.context._replace(key=torch.stack([job.context.key for job in chunk])),
        )
        for index, job in enumerate(chunk):
            yield job, pytree.tree_map(lambda value, at=index: value[at], results)


def _alike(jobs: Iterable[Job], most: int) -> Iterator[list[Job]]:
    """Chunks of successive jobs, each of states of the same shapes."""
    for _, group in groupby(jobs, key=lambda job: _shapes(job.received) | _shapes(job.private)):
        while chunk := list(islice(group, most)):
            yield chunk


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in params.items()}
