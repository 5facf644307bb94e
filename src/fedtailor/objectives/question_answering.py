"""Question answering: the answer to a question is a part of a text, its context, or there is none.

A context is read in windows of at most ``data.max_length`` tokens, the question before each, and a
third of ``data.max_length`` are in two windows. These are those of transformers' example scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief
from .cells import Cells, is_blank, parsed, usual_column
from .encoding import Example, Tokenizer, Values, filler
from .exported import ExportedModel
from .objective import IGNORED, MetricFunction, Objective, Roles, Scores, Targets, Tensor, Words
from .text_metrics import exact_match, span_f1
from .writing import token_losses

_LEAST = 32  # tokens of a window, so that there is room for the context


@dataclass(frozen=True)
class Answer:
    """A part of the context, and its first character there; "" and None where it has no answer.
    ``score`` is that of the best part minus that of no answer, in nats."""

    text: str
    start: int | None
    score: float


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    cuts = False  # a context is read in windows

    def predict(self, inputs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the answer to each question about its context (``answer``, empty if there is
        none), its first character there (``start``) and its ``score``."""
        pairs = [(question, context) for question, context in inputs]
        windows = self.windows(self.tokenizer, pairs, self.about["max_length"])
        return [
            self._answer(own, context) for own, (_, context) in zip(windows, pairs, strict=True)
        ]

    def _answer(self, windows: Sequence[Any], context: str) -> dict[str, Any]:
        import torch

        longest = max(len(one.ids) for one in windows)
        columns = {"input_ids": "ids", "attention_mask": "attention_mask"}
        if "token_type_ids" in self.tokenizer.model_input_names:
            columns["token_type_ids"] = "type_ids"
        batch = {
            name: torch.tensor(
                [[(v := getattr(one, of)) + [0] * (longest - len(v)) for one in windows]]
            )
            for name, of in columns.items()
        }
        (found,) = self.candidates(self.logits(batch), batch["attention_mask"]).tolist()
        return dict(
            zip(("answer", "start", "score"), self.best(found, windows, context), strict=True)
        )

    def say_all(self, pairs: Sequence[tuple[str, str]]) -> str:
        """Return a line for each question, with its answer."""
        answers = zip(self.predict(pairs), pairs, strict=True)
        return "\n".join(f"{one['answer'] or '-'}  {question}" for one, (question, _) in answers)

    @staticmethod
    def windows(
        tokenizer: Any, pairs: Sequence[tuple[str, str]], max_length: int
    ) -> Iterator[list[Any]]:
        """Yield the windows, ``tokenizers.Encoding``, of each question and its context. Of a
        question half a window is read at most."""
        most = max_length // 2
        for begin in range(0, len(pairs), 1000):
            questions, contexts = map(list, zip(*pairs[begin : begin + 1000], strict=True))
            alone = tokenizer(questions, add_special_tokens=False, verbose=False).encodings
            for at, one in enumerate(alone):
                if len(one.ids) > most:
                    questions[at] = questions[at][: one.offsets[most - 1][1]]
            options = {"stride": max_length // 3, "max_length": max_length, "verbose": False}
            both = tokenizer(questions, contexts, truncation="only_second", **options)
            yield from ([one, *one.overflowing] for one in both.encodings)

    @staticmethod
    def candidates(logits: Tensor, real: Tensor, spans: int = 50, longest: int = 30) -> Tensor:
        """Return the best ``spans`` of up to ``longest`` tokens, over each example's windows:
        float64 ``[b, 1 + 4 * spans]``, the score of no answer, and of each span the window, the
        first and the last token and the score. The logits ``[b, S, L, 2]`` are those of a span's
        first and last token; ``real`` ``[b, S, L]`` is 0 for padding."""
        import torch
        from torch.nn import functional as F

        hidden = -1e9
        values = logits.double().masked_fill(real[..., None] == 0, hidden)
        start, end = values.unbind(-1)
        none = (start + end)[:, :, 0].masked_fill(real[:, :, 0] == 0, -hidden).amin(1)
        ends = F.pad(end, (0, longest - 1), value=hidden).unfold(2, longest, 1)
        scores = (start[..., None] + ends)[:, :, 1:]  # [b, S, L - 1, longest]
        best = scores.flatten(1).topk(min(spans, scores[0].numel()))
        place, length = best.indices // longest, best.indices % longest
        window, first = place // scores.shape[2], 1 + place % scores.shape[2]
        found = torch.stack((window, first, first + length, best.values), -1)
        return torch.cat((none[:, None], found.flatten(1)), 1)

    @staticmethod
    def best(
        found: Sequence[float], windows: Sequence[Any], context: str
    ) -> tuple[str, int | None, float]:
        """Return the best of a row's `candidates` that lies in the context, its first character,
        and its score minus that of no answer; "" and None where that is higher."""
        for at in range(1, len(found), 4):
            window, first, last = map(int, found[at : at + 3])
            of = windows[window].sequence_ids if window < len(windows) else []
            if last < len(of) and of[first] == of[last] == 1:
                margin = found[at + 3] - found[0]
                begin, end = windows[window].offsets[first][0], windows[window].offsets[last][1]
                text = context[begin:end]
                begin += len(text) - len(text.lstrip())
                return (text.strip(), begin, margin) if margin > 0 else ("", None, margin)
        return "", None, 0.0


class QuestionAnswering(Objective):
    """The first and the last token of the answer; both are the first token of a window where the
    answer does not lie in it."""

    name = "question-answering"
    meaning = "the words of a context that answer a question"
    input_names = ("question",)
    second_names = ("context", "passage", "paragraph")
    target_names = ("answers", "answer")
    takes_pairs = True
    keeps_rows = True
    per_token = True
    counted = "windows"
    auto_classes: ClassVar[Mapping[str, str]] = {"text": "AutoModelForQuestionAnswering"}
    metrics: ClassVar[Mapping[str, MetricFunction]] = {
        "exact_match": exact_match,
        "span_f1": span_f1,
    }
    reported = tuple(metrics)
    shares = frozenset(metrics)
    selects = "span_f1"
    has_hits = False
    target = "two"
    outputs = 2
    answer_columns = frozenset({"answer", "start", "score"})
    exported = Exported

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return the columns of questions, contexts and answers; most lie in these."""
        text, pair, label = (
            usual_column(usual, columns)
            for usual in (self.input_names, self.second_names, self.target_names)
        )
        if text is None or pair is None or label is None:
            return {}
        lies = []
        for context, cell in zip(columns[pair], columns[label], strict=True):
            answers = _answers(cell)
            if answers is None and not is_blank(cell):
                return {}
            lies.append(all(said in str(context) for said, _ in answers or ()))
        found: Roles = {"text": text, "text_pair": pair, "label": label}
        return found if 2 * sum(lies) > len(lies) else {}

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Read a column of answers: as SQuAD has them, or texts. Empty cells are unknown; without
        any answer in its lists, a context has none. Raises InputError at anything else."""
        values = np.empty(len(cells.values), object)
        known = np.zeros(len(values), bool)
        for row, cell in enumerate(cells.values):
            answers = _answers(cell)
            known[row] = answers is not None
            if answers is None and not is_blank(cell):
                needed = "an answer, or lists 'text' and 'answer_start'"
                raise cells.refused(row, self.name, needed)
            values[row] = [[*answers[0], cells.row_number(row)]] if answers else []
        has_any = any(values[: cells.num_train])
        note = "" if has_any else f"{cells.place}: no training row has an answer to learn"
        return Targets(values, known, note=note)

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the windows of each question and its context, with the answer's first and last
        token in each. Raises InputError where ``max_length`` is too small, or an answer does not
        stand in its context."""
        if max_length < _LEAST:
            raise InputError(
                f"data.max_length = {max_length}: the task {self.name!r} needs {_LEAST} or more"
            )
        has_types = "token_type_ids" in tokenizer.model_input_names
        windows = Exported.windows(tokenizer, values, max_length)
        for row, (own, (_, context)) in enumerate(zip(windows, values, strict=True)):
            ids = [one.ids or [filler(tokenizer)] for one in own]
            labels = None
            if targets is not None:
                span = _characters(context, *targets[row][0]) if targets[row] else None
                labels = [place for one in own for place in _tokens(one, span)]
            yield Example(
                [*chain(*ids)],
                types=[*chain(*(one.type_ids for one in own))] if has_types else None,
                labels=labels,
                sizes=[*map(len, ids)],
            )

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return in how many windows of each example something is to be found."""
        targets = batch["labels"].reshape(len(batch["labels"]), -1, 2)
        return (targets[..., 0] != IGNORED).sum(1).float()

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) of the first and of the last token, their
        mean, summed over the windows. Padding is no token that could be chosen."""
        logits, real = _by_window(logits, batch["attention_mask"])
        hidden = logits.masked_fill(real[..., None] == 0, -1e9).movedim(-1, 2)  # [b, S, 2, L]
        targets = batch["labels"].reshape(len(logits), -1, 2)
        loss = token_losses(hidden, targets)[0].mean(2).sum(1)
        return Scores(loss, loss.new_zeros(loss.shape), self.counts(batch))

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the best spans, ``Exported.candidates``."""
        return Exported.candidates(*_by_window(logits, batch["attention_mask"]))

    def compared(
        self, targets: Any, predictions: NDArray[np.float64], rows: Sequence[Any], words: Words
    ) -> tuple[list[list[str]], list[str]]:
        """Return the right answers of each question, and the answer to it, as texts."""
        right = [[text for text, _ in _answers(cell) or ()] for _, cell in rows]
        said = self.answers(predictions, [inputs for inputs, _ in rows], words)
        return right, [one.text for one in said]

    def answers(
        self, predictions: NDArray[np.float64], inputs: Sequence[Any], words: Words
    ) -> list[Answer]:
        """Return the answer to each question."""
        windows = Exported.windows(words.tokenizer, inputs, words.max_length)
        rows = zip(predictions.tolist(), windows, inputs, strict=True)
        return [Answer(*Exported.best(found, own, context)) for found, own, (_, context) in rows]

    def summary(self, targets: Sequence[NDArray[np.int64]], classes: Sequence[str]) -> str:
        """Return the share of questions without an answer, and how many windows a context has."""
        none = 100 * float(np.mean([not one.any() for one in targets]))
        sizes = sorted({len(one) // 2 for one in targets})
        windows = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else f"{sizes[0]}"
        return f"{none:.1f} % of the questions have no answer; windows of a context: {windows}"

    def columns(self, answer: Answer) -> dict[str, Any]:
        return {"answer": answer.text, "start": answer.start, "score": round(answer.score, 6)}


def _by_window(logits: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[b, S, L, 2]`` and the mask of real tokens ``[b, S, L]``."""
    return (logits, real) if real.dim() > 2 else (logits[:, None], real[:, None])


def _answers(cell: Any) -> list[tuple[str, int | None]] | None:
    """The answers of a cell and where they begin, if it says so: an empty list where there is none;
    None where the cell holds something else, or nothing."""
    cell = parsed(cell, "{")  # in a csv file
    if isinstance(cell, list) and all(isinstance(one, dict) for one in cell):
        keys = ("text", "answer_start")
        cell = {key: [one.get(key) for one in cell] for key in keys}
    said, starts = cell, None
    if isinstance(cell, dict):  # pandas has arrays in it
        found = (cell.get(key) for key in ("text", "answer_start"))
        said, starts = (one.tolist() if isinstance(one, np.ndarray) else one for one in found)
    if isinstance(said, str | int) and not isinstance(said, bool) and not is_blank(said):
        said, starts = [str(said)], None if starts is None else [starts]
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        return None
    starts = [None] * len(said) if starts is None else starts
    fits = isinstance(starts, list) and len(starts) == len(said)
    if not fits or not all(isinstance(one, int | None) for one in starts):
        return None
    return [(one, at) for one, at in zip(said, starts, strict=True) if not is_blank(one)]


def _characters(context: str, text: str, start: int | None, row: int) -> tuple[int, int]:
    """Where an answer begins and ends. Raises InputError where the context does not have it."""
    begin = context.find(text) if start is None else start
    if begin < 0 or context[begin : begin + len(text)] != text:
        at = "" if start is None else f" at character {start}"
        raise InputError(
            f"the answer {brief(text, 60)} of row {row} does not stand in its context{at}; correct "
            "it, or leave the row out"
        )
    return begin, begin + len(text)


def _tokens(window: Any, span: tuple[int, int] | None) -> tuple[int, int]:
    """An answer's first and last token; those of the window's first where it lies outside."""
    inside = [at for at, of in enumerate(window.sequence_ids) if of == 1]
    offsets = window.offsets
    if span is None or not inside:
        return 0, 0
    if offsets[inside[0]][0] > span[0] or offsets[inside[-1]][1] < span[1]:
        return 0, 0
    first = max(at for at in inside if offsets[at][0] <= span[0])
    return first, min(at for at in inside if offsets[at][1] >= span[1])
