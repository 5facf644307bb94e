"""Token classification: each word of a text has a tag, as of an entity or a part of speech."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief, listed
from .cells import Cells, is_blank, parsed
from .classification import Classification
from .encoding import Example, Tokenizer, Values, encodings, filler
from .exported import ExportedModel
from .objective import IGNORED, MetricFunction, Objective, Roles, Scores, Targets, Tensor, Words
from .writing import token_losses

Sentences = Sequence[Sequence[str]]
Tagged = list[tuple[str, str | None]]
"""The words of an input with their tags; None for a word that the model has not read."""

_PREFIXED = re.compile(r"([BIESLUM])-(.+)")
_NUMBERS = (
    "the tags are numbers without names, so entity_f1 counts each word as an entity; name them in "
    "data.classes, such as O, B-PER and I-PER"
)
_SHOWN = 5  # types of entities in a line
_BEFORE, _AFTER = "BIM", "IMEL"  # prefixes in an entity that goes on, and where it goes on


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the entities of a sentence by its tags, as the script conlleval reads them: the first
    word, the one after the last, and the type.

    ``B-PER`` begins an entity of the type ``PER``; ``I-PER`` goes on with one, and begins one where
    there is none: so IOB1 is read as IOB2 is. ``E`` and ``L`` end an entity, ``S`` and ``U`` are a
    whole one. A tag without a prefix, but ``O``, tells of its word alone.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    """
    found: list[tuple[int, int, str]] = []
    before = ""
    for at, tag in enumerate(tags):
        prefix, kind = match.groups() if (match := _PREFIXED.fullmatch(tag)) else ("", tag)
        goes_on = before and before in _BEFORE and prefix and prefix in _AFTER
        if goes_on and found[-1][2] == kind:
            found[-1] = (found[-1][0], at + 1, kind)
        elif tag != "O":
            found.append((at, at + 1, kind))
        before = prefix
    return set(found)


def entity_f1(targets: Sentences, predictions: Sentences) -> float:
    """The F1 of the entities whose first word, last word and type are all right; of tags without
    prefixes, such as parts of speech, that of single words. NaN where no word has such a tag.

    >>> entity_f1([["B-PER", "O", "B-LOC"]], [["B-PER", "O", "O"]]) == 2 / 3
    True
    """
    from sklearn.metrics import f1_score

    true, found = (
        {(at, *entity) for at, tags in enumerate(sentences) for entity in entities(tags)}
        for sentences in (targets, predictions)
    )
    if not true:
        return math.nan
    every = true | found
    return float(f1_score([one in true for one in every], [one in found for one in every]))


def list_of(cell: Any) -> list[Any] | None:
    """Return the words, or their tags, of a cell: a list, also as JSON or Python writes it, or a
    text that blanks divide; None: it is neither.

    >>> list_of('["New York", "is"]'), list_of("EU rejects")
    (['New York', 'is'], ['EU', 'rejects'])
    """
    cell = parsed(cell)
    if isinstance(cell, str):
        return cell.split()
    return list(cell) if isinstance(cell, list | tuple | np.ndarray) else None


def _apart(words: Sequence[str]) -> list[str]:
    """The words with a blank before each, as in a text: some tokenizers know them by it. Raises
    InputError where one is no text and no number."""
    for word in words:
        if not isinstance(word, str | int | float) or word != word:
            raise InputError(f"the words {brief(words, 60)} hold {brief(word)}; words are texts")
    return [f" {word}" for word in words]


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    def predict(self, inputs: Sequence[Any]) -> list[list[str | None]]:
        """Return the tag of each word, for every list of words or text that blanks divide; None for
        words that are beyond what the model reads."""
        tags = list(self.about["id2label"].values())
        apart = list(map(self.apart, inputs))
        answers: list[list[str | None]] = []
        for words, logits in zip(apart, self.outputs(apart), strict=True):
            places = self.tokenizer(
                words, is_split_into_words=True, truncation=True,
                max_length=self.about["max_length"], verbose=False,
            ).word_ids()  # fmt: skip
            best = logits.argmax(-1).tolist()
            answers.append(
                [tags[best[places.index(n)]] if n in places else None for n in range(len(words))]
            )
        return answers

    def say(self, given: str) -> str:
        """Return a line for each word, with its tag."""
        tags = self.predict([given])[0]
        pairs = zip(self.words(given), tags, strict=True)
        return "\n".join(f"{word}\t{tag or ''}" for word, tag in pairs)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return the lines of each text, with an empty line between texts."""
        return "\n\n".join(map(self.say, texts))

    def apart(self, given: Any) -> list[str]:
        """Return the words as the tokenizer takes them."""
        return [f" {word}" for word in self.words(given)]

    @staticmethod
    def words(given: Any) -> list[str]:
        """Return the words of a list, also as JSON or Python writes it, or of a text."""
        import ast
        import json
        from contextlib import suppress

        if not isinstance(given, str):
            return list(given)
        for read in (json.loads, ast.literal_eval) if given.lstrip()[:1] == "[" else ():
            with suppress(ValueError, SyntaxError, RecursionError):
                return list(map(str, read(given)))
        return given.split()


class TokenClassification(Objective):
    """A tag a word, learned and predicted at the word's first token."""

    name = "token-classification"
    meaning = "a tag for each word"
    input_names = ("tokens", "words")
    target_names = ("ner_tags", "tags", "pos_tags", "labels")
    reads_words = True
    names_classes = "tags"
    per_token = True
    counted = "words"
    auto_classes: ClassVar[Mapping[str, str]] = {"text": "AutoModelForTokenClassification"}
    metrics: ClassVar[Mapping[str, MetricFunction]] = {"entity_f1": entity_f1}
    shares = frozenset(metrics)
    reported = tuple(metrics)
    selects = "entity_f1"
    target = "tokens"
    answer_columns = frozenset({"tokens", "tags"})
    exported = Exported

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Number the tags of a column of lists, which may be numbers of ``cells.classes`` or of
        ``classes``; empty cells are unknown. Raises InputError where a cell holds something else;
        a tag is not known; no row of a split has tags."""
        rows = [[] if is_blank(cell) else list_of(cell) for cell in cells.values]
        for row, tags in enumerate(rows):
            if tags is None:
                raise cells.refused(row, self.name, "a list of tags, one for each word")
        known = np.array([bool(tags) for tags in rows], bool)
        cells.check_known(known, "tags")
        sizes = np.array([len(tags or ()) for tags in rows], np.int64)
        numbers = [cells.row_number(row) for row in range(len(rows))]
        tags = [tag for some in rows for tag in some or ()]
        if classes and all(str(tag).isdecimal() and tag not in classes for tag in tags):
            tags = [int(tag) for tag in tags]  # in a text
        num_train = int(sizes[: cells.num_train].sum())
        of_tags = np.repeat(numbers, sizes).tolist()
        flat = replace(cells, values=tags, num_train=num_train, numbers=of_tags)
        found = Classification().targets(flat, classes)
        values = np.empty(len(rows), object)
        every = np.where(found.is_known, found.values, IGNORED)
        for row, some in enumerate(np.split(every, sizes.cumsum()[:-1])):
            values[row] = (numbers[row], some.tolist())
        is_named = classes or cells.classes or not all(map(str.isdecimal, found.classes))
        return Targets(values, known, found.classes, note="" if is_named else _NUMBERS)

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each list of words. The target of a word's first token is its tag;
        the word's others, and special ones, have none. There are no tokens of a row without any
        tag, or whose words have none. Raises InputError where a row has not as many tags as
        words."""
        words = [list_of(value) or [] for value in values]
        told = repeat(None) if targets is None else targets
        apart = encodings([*map(_apart, words)], tokenizer, max_length)
        for row, one, encoding in zip(told, words, apart, strict=False):
            ids, is_cut = encoding.ids or [filler(tokenizer)], bool(encoding.overflowing)
            if row is None:
                yield Example(ids, is_cut)
                continue
            number, tags = row
            if len(tags) != len(one):
                raise InputError(
                    f"row {number} has {len(one)} words and {len(tags)} tags: "
                    f"{brief(' '.join(map(str, one)), 60)}; each word has one tag"
                )
            labels = [IGNORED] * len(ids)
            for at, word in _first_tokens(encoding):
                labels[at] = tags[word]
            is_empty = all(label == IGNORED for label in labels)
            yield Example([] if is_empty else ids, is_cut, labels=labels)

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many words of each example have a tag."""
        return (batch["labels"] != IGNORED).sum(1).float()

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) and the top-1 hits of the tags."""
        loss, hits = token_losses(logits, batch["labels"])
        return Scores(loss.sum(1), (hits & ~loss.isnan()).sum(1), self.counts(batch))

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each token's most probable tag, from 1 on, float64 ``[b, L]``; 0 for padding."""
        tags = 1 + logits.argmax(-1).double()
        return tags.where(~logits.isnan().any(-1), math.nan) * batch["attention_mask"].double()

    def compared(
        self,
        targets: Sequence[NDArray[np.int64]],
        predictions: NDArray[np.float64],
        rows: Sequence[Any],
        words: Words,
    ) -> tuple[Sentences, Sentences]:
        """Return the true and the predicted tags of the words of each row that the model reads."""
        true, found = [], []
        for labels, row in zip(targets, predictions, strict=True):
            places = np.flatnonzero(labels != IGNORED)
            true.append([words.classes[tag] for tag in labels[places]])
            found.append([words.classes[int(tag) - 1] for tag in row[places]])
        return true, found

    def answers(
        self, predictions: NDArray[np.float64], inputs: Sequence[Any], words: Words
    ) -> list[Tagged]:
        """Return the words of each input with their tags. Raises InputError where the inputs are no
        lists of words, but tokens."""
        if not len(inputs):
            raise InputError(f"{self.name} predicts the tags of lists of words; give these")
        lists = [list_of(one) or [] for one in inputs]
        longest = int((predictions > 0).sum(1).max())  # what is cut has as many tokens
        found = []
        apart = encodings([*map(_apart, lists)], words.tokenizer, longest)
        for row, one, encoding in zip(predictions, lists, apart, strict=True):
            tags: list[str | None] = [None] * len(one)
            for at, word in _first_tokens(encoding):
                tags[word] = words.classes[int(row[at]) - 1]
            found.append([*zip(one, tags, strict=True)])
        return found

    def undefined(
        self, targets: Sequence[NDArray[np.int64]], classes: Sequence[str]
    ) -> tuple[str, ...]:
        tags = {*chain(*(set(one.tolist()) for one in targets))} - {IGNORED}
        return () if {classes[tag] for tag in tags} - {"O"} else ("entity_f1",)

    def summary(self, targets: Sequence[NDArray[np.int64]], classes: Sequence[str]) -> str:
        """Return how many entities, or words with a tag, there are of each type."""
        counts: Counter[str] = Counter()
        for one in targets:
            counts.update(kind for *_, kind in entities([classes[k] for k in one if k >= 0]))
        names, numbers = zip(*counts.most_common(), strict=True) if counts else ((), ())
        what = "entities" if any(map(_PREFIXED.fullmatch, classes)) else "words with a tag"
        return f"{counts.total():,} {what}: {listed(names, numbers, _SHOWN)}"

    def columns(self, answer: Tagged) -> dict[str, Any]:
        return {"tokens": [word for word, _ in answer], "tags": [tag for _, tag in answer]}

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return the columns of words and of tags, lists of one length in most rows."""
        for text in set(self.input_names) & columns.keys():
            for label in (name for name in self.target_names if name in columns):
                words, tags = ([list_of(cell) or [] for cell in columns[n]] for n in (text, label))
                sizes = [*map(len, words)]
                are_texts = all(isinstance(word, str) for one in words for word in one)
                fits = [size == len(one) for size, one in zip(sizes, tags, strict=True)]
                if are_texts and 2 * sum(fits) > len(fits) and max(sizes, default=0) > 1:
                    return {"text": text, "label": label}
        return {}


def _first_tokens(encoding: Any) -> Iterator[tuple[int, int]]:
    """The place of each word's first token, and the word's number."""
    before = None
    for at, word in enumerate(encoding.word_ids):
        if word is not None and word != before:
            yield at, word
        before = word if word is not None else before
