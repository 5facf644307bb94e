"""The documentation agrees with the code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engine.faults import ClientFaults, FaultConfig, Machine
from fedtailor.method import FineTuning, Method
from fedtailor.methods import METHODS
from fedtailor.optim import Optimiser
from fedtailor.runs import builtin
from fedtailor.uploads.attacks import AttackConfig

ROOT = Path(__file__).parent.parent
SECTIONS = [
    ft.DataConfig, ft.SplitConfig, ft.ModelConfig, ft.LocalConfig,
    ft.CohortConfig, ft.ScheduleConfig, ft.EngineConfig, ft.EvaluateConfig, ft.GenerateConfig,
    ft.PrivacyConfig, ft.SecureAggregationConfig, ft.StartConfig, AttackConfig, FaultConfig,
    Machine, ClientFaults,
]  # fmt: skip
LIKE_FEDAVG = "as in [FedAvg](fedavg.md)"
FEDAVGS = "[FedAvg's](fedavg.md#settings)"  # all of its fields that a table does not name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented_with_its_default(section: type) -> None:
    text = (ROOT / "docs/fields.md").read_text()
    for field in dataclasses.fields(section):
        if not dataclasses.is_dataclass(field.default):  # a table of its own
            assert f"| `{field.name}` | `{field.default}` |" in text, field.name


def page(name: str) -> str:
    return (ROOT / f"docs/methods/{name}.md").read_text()


def default_of(method: type[Method], name: str) -> Any:
    (field,) = (field for field in dataclasses.fields(method) if field.name == name)
    return field.default


def value_of(toml: str) -> Any:
    """A default as pages write it: as in an experiment file, `none` where it is not set."""
    if toml == "none":
        return None
    value = tomllib.loads(f"value = {toml}")["value"]
    if isinstance(value, list):
        return tuple(value)
    return Optimiser(**value) if isinstance(value, dict) else value


def documented(name: str) -> Iterator[tuple[str, Any]]:
    """Every field in the table of a method's page, with its default."""
    (table,) = re.findall(
        r"^\| field \| default \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", page(name), re.M
    )
    rows = [re.split(r"(?<!\\)\|", row, maxsplit=3)[1:3] for row in table.splitlines()]
    named = {name for fields, _ in rows for name in re.findall(r"`([^`]+)`", fields)}
    for fields, defaults in rows:
        names = re.findall(r"`([^`]+)`", fields)
        if fields.strip() == FEDAVGS:
            names = [
                f.name for f in dataclasses.fields(FineTuning) if f.name not in {*named, "robust"}
            ]
            values = [default_of(FineTuning, field) for field in names]
        elif defaults.strip() == LIKE_FEDAVG:
            values = [default_of(FineTuning, field) for field in names]
        else:
            values = [value_of(toml) for toml in re.findall(r"`([^`]+)`", defaults)]
        assert names, fields
        yield from zip(names, values, strict=True)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_has_its_fields_with_their_defaults(name: str) -> None:
    fields = list(documented(name))
    expected = {f.name: f.default for f in dataclasses.fields(METHODS[name]) if f.name != "robust"}
    assert dict(fields) == expected
    assert len(fields) == len(expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_cites_its_paper_and_says_where_it_differs(name: str) -> None:
    text = " ".join(page(name).split())
    paper = METHODS[name].paper()
    if paper.title:
        assert f"{paper.authors}. *{paper.title}*. {paper.venue}." in text
    assert "**Differs from the paper:** " in text
    docstring = inspect.getdoc(sys.modules[METHODS[name].__module__])
    assert docstring is not None
    assert "Differs from the paper" in docstring


def test_the_index_of_methods_follows_from_the_pages() -> None:
    script = runpy.run_path(str(ROOT / "docs/methods_index.py"))
    index = (ROOT / "docs/methods/index.md").read_text()
    assert index == script["with_tables"](index), "run: python docs/methods_index.py"
    for name in METHODS:
        assert f"\n| [`{name}`]({name}.md) | " in index


@pytest.mark.slow
def test_the_page_on_security_says_who_sees_what_of_every_method() -> None:
    script = runpy.run_path(str(ROOT / "docs/method_privacy.py"))
    text = (ROOT / "docs/security.md").read_text()
    assert text == script["with_table"](text), "run: python docs/method_privacy.py"


def test_a_methods_page_says_what_noise_does_not_cover() -> None:
    released = {name: method.released for name, method in METHODS.items() if method.released}
    assert len(released) == 14
    for name, what in released.items():
        assert f"noise does not cover {what}." in page(name)


def test_every_method_has_its_picture() -> None:
    script = runpy.run_path(str(ROOT / "docs/method_pictures.py"))
    pictures = script["files"]()
    assert pictures.keys() == METHODS.keys()
    for name, picture in pictures.items():
        file = ROOT / f"docs/images/methods/{name}.svg"
        assert file.read_text() == picture, "run: python docs/method_pictures.py"
        assert f"](../images/methods/{name}.svg)\n" in page(name)
        keeps_nothing = "**Kept by the client:** nothing" in page(name)
        assert ("stays with the client" in picture) != keeps_nothing, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedsdg", "pfedgate"])
def test_the_index_says_what_a_method_costs(name: str) -> None:
    """Of some methods; the script measures all of them in two minutes."""
    script = runpy.run_path(str(ROOT / "docs/method_costs.py"))
    assert f"{script['row'](name)}\n" in page("index"), f"run: python docs/method_costs.py {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/methods").glob("*.md")), ids=lambda p: p.stem)
def test_names_in_code_that_pages_mention_exist(path: Path) -> None:
    for dotted in re.findall(r"`fedtailor\.([\w.]+)", path.read_text()):
        module, _, name = dotted.rpartition(".")
        if not (Path(ft.__file__).parent / f"{dotted.replace('.', '/')}.py").exists():
            assert hasattr(importlib.import_module(f"fedtailor.{module}"), name), dotted


def test_the_list_of_hooks_has_every_function_of_a_method() -> None:
    text = (ROOT / "docs/python.md").read_text().partition("### The hooks")[2]
    rows = "".join(line for line in text.splitlines() if line.startswith("| "))
    functions = inspect.getmembers(Method, inspect.isfunction)
    assert set(re.findall(r"`(\w+)`", rows)) == {name for name, _ in functions if name[0] != "_"}


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs/reference/api").glob("*.md")
    text = "".join(path.read_text() for path in pages)
    documented = set(re.findall(r"^\.\. auto\w+:: fedtailor\.(?:\w+\.)*(\w+)$", text, re.M))
    methods = {method.__name__ for method in METHODS.values()}  # on the pages of the methods
    assert set(ft.__all__) - methods <= documented


@pytest.mark.slow
def test_every_experiment_file_is_valid() -> None:
    for path in builtin.experiments().values():
        assert ft.load(path).methods
