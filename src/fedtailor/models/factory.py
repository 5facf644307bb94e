"""A model of one's own, from a function in a Python file."""

from __future__ import annotations

from torch import nn

from ..errors import InputError
from ..task.backbone import Backbone
from ..user_code import load


def call_factory(factory: str) -> nn.Module | Backbone:
    """Call the function that ``factory`` names, as ``file.py:function``.

    Raises:
        InputError: no such file or function, or it returns something else.

    >>> call_factory("net.py:build")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no file net.py; give FILE.py:NAME or package.module:NAME
    """
    made = load(factory)()
    if not isinstance(made, nn.Module | Backbone):
        raise InputError(
            f"model.factory = {factory!r} returns a {type(made).__name__}; it must return an "
            f"nn.Module, or a backbone of fedtailor.from_module"
        )
    return made
