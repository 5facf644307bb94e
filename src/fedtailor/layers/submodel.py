"""Sub-models of smaller width: which axes of which tensors may be cut, and which go together.

The output channels of a layer are the input channels of the next layer, of a normalisation in
between and, across a residual sum, of several layers. `find_groups` learns that by trying:

1. In forward passes on a made-up batch, every linear layer and convolution is replaced by a
   stand-in. It records its input and returns noise, the same in each pass, whatever the input.
2. Then the noise of one layer at a time is changed in half of its channels. Inputs that differ are
   reached by that layer without another one in between.
3. If exactly those channels of an input differ, in consecutive blocks, the layer's output and that
   input are cut together. If anything else differs (the logits, a layer norm, or all channels at
   once, as behind attention scores), the layer is not cut.
4. Last, the model is run with each group cut to half. Every layer must see an input of the size
   that it will have; a forward with fixed shapes fails here.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import random
from ..params import Batch, Params
from ..task.batch_norm import FunctionalBatchNorm
from ..task.task import Task

_EXAMPLES = 4  # in the made-up batch
_SIDES = (8, 16, 28, 32, 64, 96, 224)  # of its pictures
_PROBES = 2  # passes a layer, each with another half of its channels changed

# The exceptions of a forward pass whose input has another shape; InputError is a ValueError.
_UNFIT = (RuntimeError, TypeError, AttributeError, ValueError, IndexError, KeyError, AssertionError)


class Cut(NamedTuple):
    """One axis of a tensor: unit u of the group is the ``block`` values from ``u * block`` on."""

    name: str
    axis: int
    block: int


@dataclass(frozen=True)
class Group:
    """Axes that are cut together, to the first of ``size`` units.

    ``outputs`` names the weights and biases of the layers whose outputs the units are.
    """

    size: int
    cuts: tuple[Cut, ...]
    outputs: tuple[str, ...]

    def kept(self, width: float) -> int:
        """How many units a sub-model of ``width`` has, at least 1.

        >>> [Group(6, (), ()).kept(width) for width in (1.0, 0.5, 0.25, 0.01)]
        [6, 3, 2, 1]
        """
        return max(1, math.ceil(round(self.size * width, 6)))


def slice_submodel(state: Params, groups: Sequence[Group], kept: Sequence[int]) -> Params:
    """``state`` with every group cut to its first ``kept`` units (views)."""
    cut = dict(state)
    for group, units in zip(groups, kept, strict=True):
        for name, axis, block in group.cuts:
            cut[name] = cut[name].narrow(axis, 0, units * block)
    return cut


def pad_to_full(state: Params, like: Params) -> Params:
    """The inverse of `slice_submodel`: the shapes of ``like``, with zeros for the units that were
    cut."""
    full = {}
    for name, value in state.items():
        missing = [b - a for a, b in zip(value.shape, like[name].shape, strict=True)]
        widths = [width for m in reversed(missing) for width in (0, m)]
        full[name] = F.pad(value, widths) if any(missing) else value
    return full


def kept_units(state: Params, groups: Sequence[Group]) -> list[int]:
    """How many units of each group ``state`` has, by its shapes."""
    firsts = (group.cuts[0] for group in groups)
    return [state[name].shape[axis] // block for name, axis, block in firsts]


def coverage(
    like: Params, groups: Sequence[Group], kept: Sequence[Sequence[int]], weights: Tensor
) -> Params:
    """The summed weight of the sub-models that have an element, float64, by element of ``like``.

    >>> group = Group(2, (Cut("w", 0, 1),), ("w",))
    >>> coverage({"w": torch.zeros(2)}, [group], [[2], [1]], torch.tensor([1.0, 3.0]))
    {'w': tensor([4., 1.], dtype=torch.float64)}
    """
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in like.items()}
    for units, weight in zip(kept, weights.tolist(), strict=True):
        for part in slice_submodel(total, groups, units).values():
            part += weight
    return total


_groups: WeakKeyDictionary[Task, tuple[Group, ...]] = WeakKeyDictionary()  # by task


def find_groups(task: Task) -> tuple[Group, ...]:
    """The groups of axes of ``task.state`` that can be cut.

    nn.Linear, nn.Conv2d of one group and batch normalisation can be cut, if all of their tensors
    are in the state and the module is called once. Inputs and outputs of the model are never cut.
    There are no groups if the model runs on none of the batches that are made up for it.
    """
    if task not in _groups:
        with torch.no_grad():
            _groups[task] = tuple(_Search(task).groups())
    return _groups[task]


@dataclass
class _Pass:
    """What the stand-ins do in a forward pass, by the layer's path, and what comes of it."""

    blank: bool = False  # return zeros
    changed: dict[str, Tensor] = field(default_factory=dict)  # channels with other noise, bool
    units: dict[str, int] = field(default_factory=dict)  # how many channels; else all
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)  # of every watched module
    logits: Tensor = field(init=False)


class _Search:
    def __init__(self, task: Task) -> None:
        self.task = task
        modules = dict(task.model.named_modules())
        self.layers: dict[str, nn.Module] = {
            path: module
            for path, module in modules.items()
            if type(module) in (nn.Linear, nn.Conv2d)
        }
        # of all other modules with parameters only batch normalisation can be cut
        self.others = {
            path: module
            for path, module in modules.items()
            if path not in self.layers and next(module.parameters(recurse=False), None) is not None
        }
        self.units = {
            path: len(layer.get_parameter("weight")) for path, layer in self.layers.items()
        }
        self.uses = Counter(
            id(p)
            for _, module in task.model.named_modules(remove_duplicate=False)
            for p in module.parameters(recurse=False)
        )
        self.trial = _Pass()
        self.drawn: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}
        self.calls: Counter[str] = Counter()

    def groups(self) -> Iterator[Group]:
        with self._stand_ins():
            batch = self._batch()
            if batch is None:
                return
            base = self._run(batch, _Pass())
            self.calls = Counter({path: len(inputs) for path, inputs in base.inputs.items()})
            links = {path: self._reach(path, batch, base) for path in self._sources()}
            for members in _components({p: fed for p, fed in links.items() if fed is not None}):
                group = self._group(members, links)
                if group is not None and self._runs(group, members, batch, base):
                    yield group

    def _sources(self) -> list[str]:
        """The layers that have outputs to cut."""
        return [path for path in self.layers if self._can_cut(path) and self.units[path] > 1]

    def _can_cut(self, path: str) -> bool:
        module = self.task.model.get_submodule(path)
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return False
        if path in self.others and not isinstance(module, FunctionalBatchNorm):
            return False
        tensors = dict(module.named_parameters(recurse=False))
        names = [*tensors, *(n for n, _ in module.named_buffers(recurse=False))]
        alone = all(self.uses[id(p)] == 1 for p in tensors.values())
        known = all(f"{path}.{name}" in self.task.state for name in names)
        return alone and known and self.calls[path] == 1

    def _reach(self, source: str, batch: Batch, base: _Pass) -> dict[str, int] | None:
        """The modules that ``source``'s output channels reach, with the size of a channel's block;
        None if they reach something that can't be cut."""
        units, blocks = self.units[source], {}
        for probe in range(_PROBES):
            drawn = random.uniform(random.key("half", source, probe), (units,))
            half = drawn.argsort().argsort() < (units + probe) // 2
            trial = self._run(batch, _Pass(changed={source: half.to(self.task.device)}))
            if not torch.equal(trial.logits, base.logits):
                return None
            for path, inputs in trial.inputs.items():
                if all(torch.equal(a, b) for a, b in zip(inputs, base.inputs[path], strict=True)):
                    continue
                if not self._can_cut(path):
                    return None
                differs = inputs[0] != base.inputs[path][0]
                differs = differs.movedim(self._axis(path), 0).flatten(1).any(1)  # [channels]
                channels = self._input_channels(path)
                if len(differs) % units or channels % units:
                    return None
                expected = half.to(differs.device).repeat_interleave(len(differs) // units)
                if (differs & ~expected).any():
                    return None
                blocks[path] = channels // units
        return blocks

    def _axis(self, path: str) -> int:
        """The axis of the channels in a module's input."""
        return -1 if isinstance(self.layers.get(path), nn.Linear) else 1

    def _input_channels(self, path: str) -> int:
        module = self.task.model.get_submodule(path)
        if isinstance(module, FunctionalBatchNorm):
            return len(module.running_mean)
        return int(self.task.model.get_parameter(f"{path}.weight").shape[1])

    def _group(self, members: set[str], links: dict[str, dict[str, int] | None]) -> Group | None:
        """The axes of the sources in ``members`` and of the modules that they reach."""
        sizes = {self.units[source] for source in members}
        reached = [links[source] for source in sorted(members)]
        blocks = {(path, block) for fed in reached for path, block in (fed or {}).items()}
        if len(sizes) > 1 or len({path for path, _ in blocks}) < len(blocks) or not blocks:
            return None
        outputs = tuple(
            f"{path}.{name}"
            for path in sorted(members)
            for name, _ in self.task.model.get_submodule(path).named_parameters(recurse=False)
        )
        cuts = [Cut(name, 0, 1) for name in outputs]
        for path, block in sorted(blocks):
            module = self.task.model.get_submodule(path)
            if isinstance(module, FunctionalBatchNorm):
                names = {n for n in self.task.state if n.rpartition(".")[0] == path}
                cuts += [Cut(name, 0, block) for name in sorted(names)]
            else:
                cuts.append(Cut(f"{path}.weight", 1, block))
        return Group(sizes.pop(), tuple(cuts), outputs)

    def _runs(self, group: Group, members: set[str], batch: Batch, base: _Pass) -> bool:
        """Whether the model runs with the group cut to half, each layer on the input it expects."""
        units = group.kept(0.5)
        state = slice_submodel(self.task.state, [group], [units])
        expected = {path: [x.shape for x in inputs] for path, inputs in base.inputs.items()}
        for name, axis, _ in group.cuts:
            path = name.rpartition(".")[0]
            if axis == 1 or path in self.others:
                shape, at = list(base.inputs[path][0].shape), self._axis(path)
                shape[at] = shape[at] // group.size * units
                expected[path] = [torch.Size(shape)]
        try:
            half = self._run(batch, _Pass(units=dict.fromkeys(members, units)), state)
        except _UNFIT:
            return False
        shapes = {path: [x.shape for x in inputs] for path, inputs in half.inputs.items()}
        return shapes == expected and half.logits.shape == base.logits.shape

    def _batch(self) -> Batch | None:
        """A made-up batch that the model runs on; one whose layers' inputs have the right number of
        channels, if there is one."""
        fitting = []
        for batch in _made_up(self.task):
            try:
                trial = self._run(batch, _Pass(blank=True))
            except _UNFIT:
                continue
            fitting.append(batch)
            inputs = {path: x[0] for path, x in trial.inputs.items() if path in self.layers}
            if all(
                x.shape[self._axis(path)] == self._input_channels(path)
                for path, x in inputs.items()
            ):
                return batch
        return fitting[0] if fitting else None

    def _run(self, batch: Batch, trial: _Pass, state: Params | None = None) -> _Pass:
        self.trial = trial
        trial.logits = self.task.logits(state or {}, batch)
        return trial

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Replace the layers' forwards by noise, and record the inputs of modules with
        parameters."""
        before = {path: vars(layer).get("forward") for path, layer in self.layers.items()}
        handles = [
            module.register_forward_pre_hook(partial(self._watch, path), with_kwargs=True)
            for path, module in (self.layers | self.others).items()
        ]
        for path, layer in self.layers.items():
            layer.forward = partial(self._noise, path, layer)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for path, layer in self.layers.items():
                del layer.forward
                if (forward := before[path]) is not None:
                    layer.forward = forward

    def _watch(
        self, path: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        tensors = [x.clone() for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
        self.trial.inputs.setdefault(path, []).extend(tensors)

    def _noise(self, path: str, layer: nn.Module, x: Tensor) -> Tensor:
        units, trial = self.units[path], self.trial
        if isinstance(layer, nn.Conv2d):
            one = x.new_zeros(1, 1, *layer.kernel_size)
            like = F.conv2d(x[:1, :1], one, None, layer.stride, layer.padding, layer.dilation)
            shape: tuple[int, ...] = (len(x), *like.shape[2:], units)
        else:
            shape = (*x.shape[:-1], units)
        # channels last
        y = x.new_zeros(shape) if trial.blank else self._draw("output", path, shape)
        if path in trial.changed:
            y = torch.where(trial.changed[path], self._draw("changed", path, shape), y)
        y = y[..., : trial.units.get(path, units)]
        return y.movedim(-1, 1) if isinstance(layer, nn.Conv2d) else y

    def _draw(self, purpose: str, path: str, shape: tuple[int, ...]) -> Tensor:
        entry = (purpose, path, shape)
        if entry not in self.drawn:
            drawn = random.normal(random.key(purpose, path), shape)
            self.drawn[entry] = drawn.to(self.task.device)
        return self.drawn[entry]


def _components(links: dict[str, dict[str, int]]) -> list[set[str]]:
    """Sets of sources; two sources that reach the same module are in one set."""
    sets: list[tuple[set[str], set[str]]] = []
    for source, fed in links.items():
        joined: tuple[set[str], set[str]] = ({source}, set(fed))
        apart = []
        for sources, reached in sets:
            if reached & joined[1]:
                joined = (joined[0] | sources, joined[1] | reached)
            else:
                apart.append((sources, reached))
        sets = [*apart, joined]
    return [sources for sources, _ in sets]


def _made_up(task: Task) -> Iterator[Batch]:
    """Batches of the kinds that a model may read: texts, grey pictures, vectors."""
    ids = torch.ones(_EXAMPLES, 8, dtype=torch.int64, device=task.device)
    yield {"input_ids": ids, "attention_mask": ids.float()}
    key = random.key("made up")
    for side in _SIDES:
        picture = random.uniform(key, (_EXAMPLES, 1, side, side))
        yield {"pixel_values": picture.to(task.device)}
    for name in list(inspect.signature(task.model.forward).parameters)[:1]:
        yield {name: random.uniform(key, (_EXAMPLES, 8)).to(task.device)}
