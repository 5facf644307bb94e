"""The public names: imported when they are used, and the same for type checkers."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.methods import METHODS

FOLDER = Path(ft.__file__).parent
CLASSES = {method.__name__: method for method in METHODS.values()}


def in_new_process(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def reexports(path: Path) -> dict[str, object]:
    """What a type checker takes for public: ``from x import a as a``, and ``b = a``."""
    package = ".".join(["fedtailor", *path.relative_to(FOLDER).parts[:-1]])
    imported: dict[str, object] = {}
    public: dict[str, object] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level and node.names[0].name != "*":
            module = importlib.import_module("." * node.level + (node.module or ""), package)
            for alias in node.names:
                value = getattr(module, alias.name)
                imported[alias.asname or alias.name] = value
                if alias.asname:
                    public[alias.asname] = value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            assert isinstance(node.targets[0], ast.Name)
            public[node.targets[0].id] = imported[node.value.id]
    return public


def test_the_stub_names_what_the_package_gives() -> None:
    assert reexports(FOLDER / "methods/__init__.py") == CLASSES
    stub = (FOLDER / "__init__.pyi").read_text()
    assert "from .methods import *" in stub
    public = {**reexports(FOLDER / "__init__.pyi"), **CLASSES}
    assert {name: getattr(ft, name) for name in ft.__all__} == public


def test_dir_and_star_give_the_public_names() -> None:
    assert set(ft.__all__) <= set(dir(ft))
    names: dict[str, object] = {}
    exec("from fedtailor import *", names)
    assert names.keys() - {"__builtins__"} == set(ft.__all__)


def test_importing_the_package_imports_nothing_else() -> None:
    in_new_process(
        "import sys, fedtailor as ft;"
        "assert issubclass(ft.InputError, ValueError);"
        "assert ft.__version__.count('.') == 2;"
        "loaded = {name for name in sys.modules if name.startswith('fedtailor')};"
        "assert loaded == {'fedtailor', 'fedtailor.errors'}, loaded;"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )


@pytest.mark.slow
def test_a_name_is_imported_where_it_is_first_used() -> None:
    in_new_process(
        "from fedtailor import random;"  # a module of the package, and no public name
        "assert random.key(0).ndim == 0;"
        "from fedtailor import FedProx;"
        "assert FedProx(mu=0.5).mu == 0.5"
    )


@pytest.mark.slow
def test_a_method_and_a_class_travel_to_another_process() -> None:
    sent = pickle.dumps((ft.FedProx(mu=0.5), ft.Scaffold, ft.load))
    in_new_process(
        f"import pickle; method, kind, load = pickle.loads({sent!r});"
        "import fedtailor as ft;"
        "assert (method, kind, load) == (ft.FedProx(mu=0.5), ft.Scaffold, ft.load)"
    )


@pytest.mark.parametrize("name", ["FedNothing", "nothing"])
def test_another_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'fedtailor' has no attribute '{name}'"):
        getattr(ft, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from fedtailor import {name}")
