"""Prompts by client: what stands in them, what is refused; a task a client from file to table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.data.templates import Template, fill, left_over
from fedtailor.errors import InputError
from tests import kinds

_EXPERIMENT = """
rounds = 1
[data]
path = "rows.jsonl"
task = "instruct"
client = "task"
label = "output"
max_length = 32
[[data.templates]]
clients = ["where"]
prompt = "where is {thing} now"
[split]
scheme = "natural"
[model]
name = "{model}"
[evaluate]
metrics = ["rougeL", "exact_match"]
select = "own_metric"
generate = {examples = 4, tokens = 4}
[[evaluate.by_client]]
clients = ["where", "other"]
metric = "exact_match"
[[evaluate.by_client]]
clients = ["long"]
metric = "rougeL"
[methods.fedavg]
optimiser = {lr = 0.5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of three tasks; one has no column of prompts."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"task": task, "thing": "the ward", "prompt": prompt, "output": "a bed"}
        for task, prompt in (("where", None), ("long", "has a patient"), ("other", "left"))
        for _ in range(20)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("e.toml").write_text(_EXPERIMENT.replace("{model}", kinds.model("instruct")))
    return tmp_path


def test_what_a_prompt_has_said_is_not_said_again() -> None:
    templates = [Template(("a",), "where {context} now")]
    cells = left_over(templates, ["one", "two"], ["a", "b"], "context")
    assert cells == [None, "two"]
    assert left_over(templates, ["one", "two"], ["a", "b"], "system") == ["one", "two"]
    assert left_over(templates, None, ["a", "b"], "") is None


def test_a_prompt_has_the_cells_of_its_row() -> None:
    columns: dict[str, list[Any]] = {"a": ["x", None], "b": [1, 2.5]}
    one = Template(("north",), "{{{a}}} is {b}, {a}?")
    found = fill([one], ["own", "own"], ["north", " north "], [*columns], columns.__getitem__)
    assert found == ["{x} is 1, x?", "{} is 2.5, ?"]
    assert fill([one], ["own"] * 2, ["south", None], [*columns], columns.__getitem__) == ["own"] * 2


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ({"clients": ["a"], "prompt": "the same"}, "needs the names of clients, and a column"),
        ({"clients": [], "prompt": "{thing}"}, "needs the names of clients, and a column"),
        ({"clients": ["a"], "prompt": "{thing"}, "expected '}'"),
        ({"clients": ["a"], "prompt": "{thing:.3}"}, "a column's name alone stands in braces"),
        ({"clients": ["where"], "prompt": "{think}"}, "'think'.*did you mean 'thing'"),
        ({"clients": ["where", "lang"], "prompt": "{thing}"}, "'lang'.*did you mean 'long'"),
        ({"clients": ["where"] * 2, "prompt": "{thing}"}, "has client 'where' twice"),
        ({"clients": ["long"], "prompt": "{thing}"}, "row 1 has no prompt, and .* 'where'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_a_wrong_template_is_named(template: dict[str, Any], what: str) -> None:
    listed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in template.items())
    with pytest.raises(InputError, match=what):
        ft.run(ft.load("e.toml", [f"data.templates=[{{{listed}}}]"]), "out")


@pytest.mark.slow
def test_each_client_has_its_task_and_its_metric(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = ft.load("e.toml")
    tokenizer = transformers.AutoTokenizer.from_pretrained(kinds.model("instruct"))
    dataset = ft.data.load_data(experiment.data, tokenizer)
    texts = {tokenizer.decode(dataset.inputs[row]) for row in range(60)}
    assert texts == {
        f"[CLS] {prompt} [SEP] a bed [SEP]"
        for prompt in ("where is the ward now", "has a patient", "left")
    }
    assert main(["run", "e.toml", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["compare", "run"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    for row in (["long", "rougeL"], ["other", "exact_match"], ["where", "exact_match"]):
        assert row in rows
    line = json.loads(
        (folder / "run/methods/fedavg/seed-0/clients.jsonl").read_text().split("\n")[0]
    )
    own, exact, rouge = (line["metrics"][name] for name in ("own_metric", "exact_match", "rougeL"))
    names = experiment.evaluate.metric_of
    assert names == {"where": "exact_match", "other": "exact_match", "long": "rougeL"}
    assert own == [rouge[0], *exact[1:]]  # long, other, where
    new = [{"task": "where", "thing": "the ward"}, {"task": "long", "prompt": "has a patient"}]
    Path("new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))  # no answers
    assert main(["predict", "run", "--client", "where", "--input", "new.jsonl"]) == 0
    assert main(["predict", "run", "--client", "where", "--input", "rows.jsonl"]) == 0
