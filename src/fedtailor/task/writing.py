"""Texts that a model writes: the most probable token, one after the other.

A model of transformers keeps the keys and values of the tokens that it has read (`Memory`), so that
a new token takes a pass through that token alone. Any other reads the whole text anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..objectives.objective import IGNORED
from ..params import Batch, Params, stack
from .backbone import Backbone
from .task import Task

Ids = Sequence[int]
Said = Callable[[int, int], object]  # is told the row and the token it has got; True ends the text
_CACHE = ("cache", "past_key_values")  # what versions of transformers call it
# from the tokens so far to the next of each row
_Following = Callable[[list[list[int]]], list[int]]


class Memory:
    """What a model keeps of the tokens that it has read, for each of the forward passes that a
    prediction takes."""

    def __init__(self, task: Task) -> None:
        self._model: Any = task.model
        self._arguments = inspect.signature(self._model.forward).parameters
        self._name = next(name for name in _CACHE if name in self._arguments)
        self._by_window = not getattr(task.backbone.prepare, "masks", False)
        self._caches: list[Any] = []
        self._encoded: list[Tensor] = []
        self._pass = 0

    def begin(self) -> None:
        """Begin a prediction."""
        self._pass = 0

    def inputs(self, inputs: dict[str, Any], batch: Batch) -> dict[str, Any]:
        """Return the arguments of the next forward pass, of those that `Task.inputs` gives: what
        follows the tokens that were read in this pass before."""
        from transformers import DynamicCache, EncoderDecoderCache

        at, is_first = self._pass, self._pass == len(self._caches)
        has_decoder = "decoder_input_ids" in inputs
        if is_first:
            # where masks are ours, keys beyond a window are hidden, not dropped
            config = self._model.config if self._by_window else None
            cache: Any = DynamicCache(config=config)
            cache = EncoderDecoderCache(cache, DynamicCache()) if has_decoder else cache
            self._caches.append(cache)
        elif has_decoder:
            del inputs["input_ids"]
            inputs["encoder_outputs"] = (self._encoded[at],)
            inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, -1:]
            if "decoder_attention_mask" in inputs:
                inputs["decoder_attention_mask"] = inputs["decoder_attention_mask"][:, :, -1:]
        if "position_ids" in batch and "position_ids" in self._arguments:
            inputs["position_ids"] = batch["position_ids"]
        if "logits_to_keep" in self._arguments:
            inputs["logits_to_keep"] = 1
        return {**inputs, self._name: self._caches[at], "use_cache": True}

    def tensors(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return what is kept of each pass: keys and values ``[b, heads, L, d]`` of each layer."""
        return [[(of.keys, of.values) for of in cache.layers] for cache in self._caches]

    def restore(self, kept: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Go on from `tensors` of a decoder."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        for of_pass in kept:
            cache: Any = DynamicCache()
            for keys, values in of_pass:
                layer = DynamicLayer()
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                layer.dtype, layer.device = keys.dtype, keys.device
                cache.layers.append(layer)
            self._caches.append(cache)

    def keep(self, output: Any) -> None:
        """Note what the pass has returned."""
        encoded = getattr(output, "encoder_last_hidden_state", None)
        if encoded is not None and self._pass == len(self._encoded):
            self._encoded.append(encoded)
        self._pass += 1


class Spoken:
    """Turns the tokens of a text into pieces of it, as they come; ``say`` gets each. The text ends
    before the first of ``stops`` in it."""

    def __init__(
        self, tokenizer: Any, say: Callable[[str], object], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._say, self._stops = tokenizer, say, stops
        added = tokenizer.added_tokens_decoder if stops else {}
        self._ends = {k for k, one in added.items() if one.special and one.content in stops}
        self._ids: list[int] = []
        self._said = 0
        self.has_stopped = False

    def __call__(self, row: int, token: int) -> bool:
        """Take a token; whether the text ends here."""
        if token in self._ends:  # which no text shows
            self.finish()
            self.has_stopped = True
            return True
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        found = [text.find(stop) for stop in self._stops if stop in text]
        self.has_stopped = bool(found)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not found:  # half a character
            return False
        begun = (k for stop in self._stops for k in range(len(stop)) if text.endswith(stop[:k]))
        self._say_rest(text[: min(found) if found else len(text) - max(begun, default=0)])
        return self.has_stopped

    def finish(self) -> None:
        """Say what is left, also half a character."""
        if not self.has_stopped:
            self._say_rest(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _say_rest(self, text: str) -> None:
        if rest := text[self._said :]:
            self._say(rest)
            self._said = len(text)


def remembers(task: Task) -> bool:
    """Say whether the model can keep keys and values."""
    takes = inspect.signature(task.model.forward).parameters.keys() & {*_CACHE}
    return bool(takes) and hasattr(task.backbone.prepare, "masks")


class Together:
    """The logits of rows that each have a state of their own, for `write`: under torch.func.vmap,
    with what is kept of each row. The model must have masks that vmap can follow (`can_share`)."""

    def __init__(
        self, task: Task, predict: Callable[[Params, Batch], Tensor], states: Sequence[Params]
    ) -> None:
        self._task, self._predict = task, predict
        self._states = stack(states)
        self._kept: list[list[tuple[Tensor, Tensor]]] = []

    def __call__(self, batch: Batch) -> Tensor:
        """``[b, L]`` to ``[b, 1, vocabulary]``."""
        logits: Tensor
        logits, self._kept = torch.func.vmap(self._row)(self._states, batch, self._kept)
        return logits

    def _row(
        self, state: Params, batch: Batch, kept: list[list[tuple[Tensor, Tensor]]]
    ) -> tuple[Tensor, Any]:
        memory = Memory(self._task)
        memory.restore(kept)
        with self._task.remembering(memory):
            logits = self._predict(state, {name: row[None] for name, row in batch.items()})
        return logits[0], memory.tensors()


def can_share(task: Task) -> bool:
    """Say whether rows with states of their own can be written `Together`."""
    has_masks = getattr(task.backbone.prepare, "masks", False)
    return remembers(task) and has_masks and not task.backbone.objective.has_decoder


def window_of(backbone: Backbone) -> int | None:
    """Return how many tokens the model reads at most; None: any number, or unknown."""
    prepare, config = backbone.prepare, getattr(backbone.model, "config", None)
    most = getattr(prepare, "max_length", None) or getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def write(
    task: Task,
    logits: Callable[[Batch], Tensor],
    prompts: Sequence[Ids],
    most: int | Sequence[int],
    *,
    keeps: bool = True,
    said: Said | None = None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt of a batch, or that are written from it, without
    those that end a text.

    Args:
        task: the model.
        logits: from a batch to ``[b, L, vocabulary]``, by `Task.logits`.
        prompts: token ids, one or more each.
        most: how many tokens are written at most, of each row or of all. A text is
            no longer than the model's window.
        keeps: whether the model may keep keys and values: ``logits`` looks at nothing but the
            outputs of the model.
        said: is told of each token at once.
    """
    window, has_decoder = window_of(task.backbone), task.backbone.objective.has_decoder
    read = [0 if has_decoder else len(prompt) for prompt in prompts]
    wanted = [most] * len(prompts) if isinstance(most, int) else most
    room = [
        count if window is None else min(count, window - start)
        for count, start in zip(wanted, read, strict=True)
    ]
    texts: list[list[int]] = [[] for _ in prompts]
    is_open = [count > 0 for count in room]
    shares = isinstance(logits, Together)
    memory = Memory(task) if keeps and remembers(task) and not shares else None

    def logits_of(batch: Batch) -> Tensor:
        batch = {name: value.to(task.device) for name, value in batch.items()}
        with nullcontext() if memory is None else task.remembering(memory):
            return logits(batch)

    make = _translated if has_decoder else _continued if memory or shares else _anew
    following = make(logits_of, prompts)
    with torch.no_grad():
        while any(is_open):
            for row, token in enumerate(following(texts)):
                if is_open[row] and token not in task.backbone.ends:
                    texts[row].append(token)
                    is_ended = said is not None and said(row, token) is True
                    is_open[row] = len(texts[row]) < room[row] and not is_ended
                else:
                    is_open[row] = False
    return texts


def _continued(logits: Callable[[Batch], Tensor], prompts: Sequence[Ids]) -> _Following:
    """By the last tokens alone, after the first pass. Prompts end together: they are padded on the
    left."""
    first = _padded(prompts, "left")
    seen, following = first["attention_mask"], list[int]()

    def after(texts: list[list[int]]) -> list[int]:
        nonlocal seen, following
        new = first["input_ids"]
        if following:
            new = torch.tensor(following)[:, None]
            seen = torch.cat([seen, torch.ones(len(prompts), 1)], 1)
        positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        found = logits({"input_ids": new, "attention_mask": seen, "position_ids": positions})
        following = found[:, -1].argmax(-1).tolist()
        return following

    return after


def _anew(logits: Callable[[Batch], Tensor], prompts: Sequence[Ids]) -> _Following:
    """By the whole text."""

    def after(texts: list[list[int]]) -> list[int]:
        whole = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        found = logits(_padded(whole))
        return [int(found[row, len(text) - 1].argmax()) for row, text in enumerate(whole)]

    return after


def _translated(logits: Callable[[Batch], Tensor], prompts: Sequence[Ids]) -> _Following:
    """By an encoder of the prompt, and a decoder of the tokens so far."""
    inputs = _padded(prompts)

    def after(texts: list[list[int]]) -> list[int]:
        length = 1 + max(map(len, texts))
        labels = [[*text, *[IGNORED] * (length - len(text))] for text in texts]
        following: list[int] = (
            logits({**inputs, "labels": torch.tensor(labels)})[:, -1].argmax(-1).tolist()
        )
        return following

    return after


def _padded(texts: Sequence[Ids], side: str = "right") -> Batch:
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = pad([torch.tensor(text) for text in texts])
    return {"input_ids": ids, "attention_mask": pad([torch.ones(len(text)) for text in texts])}
