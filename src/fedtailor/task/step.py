"""One training step as a function: its context, the modules that read it, and keyed dropout.

A `StepContext` says whether a forward pass trains, with which key and which padding. Modules that
need to know, the `StepModule` ones, share the context of their task and record the new values of
their state buffers in it. Dropout is one of them: `KeyedDropout` draws its mask from the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from .. import random
from ..errors import InputError
from ..params import Params
from .surgery import replace


@dataclass
class StepContext:
    """The part of a forward pass that is neither its state nor its batch.

    ``key`` (int64 scalar) seeds dropout in a training step; None: nothing is dropped. ``weight``
    ``[b]`` is 0 for padding; None: there is none. With ``targets`` ``[b, L]`` a `ScoringHead`
    returns their loss and hits. ``part`` is the number of the first row, and how many rows there
    are, where the batch is a part of a larger one: what is dropped of it is the same as there.
    """

    training: bool = False
    key: Tensor | None = None
    weight: Tensor | None = None
    targets: Tensor | None = None
    part: tuple[int, int] = (0, 1)
    buffers: Params = field(default_factory=dict)

    @contextmanager
    def passing(
        self,
        *,
        training: bool,
        key: Tensor | None = None,
        weight: Tensor | None = None,
        targets: Tensor | None = None,
        part: tuple[int, int] | None = None,
    ) -> Iterator[Params]:
        """Make a forward pass inside, also during another one. Yields the new values of the state
        buffers that modules record in it. Without a ``part`` that of the pass outside stays."""
        outside = dict(vars(self))
        self.training, self.key, self.weight, self.targets = training, key, weight, targets
        self.part, self.buffers = part or self.part, {}
        try:
            yield self.buffers
        finally:
            vars(self).update(outside)


class StepModule(nn.Module):
    """A module that reads the context of the step. Its task sets ``step`` and ``path``.

    ``state_buffers`` names the registered buffers that are part of the task's state: they are sent,
    stored and averaged as parameters are, but not trained.
    """

    step: StepContext
    path: str
    state_buffers: tuple[str, ...] = ()

    def record(self, name: str, value: Tensor) -> None:
        """Record the new value of a state buffer; the buffer itself stays as it is."""
        self.step.buffers[f"{self.path}.{name}"] = value.detach()


def bind(model: nn.Module, step: StepContext) -> list[str]:
    """Set ``step`` and ``path`` of every `StepModule` in ``model``; return the names of all state
    buffers."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, StepModule):
            module.step, module.path = step, path
            names += [f"{path}.{name}" if path else name for name in module.state_buffers]
    return names


class KeyedDropout(StepModule):
    """Dropout whose mask depends on (key, layer, position) alone.

    The same client, round and step drop the same activations, alone or batched with others and
    however much padding surrounds them. At most 4 dimensions of at most 65,536 each.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if not self.step.training or self.step.key is None:
            return x
        key = random.fold_in(self.step.key, self.layer)
        first, rows = self.step.part
        mask = random.bernoulli(key, x.shape, 1.0 - self.p, first * len(x) // rows)
        return x * (mask.to(x.dtype) * (1.0 / (1.0 - self.p)))


def key_dropout(model: nn.Module) -> None:
    """Replace every active dropout in ``model`` by a `KeyedDropout`, in place. Raises InputError
    where the model has another kind of dropout (whole channels, alpha, inside an RNN)."""
    dropouts = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            if not isinstance(module, nn.Dropout):
                raise InputError(
                    f"{name} is a {type(module).__name__}, whose random mask can't be drawn "
                    "from the run's seed; use nn.Dropout instead, or set its p to 0"
                )
            dropouts.append((name, module.p))
        elif isinstance(module, nn.RNNBase) and module.dropout > 0:
            raise InputError(
                f"{name} is a {type(module).__name__} with dropout {module.dropout} between its "
                "layers, whose random mask can't be drawn from the run's seed; set its dropout to 0"
            )
    for layer, (name, p) in enumerate(dropouts):
        replace(model, name, KeyedDropout(p, layer))
