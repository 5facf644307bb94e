"""Imports point one way."""

import ast
from pathlib import Path

import fedtailor

ROOT = Path(fedtailor.__file__).parent
FOR_METHODS = {
    "params", "parts", "task", "optim", "method", "layers", "lowrank", "random", "errors",
    "activations", "blocks", "gating", "selection", "sparse", "knapsack", "widths", "profile",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """The fedtailor modules that a file imports, by the first part of their name."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            full = [*base, *(node.module or "").split(".")] if node.module else [*base]
            names = [full[0]] if full and full[0] else [alias.name for alias in node.names]
            found.update(names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedtailor"):
            found.add((node.module or "").split(".")[1] if "." in (node.module or "") else "")
        elif isinstance(node, ast.Import):
            found.update(n.name.partition(".")[2] for n in node.names if "fedtailor" in n.name)
    return found


def test_methods_import_nothing_that_runs_them() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        if path.name != "__init__.py":
            assert imported(path) <= FOR_METHODS, path.name


def test_no_method_imports_another() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        assert path.name == "__init__.py" or "methods" not in imported(path), path.name


def test_the_engine_knows_no_method() -> None:
    for name in (
        "engine", "executors", "vectorised", "work", "client", "evaluation", "evaluator",
        "store", "federation", "history", "ranks", "link",
    ):  # fmt: skip
        assert "methods" not in imported(ROOT / f"{name}.py"), name


def test_what_runs_over_flower_knows_no_method() -> None:
    for path in [*(ROOT / "flower").glob("*.py"), *(ROOT / "deploy").glob("*.py")]:
        assert "methods" not in imported(path), path.name


def test_the_report_reads_run_directories_alone() -> None:
    for path in (ROOT / "report").glob("*.py"):
        assert imported(path) <= {"errors", "metrics", "report"}, path.name


def test_the_algebra_imports_nothing() -> None:
    assert imported(ROOT / "params.py") == set()
    assert imported(ROOT / "random.py") == set()
