"""Preferences: forms of rows, what stays of a long prompt, the loss by hand, both references."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import fedtailor as ft
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.objectives import Preference
from fedtailor.objectives.objective import REFERENCE
from fedtailor.random import key
from tests import kinds

TASK = Preference()
ASK = [{"role": "user", "content": "the ward"}]
YES = [{"role": "assistant", "content": "has a bed"}]
NO = [{"role": "assistant", "content": "left"}]
WHOLE = {"prompt": ASK, "chosen": YES, "rejected": NO}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(kinds.model("preference"))


def test_a_conversation_as_json_is_a_prompt(tokenizer: Any) -> None:
    """As an endpoint for chats has it."""
    turns = [{"role": "user", "content": "a bed"}]
    (asked,) = (json.loads(one)["prompt"] for one in TASK.conversations([[json.dumps(turns)]]))
    assert asked == turns
    (row,) = TASK.conversations([None, ["a bed"], [1], [2]])
    assert json.loads(row)["chosen"] == [{"role": "assistant", "content": "2"}]


def test_rows_of_every_form_are_the_same() -> None:
    names = TASK.joined(["id", "rejected", "chosen", "prompt"], None, None, None)
    assert names == ("", "prompt", "rejected", "chosen")
    forms: list[list[Any]] = [
        [None, "the ward", "left", "has a bed"],
        [None, ASK, NO, json.dumps(YES)],
        [None, None, ASK + NO, ASK + YES],  # the prompt is what both begin with
        [None, "not this", ASK + NO, ASK + YES],  # as some sets have it beside whole ones
    ]
    for form in forms:
        (text,) = TASK.conversations([None if cell is None else [cell] for cell in form])
        assert json.loads(text) == WHOLE
    assert TASK.joined(["preference", "client"], None, None, None) == ("preference",)
    assert TASK.conversations([[WHOLE, json.dumps(WHOLE)]]) == [text] * 2
    (told,) = TASK.conversations([["be kind"], [None], [ASK + NO], [ASK + YES]])
    assert json.loads(told)["prompt"] == [{"role": "system", "content": "be kind"}, *ASK]
    assert TASK.joined(["ask", "a", "b"], "ask", "b", "a") == ("", "ask", "b", "a")
    roles = {"text": "prompt", "text_pair": "rejected", "label": "chosen"}
    assert TASK.recognised({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}) == roles


@pytest.mark.parametrize("answers", [(ASK + YES, None), ([], ASK + NO), ("", None)])
def test_rows_with_an_empty_answer_are_left_out(tokenizer: Any, answers: list[Any]) -> None:
    chosen, rejected = answers
    nothing, rejections, choices = [None, None], [rejected, ASK + NO], [chosen, ASK + YES]
    texts = TASK.conversations([nothing, nothing, rejections, choices])
    left_out, kept = TASK.encode(texts, None, tokenizer, 64)
    assert (left_out.ids, len(kept.ids) > 0) == ([], True)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ([None, None, "left", "has a bed"], "row 1 has no prompt"),
        ([None, "the ward", NO, ASK + YES], "row 1 has the prompt in one of its answers alone"),
    ],
)
def test_rows_without_a_prompt_are_named(form: list[Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        TASK.conversations([None if cell is None else [cell] for cell in form])


def _answers(tokenizer: Any, most: int, **changes: Any) -> tuple[list[str], list[str], bool]:
    """Both sequences of a row, and what is compared of them, in words."""
    (one,) = TASK.encode([json.dumps(WHOLE | changes)], None, tokenizer, most)
    if not one.ids:
        return [], [], False
    assert one.sizes is not None
    assert one.labels is not None
    parts = [one.ids[: one.sizes[0]], one.ids[one.sizes[0] :]]
    said = [part[start:] for part, start in zip(parts, one.labels, strict=True)]
    return *([tokenizer.decode(ids) for ids in both] for both in (parts, said)), one.is_cut


@pytest.mark.parametrize("answer", ["[]", "[1, 2, 3]", "[see above]", "{}"])
def test_an_answer_that_looks_like_a_list_is_a_text(answer: str) -> None:
    told = TASK.conversations([None, ["What?"], ["No."], [answer]])
    assert json.loads(told[0])["chosen"][-1] == {"role": "assistant", "content": answer}


def test_the_answers_with_their_ends_are_compared(tokenizer: Any) -> None:
    parts, said, is_cut = _answers(tokenizer, 10)
    assert parts == ["[CLS] the ward [SEP] has a bed [SEP]", "[CLS] the ward [SEP] left [SEP]"]
    assert (said, is_cut) == (["has a bed [SEP]", "left [SEP]"], False)
    parts, said, is_cut = _answers(tokenizer, 6)  # both lose as much of the prompt
    assert parts == ["ward [SEP] has a bed [SEP]", "ward [SEP] left [SEP]"]
    assert (said, is_cut) == (["has a bed [SEP]", "left [SEP]"], True)
    parts, said, _ = _answers(tokenizer, 3)
    assert (parts, said) == (
        ["[SEP] has a", "[SEP] left [SEP]"], ["has a", "left [SEP]"]
    )  # fmt: skip
    for alike in (YES, []):
        assert _answers(tokenizer, 10, rejected=alike) == ([], [], False)
    near = [{"role": "assistant", "content": "has a left"}]
    assert _answers(tokenizer, 4, rejected=near)[0]
    assert _answers(tokenizer, 3, rejected=near) == ([], [], False)  # alike after the cut
    (prompt,) = TASK.encode_prompts([json.dumps(WHOLE)], tokenizer, 10)
    assert tokenizer.decode(prompt.ids) == "[CLS] the ward [SEP]"


def test_the_loss_is_that_of_the_paper() -> None:
    backbone, dataset = kinds.backbone("preference"), kinds.data("preference")
    backbone = replace(backbone, objective=Preference(beta=0.5))
    task = ft.Task(backbone, ft.FedAvg().adapt)
    state = {
        name: value + 0.3 * torch.randn(value.shape, generator=torch.manual_seed(0))
        for name, value in task.state.items()
    }
    batch = dataset.batch(np.arange(5))

    def log_pi(of: Any, row: int, side: int) -> float:
        count = int(batch["attention_mask"][row, side].sum())
        ids = batch["input_ids"][row, side, :count][None]
        one = {"input_ids": ids, "attention_mask": torch.ones(1, count)}
        logs = task.logits(of, one)[0].log_softmax(-1)
        first = int(batch["labels"][row, side])
        return sum(float(logs[at - 1, ids[0, at]]) for at in range(first, count))

    with torch.no_grad():
        gained = [
            [log_pi(state, row, side) - log_pi(task.state, row, side) for side in (0, 1)]
            for row in range(5)
        ]
        margins = np.array([0.5 * (one[0] - one[1]) for one in gained])
        scores = task.score(task.logits(state, batch), batch)
    expected = np.log1p(np.exp(-margins))
    np.testing.assert_allclose(scores.loss.numpy(), expected, rtol=1e-4)
    assert scores.correct.tolist() == (margins > 0).tolist()
    assert 0 < sum(scores.correct) < 5
    loss, _ = task.loss(state, batch, key(0))  # in pieces
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_the_received_model_is_the_reference_of_a_round(executor: Any) -> None:
    """In the first step of each round the model is its own reference: no preference, ln 2."""
    dataset, backbone = kinds.data("preference"), kinds.backbone("preference")
    federation = kinds.federation("preference", (4, 4))
    local = ft.LocalConfig(batch_size=4)
    method = ft.FedAvg(optimiser=ft.Optimiser(lr=1.0))

    def losses(objective: Preference) -> list[float]:
        task = ft.Task(replace(backbone, objective=objective), method.adapt)
        plan = ft.Plan(2, local, engine=ft.EngineConfig(executor=executor))
        return [one.train_loss for one in rounds(method, task, federation, plan)]

    assert REFERENCE not in dataset.batch(np.arange(1))
    base, received = losses(Preference()), losses(Preference(compares_with_received=1.0))
    assert received == pytest.approx([np.log(2)] * 2)
    assert base[0] == pytest.approx(np.log(2))
    assert base[1] < np.log(2) - 1e-3


def test_the_settings_are_refused_elsewhere_and_compared(tokenizer: Any) -> None:
    rows = pd.DataFrame({"prompt": ["a", "a"], "chosen": ["bed", "ward"], "rejected": ["at", "by"]})

    def load(task: str, **fields: Any) -> Any:
        source = ft.Data.from_pandas(rows, task=task, **({} if task == "preference" else LABEL))
        return source.load(source.config(ft.DataConfig(**fields)), tokenizer)

    LABEL = {"text": "prompt", "label": "chosen"}
    told = load("preference", beta=0.3, reference="received").objective
    assert (told.beta, told.compares_with_received) == (0.3, True)
    assert load("preference").objective.beta == 0.1
    for setting in ({"beta": 0.3}, {"reference": "base"}):
        with pytest.raises(InputError, match=f"data.{next(iter(setting))} is not for the task"):
            load("classification", **setting)
    with pytest.raises(InputError, match="'preference': prompt, chosen and rejected; name them"):
        ft.Data.from_pandas(rows[["prompt"]], task="preference")
