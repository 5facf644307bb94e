"""Preferences: of two answers to a prompt a model learns to prefer the one that people chose.

Direct Preference Optimization: Your Language Model is Secretly a Reward Model. R. Rafailov,
A. Sharma, E. Mitchell, S. Ermon, C. D. Manning, C. Finn. NeurIPS 2023.

For a prompt x, the chosen answer y_w and the rejected one y_l:
    r(x, y) = beta log(pi(y | x) / pi_ref(y | x))
    loss = -log sigmoid(r(x, y_w) - r(x, y_l))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief
from .cells import is_blank, parsed, rows_of, usual_column, written
from .encoding import Example, Tokenizer, Values
from .instruct import PROMPT, SYSTEM, Instruct, Turns, messages_in, of_cells, rendered, turns_of
from .objective import IGNORED, REFERENCE, MetricFunction, Objective, Roles, Scores, Targets, Tensor
from .writing import following, token_losses

_CHOSEN, _REJECTED = "chosen", "rejected"
_BETA = 0.1


def margin(targets: Any, predictions: NDArray[np.float64]) -> float:
    """The mean of r(x, y_w) - r(x, y_l)."""
    return float(predictions.mean())


@dataclass(frozen=True, eq=False)
class Preference(Instruct):
    """An input is a prompt, as `Instruct` reads it, with two answers, as JSON. A row is two
    sequences, prompt and chosen, prompt and rejected; the targets say where the answers begin.

    pi_ref is the model before any training or, if ``compares_with_received`` is 1, as it came in
    this round; a model that is evaluated is compared with the first.
    """

    beta: float = _BETA
    compares_with_received: float = 0.0

    name = "preference"
    meaning = "which of two answers is preferred"
    input_names = ("preference",)
    needed_columns = "prompt, chosen and rejected"
    nothing_learned = "without two answers that differ"
    settings = ("beta", "reference")
    sequences = 2
    packs = False
    target = "two"
    counted = "examples"
    compares = True
    metrics: ClassVar[Mapping[str, MetricFunction]] = {"margin": margin}
    reported = tuple(metrics)
    shares = frozenset()

    def numbers(self, given: Mapping[str, Any], targets: Targets | None) -> tuple[float, ...]:
        return given["beta"] or _BETA, float(given["reference"] == "received")

    def scaled(self, scale: Sequence[float]) -> Preference:
        return Preference(*scale) if scale else self

    def joined(
        self, columns: Sequence[str], text: str | None, second: str | None, answer: str | None
    ) -> tuple[str, ...]:
        """Return the columns of the system prompt, the prompt, the rejected and the chosen answer,
        by usual names where none is given; or one that holds all of them."""
        (whole,) = self.input_names
        if whole in columns and not (text or second or answer):
            return (whole,)
        names = [name if name in columns else "" for name in (SYSTEM, _REJECTED, _CHOSEN)]
        prompt = text or usual_column(PROMPT, columns) or ""
        return names[0], prompt, second or names[1], answer or names[2]

    def conversations(self, columns: Sequence[Sequence[Any] | None]) -> list[str]:
        """Return the rows as JSON, an object with ``prompt``, ``chosen`` and ``rejected``, lists of
        messages. Answers that begin with the prompt lose it. Raises InputError at anything else."""
        if len(columns) == 1:
            names = (SYSTEM, "prompt", _REJECTED, _CHOSEN)
            found = [_object(cell) or {"prompt": cell} for cell in columns[0] or ()]
            columns = [[one.get(name) for one in found] for name in names]
        return [_written(*one, row=row) for row, one in enumerate(rows_of(columns), 1)]

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return the columns of two answers, and of their prompt if there is one."""
        if not {_CHOSEN, _REJECTED} <= columns.keys():
            return {}
        prompt = usual_column(PROMPT, columns)
        answers: Roles = {"text_pair": _REJECTED, "label": _CHOSEN}
        return answers if prompt is None else {"text": prompt, **answers}

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each prompt with either answer, and as labels where these begin. Of a
        prompt that is too long the beginning is cut, the same for both; then answers are. There are
        no tokens of a row in which the answers are empty or alike. ``targets`` say which row of its
        source each is. Raises InputError where the template refuses a row, or writes the prompt
        otherwise before an answer."""
        for row, value in zip(targets or range(1, len(values) + 1), values, strict=True):
            content = json.loads(value)
            prompt, *answers = (content[name] for name in ("prompt", _CHOSEN, _REJECTED))
            if not all(answers):
                yield Example([])
                continue
            before = rendered(prompt, tokenizer, row, prompt=True)
            texts = [rendered([*prompt, *answer], tokenizer, row) for answer in answers]
            if not all(text.startswith(before) for text in texts):
                raise InputError(
                    f"the chat template writes the prompt of row {row} otherwise once an answer "
                    "follows; give another one: model.chat_template = 'chatml'"
                )
            found = tokenizer(texts, add_special_tokens=False, verbose=False).encodings
            starts = [sum(a < len(before) for a, _ in one.offsets) for one in found]
            over = max(len(one.ids) for one in found) - max_length
            drop = max(0, min(over, min(starts) - 1))
            both = [one.ids[drop:][:max_length] for one in found]
            if both[0] == both[1]:  # perhaps after the cut alone
                yield Example([])
                continue
            begins = [max(0, min(at - drop, max_length - 1)) for at in starts]
            yield Example([*both[0], *both[1]], over > 0, None, begins, [*map(len, both)])

    def encode_prompts(
        self, values: Values, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        prompts = [value if (of := _object(value)) is None else of["prompt"] for value in values]
        return super().encode_prompts(prompts, tokenizer, max_length)

    def summary(self, targets: Any, classes: Sequence[str]) -> str:
        return ""

    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the token after each, of those that an answer has: ``[b, 2, L]``."""
        import torch

        ids, first = batch["input_ids"], batch["labels"][..., None]
        at = torch.arange(ids.shape[-1], device=ids.device)
        is_said = (at >= first.clamp(min=1)) & batch["attention_mask"].bool()
        return following(ids.where(is_said, IGNORED))

    counts = Objective.counts

    def token_scores(
        self, loss: Tensor, hits: Tensor, targets: Tensor, batch: Mapping[str, Tensor]
    ) -> Scores:
        """Compute the loss of each row, and whether the chosen answer has the higher reward."""
        import torch
        from torch.nn import functional as F

        rewards = self._margins(loss, batch)
        return Scores(-F.logsigmoid(rewards), (rewards > 0).to(loss), torch.ones_like(rewards))

    def _margins(self, loss: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """r(x, y_w) - r(x, y_l) ``[b]``, of the losses of tokens ``[b, 2, L]``."""
        gained = batch[REFERENCE] - loss.sum(-1)  # log pi - log pi_ref
        return self.beta * (gained[:, 0] - gained[:, 1])

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the margins, float64 ``[b, 1]``."""
        loss, _ = token_losses(logits, self.token_targets(batch))
        return self._margins(loss, batch)[:, None].double()


def _object(cell: Any) -> dict[str, Any] | None:
    """A cell that is an object with a prompt or answers, as JSON or Python writes it."""
    found = parsed(cell, "{")
    names = {"prompt", _CHOSEN, _REJECTED}
    return found if isinstance(found, dict) and names & found.keys() else None


def _written(system: Any, prompt: Any, rejected: Any, chosen: Any, *, row: int) -> str:
    """A row as JSON. Answers that are whole conversations hold the prompt."""
    answers = [_answer(cell, row) for cell in (chosen, rejected)]
    before = of_cells((system, prompt, None, None), row)
    told = [turns for turns in answers if turns]
    are_whole = {turns[0]["role"] != "assistant" for turns in told}
    if are_whole == {True}:
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(told[0], told[-1], strict=False))
        shared = [one for one, _ in pairs] if len(told) == 2 else told[0][:-1]
        before = [*of_cells((system, None, None, None), row)[:-1], *shared]
        answers = [turns[len(shared) :] for turns in answers]
    elif len(are_whole) == 2:
        raise InputError(f"row {row} has the prompt in one of its answers alone; write both alike")
    if told and not any(turn["content"].strip() for turn in before):
        raise InputError(
            f"row {row} has no prompt: give a column of prompts, or answers that are lists of "
            f"messages and begin with it; the chosen one is {brief(chosen, 60)}"
        )
    return written({"prompt": before, _CHOSEN: answers[0], _REJECTED: answers[1]})


def _answer(cell: Any, row: int) -> Turns:
    """The messages of an answer; none of an empty one."""
    if isinstance(cell, int | float) and not is_blank(cell):
        cell = str(cell)
    if isinstance(cell, str):
        plain = [] if is_blank(cell) else [{"role": "assistant", "content": cell}]
        return turns_of(cell, row) if messages_in(cell) else plain
    return turns_of(cell, row) if not is_blank(cell) and len(cell) else []
