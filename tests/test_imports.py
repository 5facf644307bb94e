"""Imports point one way: the table says what each part of the package may import."""

import pytest

from tests.imports import ROOT, circle, graph, kinds_named, layers, rooms

GROUND = {
    *("run_format", "errors", "torch_private", "random", "disk_cache", "profiling", "user_code"),
    "temporary_folder",
}
ALGEBRA = GROUND | {"params", "stacked", "objectives"}
MODEL = ALGEBRA | {"task"}
METHOD = MODEL | {"layers", "optim", "method"}
ENGINE = ALGEBRA | {"data", "task", "optim", "method"}
MAY_IMPORT = {
    **{name: set[str]() for name in ("errors", "temporary_folder", "torch_private")},
    "disk_cache": {"errors", "temporary_folder"},
    "run_format": {"errors"},
    "user_code": {"errors"},
    "random": {"torch_private"},
    "profiling": {"torch_private"},
    "params": set(),
    "objectives": {"errors"},
    "stacked": {"params"},
    "data": ALGEBRA,
    "task": ALGEBRA,
    "layers": MODEL | {"optim"},
    "optim": MODEL,
    "models": MODEL | {"layers"},
    "uploads": ALGEBRA,
    "method": MODEL | {"layers", "optim", "uploads"},
    "methods": METHOD,
    "engine": ENGINE | {"uploads"},
    "report": GROUND | {"objectives"},
    "runs": ENGINE | {"layers", "models", "methods", "engine", "report", "uploads"},
    "inference": ENGINE | {"engine", "runs"},
    "trackers": GROUND | {"report"},
    "watch": GROUND | {"objectives", "report", "trackers"},
    "export": ENGINE | {"layers", "models", "report", "runs", "inference"},
    "results": GROUND | {"data", "task", "report", "runs", "inference"},
    "advice": GROUND | {"objectives", "data", "method", "methods", "report", "runs", "results"},
    "testing": ENGINE | {"engine", "runs"},
    "flower": ENGINE | {"uploads", "models", "engine", "runs", "inference"},
    "deploy": GROUND | {"data", "runs", "export", "flower"},
    "cli": GROUND
    | {"data", "models", "method", "methods", "engine", "report", "runs"}
    | {"inference", "export", "trackers", "watch", "testing", "deploy", "advice"},
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
    assert len(list(ROOT.glob("*.py"))) <= 14
    assert len(layers(rooms(graph()))) <= 13


def test_no_method_imports_another() -> None:
    for name, targets in graph().items():
        if name.startswith("methods."):
            assert not any(target.startswith("methods") for target in targets), name


def test_only_its_own_file_names_a_kind_of_task() -> None:
    assert kinds_named() == []
