"""Activation patterns: recorded in one forward pass of a model, replayed in another.

Of a piecewise-linear activation the pattern is the piece that each element is on, of a smooth one
the point at which it is linearised, and of a max-pool the places of the maxima. Exports take this
file along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from .activations import (
    IN_PLACE,
    PIECEWISE,
    POOLS,
    RECTIFIERS,
    SMOOTH,
    UNGATED,
    Pieces,
    clamp,
    tangent,
)

Smooth = Literal["first-order", "mask"]
MaxPool = Literal["own", "structural"]
Entry = tuple[Tensor | Callable[[Tensor], Tensor], ...]
"""Of an activation: its pieces, bool of its shape, or functions that make them for its input; the
point at which it is linearised; or the indices of maxima."""


class Gates(nn.Module):
    """Records the activation pattern of a model's forward pass, and replays it in the next pass.

    A `TorchFunctionMode` sees every torch function that the model calls, so that modules and
    functions are alike. Both passes run the same code and meet the same activations in the same
    order. Nothing is gated before the first module that has a trained parameter.

    Args:
        model: the root module; hooks are added to it in place.
        trained: the paths of modules with a trained parameter.
        smooth: how a smooth activation that resembles ReLU is gated. ``first-order``: by its
            tangent at the recorded point; ``mask``: as if it were ReLU.
        max_pool: ``own``: a max-pool takes its own maxima; ``structural``: those of the recorded
            pass.
        apart: kinds of modules that are not looked into: they may run other code in training than
            in evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[str],
        smooth: Smooth,
        max_pool: MaxPool,
        apart: tuple[type[nn.Module], ...] = (),
    ) -> None:
        super().__init__()
        self.smooth, self.max_pool = smooth, max_pool
        self.mode: Literal["idle", "record", "replay"] = "idle"
        self.reached = False  # whether this pass has come to the first trained module
        self.paused = False
        self.tape: list[Entry] = []  # by activation
        self.tape_is_empty = False  # whether a recording met no activation
        self._agreement: list[Tensor] | None = None
        self._real: Tensor | None = None
        self._position = 0  # on the tape
        self._intercept = _Intercept(self)
        self._unhooked = tuple(dict.fromkeys(trained))
        self._apart = apart
        for path, module in list(model.named_modules()):
            if type(module).__module__ == "transformers.activations":
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, _WrappedActivation(module, self))
        model.register_forward_pre_hook(self._begin_pass)
        model.register_forward_hook(self._end_pass, always_call=True)

    def forward(self, x: Tensor) -> Tensor:
        """The identity: in an nn.Sequential this module is called as the last one."""
        return x

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass inside."""
        self.tape = []
        self.mode = "record"
        try:
            yield
            self.tape_is_empty = not self.tape
        finally:
            self.mode = "idle"

    def replay(self, tape: list[Entry], run: Callable[[], object]) -> None:
        """Replay a pattern, the ``tape``, in the next forward pass; of an empty one the pattern of
        the pass that ``run`` makes."""
        self.tape = tape
        if not self.tape and not self.tape_is_empty:
            with self.recording():
                run()
        self.mode = "replay"

    @contextmanager
    def comparing(self, real: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Collect, for every gated activation, the share of elements whose own piece is the
        replayed one (smooth activations: that are on the same side of 0).

        ``real`` ``[b, L]`` is 0 for the tokens that don't count.
        """
        self._agreement, self._real = [], real
        try:
            yield self._agreement
        finally:
            self._agreement = self._real = None

    def _begin_pass(self, model: nn.Module, inputs: Any) -> None:
        if self._unhooked:  # here, since the task replaces modules after `adapt`
            for path in self._unhooked:
                model.get_submodule(path).register_forward_pre_hook(self._reach)
            for module in model.modules():
                if isinstance(module, self._apart):
                    module.register_forward_pre_hook(self._pause)
                    module.register_forward_hook(self._resume)
            self._unhooked = ()
        self._position = 0
        self.reached = self.paused = False
        if self.mode != "idle":
            self._intercept.__enter__()  # type: ignore[no-untyped-call]

    def _reach(self, module: nn.Module, inputs: Any) -> None:
        self.reached = self.mode != "idle"

    def _pause(self, module: nn.Module, inputs: Any) -> None:
        self.paused = True

    def _resume(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.paused = False

    def _end_pass(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self.mode != "idle":
            self._intercept.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self.mode == "replay":
            self.mode, self.tape = "idle", []
        self.reached = False

    def call(
        self, function: Any, name: str, z: Any, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The value of ``function(z, *rest, **options)`` in this pass."""
        if name in UNGATED:
            if self.mode == "replay" and _is_trained((z, rest, *options.values())):
                raise InputError(_cannot_gate(name))
            return function(z, *rest, **options)
        if not (isinstance(z, Tensor) and z.is_floating_point()):
            return function(z, *rest, **options)
        if name.removesuffix("_with_indices") in POOLS:
            if self.max_pool == "own":
                return function(z, *rest, **options)
            return self._pool(name, z, rest, options)
        base = IN_PLACE.get(name, name)
        in_place = options.pop("inplace", False) or name == f"{base}_"
        pieces = None
        if base in PIECEWISE:
            pieces = PIECEWISE[base](*rest, **options)
        h = self.gate(
            lambda z: function(z.clone() if in_place else z, *rest, **options),
            z.clone() if in_place else z,
            pieces,
            rectifies=base in RECTIFIERS,
        )
        return z.copy_(h) if in_place else h

    def gate(
        self, phi: Callable[[Tensor], Tensor], z: Tensor, pieces: Pieces | None, *, rectifies: bool
    ) -> Tensor:
        """phi(z) in a recording; in a replay ``z`` on the recorded piece or tangent."""
        if pieces is None and rectifies and self.smooth == "mask":
            pieces = clamp(0.0)
        if self.mode == "record":
            self.tape.append((z,) if pieces is None else pieces.find(z))
            return phi(z)
        entry = self._next()
        if pieces is None:
            start: Tensor = entry[0]
            value, slope = tangent(phi, start)
            self._compare(lambda: (z > 0,), (start > 0,))
            return value + slope * (z - start)
        piece = tuple(e(z) if callable(e) else e for e in entry)
        self._compare(lambda: pieces.find(z), piece)
        return pieces.apply(z, piece)

    def _pool(self, name: str, z: Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Any:
        base = name.removesuffix("_with_indices")
        options = {n: value for n, value in options.items() if n != "return_indices"}
        if self.mode == "record":
            h, indices = getattr(F, f"{base}_with_indices")(z, *rest, **options)
            self.tape.append((indices,))
        else:
            (indices,) = self._next()
            axis = -int(base[-2])
            h = z.flatten(axis).gather(-1, indices.flatten(axis).long()).view(indices.shape)
        return h if name == base else (h, indices)

    def _next(self) -> Any:
        self._position += 1
        return self.tape[self._position - 1]

    def _compare(self, own: Callable[[], tuple[Tensor, ...]], replayed: tuple[Tensor, ...]) -> None:
        if self._agreement is None:
            return
        same = torch.stack([a == b for a, b in zip(own(), replayed, strict=True)]).all(0).float()
        if self._real is not None and same.shape[:2] == self._real.shape:
            each = same.flatten(2).mean(2) * self._real
            self._agreement.append(each.sum() / self._real.sum().clamp(min=1))
        else:
            self._agreement.append(same.mean())


def _is_trained(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_trained, value))
    return getattr(value, "requires_grad", False)


class _Intercept(TorchFunctionMode):
    """Passes the calls of activation functions to the gates."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self._gates = gates

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        gates = self._gates
        if name not in _KNOWN or not gates.reached or gates.paused:
            return func(*args, **(kwargs or {}))
        options = dict(kwargs or {})
        z, *rest = args or (options.pop("input", None),)
        other = rest[0] if rest else options.get("other")
        if name in _EXTREMES and not isinstance(other, Tensor):
            return func(*args, **(kwargs or {}))  # along an axis: a pool
        return gates.call(func, name, z, tuple(rest), options)


class _WrappedActivation(nn.Module):
    """One of transformers' activations; some of them call several torch functions."""

    def __init__(self, activation: nn.Module, gates: Gates) -> None:
        super().__init__()
        self.activation = activation
        self._gates = (gates,)  # not as a submodule
        name = type(activation).__name__.lower()
        self._rectifies = any(kind in name for kind in RECTIFIERS)

    def forward(self, z: Tensor) -> Tensor:
        gates = self._gates[0]
        if not gates.reached:
            return self._plain(z)
        gates.reached = False
        h = gates.gate(self._plain, z, None, rectifies=self._rectifies)
        gates.reached = True
        return h

    def _plain(self, z: Tensor) -> Tensor:
        value: Tensor = self.activation(z)
        return value


def _cannot_gate(name: str) -> str:
    """The message that names the function and the innermost module on the call stack."""
    frame = sys._getframe()
    while frame.f_back is not None and not _is_layer(frame.f_locals.get("self")):
        frame = frame.f_back
    owner = type(frame.f_locals.get("self")).__name__
    allowed = ", ".join(sorted({*PIECEWISE, *SMOOTH}))
    return f"FedSQ can't gate {name!r} in {owner}; activations it can gate: {allowed}"


def _is_layer(thing: Any) -> bool:
    return isinstance(thing, nn.Module) and not isinstance(thing, Gates)


_INDICES = frozenset(f"{name}_with_indices" for name in POOLS)
_EXTREMES = frozenset({"max", "min"})
_KNOWN = frozenset({*PIECEWISE, *SMOOTH, *POOLS, *UNGATED, *IN_PLACE, *_INDICES})
