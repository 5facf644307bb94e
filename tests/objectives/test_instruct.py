"""Conversations: whose turns are learned, what stays of a long one, from a table to an export."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import transformers
from torch import nn

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.errors import InputError
from fedtailor.models.chat import TEMPLATES
from fedtailor.objectives import Instruct
from fedtailor.objectives.instruct import turns_of
from fedtailor.objectives.objective import IGNORED
from fedtailor.task.backbone import Backbone
from tests.models.small import CAUSAL, DECODERS, save

TASK = Instruct()
WORDS = [
    *("a", "bed", "for", "each", "patient", "is", "free", "here", "there", "you", "work"),
    *("user", "assistant", "system"),
]
CHATML = (  # as many models have it: it marks nothing
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "you work here"},
    {"role": "user", "content": "a bed"},
    {"role": "assistant", "content": "is free"},
    {"role": "user", "content": "for each patient"},
    {"role": "assistant", "content": "there is"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "<|im_start|>", "<|im_end|>", "[UNK]"]
    made = Tokenizer(models.WordLevel({w: at for at, w in enumerate([*special, *WORDS])}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="<|im_end|>", unk_token="[UNK]",
        additional_special_tokens=["<|im_start|>"], chat_template=CHATML,
    )  # fmt: skip


def learned(tokenizer: Any, turns: Any, max_length: int = 99) -> tuple[str, str, bool]:
    """A conversation, and what of it is learned, in words; whether something is cut."""
    (one,) = TASK.encode([json.dumps(turns)], None, tokenizer, max_length)
    assert one.labels is not None
    told = [token for token in one.labels if token != IGNORED]
    assert all(a in (b, IGNORED) for a, b in zip(one.labels, one.ids, strict=True))
    return *(tokenizer.decode(some).replace(" <", "<") for some in (one.ids, told)), one.is_cut


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["chatml"]], ids=["by text", "by marks"])
def test_every_turn_of_the_assistant_is_learned_with_its_end(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    text, told, is_cut = learned(tokenizer, CHAT)
    assert told == "is free<|im_end|> there is<|im_end|>"
    assert text.startswith("<|im_start|> system you work here<|im_end|><|im_start|> user a bed")
    assert not is_cut
    tokenizer.chat_template = CHATML


@pytest.mark.parametrize("end", ["<|im_end|>\n", "\n"])
def test_a_line_end_is_learned_where_nothing_else_ends_a_turn(tokenizer: Any, end: str) -> None:
    from tokenizers import models, pre_tokenizers

    made = copy.deepcopy(tokenizer)
    words = {**tokenizer.get_vocab(), "\n": len(tokenizer)}
    made.backend_tokenizer.model = models.WordLevel(words, "[UNK]")
    apart = [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(apart)
    made.chat_template = CHATML.replace("<|im_end|>\n", end)
    _, told, _ = learned(made, CHAT)
    assert told.split() == ["is", f"free{end}".strip(), "there", f"is{end}".strip()]
    assert told.count("\n") == (2 if end == "\n" else 0)


@pytest.mark.parametrize(
    ("max_length", "kept", "told"),
    [
        (15, "assistant is free<|im_end|>", "is free<|im_end|> there is<|im_end|>"),
        (7, "patient<|im_end|><|im_start|> assistant there", "there is<|im_end|>"),
        (3, "assistant there is", "there is"),
    ],
)
def test_of_a_long_conversation_the_last_answer_stays(
    tokenizer: Any, max_length: int, kept: str, told: str
) -> None:
    text, found, is_cut = learned(tokenizer, CHAT, max_length)
    assert (found, is_cut) == (told, True)
    assert kept in text


def test_the_named_chatml_is_chatml_to_the_letter(tokenizer: Any) -> None:
    made = [
        tokenizer.apply_chat_template(CHAT[:-1], chat_template=one, tokenize=False, **more)
        for one in (CHATML, TEMPLATES["chatml"])
        for more in ({}, {"add_generation_prompt": True})
    ]
    assert made[0].count("<|im_end|>\n<|im_start|>") == 3
    assert made[:2] == made[2:]


def test_the_token_that_ends_a_turn_ends_an_answer(tokenizer: Any) -> None:
    """Whatever the tokenizer's end of a text is; not where the template has no such token."""
    kept, tokenizer.eos_token = tokenizer.eos_token, "[PAD]"
    try:
        for template, ends in ((CHATML, {"<|im_end|>"}), (TEMPLATES["alpaca"], {"[PAD]"})):
            tokenizer.chat_template = template
            found = TASK.turn_ends(tokenizer)
            assert {*tokenizer.convert_ids_to_tokens([*found])} == ends
            assert Backbone(nn.Identity(), TASK, tokenizer=tokenizer).ends >= found
        tokenizer.chat_template = None
        assert not TASK.turn_ends(tokenizer)
    finally:
        tokenizer.eos_token = kept


def test_a_conversation_may_begin_with_the_assistant(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    for turns in (CHAT[2:3], CHAT[2:4]):
        assert learned(tokenizer, turns)[1] == "is free<|im_end|>"
        (one,) = TASK.encode([json.dumps(turns)], None, tokenizer, 99)
        prompt, _ = TASK.exercise(one.ids, one.labels)
        assert len(prompt) == 2  # its header


def test_rows_of_every_form_are_the_same_conversation() -> None:
    rows = [CHAT[1:], CHAT]
    assert TASK.joined(["messages", "system"], None, None, None) == ("system", "messages")
    found = TASK.conversations([["you work here", "others"], rows])
    assert list(map(json.loads, found)) == [CHAT, CHAT]  # its own stays
    assert turns_of("[]") == [{"role": "user", "content": "[]"}]
    whole = json.dumps(CHAT[:3])
    shared = [
        {"from": "system", "value": "you work here"},
        {"from": "human", "value": "a bed"},
        {"from": "gpt", "value": "is free"},
    ]
    (messages,) = TASK.joined(["id", "messages"], None, None, None)
    assert messages == "messages"
    assert TASK.conversations([[CHAT[:3], shared, whole]]) == [whole] * 3
    names = TASK.joined(["output", "instruction", "input", "system"], None, None, None)
    assert names == ("system", "instruction", "input", "output")
    (parts,) = TASK.conversations([["you work here"], ["a bed"], [None], ["is free"]])
    assert parts == whole
    assert TASK.conversations([None, [CHAT[:2]], [None], [CHAT[2:3]]]) == [whole]  # as TRL has them
    assert TASK.conversations([None, ["a bed"], None, [["is free", "there is"]]]) == [
        json.dumps(CHAT[1:3])
    ]
    assert TASK.joined(["ask", "say"], "ask", None, "say") == ("", "ask", "", "say")
    assert TASK.recognised({"prompt": ["a"], "completion": ["b"]}) == {
        "text": "prompt", "label": "completion",
    }  # fmt: skip
    assert TASK.recognised({"messages": [CHAT]}) == {"text": "messages"}


@pytest.mark.parametrize("wrong", [[{"role": "user"}], [{"role": 1, "content": "a"}], ["a"], 3, []])
def test_what_is_no_conversation_is_named(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"row 8 has .* each needs a role and a content"):
        turns_of(wrong, 8)


def test_a_message_is_no_conversation() -> None:
    with pytest.raises(InputError, match=r"row 8 is one message, .* is a list of messages, and"):
        turns_of(CHAT[0], 8)


def test_conversations_are_read_as_people_write_them() -> None:
    assert turns_of(" " + json.dumps(CHAT)) == turns_of(repr(CHAT)) == CHAT
    assert turns_of([{"role": "Assistant", "content": "is"}])[0]["role"] == "assistant"
    assert turns_of("[1] bed")[0]["content"] == "[1] bed"
    assert "?" in TASK.conversations([[[{"role": "user", "content": "\ud800"}]]])[0]
    usual = TASK.joined(["prompt", "system"], "prompt", None, None)  # predict gives no answer
    assert usual == ("system", "prompt", "", "")
    told = ft.Data.from_arrays(["a bed"], ["is free"], task="instruct").columns
    assert told is not None
    assert turns_of(told.read(np.arange(1))[0]) == CHAT[1:3]


def test_rows_that_teach_nothing_are_named(tokenizer: Any) -> None:
    def load(**columns: Any) -> Any:
        source = ft.Data.from_pandas(pd.DataFrame(columns), task="instruct")
        return source.load(source.config(ft.DataConfig()), tokenizer)

    missing = pd.array(["is", None, "free"], "string")
    (note,) = load(prompt=["a", "bed", "is"], response=missing).omissions
    assert note.text == "1 row in which the assistant says nothing, left out"
    silent = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]
    told = load(messages=[CHAT[1:], CHAT[1:], silent, silent, None, CHAT[:1], CHAT[:1]]).omissions
    assert [note.text for note in told] == [
        "5 rows in which the assistant says nothing, left out",
        "1 row with the text of an earlier row, kept: one may be trained on, one tested",
    ]
    with pytest.raises(InputError, match="one is needed; 1 row in which the assistant says noth"):
        load(messages=[silent])
    by_ward = pd.DataFrame({"messages": [silent], "ward": ["c"]})
    source = ft.Data.from_pandas(by_ward, client="ward", task="instruct")
    with pytest.raises(InputError, match="one is needed; 1 row in which the assistant says noth"):
        source.load(source.config(ft.DataConfig()), tokenizer)
    for empty in (missing[1:2], [float("nan")], [" "]):
        with pytest.raises(InputError, match=r"^every answer in column 'response' is empty; name"):
            load(prompt=["a"], response=empty)
    ward = pd.DataFrame({"prompt": ["a"], "response": ["b"], "ward": ["c"]})
    for text, said in (
        ("nope", "no column 'nope' for .*; columns: prompt, response, ward$"),
        ("ward", "input and data.client are both column 'ward'"),
    ):
        with pytest.raises(InputError, match=said):
            ft.Data.from_pandas(ward, text=text, client="ward", task="instruct")
    with pytest.raises(InputError, match="nothing in any conversation; roles: bing, user; allowed"):
        load(messages=[[CHAT[1], {"from": "Bing", "value": "is"}]])
    with pytest.raises(InputError, match="reads one column"):
        ft.Data.from_pandas(pd.DataFrame({"a": ["b"]}), label=["a", "a"], task="instruct")
    for template in (CHATML, TEMPLATES["chatml"]):
        alternate = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        tokenizer.chat_template = {"default": alternate + template}
        with pytest.raises(InputError, match=r"refuses row 4, turns of 'system and user.*: no"):
            load(messages=[CHAT[1:]] * 3 + [CHAT])
    tokenizer.chat_template = CHATML


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }} {% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with pytest.raises(InputError, match="writes earlier turns otherwise"):
        learned(tokenizer, CHAT)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        learned(tokenizer, CHAT)
    tokenizer.chat_template = CHATML


@pytest.mark.slow
def test_answers_end_and_are_the_same_in_an_export(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model", DECODERS["llama"], CAUSAL)
    tokenizer.save_pretrained(tmp_path / "model")
    teams = {"ward": "a bed is free", "desk": "you work here"}
    rows = [
        {"prompt": prompt, "response": answer, "team": team}
        for team, answer in teams.items()
        for prompt in ("here", "there", "patient", "for each", "bed")
        for _ in range(4)
    ]
    Path("teams.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["new", "teams.jsonl", "--client", "team", "--model", "model"]) == 0
    capsys.readouterr()
    settings = [
        "rounds=4", 'methods=["local"]', "local.epochs=8", "methods.local.trainable=full",
        "methods.local.optimiser.lr=0.02", "evaluate.every=4",
    ]  # fmt: skip
    assert main(["run", "teams.toml", *(x for one in settings for x in ("--set", one))]) == 0
    capsys.readouterr()
    Path("ask.jsonl").write_text(json.dumps({"prompt": "there"}))
    for team, answer in teams.items():
        asked = ["predict", "runs/teams", "--client", team, "--input", "ask.jsonl"]
        assert main([*asked, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == answer
        assert main(["export", "runs/teams", "--client", team, "--out", team]) == 0
        done = subprocess.run(
            [sys.executable, f"{team}/use.py", "there"], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == answer
        capsys.readouterr()
