"""Imports point one way: the table says what each part of the package may import."""

import pytest

from tests.imports import ROOT, circle, graph, layers, rooms

GROUND = {"run_format", "errors", "random", "disk_cache", "profiling"}
ALGEBRA = GROUND | {"params", "stacked"}
MODEL = ALGEBRA | {"task"}
METHOD = MODEL | {"layers", "optim", "method"}
ENGINE = ALGEBRA | {"data", "task", "optim", "method"}
MAY_IMPORT = {
    **{name: set[str]() for name in GROUND - {"run_format"}},
    "run_format": {"errors"},
    "params": set(),
    "stacked": {"params"},
    "data": ALGEBRA,
    "task": ALGEBRA,
    "layers": MODEL | {"optim"},
    "optim": MODEL,
    "models": MODEL | {"layers"},
    "robustness": ALGEBRA,
    "method": MODEL | {"layers", "optim", "robustness"},
    "methods": METHOD,
    "engine": ENGINE,
    "report": GROUND,
    "runs": ENGINE | {"layers", "models", "methods", "engine", "report"},
    "inference": ENGINE | {"engine", "runs"},
    "trackers": GROUND | {"report"},
    "flower": ENGINE | {"models", "engine", "runs"},
    "deploy": GROUND | {"data", "runs", "flower"},
    "cli": GROUND
    | {"data", "models", "method", "methods", "engine", "report", "runs"}
    | {"inference", "trackers", "deploy"},
    "__main__": {"cli"},
}


@pytest.mark.parametrize("name", sorted(rooms(graph()).keys() - {""}))
def test_a_part_imports_only_what_the_table_allows(name: str) -> None:
    assert rooms(graph())[name] <= MAY_IMPORT[name]


def test_every_part_stands_in_the_table() -> None:
    assert rooms(graph()).keys() - {""} == MAY_IMPORT.keys()


def test_there_is_no_circle() -> None:
    assert circle(graph()) == []
    assert circle(rooms(graph())) == []


def test_the_house_is_small() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 12
    assert len(layers(rooms(graph()))) <= 12


def test_no_method_imports_another() -> None:
    for name, targets in graph().items():
        if name.startswith("methods."):
            assert not any(target.startswith("methods") for target in targets), name
