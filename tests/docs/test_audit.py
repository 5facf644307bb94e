"""The tables of the page on the audit are those that the benchmark has kept."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT, PAGE = ROOT / "benchmarks/results/audit-cpu.md", ROOT / "docs/audit.md"


def tables(path: Path) -> list[list[list[str]]]:
    """Those whose rows begin with a method, each a list of rows without the heading."""
    found = re.findall(r"^\| method \|.*\n\|[-:|]+\n((?:\|.*\n)+)", path.read_text(), re.M)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        for table in found
    ]


def kept(number: int) -> dict[tuple[str, str], list[str]]:
    """The cells of a table of the benchmark, by method and defence."""
    return {(row[0], row[1]): row[2:] for row in tables(KEPT)[number]}


def of_two(cell: str) -> str:
    """A mean with the interval of two batches, which are its ends."""
    return re.sub(r".* \[(.*), (.*)\]", r"\1 and \2", cell).replace("-", "")


def test_each_cell_of_the_first_table_is_the_kept_one() -> None:
    expected, shown = kept(0), dict[tuple[str, str], list[str]]()
    for methods, defence, *cells in tables(PAGE)[0]:
        for method in methods.split(", "):
            if not method.startswith("`"):  # a setting
                shown[method, defence] = cells
    assert shown.keys() == expected.keys()
    for (method, defence), cells in expected.items():
        if cells[0].startswith("refused"):
            wanted = ["refused", "", "", "", ""]
        else:
            personal, shared, upload, release, epsilon = cells
            shared = shared.replace("-", "no global model")
            upload = f"{upload} of four rows" if method == "pfedgate" else of_two(upload)
            wanted = [personal, shared, upload, of_two(release), epsilon.replace("-", "")]
        assert shown[method, defence] == wanted, (method, defence)


def test_each_cell_of_the_second_table_is_the_kept_one() -> None:
    expected, shown = kept(1), tables(PAGE)[1]
    methods = [row[0].split(",")[0] for row in shown]
    assert {(m, d) for m in methods for d in ("none", "epsilon 8 of records")} == expected.keys()
    for method, row in zip(methods, shown, strict=True):
        wanted = list[str]()
        for defence in ("none", "epsilon 8 of records"):
            personal, shared = expected[method, defence][:2]
            wanted += [personal, shared.replace("-", "")]
        assert row[1:] == wanted, method
