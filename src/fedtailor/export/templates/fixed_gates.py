"""A trained model inside the activation pattern of the base model (FedSQ).

The base model runs first, and its activation pattern is recorded: of a piecewise-linear activation
the piece that each value is on, of a smooth one its tangent. The trained copy then runs with this
pattern instead of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...layers.activations import IN_PLACE, PIECEWISE, POOLS, RECTIFIERS, SMOOTH, clamp, tangent
from .base import HERE, Base, Batch


class Model(Base):
    """Both copies: the network has the base model's tensors, ``quantitative/`` are the trained."""

    def __init__(self, folder: Path | str = HERE) -> None:
        super().__init__(folder)
        self.pattern = Pattern(self.network, **self.settings)

    def logits(self, batch: Batch) -> Tensor:
        with self.pattern.recording():
            self.forward(batch)
        with self.pattern.replaying():
            return self.forward(batch, self.part("quantitative"))


class Pattern(TorchFunctionMode):
    """Records the activation pattern of one forward pass, and replays it in the next.

    It sees every torch function that the network calls. Nothing is gated before the first module
    that has ``trained`` parameters. ``smooth`` says how an activation like GELU is gated, by its
    tangent or as if it were ReLU, and ``max_pool`` whose maxima a pool takes.
    """

    def __init__(self, network: nn.Module, trained: list[str], smooth: str, max_pool: str) -> None:
        super().__init__()
        self.smooth, self.max_pool = smooth, max_pool
        self.tape: list[Any] = []
        self.position = 0
        self.replay = self.reached = False
        for path in trained:
            network.get_submodule(path).register_forward_pre_hook(self._reach)
        for module in network.modules():
            if type(module).__module__ == "transformers.activations":
                module.forward = partial(self._activation, module, module.forward)

    def recording(self) -> Pattern:
        """Return this as the context of the pass that is recorded."""
        self.tape, self.replay, self.reached = [], False, False
        return self

    def replaying(self) -> Pattern:
        """Return this as the context of the pass that uses the pattern."""
        self.position, self.replay, self.reached = 0, True, False
        return self

    def _reach(self, module: nn.Module, inputs: Any) -> None:
        self.reached = True

    def _activation(self, module: nn.Module, phi: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """One of transformers' activations; some of them call several torch functions."""
        if not self.reached:
            return phi(z)
        self.reached = False
        name = type(module).__name__.lower()
        h: Tensor = self._gate(phi, z, None, any(kind in name for kind in RECTIFIERS))
        self.reached = True
        return h

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gate the call of an activation function; pass on all other calls."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        base = IN_PLACE.get(name, name)
        pool = name.removesuffix("_with_indices") in POOLS and self.max_pool == "structural"
        if not self.reached or not (base in PIECEWISE or base in SMOOTH or pool):
            return func(*args, **options)
        z, *rest = args or (options.pop("input"),)
        if not (isinstance(z, Tensor) and z.is_floating_point()):
            return func(z, *rest, **options)
        if pool:
            return self._pool(name, z, rest, options)
        in_place = options.pop("inplace", False) or name != base
        pieces = PIECEWISE[base](*rest, **options) if base in PIECEWISE else None

        def phi(z: Tensor) -> Tensor:
            value: Tensor = func(z.clone() if in_place else z, *rest, **options)
            return value

        h = self._gate(phi, z.clone() if in_place else z, pieces, base in RECTIFIERS)
        return z.copy_(h) if in_place else h

    def _gate(
        self, phi: Callable[[Tensor], Tensor], z: Tensor, pieces: Any, rectifies: bool
    ) -> Any:
        if pieces is None and rectifies and self.smooth == "mask":
            pieces = clamp(0.0)
        if not self.replay:
            self.tape.append(z if pieces is None else pieces.find(z))
            return phi(z)
        recorded = self._next()
        if pieces is not None:
            return pieces.apply(z, recorded)
        value, slope = tangent(phi, recorded)
        return value + slope * (z - recorded)

    def _pool(self, name: str, z: Tensor, rest: list[Any], options: dict[str, Any]) -> Any:
        base = name.removesuffix("_with_indices")
        options.pop("return_indices", None)
        if self.replay:
            indices, axis = self._next(), -int(base[-2])
            h = z.flatten(axis).gather(-1, indices.flatten(axis)).view(indices.shape)
        else:
            h, indices = getattr(F, f"{base}_with_indices")(z, *rest, **options)
            self.tape.append(indices)
        return h if name == base else (h, indices)

    def _next(self) -> Any:
        self.position += 1
        return self.tape[self.position - 1]
