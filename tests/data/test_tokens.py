from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedtailor.data.table import Ragged, Tokens
from fedtailor.data.tokens import encode, tokenise
from fedtailor.errors import InputError
from fedtailor.objectives import CausalLM, Classification

TEXTS = ["Grain prices rose.", "", "oil " * 50]


def test_sequences_are_the_tokenizer_s_and_cut(tokenizer):
    found = tokenise(TEXTS, tokenizer, 8)
    tokens, rows = found.inputs, found.rows
    assert rows.tolist() == [0, 1, 2]
    assert tokens.lengths(rows).tolist() == [6, 2, 8]
    for row, text in enumerate(TEXTS):
        start, end = tokens.offsets[row : row + 2]
        expected = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        assert tokens.values[start:end].tolist() == expected
    assert tokens.values.dtype == np.uint16
    assert isinstance(tokens.values, np.memmap)


@pytest.mark.slow
def test_the_second_call_reads_the_cache(tokenizer, tmp_path, monkeypatch):
    first = tokenise(TEXTS, tokenizer, 8).inputs
    tokenizer("changes the backend's truncation", truncation=True, max_length=3)
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    second = tokenise(TEXTS, tokenizer, 8).inputs
    assert np.array_equal(first.values, second.values)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["texts", "joined", "length", "task", "tokenizer"])
def test_the_key_covers_what_the_result_depends_on(change, tokenizer, cache):
    tokenise(["ab", "c"], tokenizer, 8)
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"ab": 0, "c": 1, "?": 2}, unk_token="?"))
    )
    tokenise(
        {"texts": ["ab", "d"], "joined": ["a", "bc"]}.get(change, ["ab", "c"]),
        other if change == "tokenizer" else tokenizer,
        9 if change == "length" else 8,
        CausalLM() if change == "task" else Classification(),
    )
    assert len(list((cache / "tokens").iterdir())) == 2


def words(*, adds_end=False, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words; its post-processor may add the end, as Llama's can."""
    known = {"[UNK]": 0, "[END]": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A [END]", special_tokens=[("[END]", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sequences(tokens) -> list[list[int]]:
    return [tokens.values[a:b].tolist() for a, b in pairwise(tokens.offsets)]


def test_a_text_without_tokens_is_its_first_special_one(tmp_path):
    found = tokenise(["", "a"], words(eos_token="[END]"), 8)
    tokens, rows = found.inputs, found.rows
    assert rows.tolist() == [0, 1]
    assert sequences(tokens) == [[1], [2]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("adds_end", [False, True])
def test_a_text_to_learn_ends_once_unless_it_is_cut(adds_end, side):
    tokenizer = words(adds_end=adds_end, eos_token="[END]", truncation_side=side)
    texts = ["a b", "", " ", "a", "b a [END]", "a b a b", "a b a b a b"]
    found = tokenise(texts, tokenizer, 4, CausalLM())
    tokens, rows = found.inputs, found.rows
    assert rows.tolist() == [0, 3, 4, 5, 6]
    assert sequences(tokens) == [[2, 3, 1], [2, 1], [3, 2, 1], [2, 3, 2, 3], [2, 3, 2, 3]]
    assert tokens.cut.tolist() == [3, 4]
    prompts = encode(["a b", "", "a b a b a b"], tokenizer, 4, CausalLM())
    assert sequences(prompts) == [[2, 3], [1], [2, 3, 2, 3]]
    assert prompts.cut.tolist() == [2]


def test_without_an_end_of_text_token_texts_of_two_tokens_are_learnt(tmp_path):
    found = tokenise(["a", "a b"], words(unk_token="[UNK]"), 4, CausalLM())
    tokens, rows = found.inputs, found.rows
    assert rows.tolist() == [1]
    assert sequences(tokens) == [[2, 3]]


@pytest.mark.slow
def test_large_vocabularies_take_four_bytes(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    large = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    )
    tokens = tokenise(["w69999"], large, 8).inputs
    assert tokens.values.tolist() == [69_999]
    assert tokens.values.dtype == np.uint32


def test_a_slow_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="a fast tokenizer is needed"):
        tokenise(TEXTS, object(), 8)


@pytest.mark.slow
def test_pairs_are_joined_as_the_tokenizer_joins_them(tokenizer):
    pairs = [("Grain rose.", "Oil fell."), ("", "oil " * 50), ("a", "")]
    tokens = tokenise(pairs, tokenizer, 12).inputs
    batch = tokens.batch(np.arange(3))
    firsts, seconds = map(list, zip(*pairs, strict=True))
    expected = tokenizer(
        firsts, seconds, truncation=True, max_length=12, padding=True, return_tensors="pt"
    )
    for name, values in expected.items():
        assert batch[name].tolist() == values.tolist()
    assert batch["token_type_ids"].any()
    assert tokens.cut.tolist() == [1]


def test_a_row_may_be_several_sequences():
    sizes = Ragged(np.array([2, 1, 3]), np.array([0, 2, 3]))
    tokens = Tokens(np.array([7, 8, 9, 1, 2, 3]), np.array([0, 3, 6]), sizes=sizes)
    batch = tokens.batch(np.array([1, 0]))
    assert batch["input_ids"].tolist() == [[[1, 2, 3], [0, 0, 0]], [[7, 8, 0], [9, 0, 0]]]
    assert batch["attention_mask"].tolist() == [[[1, 1, 1], [0, 0, 0]], [[1, 1, 0], [1, 0, 0]]]
