import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedtailor.errors import InputError
from fedtailor.report.comparison import compare
from tests.report.conftest import row_of

MakeRun = Callable[..., Path]
Expected = Callable[[str, int, str], NDArray[np.float64]]


def test_costs_are_a_client_a_round(make_run: MakeRun) -> None:
    row = row_of([make_run()], "fedavg")
    assert (row["bytes_down"], row["bytes_up"]) == (4000, 2000)
    assert (row["trained"], row["communicated"], row["private"]) == (1500, 1000, 0)
    assert row["seconds"] == 8 * 2.0
    assert row["personal_model"]["perplexity"] is None


def test_text_fits_a_terminal_and_says_what_it_shows(make_run: MakeRun, expected: Expected) -> None:
    text = compare([make_run()])
    assert max(len(x) for x in text.splitlines() if not x.startswith("    ")) <= 120
    x = 100 * expected("fedavg", 4, "personal").mean(axis=1)
    assert f"{x.mean():.1f}±{x.std(ddof=1):.1f}" in text
    words = " ".join(text.split())
    assert "round: the one with the highest mean validation accuracy over clients" in words
    assert "Results of 6 clients and 2 seeds: " in words
    assert "Left out because they have no test examples: 1 client" in words


def test_a_long_label_of_a_directory_is_on_one_line(make_run: MakeRun) -> None:
    """It is a path, which a break would change."""
    name = "a-directory-with-a-long-name_of-its-own.and-more-than-a-column-has"
    text = compare([make_run(methods=("fedavg",)), make_run(name, methods=("fedavg",))])
    lines = text.splitlines()
    tables = text[: text.index("Verdict")].splitlines()
    assert sum(line.startswith(f"({name})") for line in tables) == 2  # of results, and of costs
    assert not [line for line in lines if "a-directory" in line and f"({name})" not in line]


def test_one_seed_has_no_spread(make_run: MakeRun) -> None:
    text = compare([make_run(seeds=(0,), methods=("local",))])
    assert "±" not in text
    assert "clients and 1 seed: " in " ".join(text.split())
    assert row_of([make_run("b", seeds=(0,), methods=("local",))], "local")["global_model"] is None


def test_seeds_at_different_rounds_are_told_apart(make_run: MakeRun) -> None:
    path = make_run()
    where = path / "methods/fedavg/seed-1/commit.json"
    commit = json.loads(where.read_text())
    where.write_text(json.dumps(commit | {"finished": False, "round": 7}))
    assert row_of([path], "fedavg")["progress"] == "seed 1: round 7 of 8"


def test_language_models_are_compared_by_loss(make_run: MakeRun, expected: Expected) -> None:
    path = make_run(is_lm=True)
    row = row_of([path], "fedavg")["personal_model"]
    loss = 3.0 - expected("fedavg", 4, "personal")  # [seeds, clients]
    assert row["rounds"] == [4, 4]
    assert row["mean"]["mean"] == pytest.approx(loss.mean())
    assert row["worst"]["mean"] == pytest.approx(loss.max(axis=1).mean())
    assert row["perplexity"]["mean"] == pytest.approx(np.exp(loss.mean(axis=1)).mean())
    assert row["accuracy"]["mean"] == pytest.approx(3.0 - loss.mean())
    text = compare([path])
    assert max(len(x) for x in text.splitlines() if not x.startswith("    ")) <= 120
    assert "lowest mean validation loss" in " ".join(text.split())


def _rewrite(path: Path, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Put what ``change`` makes of each evaluation in its place."""
    for log in path.glob("methods/*/*/clients.jsonl"):
        before = [json.loads(line) for line in log.read_text().splitlines()]
        records = [record for old in before for record in change(old)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        log.write_text(text)
        where = log.parent / "commit.json"
        commit = json.loads(where.read_text())
        commit["bytes"]["clients"] = len(text)
        where.write_text(json.dumps(commit))


def _drop(path: Path, split: str) -> None:
    """Leave the evaluations on ``split`` without examples."""

    def change(record: dict[str, Any]) -> list[dict[str, Any]]:
        if record["split"] == split:
            none = [None] * len(record["clients"])
            record |= {"num_examples": [0] * len(none), "loss": none, "accuracy": none}
        return [record]

    _rewrite(path, change)


def test_novel_clients_have_a_column_of_their_own(make_run: MakeRun) -> None:
    path = make_run(tail=b"")
    assert " novel " not in compare([path])

    def change(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [record, {**record, "model": "novel"}] if record["model"] == "personal" else [record]

    _rewrite(path, change)
    row = row_of([path], "fedsdg")
    assert row["novel_clients"] == row["personal_model"]
    assert " novel " in compare([path])


def test_without_validation_examples_the_last_round_is_shown_and_said(make_run: MakeRun) -> None:
    path = make_run(tail=b"")
    _drop(path, "validation")
    assert row_of([path], "fedavg")["personal_model"]["rounds"] == [8, 8]
    assert "round: the last evaluated one" in " ".join(compare([path]).split())


def test_a_chosen_round_without_test_results_is_refused(make_run: MakeRun) -> None:
    path = make_run(tail=b"")
    _drop(path, "test")
    with pytest.raises(InputError, match="no test results of the personal model at round 4"):
        compare([path])


def test_a_diverged_client_makes_json_null(make_run: MakeRun) -> None:
    path = make_run(tail=b"", methods=("local",), seeds=(0,), done=0)
    log = path / "methods/local/seed-0/clients.jsonl"
    text = re.sub(r"(\"accuracy\": \[)[^,]*", r"\1NaN", log.read_text())
    log.write_text(text)
    where = log.parent / "commit.json"
    commit = json.loads(where.read_text())
    commit["bytes"]["clients"] = len(text)
    where.write_text(json.dumps(commit))
    found = row_of([path], "local")
    assert found["personal_model"]["mean"]["mean"] is None
    assert found["bytes_down"] is None
    assert math.isclose(found["trained"], 1500)
    assert "accuracy - %" in compare([path])


@pytest.mark.slow
def test_importing_the_report_draws_nothing() -> None:
    code = (
        "import sys, fedtailor.report;"
        "assert not {'vl_convert', 'jinja2', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
