"""A model of one's own, from a function in a Python file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from torch import nn

from ..errors import InputError
from ..task.backbone import Backbone


def call_factory(factory: str) -> nn.Module | Backbone:
    """Call the function that ``factory`` names, as ``file.py:function``.

    Raises:
        InputError: no such file or function, or it returns something else.

    >>> call_factory("net.py")
    Traceback (most recent call last):
    fedtailor.errors.InputError: model.factory = 'net.py'; it is written file.py:function
    """
    name, _, function = factory.rpartition(":")
    file = Path(name).expanduser()
    if not name.endswith(".py") or not function.isidentifier():
        raise InputError(f"model.factory = {factory!r}; it is written file.py:function")
    if not file.is_file():
        raise InputError(f"model.factory: no file {file}")
    spec = importlib.util.spec_from_file_location(f"fedtailor_factory_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code  # where dataclasses and pickle look for it
    spec.loader.exec_module(code)
    if not callable(make := getattr(code, function, None)):
        raise InputError(f"model.factory: {file} has no function {function!r}")
    made = make()
    if not isinstance(made, nn.Module | Backbone):
        raise InputError(
            f"model.factory: {function} of {file} returns a {type(made).__name__}; it must return "
            f"an nn.Module, or a backbone of fedtailor.from_module"
        )
    return made
