"""Every kind of task, small: its rows, and a model with random weights that knows their words."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.data.federation import Federation
from fedtailor.data.table import Dataset, Partition, Shares
from fedtailor.models import load_model
from fedtailor.objectives import OBJECTIVES
from fedtailor.task.backbone import Backbone
from tests.models.small import save

WORDS = "the ward has a bed for each patient who came in by night and left at noon".split()  # noqa: SIM905
_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "where", "is", "now"]
_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": len(_TOKENS),
    "max_position_embeddings": 40,
}
ENCODER = transformers.BertConfig(
    **_SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
LARGE = transformers.BertConfig(**_SHAPE | {"vocab_size": 30522})  # for MiniLM's tokenizer
DECODER = transformers.LlamaConfig(
    **_SHAPE, num_key_value_heads=1, pad_token_id=0, bos_token_id=2, eos_token_id=3
)
T5 = transformers.T5Config(
    vocab_size=len(_TOKENS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
    dropout_rate=0.0, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
)  # fmt: skip
BART = transformers.BartConfig(
    vocab_size=len(_TOKENS), d_model=16, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    max_position_embeddings=40, dropout=0.0, pad_token_id=0, eos_token_id=3,
    decoder_start_token_id=2,
)  # fmt: skip
MODELS: dict[str, Any] = {  # by kind; the others: ENCODER
    "causal-lm": DECODER,
    "instruct": DECODER,
    "preference": DECODER,
    "seq2seq": T5,
}
_CHAT = (
    "{% for one in messages %}{% if one.role == 'assistant' %}{% generation %}{{ one.content }} "
    "[SEP]{% endgeneration %}{% else %} [CLS] {{ one.content }} [SEP] {% endif %}{% endfor %}"
)


def rows(kind: str, number: int = 90) -> tuple[list[Any], list[Any] | None]:
    """Inputs and targets. Numbers are 37 on average; the ward is a place, and so is what follows
    "in"; questions of 5 tokens have contexts of 38 and, two of three, an answer, so that of 32
    tokens there are two full windows with 10 tokens in both."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, draw.integers(2, 9))) for _ in range(number)]
    numbers = [37 + len(text.split()) + float(draw.normal()) for text in texts]
    split = [text.split() for text in texts]
    if kind == "question-answering":
        return _questions(draw, number)
    if kind == "token-classification":
        return split, [_tags(words) for words in split]
    if kind == "instruct":
        roles = ["user", "assistant"] * 2
        every = [
            [" ".join(words[:2]), " ".join(words[::-2]), words[-1], " ".join(words[1:4])]
            for words in split
        ]
        return [
            [
                {"role": role, "content": said}
                for role, said in zip(roles, turns[: 2 + 2 * (row % 2)], strict=False)
            ]
            for row, turns in enumerate(every)
        ], None  # every second one has two turns of each
    if kind == "preference":  # the longer of two answers
        return [
            {
                "prompt": [{"role": "user", "content": words[0]}],
                "chosen": [{"role": "assistant", "content": " ".join(words)}],
                "rejected": [{"role": "assistant", "content": words[-1]}],
            }
            for words in split
        ], None
    targets: dict[str, list[Any]] = {
        "classification": ["long" if number > 42 else "short" for number in numbers],
        "multi-label": [[name for name in ("bed", "left", "night") if name in t] for t in texts],
        "regression": numbers,
        "seq2seq": [" ".join(words[::-2]) for words in split],
    }
    return texts, targets.get(kind)


def _tags(words: list[str]) -> list[str]:
    tags = ["O"]
    for before, word in zip(["", *words], words, strict=False):
        is_place = word == "ward" or before == "in"
        tags.append(("O", "B-LOC", "I-LOC")[is_place and 1 + (tags[-1] != "O")])
    return tags[1:]


def _questions(draw: np.random.Generator, number: int) -> tuple[list[Any], list[Any]]:
    pairs = [("where is the bed now", " ".join(draw.choice(WORDS, 38))) for _ in range(number)]
    answers = []
    for number, (_, context) in enumerate(pairs):
        words, first = context.split(), int(draw.integers(0, 36))
        text, start = " ".join(words[first : first + 2]), len(" ".join([*words[:first], ""]))
        is_there = number % 3 > 0
        answers.append({"text": [text] * is_there, "answer_start": [start] * is_there})
    return pairs, answers


def save_model(folder: Path, kind: str, architecture: Any = None) -> Path:
    """A model with random weights, and a tokenizer of few words."""
    architecture = architecture or MODELS.get(kind, ENCODER)
    save(folder, architecture, OBJECTIVES[kind].auto_classes["text"])
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of few words."""
    made = Tokenizer(models.WordLevel({t: n for n, t in enumerate(_TOKENS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", eos_token="[SEP]", chat_template=_CHAT,
    ).save_pretrained(folder)  # fmt: skip


@functools.cache
def model(kind: str) -> str:
    """The folder of `save_model`."""
    return str(save_model(Path(tempfile.mkdtemp(prefix="kinds-")) / kind, kind))


def source(kind: str, number: int = 90) -> ft.Data:
    """The rows, not tokenised yet."""
    return ft.Data.from_arrays(*rows(kind, number), task=kind)


@functools.cache
def data(kind: str, number: int = 90) -> Dataset:
    """The rows, in sequences of at most 10 tokens, or 32 of questions and contexts."""
    given = source(kind, number)
    most = 32 if OBJECTIVES[kind].second_names else 10
    tokenizer = transformers.AutoTokenizer.from_pretrained(model(kind))
    return given.load(given.config(ft.DataConfig(max_length=most)), tokenizer)


def backbone(kind: str) -> Backbone:
    """The model for `data`."""
    return load_model(ft.ModelConfig(model(kind)), data(kind).objective, data(kind).num_classes, 0)


def federation(kind: str, sizes: tuple[int, ...]) -> Federation:
    """Clients with so many training examples, 4 validation and 6 test examples, in order; public
    are the last 24."""
    dataset = data(kind, sum(sizes) + 10 * len(sizes))
    ends = np.cumsum([count for size in sizes for count in (size, 4, 6)])
    parts = np.split(np.arange(len(dataset.inputs)), ends[:-1])
    shares = [Shares.of(parts[at::3]) for at in range(3)]
    return Federation(dataset, Partition(*shares, digest="test"), public=data(kind, 24))


def write_table(path: Path, kind: str) -> Path:
    """The rows as JSON lines, with the usual columns' names, of the clients a, b and c."""
    one = OBJECTIVES[kind]
    inputs, targets = rows(kind)
    with path.open("w") as file:
        for number, value in enumerate(inputs):
            texts = value if isinstance(value, tuple) else (value,)
            names = [one.input_names[0], *one.second_names[:1]]
            row = dict(zip(names, texts, strict=True)) | {"ward": "abc"[number % 3]}
            if targets is not None:
                row[one.target_names[0]] = targets[number]
            file.write(json.dumps(row) + "\n")
    return path


_EXPERIMENT = """
rounds = 2
[data]
path = "{folder}/rows.jsonl"
task = "{kind}"
client = "ward"
max_length = 32
[split]
scheme = "natural"
validation = 0.2
[local]
batch_size = 8
[model]
name = "{model}"
[engine]
executor = "sequential"
[methods.fedavg]
optimiser = {{lr = 0.05}}
[methods.fedsdg]
rank = 2
"""


@functools.cache
def finished(kind: str, methods: str = "") -> Path:
    """A folder with the rows, the experiment ``e.toml`` and its run ``run``, with FedAvg, FedSDG
    and these ``methods``, in TOML."""
    folder = Path(tempfile.mkdtemp(prefix="kinds-"))
    write_table(folder / "rows.jsonl", kind)
    content = _EXPERIMENT.format(kind=kind, folder=folder, model=model(kind)) + methods
    (folder / "e.toml").write_text(content)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["run", str(folder / "e.toml"), "--out", str(folder / "run")]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@functools.cache
def page() -> dict[str, list[str]]:
    """The table of tasks in the documentation: the other cells of a task's row."""
    text = (Path(__file__).parents[1] / "docs/data.md").read_text()
    table = text[text.index("| task | can't train it") :].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()[2:]]
    return {task: row[1:] for row in cells for task in re.findall(r"`([\w-]+)`", row[0])}


def refused(kind: str) -> set[str]:
    """The methods that can't train it, says the documentation."""
    return {*re.findall(r"`([\w-]+)`", page()[kind][0])}
