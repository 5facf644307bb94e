"""A model of one's own, from a function in a Python file."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..errors import InputError
from ..task.backbone import Backbone
from ..user_code import load, own_faults


def call_factory(factory: str) -> nn.Module | Backbone:
    """Call the function that ``factory`` names, as ``file.py:function``.

    Raises:
        InputError: no such file or function, a mistake in it, or it needs arguments or returns
            something else.

    >>> call_factory("net.py:build")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no file net.py; give FILE.py:NAME or package.module:NAME
    """
    function = load(factory)
    needed = _needed(function)
    if needed:
        raise InputError(
            f"model.factory = {factory!r} needs {', '.join(needed)}; it is called without "
            "arguments: give each of them a default"
        )
    with own_faults():
        made = function()
    if not isinstance(made, nn.Module | Backbone):
        raise InputError(
            f"model.factory = {factory!r} returns a {type(made).__name__}; it must return an "
            f"nn.Module, or a backbone of fedtailor.from_module"
        )
    return made


def _needed(function: Any) -> list[str]:
    """The arguments without a default; none of what has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
