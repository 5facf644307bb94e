"""Personalized federated fine-tuning: one pretrained model, fitted to every client."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .method import Method

# Each public name is imported when it is first used, so that `import fedtailor` takes no time.
# ``__init__.pyi`` has them, for type checkers, too. The classes in METHODS are public as well.
_NAME = re.compile(r"^from \.([\w.]+) import (\w+) as \2$", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in _NAME.findall(_STUB)}


def __getattr__(name: str) -> Any:
    value: Any
    if name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    elif name == "write_report":
        from .report import write as value
    elif name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    elif name == "__all__":
        value = sorted([*_MODULES, "write_report", *_method_classes()])
    elif name[:1].isupper() and name in (classes := _method_classes()):
        value = classes[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _method_classes() -> dict[str, type[Method]]:
    from .methods import METHODS

    return {method.__name__: method for method in METHODS.values()}
