"""Imports point one way: the table says what each part of the package may import."""

import pytest

from tests.imports import ROOT, circle, graph, kinds_named, layers, rooms

GROUND = {
    *("errors", "torch_private", "random", "disk_cache", "profiling", "user_code"),
    *("temporary_folder", "units"),
}
ALGEBRA = GROUND | {"params", "stacked", "objectives"}
MODEL = ALGEBRA | {"task"}
METHOD = MODEL | {"layers", "optim", "method"}
ENGINE = ALGEBRA | {"data", "task", "optim", "method"}
MAY_IMPORT = {
    **{name: set[str]() for name in ("errors", "temporary_folder", "torch_private", "units")},
    "disk_cache": {"errors", "temporary_folder"},
    "user_code": {"errors"},
    "random": {"torch_private"},
    "profiling": {"torch_private"},
    "params": {"torch_private"},
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
    "store": ENGINE | {"engine", "uploads"},
    "report": GROUND | {"objectives", "store"},
    "runs": ENGINE | {"layers", "models", "methods", "engine", "store", "uploads"},
    "inference": ENGINE | {"engine", "report", "runs", "store"},
    "audit": ENGINE | {"runs", "engine", "store", "uploads"},
    "trackers": GROUND | {"report", "store"},
    "watch": GROUND | {"objectives", "report", "store", "trackers"},
    "serving": ENGINE | {"runs", "inference", "watch"},
    "export": ENGINE | {"layers", "models", "report", "runs", "inference", "store"},
    "results": GROUND | {"data", "task", "report", "runs", "inference", "store"},
    "advice": GROUND
    | {"objectives", "data", "method", "methods", "report", "runs", "results", "store"},
    "testing": ENGINE | {"engine", "runs", "store"},
    "flower": ENGINE | {"uploads", "models", "engine", "runs", "inference", "store"},
    "deploy": GROUND | {"data", "runs", "export", "flower", "store"},
    "cli": GROUND
    | {"objectives", "data", "models", "method", "methods", "engine", "report", "runs", "store"}
    | {"inference", "export", "trackers", "watch", "testing", "deploy", "advice", "serving"}
    | {"audit"},
    "__main__": {"cli"},
}


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_the_table_allows(name: str) -> None:
    assert rooms(graph())[name] <= MAY_IMPORT[name]


def test_every_part_stands_in_the_table() -> None:
    assert rooms(graph()).keys() - {""} == MAY_IMPORT.keys()


def test_there_is_no_circle() -> None:
    assert circle(graph()) == []
    assert circle(rooms(graph())) == []


def test_who_shows_runs_sees_the_reading_half_of_the_store_alone() -> None:
    """And with it neither the engine nor what it trains."""
    imports = graph()
    seen = {name for name in imports if name.partition(".")[0] in ("report", "watch", "trackers")}
    while new := {target for name in seen for target in imports[name]} - seen:
        seen |= new
    assert not {name.partition(".")[0] for name in seen} & {"engine", "method", "task", "data"}


def test_the_house_is_small() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 14
    assert len(layers(rooms(graph()))) <= 14


def test_no_method_imports_another() -> None:
    for name, targets in graph().items():
        if name.startswith("methods."):
            assert not any(target.startswith("methods") for target in targets), name


def test_only_its_own_file_names_a_kind_of_task() -> None:
    assert kinds_named() == []
