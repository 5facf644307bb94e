"""``fedtailor list``."""

from __future__ import annotations

import json

import pytest

from fedtailor.cli import main
from fedtailor.methods import METHODS

LISTS = ["experiments", "methods", "datasets", "models"]


def test_alone_it_says_what_there_is_to_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["fedtailor", "list", what] for what in LISTS]
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["list"] for row in rows] == LISTS


@pytest.mark.parametrize("what", LISTS)
def test_a_list_as_a_table_and_as_json(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = dict(zip(LISTS, ("quickstart", "fedsdg", "20newsgroups", "minilm"), strict=True))[what]
    assert main(["list", what]) == 0
    assert known in capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    assert known in {next(iter(row.values())) for row in json.loads(capsys.readouterr().out)}


def test_methods_stand_below_their_family_within_100_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    family, families = "", {}
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            family = line.removesuffix(":")
        elif line.startswith("  ") and not line.startswith("   "):
            families[line.split()[0]] = family
    assert families == {name: method.family for name, method in METHODS.items()}
    prox = next(line for line in lines if line.startswith("  fedprox "))
    assert prox.split(maxsplit=2)[1:] == [
        "2020",
        "FedAvg whose clients are held near the model that they received",
    ]


def test_json_has_a_row_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == METHODS.keys()
    assert rows["fedprox"] == {
        "method": "fedprox",
        "family": "regularised",
        "paper": "Federated Optimization in Heterogeneous Networks",
        "year": 2020,
    }
