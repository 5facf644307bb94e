"""The frozen prefix of a model: the modules that run before the first trained one.

What the prefix computes of an example never changes, so it needs to be computed once. It reaches
the logits through the first input of one module, the *boundary*; that input is called the
*features*. A forward pass that starts from the features leaves the modules below the boundary out.

`find_prefix` finds the boundary by trial: it traces one forward pass, proposes the modules around
the first trained one, from the inside out, and takes the first at which the logits stay the same to
the bit when the pass starts from the features, and the features when what is trained has other
values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .step import KeyedDropout

# What a forward pass may raise when modules below a wrong boundary return their input.
_WRONG_BOUNDARY = (
    RuntimeError, TypeError, AttributeError, ValueError, ArithmeticError, IndexError, KeyError,
)  # fmt: skip


class _Reached(Exception):  # noqa: N818  # no error: it ends a pass whose rest nobody needs
    """A pass has come to the boundary."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Prefix:
    """The part of a model below the module at ``boundary``; None: there is nothing to leave out.

    When a pass starts from the features, the modules at ``skipped`` return their input instead of
    working, and the boundary gets the features as its first input.
    """

    def __init__(self, model: nn.Module) -> None:
        self.boundary: str | None = None
        self.skipped: tuple[str, ...] = ()
        self._modules_below: frozenset[str] = frozenset()
        self._model = model
        self._features: Tensor | None = None
        self._recording = False
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def starting_from(self, features: Tensor | None) -> Iterator[None]:
        """Start the forward passes inside from ``features`` ``[b, ...]``; None: from the input."""
        self._features = features
        try:
            yield
        finally:
            self._features = None

    def features(self, run: Callable[[], object]) -> Tensor:
        """Return the features ``[b, ...]`` of the forward pass that ``run`` makes. The pass ends
        there."""
        self._recording = True
        try:
            run()
        except _Reached as reached:
            return reached.features
        finally:
            self._recording = False
        raise RuntimeError(f"the pass did not reach {self.boundary}")

    def contains_any(self, names: Iterable[str]) -> bool:
        """Say whether any of the tensors ``names`` belongs to a module below the boundary."""
        return any(name.rpartition(".")[0] in self._modules_below for name in names)

    def set_boundary(
        self, boundary: str | None, skipped: tuple[str, ...] = (), below: Collection[str] = ()
    ) -> None:
        """Put the boundary at a module, or nowhere, in place of an earlier one: ``skipped`` are the
        paths of the modules that return their input, ``below`` those of all below it."""
        while self._undo:
            self._undo.pop()()
        self.boundary, self.skipped, self._modules_below = boundary, skipped, frozenset(below)
        if boundary is None:
            return
        hook = self._model.get_submodule(boundary).register_forward_pre_hook(self._at_boundary)
        self._undo.append(hook.remove)
        for module in map(self._model.get_submodule, skipped):
            module.forward = functools.partial(self._run_or_skip, module.forward)
            self._undo.append(functools.partial(delattr, module, "forward"))

    def _run_or_skip(
        self, forward: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any
    ) -> Any:
        return forward(x, *arguments, **options) if self._features is None else x

    def _at_boundary(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._recording:
            raise _Reached(inputs[0])
        return inputs if self._features is None else (self._features, *inputs[1:])


@dataclass
class _Call:
    """A module's call in a traced pass; ``begin`` and ``end`` count calls begun and ended."""

    path: str
    module: nn.Module
    begin: int
    input: Any  # the first one
    end: int = 0
    output: Any = None


def find_prefix(
    model: nn.Module,
    changing: Collection[str],
    run: Callable[[], Tensor],
    run_at_others: Callable[[], Tensor],
) -> Prefix:
    """Find the boundary below which the most modules can be left out.

    Args:
        model: gets hooks; what it computes stays the same.
        changing: the names of its parameters and buffers that don't keep their values.
        run: a forward pass: the logits ``[b, ...]``. No changing tensor may be at a special value,
            such as 0, which would make a wrong boundary look right.
        run_at_others: the same with values of the changing tensors that are far from those.

    Returns:
        The prefix. Its boundary is None if nothing frozen runs first (norms alone don't count), if
        the frozen part has dropout, or if its result is used in more than one place.
    """
    prefix = Prefix(model)
    logits, calls = _trace(model, run)
    called = {call.path for call in calls}
    # nothing says which modules read a tensor of the whole model; the trial tells
    owners = {_reader(name, called) for name in changing} - {""}
    first = next((call for call in calls if call.path in owners), None)
    if first is None:
        return prefix
    counts = {call.path: sum(c.path == call.path for c in calls) for call in calls}
    enclosing = [call for call in calls if call.begin <= first.begin and call.end >= first.end]
    for candidate in reversed(enclosing):  # from the first trained module outwards
        earlier = [call for call in calls if call.end < candidate.begin]
        if any(isinstance(call.module, KeyedDropout) for call in earlier):
            continue
        skipped = _outermost([c.path for c in earlier if counts[c.path] == 1 and _is_plain(c)])
        if not _has_matrix(model, skipped):  # norms are hardly worth it
            continue
        if counts[candidate.path] > 1 or not _is_feature(candidate.input, len(logits)):
            continue
        prefix.set_boundary(candidate.path, skipped, {call.path for call in earlier})
        if _is_boundary(prefix, candidate.input, run, run_at_others, logits):
            return prefix
        prefix.set_boundary(None)
    return prefix


def _reader(name: str, called: Collection[str]) -> str:
    """The path of the module that reads a tensor: the innermost one around it that is called."""
    path = name.rpartition(".")[0]
    while path and path not in called:
        path = path.rpartition(".")[0]
    return path


def _trace(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[_Call]]:
    """Return the logits and the module calls, in the order in which they began."""
    calls: list[_Call] = []
    running: list[_Call] = []
    paths = {module: path for path, module in model.named_modules()}
    events = 0

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal events
        events += 1
        call = _Call(paths[module], module, events, inputs[0] if inputs else None)
        calls.append(call)
        running.append(call)

    def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal events
        events += 1
        call = running.pop()
        call.end, call.output = events, output

    handles = [module.register_forward_pre_hook(begin) for module in paths]
    handles += [module.register_forward_hook(end) for module in paths]
    logits = run()
    for handle in handles:
        handle.remove()
    return logits, calls


def _is_plain(call: _Call) -> bool:
    return all(isinstance(x, Tensor) and x.is_floating_point() for x in (call.input, call.output))


def _is_feature(x: Any, examples: int) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and len(x) == examples


def _has_matrix(model: nn.Module, paths: Sequence[str]) -> bool:
    return any(p.dim() > 1 for path in paths for p in model.get_submodule(path).parameters())


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(p for p in paths if not any(p.startswith(f"{q}.") for q in paths))


def _is_boundary(
    prefix: Prefix,
    features: Tensor,
    run: Callable[[], Tensor],
    run_at_others: Callable[[], Tensor],
    logits: Tensor,
) -> bool:
    """Whether a pass at other values has the same features, and one from these the same logits."""
    try:
        if not torch.equal(prefix.features(run_at_others), features):
            return False
        with prefix.starting_from(features):
            return torch.equal(run(), logits)
    except _WRONG_BOUNDARY:
        return False
