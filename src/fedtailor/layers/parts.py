"""Parts of a model, by name: what is trained, what is one layer, what can be adapted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import InputError, listed
from ..task.backbone import Backbone
from ..task.task import Task

# by task and patterns, for as long as the task lives
_MATCHING: WeakKeyDictionary[Task, dict[tuple[str, ...] | None, Callable[[str], bool]]]
_MATCHING = WeakKeyDictionary()


def train_only(model: nn.Module, chosen: Callable[[str], bool]) -> nn.Module:
    """Let exactly the parameters whose name is ``chosen`` be trained; in place."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))
    return model


def train_head_and(backbone: Backbone, chosen: Callable[[str], bool]) -> nn.Module:
    """Let exactly the task head's parameters be trained, and those whose name is ``chosen``; in
    place."""
    head = tuple(f"{path}." for path in backbone.head)
    return train_only(backbone.model, lambda name: name.startswith(head) or chosen(name))


def train_layers(backbone: Backbone, patterns: Sequence[str]) -> nn.Module:
    """Let exactly the parameters inside certain modules be trained; in place.

    These are the modules whose path matches one of ``patterns``, where ``*`` stands for anything,
    dots too. (): all parameters are trained. Raises InputError where a pattern that no module with
    parameters matches."""
    model = backbone.model
    if not patterns:
        return train_only(model, lambda name: True)
    owners = [
        path
        for path, module in model.named_modules()
        if path and next(module.parameters(), None) is not None
    ]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in owners):
            raise InputError(
                f"layers {pattern!r} names no layer of model {backbone.name!r}; "
                f"its layers, from the input up: {patterns_of(chain(*units(model)))}"
            )
    chosen = [path for path in owners if any(fnmatchcase(path, p) for p in patterns)]
    return train_only(model, lambda name: name.startswith(tuple(f"{path}." for path in chosen)))


def units(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The parts of a model that are frozen or trained together, as module paths, from the input up.

    A unit is an item of a list of layers, or a module beside such a list. A module without a
    matrix, as a norm, belongs to the unit before it. The order is that in which modules were
    registered.

    >>> units(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 2)))
    (('0', '1'), ('3',))
    """
    listed: list[tuple[str, ...]] = []
    for path in _parts(model, ""):
        parameters = list(model.get_submodule(path).parameters())
        if listed and all(parameter.dim() < 2 for parameter in parameters):
            listed[-1] = (*listed[-1], path)
        else:
            listed.append((path,))
    return tuple(listed)


def _parts(module: nn.Module, path: str) -> Iterator[str]:
    """The paths below ``module``, with the items of a list of layers instead of the list, and
    instead of a module that has such a list inside."""
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        child_path = f"{path}.{name}" if path else name
        if not is_list and any(_is_long(inner) for inner in child.modules()):
            yield from _parts(child, child_path)
        else:
            yield child_path


def _is_long(module: nn.Module) -> bool:
    """Whether a module is a list of several layers."""
    return isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1


def require_blocks(backbone: Backbone) -> tuple[tuple[str, ...], ...]:
    """The backbone's adaptable projections, block by block. Raises InputError where there are none;
    the message lists the linear layers."""
    if backbone.blocks:
        return backbone.blocks
    linear = [p for p, module in backbone.model.named_modules() if isinstance(module, nn.Linear)]
    candidates = patterns_of(linear) or "none, it has no nn.Linear"
    raise InputError(
        f"model {backbone.name!r} has no recognised transformer blocks; name the projections to "
        f"adapt in model.targets, as patterns; candidates: {candidates}"
    )


def require_head(task: Task, field: str) -> None:
    """Check that there is a task head for a method's ``field`` to keep private. Raises InputError
    where none is recognised."""
    if not task.backbone.head:
        raise InputError(
            f"{field} is true, but model {task.backbone.name!r} has no recognised task head; name "
            f"its modules in model.head, or set it to false"
        )


def projections(backbone: Backbone) -> list[str]:
    """The paths of the backbone's adaptable projections, block after block."""
    return [path for block in backbone.blocks for path in block]


def patterns_of(paths: Iterable[str]) -> str:
    """List module paths for a message: numbers inside them replaced by ``*``, each once, not all if
    they are many.

    >>> patterns_of(["layer.0.key", "layer.1.key", "head"])
    'layer.*.key, head'
    """
    return listed(list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths)))


def matching(task: Task, patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether a state's name belongs to a part of the model.

    The part is the modules whose path matches one of ``patterns``, and all inside them. (): the
    task head; None: nothing. Raises InputError where a pattern that no module of the model matches;
    () without a known head."""
    key = None if patterns is None else tuple(patterns)
    cached = _MATCHING.setdefault(task, {})  # this is called for every name of every state
    if key not in cached:
        cached[key] = _matching(task, key)
    return cached[key]


def _matching(task: Task, patterns: tuple[str, ...] | None) -> Callable[[str], bool]:
    if patterns is None:
        return lambda name: False
    paths = tuple(path for path, _ in task.model.named_modules() if path)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise InputError(
                f"{pattern!r} names no part of model {task.backbone.name!r}; {_its_parts(task)}"
            )
    if not patterns and not task.backbone.head:
        way = "name its modules in model.head, or the private parts in the method"
        if task.backbone.objective.num_outputs(0) is None:  # whose output layer may be a tied one
            way = f"name the private parts in the method; {_its_parts(task)}"
        raise InputError(f"model {task.backbone.name!r} has no recognised task head; {way}")
    chosen = [p for p in paths if any(fnmatchcase(p, pattern) for pattern in patterns)]
    prefixes = tuple(f"{path}." for path in (chosen if patterns else task.backbone.head))
    return lambda name: name.startswith(prefixes)


def _its_parts(task: Task) -> str:
    return f"its parts: {patterns_of(chain(*units(task.model)))}"


def check_split(task: Task, field: str, patterns: tuple[str, ...] | None) -> None:
    """Check a method's ``field``, the `matching` patterns of a part of what is trained. Raises
    InputError where as `matching`; all that is trained is inside the part, or, unless ``patterns``
    is None, all is outside it."""
    inside = {name for name in task.trained if matching(task, patterns)(name)}
    if patterns is None or (inside and inside < task.trained):
        return
    much = "all" if inside else "nothing"
    part = list(patterns) if patterns else "the task head"
    raise InputError(
        f"{field} = {part} matches {much} of what is trained; allowed: some of it, not all"
    )


def in_norm(task: Task) -> Callable[[str], bool]:
    """Whether a state's name belongs to a normalisation (batch, layer, group, instance, RMS)."""

    def inside(name: str) -> bool:
        *path, _ = name.split(".")
        owner: nn.Module | None = task.model
        for part in path:
            owner = owner._modules.get(part) if owner is not None else None
        return bool(path) and "Norm" in type(owner).__name__

    return inside
