"""Trainings whose kernels a GPU records once and plays again.

A GPU that trains a small model waits for the program, which starts every kernel. A training is a
function of tensors alone. So where one comes with tensors of the same shapes as another, the same
kernels do, and a CUDA graph starts them all at once. The numbers are the same to the last bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from ...errors import announce, brief
from ...optim import ClientContext
from ...params import Batch, Params
from ...torch_private import in_each, leaves, map_leaves

Arguments = tuple[Params, Params, Sequence[Batch], ClientContext]
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], object]]]
"""Runs a function without arguments. Returns its result, and a function that runs it again on what
its tensors hold by then, and writes over that result. Raises RuntimeError where it can't."""

_MOST = 8  # recordings; each holds its inputs and results; what comes later runs as it is
_REMEMBERED = 1024  # shapes that came once

_CLOSE = 1e-2  # of the norm: kernels that add in any order don't give the same bits twice


class Captured:
    """Runs trainings. One that comes a second time with the same shapes is recorded by ``capture``,
    and played from the third time on. Where one can't be recorded, a line on stderr says why, and
    all run as they are; so they do where ``capture`` is None."""

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._recordings: dict[Any, Recording] = {}
        self._by_round: set[Any] = set()  # the shapes of trainings that look at the round's number

    def __call__(self, train: Callable[..., Any], arguments: Arguments, name: object = None) -> Any:
        """``train(*arguments)``; what has the same ``name`` does the same."""
        if self._capture is None:
            return train(*arguments)
        number = arguments[-1].round
        shapes = name, _shapes(arguments)
        key = (*shapes, number if shapes in self._by_round else None)
        if (recording := self._recordings.get(key)) is not None:
            return recording.play(with_tensors(arguments))
        Watched.was_read = False
        outcome = train(*arguments)
        if Watched.was_read:
            self._by_round.add(shapes)
            key = (*shapes, number)
        if key in self._seen:
            self._record(key, train, arguments)
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return outcome

    @property
    def holds_any(self) -> bool:
        """Whether there are recordings, which take memory."""
        return bool(self._recordings)

    def forget(self) -> None:
        """Let go of all recordings, and of the memory that they hold."""
        self._recordings.clear()
        self._seen.clear()

    def stop(self, why: str) -> None:
        """Record nothing any more; a line on stderr says why."""
        announce(f"clients are trained without CUDA graphs: {why}")
        self._capture = None
        self.forget()

    def _record(self, key: Any, train: Callable[..., Any], arguments: Arguments) -> None:
        assert self._capture is not None
        for old in [old for old in self._recordings if old[-1] not in (None, key[-1])]:
            del self._recordings[old]  # of another round, which doesn't come again
        if len(self._recordings) == _MOST:
            return
        try:
            self._recordings[key] = Recording(self._capture, train, with_tensors(arguments))
        except RuntimeError as error:
            reason = error.__context__ or error  # to end a recording that has failed fails, too
            first, _, _ = str(reason).partition("\n")
            self.stop(f"the training can't be recorded as one ({brief(first, 200)})")


class Recording:
    """A training as it was recorded, with its own tensors for what it reads. Numbers that change
    from round to round are tensors, as `with_tensors` makes them."""

    def __init__(self, capture: Capture, train: Callable[..., Any], arguments: Arguments) -> None:
        own = _clone(arguments)
        self._inputs = [x for x in leaves(own) if isinstance(x, Tensor)]
        self._copied: list[Tensor] = []  # what the inputs are copies of
        self._outcome, self._replay = capture(lambda: train(*own))

    def play(self, arguments: Arguments) -> Any:
        """What the training returns for other ``arguments`` of the same shapes."""
        given = [x for x in leaves(arguments) if isinstance(x, Tensor)]
        known, pairs = self._copied, dict[torch.dtype, list[tuple[Tensor, Tensor]]]()
        for at, (own, x) in enumerate(zip(self._inputs, given, strict=True)):
            if not known or x is not known[at]:
                pairs.setdefault(x.dtype, []).append((own, x))
        for of_type in pairs.values():  # few kernels, if all are of one type
            in_each("copy", *zip(*of_type, strict=True))
        self._copied = given
        self._replay()
        return _clone(self._outcome)


def _clone(tree: Any) -> Any:
    return map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


class Watched(ClientContext):
    """What a client is told; it remembers whether the round's number was looked at."""

    was_read: ClassVar[bool] = False

    @property
    def round(self) -> int:
        Watched.was_read = True
        number: int = self[2]
        return number


def with_tensors(arguments: Arguments) -> Arguments:
    """The arguments, with tensors for the numbers that change from round to round."""
    received, private, batches, context = arguments
    scale, slope = (
        number
        if isinstance(number, Tensor) or number == neutral
        else context.key.new_full((), number, dtype=torch.float64)
        for number, neutral in ((context.lr_scale, 1.0), (context.lr_slope, 0.0))
    )
    return received, private, batches, context._replace(lr_scale=scale, lr_slope=slope)


def _shapes(arguments: Arguments) -> Any:
    """What a recording depends on: all but the values of tensors, the round's number and learning
    rates."""
    *states, batches, context = arguments
    told = context._replace(
        round=0, lr_scale=context.lr_scale == 1.0, lr_slope=context.lr_slope == 0.0
    )
    return tuple(map(_shape, (*states, *batches, told._asdict())))


def _shape(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return tuple((name, _shape(value)) for name, value in tree.items())
    return tuple(map(_shape, tree)) if isinstance(tree, tuple) else tree


def cuda_graphs(device: torch.device) -> Capture:
    """Recording as CUDA graphs on a ``device``; they share one pool of memory."""
    graphs = WeakSet[Any]()
    streams: list[Any] = []

    def capture(run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        with torch.cuda.device(device):
            streams[:] = streams or [torch.cuda.Stream()]  # type: ignore[no-untyped-call]
            side, graph = streams[0], torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # kernels are loaded, and libraries get their memory
                expected = run()
                pool = next((other.pool() for other in graphs), None)
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    outcome = run()
            torch.cuda.current_stream().wait_stream(side)
            graphs.add(graph)
            _check(graph, outcome, expected)
        return outcome, graph.replay

    return capture


def _check(graph: Any, outcome: Any, expected: Any) -> None:
    """Raise RuntimeError where a recording gives other numbers than what was recorded."""
    pairs = [
        (a, b)
        for a, b in zip(leaves(outcome), leaves(expected), strict=True)
        if isinstance(a, Tensor) and a.data_ptr() != b.data_ptr()  # others are inputs
    ]
    for a, _ in pairs:
        a.zero_()
    graph.replay()
    for a, b in pairs:
        if (a.double() - b.double()).norm() > _CLOSE * b.double().norm():
            raise RuntimeError("its recorded kernels give other numbers")
