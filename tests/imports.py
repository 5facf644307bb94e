"""The package's imports as a graph: files in the root, layers, circles.

``python -m tests.imports`` prints them; `tests.test_imports` holds them to their limits.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import fedtailor
from fedtailor.objectives import OBJECTIVES

ROOT = Path(fedtailor.__file__).parent
Graph = Mapping[str, frozenset[str]]  # from a module's name to those that it imports


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module's file by its dotted name within the package, packages' included."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def graph(root: Path = ROOT) -> Graph:
    """Every import, also inside functions and under TYPE_CHECKING."""
    files = modules(root)
    return {
        name: frozenset(target for target in _imports(name, path, files) if target != name)
        for name, path in files.items()
    }


def _imports(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in package if part][: len(package) - node.level + 1]
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}".lstrip(".")
                yield inner if inner in files else target
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            packages = {imported.split(".")[0] for imported in names}
            assert "fedtailor" not in packages or name == "cli.main", path


def circle(imports: Graph) -> list[str]:
    """A circle of imports, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def layers(imports: Graph) -> list[list[str]]:
    """Modules or parts by layer: each stands above all that it imports."""
    sorter = TopologicalSorter(imports)
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorter.get_ready()
        found.append(sorted(ready))
        sorter.done(*ready)
    return found


def rooms(imports: Graph) -> Graph:
    """The same between the parts of the package: a module in its root, or a whole package there."""
    found: dict[str, set[str]] = {}
    for name, targets in imports.items():
        part = name.partition(".")[0]
        others = {target.partition(".")[0] for target in targets} - {part}
        found.setdefault(part, set()).update(others)
    return {part: frozenset(targets) for part, targets in found.items()}


def kinds_named(root: Path = ROOT) -> list[str]:
    """The places outside of their own files that name a kind of task, as ``file:line``."""
    return [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in modules(root).values()
        if path.parent.name != "objectives"
        if any(f'"{kind}"' in (text := path.read_text()) for kind in OBJECTIVES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in OBJECTIVES
    ]


def calls() -> int:
    """How often, in a small run of one round, code of runs/ or store/ is called from another file
    before the first round."""
    from tests.small import digits, digits_backbone

    watched = tuple(str(ROOT / part) for part in ("runs", "store"))
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        callee, caller = frame.f_code.co_filename, frame.f_back and frame.f_back.f_code.co_filename
        is_import = frame.f_code.co_name == "<module>"
        if event == "call" and callee.startswith(watched) and caller != callee and not is_import:
            count += 1
        if event == "call" and frame.f_code.co_name == "synchronous_round":
            sys.setprofile(None)

    experiment = fedtailor.Experiment({"fedavg": fedtailor.FedAvg()}, rounds=1)
    experiment = replace(experiment, split=fedtailor.SplitConfig(4))
    with TemporaryDirectory() as folder:
        sys.setprofile(profile)
        try:
            fedtailor.run(experiment, f"{folder}/run", data=digits(), backbone=digits_backbone())
        finally:
            sys.setprofile(None)
    return count


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    """Print what the limits are about."""
    project = ROOT.parents[1]
    sizes = [_lines(folder) for folder in (ROOT, project / "tests")]
    print(f"lines of src: {sizes[0]:,}, of tests: {sizes[1]:,}")
    words = sum(len(page.read_text().split()) for page in (project / "docs").rglob("*.md"))
    print(f"words of docs: {words:,}")
    print(f"places that name a kind of task: {len(kinds_named())}")
    print(f"calls between files of runs/ and store/ before the first round: {calls()}")
    imports = graph()
    parts = rooms(imports)
    in_root = sorted(path.name for path in ROOT.glob("*.py"))
    print(f"files in the root: {len(in_root)} ({', '.join(in_root)})")
    print(f"circle of modules: {' -> '.join(circle(imports)) or 'none'}")
    print(f"circle of parts: {' -> '.join(circle(parts)) or 'none'}")
    arrows = sum(len(targets) for targets in parts.values())
    print(f"parts: {len(parts)}, arrows between them: {arrows}")
    for number, names in enumerate(layers(parts), 1):
        print(f"layer {number}: {', '.join(name or '__init__' for name in names)}")


if __name__ == "__main__":
    main()
