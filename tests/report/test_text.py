"""Tables as files."""

import csv
import io

from fedtailor.report.text import TextTable

TABLE = TextTable(
    "A", ["method", "its\nround"], [["a_b & c", "1±0.5"], ["d,e", "2"]], frozenset({(1, 1)})
)


def test_csv_holds_every_cell() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [["method", "its round"], ["a_b & c", "1±0.5"], ["d,e", "2"]]


def test_latex_escapes_and_marks_the_best() -> None:
    text = TABLE.latex()
    assert text.startswith("\\begin{tabular}{lr}\n\\toprule")
    assert "a\\_b \\& c" in text
    assert "1$\\pm$0.5" in text
    assert "\\textbf{2}" in text
    assert text.count("\\\\") == 3
