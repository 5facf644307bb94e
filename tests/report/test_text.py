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


def test_names_are_no_formulas_of_a_spreadsheet() -> None:
    cells = [["=HYPERLINK(1)", "-3.2"], ["+a", "-12.5k"], ["-1+1", "+1.0±0.5"], ["@b", "-"]]
    rows = list(csv.reader(io.StringIO(TextTable("A", ["client", "ahead"], cells).csv())))
    assert [row[0] for row in rows[1:]] == ["'=HYPERLINK(1)", "'+a", "'-1+1", "'@b"]
    assert [row[1] for row in rows[1:]] == ["-3.2", "-12.5k", "+1.0±0.5", "-"]


def test_latex_escapes_and_marks_the_best() -> None:
    text = TABLE.latex()
    assert text.startswith("\\begin{tabular}{lr}\n\\toprule")
    assert "a\\_b \\& c" in text
    assert "1$\\pm$0.5" in text
    assert "\\textbf{2}" in text
    assert text.count("\\\\") == 3
