"""``fedtailor describe``."""

from __future__ import annotations

import json

import pytest

from fedtailor.cli import main
from fedtailor.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_each_method_within_100_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", name]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert printed.startswith(f"{name} ({METHODS[name].family})\n")
    paper = METHODS[name].paper()
    words = " ".join(printed.split())
    for part in (paper.title, paper.authors, paper.venue):
        assert words.count(part) == 1 or not part
    assert "Differs from the paper" in printed
    assert "\noptimiser.lr  " in printed


def test_paper_update_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "fedsdg"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == (
        "title    FedSDG: Structure Decoupled Gating for Personalized Federated Finetuning"
    )
    assert sum("theta_g <- theta_g + sum_k w_k Delta_k" in line for line in lines) == 1
    cells = [line.split(maxsplit=2) for line in lines]
    assert ["lambda1", "0.0001", "float >= 0, <= 1,000,000"] in cells
    assert ["lr_private", "none", "float > 0, <= 1,000,000 | none"] in cells
    assert ["private_head", "false", "bool"] in cells
    assert ["form", "branch", "branch | factor"] in cells
    assert ["optimiser.name", "adam", "sgd | adam | adamw"] in cells


def test_the_fields_of_an_experiment_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "experiment"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    cells = [line.split(maxsplit=2) for line in printed.splitlines()]
    assert ["rounds", "10", "int > 0, <= 1,000,000"] in cells
    assert ["faults.machines[].flops_per_second", "none", "float >= 1, <= 1e18 | none"] in cells
    assert main(["describe", "experiment", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)["fields"]
    assert {"field": "data.path", "default": "none", "type": "str | none"} in described


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "hetlora", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["name"], described["family"]) == ("hetlora", "adapter")
    assert described["paper"]["year"] == 2024
    assert described["fields"][0] == {
        "field": "gamma", "default": 0.99, "type": "float > 0, <= 1"
    }  # fmt: skip
    assert {"rank", "optimiser.eps", "robust.rule"} <= {f["field"] for f in described["fields"]}


def test_an_unknown_method_gets_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "fedsgd"]) == 2
    assert "unknown method 'fedsgd'; did you mean 'fedsdg'" in capsys.readouterr().err
