"""Sequence to sequence: a model reads a text and writes another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .cells import Cells, is_blank, usual_column
from .encoding import Example, Tokenizer, Values, encodings, whole_texts, with_end
from .exported import ExportedModel
from .objective import Roles, Targets, Tensor
from .writing import Ids, Writing

_LONG = 4  # words of a target, on average, that is surely no class


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    def say(self, given: str) -> str:
        """Return the text that the model writes."""
        return self.generate(given)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return what the model writes for each text, in a line."""
        return "\n".join(" ".join(self.generate(text).split()) for text in texts)

    def generate(self, text: str, tokens: int = 32) -> str:
        """Write at most so many tokens, each time the most probable one."""
        import torch

        config = self.network.config
        start = getattr(config, "decoder_start_token_id", None)
        written = torch.tensor([[config.pad_token_id if start is None else start]])
        positions = self.about["inputs"].get("positions")  # the model's; None: no limit
        inputs = self.batch([text])
        for _ in range(min(tokens, positions or tokens)):
            logits = self.logits({**inputs, "decoder_input_ids": written})
            following = logits[:, -1].argmax(-1)
            if int(following) in self.about["ends"]:
                break
            written = torch.cat([written, following[:, None]], 1)
        return str(self.tokenizer.decode(written[0, 1:], skip_special_tokens=True))


class Seq2Seq(Writing):
    """Texts are inputs, and other texts are the targets; the end of a target is one of its tokens.

    The decoder reads the target's tokens before the one that it predicts.
    """

    name = "seq2seq"
    meaning = "one text written from another"
    input_names = ("source", "document", "article", "dialogue", "input", "text")
    target_names = ("target", "summary", "highlights", "output")
    has_decoder = True
    auto_classes: ClassVar[Mapping[str, str]] = {"text": "AutoModelForSeq2SeqLM"}
    peft_task = "SEQ_2_SEQ_LM"
    exported = Exported

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets:
        """Read a column of texts; empty cells are unknown. Raises InputError at anything else."""
        values = np.empty(len(cells.values), object)
        for row, value in enumerate(cells.values):
            if not isinstance(value, str | int | float | None) or isinstance(value, bool):
                raise cells.refused(row, self.name, "texts")
            values[row] = "" if is_blank(value) else str(value)
        return Targets(values, np.array([bool(value) for value in values], bool))

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return the columns of two texts by their usual names, if most targets differ and have
        several words."""
        text = usual_column(self.input_names, columns)
        for name in self.target_names if text else ():
            texts = [cell for cell in columns.get(name, ()) if isinstance(cell, str)]
            words = sum(len(one.split()) for one in texts)
            if len(set(texts)) > len(texts) / 2 and words >= _LONG * len(texts):
                return {"text": str(text), "label": name}
        return {}

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each text, and of its target with its end, the tokenizer's
        end-of-text token, once. A target that is truncated has none: it did not end there."""
        inputs = whole_texts(values, tokenizer, max_length)
        if targets is None:
            yield from inputs
            return
        for one, encoding in zip(inputs, encodings(targets, tokenizer, None), strict=True):
            labels = with_end(encoding.ids, tokenizer)
            is_cut = one.is_cut or len(labels) > max_length
            yield Example(one.ids, is_cut, one.types, labels[:max_length])

    def summary(self, targets: Sequence[NDArray[np.int64]], classes: Sequence[str]) -> str:
        """Return how long the targets are."""
        sizes = [len(one) for one in targets]
        three = f"{min(sizes):,}, {np.median(sizes):,.0f}, {max(sizes):,}"
        return f"tokens of a target (least, median, most): {three}"

    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"]

    def exercise(self, ids: Ids, targets: Ids | None) -> tuple[Ids, Ids]:
        """Return the text to read, and the one to write."""
        assert targets is not None
        return ids, targets
