"""The columns of a table, and which one is taken for what."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pandas
import pytest

from fedtailor.data.survey import Roles, Survey, survey
from fedtailor.errors import InputError
from fedtailor.objectives import DEFAULT, Regression


def table(tmp_path: Path, **columns: list[Any]) -> Survey:
    path = tmp_path / "visits.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return survey(str(path))


REPORTS = [f"the ward was clean on day {day}" for day in range(12)]


def test_columns_are_guessed_by_name_and_content(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        id=range(12),
        hospital_id=[7, 8, 9] * 4,
        ward=["a", "b"] * 6,
        notes=REPORTS,
        outcome=["good", "bad", "good"] * 4,
        score=[0.5] * 12,
    )
    assert found.roles(None, None, None) == Roles("notes", "outcome", "hospital_id")
    assert found.roles(None, "ward", "none") == Roles("notes", "ward", None)
    kinds = {column.name: column.kind for column in found.columns}
    assert (kinds["score"], kinds["id"], kinds["notes"]) == ("number", "integer", "text")
    assert found.counts("ward") == {"a": 6, "b": 6}


def test_without_usual_names_the_column_of_fewest_values_is_the_label(tmp_path: Path) -> None:
    found = table(tmp_path, a=REPORTS, b=["x", "y", "z"] * 4, c=[0, 1] * 6)
    assert found.roles(None, None, None) == Roles("a", "c", None)


def test_names_that_come_often_are_no_text_however_long(tmp_path: Path) -> None:
    names = ["the department of all that is red", "the department of all that itches"]
    notes = [f"the ward was clean on day {n}" for n in range(40)]
    rest = {"b": names * 20, "c": [0, 1, 1, 0] * 10}
    assert table(tmp_path, a=notes, **rest).roles(None, "c", None).source == "a"
    codes = [f"T{n:04d}x" for n in range(40)]  # no texts, so what is said again and again is one
    assert table(tmp_path, a=codes, **rest).roles(None, "c", None).source == "b"
    few = [note if n % 8 == 0 else "" for n, note in enumerate(notes)]
    found = table(tmp_path, a=codes, b=few, c=rest["c"])
    assert found.roles(None, "c", None).source == "b"


def test_ages_dates_and_clients_are_not_guessed_as_labels(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "site": [f"hospital {row % 4}" for row in range(60)],
        "note_text": [f"chest pain on day {row}" for row in range(60)],
        "age": [20 + row % 25 for row in range(60)],
        "visit_date": [f"2025-03-{1 + row % 7:02d}" for row in range(60)],
    }
    found = table(tmp_path, **columns, department=["heart", "skin", "eyes"] * 20)
    assert found.roles(None, None, None) == Roles("note_text", "department", "site")
    assert found.roles(None, "age", None).label == "age"
    assert found.column("visit_date").kind == "date"
    with pytest.raises(InputError, match=r"'visit_date' of .* holds dates; labels are words"):
        found.roles(None, "visit_date", None)
    with pytest.raises(InputError, match=r"looks like a label .* name one with --label"):
        table(tmp_path, **columns).roles(None, None, None)


def test_numbers_are_to_be_predicted(tmp_path: Path) -> None:
    found = table(tmp_path, text=REPORTS, score=[0.5, 0.7] * 6, site=["a", "b"] * 6)
    assert found.roles(None, None, None) == Roles("text", "score", "site", Regression.name)
    whole = table(tmp_path, text=REPORTS, score=[1.0, 2.0] * 6, site=["a", "b"] * 6)
    assert whole.roles(None, None, None).task == DEFAULT.name


def test_missing_values_are_counted_and_are_no_class(tmp_path: Path) -> None:
    found = table(tmp_path, text=REPORTS, label=["x", "y", ""] * 4)
    assert found.column("label").missing == 4
    assert found.column("label").distinct == 2
    assert found.counts("label") == {"x": 4, "y": 4}
    sites = table(tmp_path, text=REPORTS, label=["x", "y", " "] * 4, site=["a"] * 9 + ["b"] * 3)
    assert sites.counts("site", "label") == {"a": 6, "b": 2}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": REPORTS, "label": ["x"] * 12}, "holds one class only .'x'.; there is"),
        ({"a": range(12), "label": [0, 1] * 6}, "has no text or picture column: a "),
        ({"text": REPORTS, "label": range(12)}, "has another value in each row; a label has a few"),
    ],
)
def test_a_table_without_what_is_needed_is_told_in_one_line(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        table(tmp_path, **columns).roles(None, None, None)
    assert "\n" not in str(caught.value)


def test_a_file_without_rows_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows; give a file with at least one row"):
        table(tmp_path, text=[], label=[])
    (tmp_path / "visits.csv").write_text("")
    with pytest.raises(InputError, match="is empty; give a file with at least one row"):
        survey(str(tmp_path / "visits.csv"))
    pandas.DataFrame().to_parquet(tmp_path / "visits.parquet")
    with pytest.raises(InputError, match="has no rows; give a file with at least one row"):
        survey(str(tmp_path / "visits.parquet"))


@pytest.mark.parametrize("clients", [["oslo", "nice", "oslo"], [7, 8, 7], [7.0, 8.0, 7.0]])
@pytest.mark.parametrize("named", [None, "hospital"])
def test_a_client_column_with_an_empty_cell_is_not_passed_over(
    tmp_path: Path, clients: list[Any], named: str | None
) -> None:
    hospitals = [*clients * 3, *clients[:2], ""]
    columns = {"text": REPORTS, "label": ["x", "y"] * 6, "hospital": hospitals}
    assert table(tmp_path, **columns).roles(None, None, named).client == "hospital"
    assert table(tmp_path, **columns).roles(None, None, "none").client is None
    complete = table(tmp_path, **columns, city=["a", "b", "c"] * 4)
    assert complete.roles(None, None, None).client == "city"


def test_decimal_commas_of_a_spreadsheet_are_numbers_to_predict(tmp_path: Path) -> None:
    path = tmp_path / "rents.csv"
    rows = "".join(f"flat of {n} rooms;{300 * n},5{n % 10};1,{n}\n" for n in range(1, 40))
    path.write_text("\ufeffflat;price;note\n" + rows)  # as a German Excel writes it
    found = survey(str(path))
    assert {c.name: c.kind for c in found.columns}["price"] == "number"
    roles = found.roles("flat", "price", None)
    assert (roles.task, roles.label) == (Regression.name, "price")
    path.write_text(path.read_text().replace(";", "\t"))  # lists of numbers, perhaps
    assert {c.name: c.kind for c in survey(str(path)).columns}["price"] == "text"
