"""Clients go by their names in tables and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.report.comparison import compare
from fedtailor.report.page import write
from tests.report.conftest import hold, name

MakeRun = Callable[..., Path]
Expected = Callable[[str, int, str], NDArray[np.float64]]
NAMES = ["berlin", "lagos", "3 <west>", "oslo", "rome", "turin"]


def named(path: Path) -> Path:
    omission = {"kind": "min-examples", "count": 1, "text": "1 client too small: nice (4)"}
    for seed in (0, 1):
        name(path, seed, names=NAMES, omissions=[omission])
        hold(path, seed, majority=[0] * 6, majority_correct=[5, 5, 3, 0, 0, 30])
    return path


def test_each_named_client_has_a_row(make_run: MakeRun, expected: Expected) -> None:
    path = named(make_run())
    rows = json.loads(compare([path], as_json=True))["clients"]
    assert [row["client"] for row in rows] == NAMES
    accuracy = expected("fedsdg", 4, "personal").mean(0)  # over seeds; oslo has no test examples
    results = [row["results"]["fedsdg"] for row in rows if row["results"]["fedsdg"] is not None]
    np.testing.assert_allclose(results, accuracy)
    assert rows[3]["results"]["fedsdg"] is None
    assert rows[0]["majority"] == 0.25
    text = compare([path])
    assert re.search(r"^berlin +60 +20 +25\.0 +", text, re.MULTILINE)
    assert "Data: 1 client too small: nice (4)" in text
    omission = {"kind": "min-examples", "count": 6, "text": "a to f", "short": "a and 5 more"}
    for seed in (0, 1):
        name(path, seed, names=NAMES, omissions=[omission])
    assert "Data: a and 5 more; see the report" in compare([path])
    assert "Data: a to f" in json.loads(compare([path], as_json=True))["notes"]


def test_many_methods_take_several_tables(make_run: MakeRun) -> None:
    methods = tuple(f"a-long-label-{n}" for n in range(9))
    text = compare([named(make_run(methods=methods))])
    assert max(len(x) for x in text.splitlines() if not x.startswith("    ")) <= 120
    assert text.count("Clients: examples, and test accuracy") == 3


def test_clients_without_names_have_no_rows(make_run: MakeRun) -> None:
    assert "Clients: examples" not in compare([make_run()])


def test_the_worst_clients_have_names(make_run: MakeRun, tmp_path: Path) -> None:
    path = named(make_run(methods=("fedavg",)))
    result = json.loads(compare([path], as_json=True))["rows"][0]["personal_model"]
    page = write([path], tmp_path / "page.html").read_text(encoding="utf-8")
    worst = page.split("<h2>Worst clients</h2>")[1]
    first = re.search(r"<tr><th scope=\"row\">fedavg</th><td>0</td><td>(.*?)</td>", worst)
    assert first is not None
    assert first[1].replace("&lt;", "<").replace("&gt;", ">") == result["worst_client"][0]
    every = page.split("Every client: examples")[1]
    assert re.search(r'data-key="0:0"><th scope="row">berlin</th>', every)
    assert '<th scope="row">3 &lt;west&gt;</th>' in every
