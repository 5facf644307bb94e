"""Texts that models write: the same with keys and values that are kept, and as transformers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods import METHODS
from fedtailor.models import ModelConfig, from_module, load_model, load_tokenizer
from fedtailor.random import key
from fedtailor.task.writing import Spoken, Together, write
from tests import kinds
from tests.models.small import CAUSAL, DECODERS, GENERATORS, ROTARY, WRITER, save

PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 30, 31, 32], [11, 40]]
END = 9


class Counting(nn.Module):
    """After token n comes n + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.read = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.read = max(self.read, input_ids.shape[1])
        return nn.functional.one_hot((input_ids + 1).clamp(max=END), 10).float() * self.scale


class Ends:
    """A tokenizer, as far as ends go."""

    eos_token_id = END
    added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012


def test_each_prompt_goes_on_from_its_own_end() -> None:
    backbone = from_module(Counting(), "causal-lm")
    object.__setattr__(backbone, "tokenizer", Ends())
    task, prompts = ft.Task(backbone), [[1], [4, 5, 6], [2, 2]]
    logits = partial(task.logits, task.state)
    assert write(task, logits, prompts, 4) == [[2, 3, 4, 5], [7, 8], [3, 4, 5, 6]]
    assert write(task, logits, prompts, 0) == [[], [], []]
    object.__setattr__(task.backbone, "prepare", Short(task.backbone.prepare))
    assert write(task, logits, prompts, 4) == [[2, 3, 4], [7], [3, 4]]
    task.model.read = 0
    assert write(task, logits, [[1, 2, 3, 4]], 4) == [[]]
    assert task.model.read == 0


class Short:
    """A model that reads four tokens."""

    max_length = 4

    def __init__(self, prepare: Any) -> None:
        self._prepare = prepare

    def __call__(self, batch: Any) -> Any:
        return self._prepare(batch)


_QUICK = ("gpt2", "mistral", "gemma2", "t5")
_MODELS = {**DECODERS, **ROTARY, **GENERATORS}


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in _MODELS]
)
def test_a_model_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    """In a batch of several prompts, alone, and with the whole text read for each token."""
    config, is_pair = copy.deepcopy(_MODELS[name]), name in GENERATORS
    if is_pair:
        config.decoder_start_token_id, config.pad_token_id, config.forced_eos_token_id = 7, 0, None
    folder = save(tmp_path / "model", config, WRITER if is_pair else CAUSAL)
    backbone = load_model(ft.ModelConfig(str(folder)), "seq2seq" if is_pair else "causal-lm", 0, 0)
    task = ft.Task(backbone)
    logits = partial(task.logits, task.state)
    ours = write(task, logits, PROMPTS, 8)
    assert ours == write(task, logits, PROMPTS, 8, keeps=False)
    assert ours == [write(task, logits, [prompt], 8)[0] for prompt in PROMPTS]
    model: Any = backbone.model
    model.config.use_cache = True
    with torch.no_grad():
        for prompt, mine in zip(PROMPTS, ours, strict=True):
            theirs = model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                max_new_tokens=8, do_sample=False, num_beams=1, eos_token_id=None, pad_token_id=0,
                forced_eos_token_id=None, forced_bos_token_id=None,
            )  # fmt: skip
            assert mine == theirs[0, 1 if is_pair else len(prompt) :].tolist()


@pytest.mark.parametrize("label", ["fedsdg", "fedem", "fedhft", "fedalt", "feddpa"])
def test_methods_write_the_same_from_what_they_keep(label: str) -> None:
    """Each reads a token once, unless its prediction looks at the whole text."""
    fields: dict[str, Any] = {"fedem": {"trainable": "lora"}}
    method = METHODS[label](**fields.get(label, {}))
    task = ft.Task(kinds.backbone("causal-lm"), method.adapt)
    state = method.send(task, method.init_server(task, 2, key(0)), 0)
    state = {**state, **method.init_client(task, 0, key(0))}
    drawn = torch.Generator().manual_seed(0)
    state = {  # adapters begin with nothing to say
        name: value + 0.3 * torch.randn(value.shape, generator=drawn) if "B" in name else value
        for name, value in state.items()
    }
    logits, widths = partial(method.predict, task, state), set()

    def watched(batch: Any) -> Tensor:
        widths.add(batch["input_ids"].shape[1])
        return logits(batch)

    prompts = [[6, 7, 8], [9, 10, 11, 12, 13]]
    if method.keeps_keys:  # rows of two clients at once
        other = {name: value * 1.5 for name, value in state.items()}
        both = Together(task, partial(method.predict, task), [state, other])
        each = (partial(method.predict, task, one) for one in (state, other))
        alone = [write(task, one, [p], 6)[0] for one, p in zip(each, prompts, strict=True)]
        assert write(task, both, prompts, 6) == alone
    ours = write(task, watched, prompts, 6, keeps=method.keeps_keys)
    assert ours == write(task, logits, prompts, 6, keeps=False)
    assert widths == ({5, 1} if method.keeps_keys else {*range(5, 11)})
    assert method.keeps_keys == (label != "feddpa")


def test_pieces_of_a_text_are_whole_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    said: list[str] = []
    told = Spoken(Bytes(), said.append)
    for byte in "aé ü".encode():
        told(0, byte)
    assert said == ["a", "é", " ", "ü"]


def test_a_special_token_that_no_text_shows_ends_one() -> None:
    tokenizer: Any = load_tokenizer(ModelConfig("minilm"))
    said: list[str] = []
    told = Spoken(tokenizer, said.append, ["[SEP]"])
    ids = tokenizer("the ward has a bed")["input_ids"][1:]
    assert [told(0, token) for token in ids] == [False] * 5 + [True]
    assert "".join(said) == "the ward has a bed"
