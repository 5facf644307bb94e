import json
import sys

import pytest
from benchmarks.harness import Contender, ContenderError, in_turns, markdown, run, spread

PROGRAM = """
import json, pathlib, sys, time
ends = []
for _ in range(3):
    ends.append(time.monotonic())
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"ends": ends, "answer": 42}))
time.sleep(0.9)  # memory is sampled every 0.4 s
"""


def test_a_contender_is_run_and_what_it_found_comes_back(tmp_path):
    found = run(Contender("mine", (sys.executable, "-c", PROGRAM)), tmp_path)
    assert found["answer"] == 42
    assert len(found["rounds_s"]) == len(found["rounds_cpu_s"]) == 2
    assert 0 < found["first_s"] <= found["seconds"]
    assert found["first_s"] + sum(found["rounds_s"]) <= found["seconds"]
    assert found["peak_mb"] > 0
    assert json.dumps(found)


def test_a_contender_that_fails_shows_its_output(tmp_path):
    with pytest.raises(ContenderError, match="no data"):
        run(Contender("mine", (sys.executable, "-c", "raise ValueError('no data')")), tmp_path)


def test_turns_rotate():
    contenders = [Contender(name, ()) for name in "abc"]
    order = [(repeat, contender.name) for repeat, contender in in_turns(contenders, 2)]
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_spread_is_the_median_and_the_quartiles():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0], digits=1) == "3.0 (2.0-4.0)"
    assert spread([0.5], digits=0, factor=1000) == "500"


def test_table():
    assert markdown(["", "s"], [["a", "1"]]) == "|  | s |\n| --- | ---: |\n| a | 1 |\n"
