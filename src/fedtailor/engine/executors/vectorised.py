"""Several clients' work at once, under ``torch.func.vmap``; on a GPU as many as pays."""

from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from typing import Any

import torch

from ...data.federation import pad_and_stack
from ...errors import announce, brief
from ...optim import ClientContext
from ...params import Batch, Params, moved, same_tensors, stack
from ...task.records import RecordNoise
from .captured import Capture, Captured
from .work import AnyItem, ClientInputs, ClientWork, Executor, Work, looks_at_values

_FEW = 4  # clients at once, to find out whether that is faster than one after the other
_TRIES = (1, 1, 1, _FEW, _FEW, _FEW)  # the first starts things up, the second records kernels
_USED = 0.85  # of the memory that is free
_MOST = 256  # clients at once: more are hardly faster, and all their batches are in memory


@dataclass
class AdaptiveChunk:
    """How many clients a GPU trains at once. The first ones tell: some of them run alone and some
    by fours. Then it is as many as the memory holds, or one where one after the other is faster."""

    size: int = 1
    settled: bool = False
    tries: tuple[int, ...] = _TRIES
    paces: dict[int, float] = field(default_factory=dict)  # seconds by size, at best
    room: int = _MOST  # clients that the memory holds

    def ran(self, clients: int, pace: float, room: int, all_there: bool = False) -> None:
        """So many clients took ``pace`` seconds by size; the memory has ``room`` for so many. Fewer
        than were to run say nothing, unless there are no more: ``all_there``."""
        if self.settled:
            return
        if all_there and clients < self.size:
            self.size, self.tries = clients, (clients,) * len(self.tries)
            self.settled = clients == 1
        if clients < self.size:
            return
        if self.size not in self.paces:
            self.room = _MOST  # what the last size had says less
        self.paces[self.size] = min(pace, self.paces.get(self.size, math.inf))
        self.room, self.tries = max(1, min(self.room, room)), self.tries[1:]
        if self.tries:
            self.size = min(self.tries[0], self.room)
            return
        self.settled = True
        alone = self.paces.pop(1, math.inf)
        self.size = self.room if min(self.paces.values(), default=math.inf) < alone else 1

    def failed(self, clients: int) -> None:
        """So many clients did not fit."""
        self.size, self.settled = min(self.size, clients // 2), True


class Vectorised(Executor):
    """Clients' work under ``torch.func.vmap``, ``clients_per_step`` at once where their states have
    the same shapes; any other work one item after the other. ``clients_per_step`` may be found out,
    for each work; then clients that don't fit into memory together are run in halves. Where vmap
    can't follow the model's code, clients run one after the other, and a line on stderr says so.
    With ``capture`` trainings are recorded."""

    def __init__(
        self,
        works: Mapping[str, Work],
        clients_per_step: int | AdaptiveChunk,
        capture: Capture | None = None,
    ) -> None:
        self._works = works
        self._fixed = isinstance(clients_per_step, int)
        if isinstance(clients_per_step, int):
            clients_per_step = AdaptiveChunk(clients_per_step, settled=True)
        self._alone = False  # the model's code can't run under vmap
        self._sizes = {name: replace(clients_per_step, paces={}) for name in works}
        self._largest = dict.fromkeys(works, 0)  # chunk so far
        self._captured = Captured(capture)
        first = next(iter(works.values()))  # of a round
        if capture and isinstance(first, ClientWork) and not first.recordable:
            announce(
                "clients are trained without CUDA graphs: the method looks at values in Python"
            )

    @property
    def name(self) -> str:
        """With the number of clients, once that is found out."""
        size = next(iter(self._sizes.values()))
        if self._alone or (self._fixed and size.size == 1):
            return "sequential"
        return "vectorised" if self._fixed or not size.settled else f"vectorised-{size.size}"

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
        size = self._sizes[name]
        prepared: Iterator[tuple[Any, ClientInputs]] = (
            (item, work.prepare(server, item, drawn)) for item, drawn in _drawn(work, items, size)
        )
        is_first = True
        for _, group in groupby(prepared, key=lambda of: _shapes(of[1])):
            while chunk := list(islice(group, size.size)):
                if len(chunk) > self._largest[name]:  # smaller ones hardly come again
                    self._largest[name] = len(chunk)
                    self._captured.forget()
                held = _held(work.device)
                start, steps = time.perf_counter(), sum(request.size for request, _ in chunk)
                yield from self._together(work, chunk, size)
                pace = (time.perf_counter() - start) / max(steps, 1)
                if not size.settled:
                    size.ran(len(chunk), pace, _room(work.device, held, len(chunk)), is_first)
                is_first = False

    def _together(
        self, work: ClientWork, chunk: Sequence[tuple[Any, ClientInputs]], size: AdaptiveChunk
    ) -> Iterator[tuple[Any, Any]]:
        if self._alone or size.size == 1:
            for request, inputs in chunk:
                run = partial(work.complete, request, inputs, self._captured)
                yield request, self._with_room(run)
            return
        outcomes, start = None, time.process_time()
        many = [inputs for _, inputs in chunk]
        try:
            outcomes = self._with_room(lambda: work.to_host(self._stacked(work, many)))
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
                yield from self._together(work, chunk, size)
                return
            torch.cuda.empty_cache()
            size.failed(len(chunk))
            for part in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
                yield from self._together(work, part, size)
            return
        cpu_seconds = (time.process_time() - start) / len(chunk)
        yield from work.finish_all(chunk, outcomes, cpu_seconds)

    def _with_room(self, run: Callable[[], Any]) -> Any:
        """What ``run`` returns; if it does not fit beside the recordings, without these."""
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self._captured.holds_any:
                raise
        self._captured.stop("the recordings leave too little memory")
        torch.cuda.empty_cache()
        return run()

    def _stacked(self, work: ClientWork, many: Sequence[ClientInputs]) -> Any:
        """What the work returns for several clients at once."""
        first = many[0]
        same = all(same_tensors(inputs.received, first.received) for inputs in many)
        context, dims = _stacked_context(many)
        states = (
            first.received if same else stack([inputs.received for inputs in many]),
            stack([inputs.private for inputs in many]),
            pad_and_stack([inputs.batches for inputs in many], work.most_tokens),
        )
        arguments = *moved(states, work.device), context
        run: Callable[..., Any] = torch.func.vmap(
            work.watched, in_dims=(None if same else 0, 0, 0, dims)
        )
        return (
            self._captured(run, arguments, (id(work), same)) if work.recordable else run(*arguments)
        )


def _drawn(
    work: ClientWork, items: Iterable[Any], size: AdaptiveChunk
) -> Iterator[tuple[Any, list[Batch] | None]]:
    """Items, on a GPU with their batches: a second thread draws these for one chunk more."""
    if not work.draws_ahead:
        yield from ((item, None) for item in items)
        return
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[tuple[Any, Future[list[Batch] | None]]] = deque()
        for item in items:
            waiting.append((item, thread.submit(work.draw, item)))
            if len(waiting) > size.size:
                first, drawn = waiting.popleft()
                yield first, drawn.result()
        yield from ((item, drawn.result()) for item, drawn in waiting)


def _held(device: torch.device) -> int:
    """The bytes of a GPU's memory that are in use."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _room(device: torch.device, held: int, clients: int) -> int:
    """How many clients a GPU's memory holds, of which ``held`` bytes were in use before so many
    have run."""
    if device.type != "cuda":
        return _FEW
    each = max(1, (torch.cuda.max_memory_allocated(device) - held) // clients)
    torch.cuda.empty_cache()
    return int(_USED * torch.cuda.mem_get_info(device)[0] / each)


def _is_of_the_model(error: RuntimeError) -> bool:
    """Whether a module's forward looks at values, which vmap can't follow."""
    frames = traceback.extract_tb(error.__traceback__)
    return looks_at_values(error) and any(f.name == "_call_impl" for f in frames)


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
