"""What models write in evaluations: when, which metrics it has, samples, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.engine.evaluation import Evaluator
from fedtailor.engine.executors.sequential import Sequential
from fedtailor.engine.metrics import Metrics
from fedtailor.engine.prepare import client_works, first_server, memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.engine.writing import Writing
from fedtailor.methods import METHODS
from fedtailor.objectives import OBJECTIVES
from fedtailor.runs.experiment import parse
from fedtailor.store.read import read
from fedtailor.task.task import Task
from tests import kinds

PLAN = ft.Plan(
    rounds=3,
    local=ft.LocalConfig(4, steps=1),
    engine=ft.EngineConfig(executor="sequential"),
    evaluate=ft.EvaluateConfig(
        metrics=("rougeL", "told"),
        select="told",
        generate=ft.GenerateConfig(examples=2, tokens=4, every=2),
    ),
)


def ran(label: str, kind: str, heard: list[tuple[str, str, str]]) -> list[Any]:
    def told(prompt: str, answer: str, reference: str) -> float:
        heard.append((prompt, answer, reference))
        return len(heard) % 2

    method = METHODS[label]()
    task = Task(kinds.backbone(kind), method.adapt)
    return [
        *rounds(method, task, kinds.federation(kind, (5, 6, 7, 8)), PLAN, metrics={"told": told})
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["instruct", "seq2seq", "causal-lm"])
def test_texts_are_written_at_their_rounds_and_judged(kind: str) -> None:
    heard: list[tuple[str, str, str]] = []
    first, second, third = ran("fedsdg", kind, heard)
    assert all(value is None for e in first.evaluations for value in e.metrics["rougeL"])
    assert first.samples == ()
    for done in (second, third):
        assert {e.model for e in done.evaluations} == {"personal", "global"}
        assert all(0 <= value <= 1 for e in done.evaluations for value in e.metrics["rougeL"])
        assert all(e.metrics["told"] == (0.5,) * 4 for e in done.evaluations)
        assert [[*one.answers] for one in done.samples] == [["base", "global", "0", "1", "2"]] * 3
        assert [one.client for one in done.samples] == [0, 1, 2]
    # 2 rounds, 2 models, 2 splits and 2 examples of 4 clients; the first one is a sample, too
    assert len(heard) == 2 * 2 * 2 * 2 * 4
    sample = third.samples[0]
    own = [(sample.prompt, sample.answers["0"], sample.reference)]
    assert {*own} <= {*heard}
    federation = kinds.federation(kind, (5, 6, 7, 8))
    said, targets = kinds.rows(kind, len(federation.dataset.inputs))
    row = federation.rows(0, "validation")[0]
    if kind == "causal-lm":
        assert f"{sample.prompt} {sample.reference}" == said[row]
        return
    if kind == "instruct":  # of a long one the beginning is cut
        *before, asked, right = (turn["content"] for turn in said[row])
        assert " ".join([*before, asked]).endswith(sample.prompt)
        assert sample.prompt.endswith(asked.split()[-1])
        assert sample.reference == right
        return
    assert targets is not None
    assert (sample.prompt, sample.reference) == (said[row], targets[row])


@pytest.mark.slow
def test_a_client_that_did_not_train_writes_what_it_wrote_before() -> None:
    """Its results are kept from round to round, but not from one without texts."""
    method, federation = METHODS["local"](), kinds.federation("instruct", (5, 6, 7))
    task = Task(kinds.backbone("instruct"), method.adapt)
    plan = replace(PLAN, evaluate=replace(PLAN.evaluate, metrics=("rougeL",), select=None))
    works = client_works(method, task, federation, plan)
    states, executor = memory_states(method, task, federation), Sequential(works._asdict())
    of = works.score, works.write
    evaluator = Evaluator(method, task, federation, plan, states, executor.map, *of)
    server = first_server(method, task, federation)
    scores = [evaluator.evaluate(server, number)[0][0].metrics["rougeL"] for number in (1, 2, 2, 1)]
    assert scores[0] == scores[3] == (None,) * 3
    assert None not in scores[1]
    assert scores[1] == scores[2]


def test_the_base_is_the_model_before_any_training() -> None:
    method = METHODS["fedavg"]()
    federation = kinds.federation("instruct", (5, 6))
    task = Task(kinds.backbone("instruct"), method.adapt)
    writing = Writing(method, task, federation, PLAN)
    server = first_server(method, task, federation)
    changed = {name: value + torch.randn(value.shape) for name, value in server.items()}
    base = writing.texts(None, [0, 1])
    assert base == writing.texts(server, [0, 1])
    assert base != writing.texts(changed, [0, 1])


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        ({"metrics": ["rougeL"]}, "none are written; set evaluate.generate.examples"),
        ({"generate": {"tokens": 8}}, "examples = 0: nothing is written, so tokens and every"),
        ({"every": 2, "generate": {"examples": 1, "every": 3}}, "a multiple of evaluate.every = 2"),
    ],
)
def test_a_setting_without_effect_is_refused(evaluate: dict[str, Any], words: str) -> None:
    def read() -> None:
        chosen = parse({"evaluate": evaluate, "methods": {"fedavg": {}}})
        Metrics(chosen.evaluate).check(OBJECTIVES["instruct"])

    with pytest.raises(ft.InputError, match=words):
        read()


def test_other_kinds_write_nothing() -> None:
    config = ft.EvaluateConfig(generate=ft.GenerateConfig(examples=1))
    with pytest.raises(
        ft.InputError, match=r"for models that learn to write texts; .* 'regression'"
    ):
        Metrics(config).check(OBJECTIVES["regression"])


@pytest.mark.slow
def test_the_cost_is_said_and_the_metric_chooses_the_round(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Round 1 has no texts; the best is one of those that have."""
    generate = {"examples": 3, "tokens": 5, "every": 2}
    chosen = parse({
        "rounds": 3, "methods": {"fedlora": {"rank": 2}}, "split": {"clients": 3, "scheme": "iid"},
        "local": {"batch_size": 4, "steps": 1}, "seeds": [0],
        "evaluate": {"metrics": ["rougeL", "chrf"], "select": "rougeL", "generate": generate},
    })  # fmt: skip
    result = ft.run(chosen, tmp_path / "run", data=kinds.data("instruct"),
                    backbone=kinds.backbone("instruct"))  # fmt: skip
    said = capsys.readouterr().err
    assert (
        "texts     15 answers for 3 clients, of at most 5 tokens, by own and global models, after "
        "2 of 3 rounds: at most 300 tokens for each method and seed"
    ) in said, said[said.find("texts  ") :][:300]
    assert "client's step; writing the texts comes on top)" in said
    assert "rougeL" in result.report().read_text()
    assert read(result.path).trials[0].commit.best_round in (2, 3)
