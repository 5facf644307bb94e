"""Activation checkpointing: a block keeps its inputs alone, and works the rest out once more.

PyTorch's own works by hooks on saved tensors, which a transform of ``torch.func`` refuses. Here a
block is a `torch.autograd.Function` of all tensors that it reads: its inputs, the state's tensors
inside it and directly below the model, and the key and the weights of the training step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import InputError
from ..torch_private import leaves, map_leaves
from .backbone import Backbone
from .step import StepContext

Run = Callable[..., tuple[Tensor, ...]]
Places = tuple[tuple[int, ...], int]

_BLOCK = re.compile(r"(?:.*?\.)?[0-9]+(?=\.)")


def block_paths(backbone: Backbone) -> list[str]:
    """The paths of the transformer blocks: those of the projections, up to the first number."""
    found = (_BLOCK.match(path) for block in backbone.blocks for path in block)
    return list(dict.fromkeys(match[0] for match in found if match))


def checkpoint_blocks(backbone: Backbone, model: nn.Module, step: StepContext) -> None:
    """Let each transformer block of ``model``, the adapted ``backbone``, keep nothing but its
    inputs in a training step; in place. Raises InputError where the model has no known block."""
    paths = block_paths(backbone)
    if not paths:
        raise InputError(
            f"engine.checkpointing = true: model {backbone.name!r} has no recognised transformer "
            "blocks; leave it out, or name its projections in model.targets"
        )
    for path in paths:
        block: Any = backbone.model.get_submodule(path)
        block.forward = _Block(model, block, step)


class _Block:
    """The forward pass of a block, in the place of the module's own."""

    def __init__(self, model: nn.Module, block: nn.Module, step: StepContext) -> None:
        self._step = step
        self._model = model
        self._path = next(path for path, module in model.named_modules() if module is block)
        self._block = block
        self._runner = _Runner(model, block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._step.training and torch.is_grad_enabled()):
            return self._runner.call(*args, **kwargs)
        inputs = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        state = self._tensors()
        known = {name: getattr(self._step, name) for name in ("key", "weight")}
        known = {name: value for name, value in known.items() if value is not None}
        outputs: list[Any] = []
        part, casts = self._step.part, _autocast(inputs)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            of_state = {f"model.{name}": next(given) for name in state}
            of_step = {name: next(given) for name in known}
            of_args, of_kwargs = map_leaves(
                lambda x: next(given) if isinstance(x, Tensor) else x, (args, kwargs)
            )
            with self._step.passing(training=True, part=part, **of_step), casts():
                found = functional_call(
                    self._runner, of_state, of_args, of_kwargs, tie_weights=False
                )
            outputs[:] = [map_leaves(lambda x: ... if isinstance(x, Tensor) else x, found)]
            several = [x for x in leaves(found) if isinstance(x, Tensor)]
            known_ids = {id(x) for x in tensors}  # none of them may be an output itself
            return tuple(x.view_as(x) if id(x) in known_ids else x for x in several)

        found = iter(_apply(_Recomputed, run, *state.values(), *known.values(), *inputs))
        return map_leaves(lambda x: next(found) if x is ... else x, outputs[0])

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that the block may read, by their names in the model."""
        found: dict[str, Tensor] = {}
        for module, path, recurse in ((self._model, "", False), (self._block, self._path, True)):
            options: Any = {"prefix": path, "recurse": recurse, "remove_duplicate": False}
            found |= dict(module.named_parameters(**options))
            found |= dict(module.named_buffers(**options))
        return found


class _Runner(nn.Module):
    """Calls a block's own forward with other tensors in the model."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _autocast(inputs: Sequence[Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """What autocast does now, for the time when the block runs once more."""
    kind = inputs[0].device.type
    dtype, on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return lambda: torch.autocast(kind, dtype, on)


class _Recomputed(torch.autograd.Function):
    """(function, tensors) -> the function's outputs, tensors; it runs again for the gradient."""

    @staticmethod
    def forward(run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = tuple(at for at, needs in enumerate(ctx.needs_input_grad[1:]) if needs)
        places = needed, len(ctx.saved_tensors)
        found = _apply(_Gradient, ctx.run, places, *ctx.saved_tensors, *gradients)
        by_place = dict(zip(needed, found, strict=True))
        return None, *(by_place.get(at) for at in range(len(ctx.saved_tensors)))

    @staticmethod
    def vmap(info: Any, dims: Any, run: Run, *tensors: Tensor) -> Any:
        outputs = _apply(_Recomputed, torch.func.vmap(run, dims[1:]), *tensors)
        return outputs, (0,) * len(outputs)


class _Gradient(torch.autograd.Function):
    """(function, places, its inputs, the gradients of its outputs) -> the gradients of the inputs
    at these places; the places come with the number of inputs.

    It is a Function by itself so that, where several clients run together, the gradient is taken of
    the function for all of them. PyTorch can't take a gradient inside that of several clients.
    """

    @staticmethod
    def forward(run: Run, places: Places, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return _pulled_back(run, places, tensors, twice=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, ctx.places, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The second derivatives."""
        tensors = ctx.saved_tensors
        floats = [at for at, x in enumerate(tensors) if x.is_floating_point()]

        def first(*values: Tensor) -> tuple[Tensor, ...]:
            every = _with(tensors, floats, values)
            return _pulled_back(ctx.run, ctx.places, every, twice=True)

        found = torch.func.vjp(first, *[tensors[at] for at in floats])[1](gradients)
        by_place = dict(zip(floats, found, strict=True))
        return None, None, *(by_place.get(at) for at in range(len(tensors)))

    @staticmethod
    def vmap(info: Any, dims: Any, run: Run, places: Places, *tensors: Tensor) -> Any:
        (needed, count), n = places, info.batch_size
        dims, every = list(dims[2:]), list(tensors)
        for at in {*needed, *range(count, len(every))}:  # each client has a gradient of its own
            x, dim = tensors[at], dims[at]
            every[at], dims[at] = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0), 0
        found = _apply(_Gradient, torch.func.vmap(run, tuple(dims[:count])), places, *every)
        return found, (0,) * len(found)


def _pulled_back(
    run: Run, places: Places, tensors: Sequence[Tensor], *, twice: bool
) -> tuple[Tensor, ...]:
    """The gradients, which have a gradient themselves if it is taken ``twice``."""
    needed, count = places

    def of_needed(*values: Tensor) -> tuple[Tensor, ...]:
        return run(*_with(tensors[:count], needed, values))

    pull_back = torch.func.vjp(of_needed, *[tensors[at] for at in needed])[1]
    found: tuple[Tensor, ...] = pull_back(
        tuple(tensors[count:]), retain_graph=twice, create_graph=twice
    )
    return found


def _with(
    tensors: Sequence[Tensor], places: Sequence[int], values: Sequence[Tensor]
) -> list[Tensor]:
    every = list(tensors)
    for at, value in zip(places, values, strict=True):
        every[at] = value
    return every


def _apply(function: Any, *inputs: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = function.apply(*inputs)
    return found
