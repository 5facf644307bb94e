"""Several clients' work at once, under ``torch.func.vmap``; on a GPU as many as pays."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import torch

from ...data.federation import pad_and_stack
from ...errors import announce, brief
from ...optim import ClientContext
from ...params import Params, same_tensors, stack
from ...task.records import RecordNoise
from ...torch_private import map_leaves
from .work import AnyItem, ClientInputs, ClientWork, Executor, Work

# how PyTorch's messages begin about code that looks at values, or makes tensors of their number
_OF_VALUES = ("vmap: It looks like you're", "vmap: We do not support batching operators")


@dataclass
class AdaptiveChunk:
    """How many clients a GPU trains at once: twice as many each time, as long as its memory lasts
    and each client takes a twentieth less time so."""

    size: int = 4
    settled: bool = False
    pace: float = math.inf  # seconds by size, of half as many clients
    warm: bool = False  # whether so many have run before: the first time also starts things up

    def ran(self, clients: int, pace: float) -> None:
        """So many clients took ``pace`` seconds by size."""
        if self.settled or clients < self.size:
            return
        if not self.warm:
            self.warm = True
        elif pace < 0.95 * self.pace:
            self.size, self.pace, self.warm = 2 * self.size, pace, False
        else:
            self.size, self.settled = self.size // 2, True

    def failed(self, clients: int) -> None:
        """So many clients did not fit."""
        self.size, self.settled = min(self.size, clients // 2), True


class Vectorised(Executor):
    """Clients' work under ``torch.func.vmap``, ``clients_per_step`` at once where their states have
    the same shapes; any other work one item after the other. ``clients_per_step`` may grow, by
    itself for each work; then clients that don't fit into memory together are run in halves. Where
    vmap can't follow the model's code, clients run one after the other, and a line on stderr says
    so."""

    def __init__(self, works: Mapping[str, Work], clients_per_step: int | AdaptiveChunk) -> None:
        self._works = works
        self._fixed = isinstance(clients_per_step, int)
        if isinstance(clients_per_step, int):
            clients_per_step = AdaptiveChunk(clients_per_step, settled=True)
        self._alone = False  # the model's code can't run under vmap
        self._sizes = {name: replace(clients_per_step) for name in works}

    @property
    def name(self) -> str:
        """With the number of clients, where that is being found out."""
        if self._alone:
            return "sequential"
        return "vectorised" if self._fixed else f"vectorised-{self.concurrency}"

    @property
    def concurrency(self) -> int:
        return next(iter(self._sizes.values())).size

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        work = self._works[name]
        if not isinstance(work, ClientWork) or not work.together:
            for item in items:
                yield item, work.one(server, item)
            return
        prepared: Iterator[tuple[Any, ClientInputs]] = ((i, work.prepare(server, i)) for i in items)  # type: ignore[arg-type]
        concurrency = self._sizes[name]
        for _, group in groupby(prepared, key=lambda of: _shapes(of[1])):
            while chunk := list(islice(group, concurrency.size)):
                start, size = time.perf_counter(), sum(request.size for request, _ in chunk)
                yield from self._together(work, chunk, concurrency)
                concurrency.ran(len(chunk), (time.perf_counter() - start) / max(size, 1))

    def _together(
        self,
        work: ClientWork,
        chunk: Sequence[tuple[Any, ClientInputs]],
        concurrency: AdaptiveChunk,
    ) -> Iterator[tuple[Any, Any]]:
        if self._alone:
            for request, inputs in chunk:
                yield request, work.complete(request, inputs)
            return
        outcomes, start = None, time.process_time()
        try:
            outcomes = _vectorised(work, [inputs for _, inputs in chunk])
        except torch.OutOfMemoryError:
            if self._fixed or len(chunk) == 1:
                raise
        except RuntimeError as error:
            if not _is_of_the_model(error):
                raise
            self._alone = True
            announce(
                "clients run one after the other, since torch.func.vmap can't follow the model's "
                f"code: {brief(str(error))}"
            )
        if outcomes is None:  # what was allocated is free only after the error's own frames
            if self._alone:
                yield from self._together(work, chunk, concurrency)
                return
            torch.cuda.empty_cache()
            concurrency.failed(len(chunk))
            for part in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
                yield from self._together(work, part, concurrency)
            return
        cpu_seconds = (time.process_time() - start) / len(chunk)
        for index, (request, inputs) in enumerate(chunk):
            outcome = map_leaves(itemgetter(index), outcomes)
            yield request, work.finish(request, inputs, outcome, inputs.cpu_seconds + cpu_seconds)


def _is_of_the_model(error: RuntimeError) -> bool:
    """Whether a module's forward looks at values, which vmap can't follow."""
    frames = traceback.extract_tb(error.__traceback__)
    return str(error).startswith(_OF_VALUES) and any(f.name == "_call_impl" for f in frames)


def _vectorised(work: ClientWork, many: Sequence[ClientInputs]) -> Any:
    first = many[0]
    same = all(same_tensors(inputs.received, first.received) for inputs in many)
    context, dims = _stacked_context(many)
    in_dims = (None if same else 0, 0, 0, dims)
    return torch.func.vmap(work.run, in_dims=in_dims)(
        first.received if same else stack([inputs.received for inputs in many]),
        stack([inputs.private for inputs in many]),
        pad_and_stack([inputs.batches for inputs in many]),
        context,
    )


def _stacked_context(many: Sequence[ClientInputs]) -> tuple[ClientContext, Any]:
    """What clients are told, stacked where they differ, and which axes that gives."""
    told = [inputs.context for inputs in many]
    context = told[0]._replace(key=torch.stack([one.key for one in told]))
    dims: Any = (0, *[None] * (len(context) - 1))
    noises = [one.noise for one in told if one.noise is not None]
    if noises:
        keys = torch.stack([noise.key for noise in noises])
        sizes = torch.stack([noise.size for noise in noises])
        context = context._replace(noise=noises[0]._replace(key=keys, size=sizes))
        dims = (*dims[:-1], RecordNoise(0, 0, None, None))  # type: ignore[arg-type]
    return context, ClientContext(*dims)


def _shapes(inputs: ClientInputs) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape) for name, value in {**inputs.received, **inputs.private}.items()
    }
