"""Every kind of task goes everywhere: executors, Flower, and from a table to an export."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.flower import serve
from fedtailor.objectives import OBJECTIVES
from fedtailor.store.files import load_tensors
from tests import kinds
from tests.flower.grid import experiment, grid
from tests.flower.test_parity import QUICK
from tests.small import same_bits

_FAST = ("multi-label", "instruct")  # a kind that gives numbers, and one that writes texts
_KINDS = [
    pytest.param(kind, marks=[] if kind in _FAST else pytest.mark.slow) for kind in OBJECTIVES
]
EVERY = pytest.mark.parametrize("kind", _KINDS)
_FIELDS: dict[str, Any] = {"fedhft": {"warmup_rounds": 1, "clusters": 2}, "fedmerge": {"models": 2}}
_OTHERS = ("fedavg", "feddpa", "fedhft", "fedmerge", "fedsq", "pfedgate")
_PAIRS = [  # each kind with one method that all can train, and a sixth of the others
    pytest.param(
        kind, label, id=f"{kind}-{label}",
        marks=pytest.mark.slow if (number + at) % 6 == 0 else pytest.mark.long,
    )
    for number, kind in enumerate(OBJECTIVES)
    for at, label in enumerate(_OTHERS)
] + [pytest.param(kind, "fedsdg", marks=pytest.mark.slow) for kind in OBJECTIVES]  # fmt: skip


def lines(out: Path, label: str) -> list[dict[str, Any]]:
    text = (out / "methods" / label / "seed-0/clients.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _floats(values: list[float | None]) -> NDArray[np.float64]:
    return np.array(values, np.float64)  # None becomes NaN


@pytest.mark.parametrize(("kind", "label"), _PAIRS)
def test_executors_and_a_federation_give_the_numbers_of_one_process(
    kind: str, label: str, tmp_path: Path
) -> None:
    dataset, backbone = kinds.data(kind), kinds.backbone(kind)
    objective = dataset.objective
    generate = {"examples": 3, "tokens": 5} if objective.learns_texts else {}
    chosen = experiment(
        label, _FIELDS.get(label, {}), rounds=2, cohort={"size": 2},
        split={"clients": 3, "scheme": "iid", "max_examples": 10},
        evaluate={"every": 2, "metrics": [m for m in objective.metrics if m != objective.tunes],
                  "generate": generate},
    )  # fmt: skip

    def here(**engine: Any) -> Path:
        changed = replace(chosen, engine=ft.EngineConfig(**engine))
        out = tmp_path / engine["executor"]
        return ft.run(changed, out, data=dataset, backbone=backbone).path

    near, processes = here(executor="sequential"), here(executor="processes", processes=2)
    stacked = here(executor="vectorised", clients_per_step=2)
    direct = grid(chosen, tmp_path / "nodes", dataset=dataset, model=lambda: kinds.backbone(kind))
    far = serve(direct, chosen, tmp_path / "far", backbone=backbone, timeouts=QUICK)
    known = [json.loads((out / "partitions/seed-0.json").read_text()) for out in (near, far)]
    assert known[0].get("scale") == known[1].get("scale")
    name = f"methods/{label}/seed-0/server.safetensors"
    for other in (far, processes):
        assert same_bits(load_tensors(near / name), load_tensors(other / name))
    for a, b, c in zip(*(lines(out, label) for out in (near, far, stacked)), strict=True):
        assert a.get("metrics", {}).keys() == {*objective.metrics}
        assert all((hits is not None) == objective.has_hits for hits in a["accuracy"])
        assert a["accuracy"] == b["accuracy"]
        for metric, values in a.get("metrics", {}).items():
            np.testing.assert_allclose(
                _floats(b["metrics"][metric]), _floats(values), rtol=1e-5, atol=1e-5
            )  # R2 is 1 less a ratio
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["loss"] == pytest.approx(c["loss"], rel=1e-3)


def test_the_page_has_every_task() -> None:
    assert [*kinds.page()] == [*OBJECTIVES]


def _percent(those: list[bool]) -> str:
    return f"{100 * sum(those) / len(those):.1f} %"


_BEFORE: dict[str, Callable[[Any, Any], str]] = {  # what a run says of its targets before it starts
    "classification": lambda _, of: f"({_percent([one == 'long' for one in of])})",
    "multi-label": lambda _, of: f"; {_percent([not one for one in of])} of the rows have none",
    "regression": lambda _, of: f"; numbers from {min(of):g} to {max(of):g}, {np.mean(of):g} on av",
    "token-classification": lambda _, of: f" entities: LOC ({sum(s.count('B-LOC') for s in of)})",
    "question-answering": lambda _, of: f"; {_percent([not one['text'] for one in of])} of the que",
    "seq2seq": lambda _, of: f"(least, median, most): {min(len(s.split()) for s in of) + 2}, ",
    "instruct": lambda of, _: f"; {_percent(_said_by_assistants(of))} of the tokens are the assist",
    "preference": lambda *_: "tokens of a text (least, median, most): 5, ",
    "causal-lm": lambda of, _: (
        f"tokens of a text (least, median, most): {min(len(s.split()) for s in of) + 2}, "
    ),
}


def _said_by_assistants(inputs: list[Any]) -> list[bool]:
    """Of each token; a turn has its words, and a mark on either side or behind it."""
    every = [(turn["role"] == "assistant", turn["content"].split()) for i in inputs for turn in i]
    return [said for said, words in every for _ in range(len(words) + 2 - said)]


@pytest.mark.slow
@EVERY
def test_a_run_and_its_report_have_the_tasks_words(kind: str) -> None:
    folder, one = kinds.finished(kind), OBJECTIVES[kind]
    assert kinds.page()[kind][1] == one.selects
    printed = (folder / "printed.txt").read_text()
    assert _BEFORE[kind](*kinds.rows(kind)) in (folder / "run/run.log").read_text()
    is_share = one.selects in {"accuracy", *one.shares}
    unit = " (nats)" if one.selects == "loss" else " (%)" if is_share else ""
    assert f"Test {one.selects}{unit}, the best first" in printed
    least = one.selects in {"loss", *one.errors}
    assert f"the one with the {'lowest' if least else 'highest'} mean validation" in printed
    assert ("accuracy" in printed) == (one.has_hits and not one.learns_texts)
    assert "nan" not in printed
    page = (folder / "run/report.html").read_text()
    assert one.selects in page
    assert ("majority class" in page) == one.has_classes


@pytest.mark.slow
@EVERY
def test_a_search_shows_the_tasks_measure(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    search = ["tune", str(kinds.finished(kind) / "e.toml"), "--out", str(tmp_path / "tuned")]
    space = "tune={candidates=1, space={fedsdg={rank=[1]}}}"
    fewer = ["--set", "rounds=1", "--set", 'methods=["fedsdg"]', "--set", space]
    assert main([*search, *fewer]) == 0
    printed, told = capsys.readouterr()
    found = re.search(rf"candidate 1: {OBJECTIVES[kind].selects} ([\d.]+) on validation", told)
    assert found is not None, told
    assert f" {found[1]} " in printed


@pytest.mark.slow
@EVERY
def test_each_client_predicts_and_another_joins(
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "own"  # other tests use the run, without the new client
    monkeypatch.chdir(shutil.copytree(kinds.finished(kind), folder))
    of = ["run", "--method", "fedsdg"]
    assert main(["predict", *of, "--by-client", "--input", "rows.jsonl"]) == 0
    header, *answers = csv.reader(capsys.readouterr().out.splitlines())
    classes = kinds.data(kind).classes
    assert header[0] == "client"
    assert {*header[1:]} <= OBJECTIVES[kind].column_names(classes)
    columns = [name for name in header[1:] if not name.startswith("p(")]
    assert kinds.page()[kind][2].removesuffix(", p(CLASS)").split(", ") == columns
    assert [row[0] for row in answers] == [*"abc"] * 30
    inputs, _ = kinds.rows(kind)
    assert len(ft.load_model("run", "fedsdg", "a").predict(inputs[:2])) == 2
    Path("new.jsonl").write_text(Path("rows.jsonl").read_text().replace('"c"', '"d"'))
    join = ["onboard", *of, "--data", "new.jsonl", "--client", "d"]
    assert main(join) == 0
    told = capsys.readouterr().out
    one = OBJECTIVES[kind]
    own = one.selects if one.selects in one.metrics and not one.tunes else ""
    unit = " %" if own in one.shares or (one.has_hits and not own) else ""
    head = f"validation{own and f' {own}'}{unit}  " if own or one.has_hits else "validation loss  "
    assert head in told
    assert "5 validation examples" in told
    assert main(["predict", *of, "--client", "d", "--input", "new.jsonl"]) == 0


_SAID: dict[str, Callable[[dict[str, Any]], str]] = {  # by use.py, of what predict says
    "classification": lambda of: f"{of['probability']:.3f}  {of['label']}",
    "multi-label": lambda of: "|".join(of["labels"]) or "-",
    "regression": lambda of: f"{of['number']:.6g}",
    "token-classification": lambda of: "\n".join(
        map("\t".join, zip(of["tokens"], of["tags"], strict=True))
    ),
    "question-answering": lambda of: of["answer"],
    "seq2seq": lambda of: of["text"],
    "instruct": lambda of: of["text"],
    "preference": lambda of: of["text"],
    "causal-lm": lambda of: of["text"],
}
_FORMS = {  # methods of all forms that an export has, in TOML
    "fedavg": "", "fedem": "components = 2", "pfedmoe": "", "feddpa": "rank = 2",
    "fedalt": "rank = 2", "fedhft": "warmup_rounds = 1\nclusters = 2", "fedmerge": "models = 2",
    "pfedgate": 'evaluation = "sample"', "fedsq": "",
}  # fmt: skip
_USE = """
import contextlib, io, json, os, runpy, sys
sys.modules["fedtailor"] = None  # an import of it fails
said = {}
for kind, (folder, *arguments) in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    before, sys.argv = {*sys.modules}, ["use.py", *arguments]
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("use.py", run_name="__main__")
    said[kind] = printed.getvalue()
    sys.path.pop(0)
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
print(json.dumps(said))
"""


def _finished(kind: str, label: str) -> Path:
    """The run of `kinds.finished` with this method; those beside FedSDG share one."""
    if label == "fedsdg":
        return kinds.finished(kind)
    trained = [one for one in _FORMS if one not in {"fedavg", *kinds.refused(kind)}]
    return kinds.finished(kind, "".join(f"[methods.{one}]\n{_FORMS[one]}\n" for one in trained))


@cache
def used(labels: tuple[str, ...]) -> dict[str, str]:
    """What ``use.py`` in an export of each kind and method, in a process of its own, says of the
    first rows, where nothing can import this library."""
    given = {}
    for kind, label in ((kind, label) for kind in OBJECTIVES for label in labels):
        if label in kinds.refused(kind):
            continue
        folder = _finished(kind, label)
        out = str(folder / f"out-{label}")
        of = ["--method", label, "--client", "a", "--out", out]
        assert main(["export", str(folder / "run"), *of]) == 0
        inputs, _ = kinds.rows(kind)
        if kind == "instruct":
            inputs = [turns[0]["content"] for turns in inputs]
        if kind == "preference":
            inputs = [row["prompt"][0]["content"] for row in inputs]
        one = OBJECTIVES[kind]
        names = [one.input_names[0], *one.second_names[:1]]
        with (folder / "ask.csv").open("w", newline="") as file:
            rows = [
                given
                if isinstance(given, tuple)
                else [" ".join(given) if one.reads_words else given]
                for given in inputs[:3]
            ]
            csv.writer(file).writerows([names, *rows])
        given[f"{kind} {label}"] = [out, str(folder / "ask.csv")]
    command = [sys.executable, "-I", "-c", _USE, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_export_says_the_same_without_this_library(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = OBJECTIVES[kind]
    _check_export(kind, "fedsdg", used(("fedsdg",))[f"{kind} fedsdg"], capsys)
    accuracy = ["accuracy"] if one.has_hits and not one.learns_texts else []
    counted = {"token-classification": "words", "question-answering": "windows"}.get(
        kind, "tokens" if one.learns_texts else "examples"
    )
    heads = ["split", counted, *accuracy, *one.reported, "loss"]
    card = (kinds.finished(kind) / "out-fedsdg/README.md").read_text()
    assert f"| {' | '.join(heads)} |" in card
    does = "generate" if one.writes else "predict"
    assert f"has `{does}(" in card
    assert f"def {does}(" in (kinds.finished(kind) / "out-fedsdg/answers.py").read_text()


@pytest.mark.long
def test_every_form_of_an_export_answers_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    said = used(tuple(_FORMS))
    assert {key.split()[0] for key in said} == {*OBJECTIVES}
    assert {key.split()[1] for key in said} == {*_FORMS}
    for key, printed in said.items():
        _check_export(*key.split(), printed, capsys)


def _check_export(kind: str, label: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _finished(kind, label)
    of = [str(folder / "run"), "--method", label, "--client", "a"]
    capsys.readouterr()
    assert main(["predict", *of, "--input", str(folder / "ask.csv"), "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [_SAID[kind](answer) for answer in answers]
    assert len(expected) == 3
    for said in expected:
        assert said in printed, (kind, label)
