"""Writes the answers to requests: those that wait share a batch, each row with its own model."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..data.table import Tokens
from ..errors import InputError, announce, one_line
from ..inference.model import examples_of
from ..params import Batch, Params, count
from ..task.writing import Ids, Spoken, Together, can_share, window_of, write
from .models import Models

# what a model, a tokenizer or a chat template may raise over what it is given
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError,
           RuntimeError, TypeError, ValueError)  # fmt: skip
_LARGE = 50_000_000  # scalars of a state; rows with states of their own are not stacked beyond it


@dataclass
class Answer:
    """What a request waits for. ``pieces`` has texts as they come, then None, or an error."""

    model: str
    prompt: str  # as `PersonalModel.predict` takes it
    most: int  # tokens
    stops: Sequence[str] = ()  # it ends before the first of these
    pieces: queue.SimpleQueue[str | Exception | None] = field(default_factory=queue.SimpleQueue)
    ids: Ids = ()
    written: list[int] = field(default_factory=list)
    is_cut: bool = False  # it has as many tokens as there may be
    is_gone: bool = False  # nobody waits for it any more


_Groups = dict[Hashable, list[tuple[Answer, Params | None]]]  # with the states of their models


class Writer(threading.Thread):
    """The one thread that uses the model: so many requests ``together`` share a batch at most, and
    so many are ``waiting`` at most."""

    def __init__(self, models: Models, together: int, waiting: int) -> None:
        super().__init__(daemon=True)
        self._models, self._together, self._most_waiting = models, together, waiting
        self._waiting: deque[Answer] = deque()
        self._has_work = threading.Condition()

    def ask(self, answer: Answer) -> bool:
        """Let an answer be written; whether it will be, since not too many wait."""
        with self._has_work:
            if len(self._waiting) >= self._most_waiting:
                return False
            self._waiting.append(answer)
            self._has_work.notify()
            return True

    def run(self) -> None:
        """Write answers, until the process ends."""
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: self._waiting)
                number = min(self._together, len(self._waiting))
                some = [self._waiting.popleft() for _ in range(number)]
            for group in self._groups(some).values():
                states = [state for _, state in group]
                with _told([answer for answer, _ in group]):
                    self._write([answer for answer, _ in group], states)

    def _groups(self, answers: Sequence[Answer]) -> _Groups:
        """The answers that are written together, each with its model's state: those of one model,
        or of models whose states have the same tensors."""
        groups: _Groups = {}
        opened = self._models.opened
        shares = can_share(opened.task) and opened.method.keeps_keys
        for answer in answers:
            with _told([answer]):
                state = self._models.state(answer.model)
                prompts = examples_of(opened, [answer.prompt])
                assert isinstance(prompts, Tokens)
                if prompts.cut is not None and len(prompts.cut):  # what an encoder reads
                    raise InputError("the prompt has more tokens than this model reads")
                answer.ids = prompts[0].tolist()
                form: Hashable = answer.model
                if state is not None and shares and count(state) <= _LARGE:
                    form = tuple((name, value.shape) for name, value in sorted(state.items()))
                groups.setdefault(form, []).append((answer, state))
        return groups

    def _write(self, answers: Sequence[Answer], states: Sequence[Params | None]) -> None:
        task, method = self._models.opened.task, self._models.opened.method
        tokenizer, window = task.backbone.tokenizer, window_of(task.backbone)
        spoken = [Spoken(tokenizer, one.pieces.put, one.stops) for one in answers]

        def said(row: int, token: int) -> bool:
            answers[row].written.append(token)
            return spoken[row](row, token) or answers[row].is_gone

        logits: Callable[[Batch], Tensor] = partial(task.logits, {})
        some = [state for state in states if state is not None]
        if len({answer.model for answer in answers}) > 1:
            logits = Together(task, partial(method.predict, task), some)
        elif some:
            logits = partial(method.predict, task, some[0])
        keeps, most = method.keeps_keys or not some, [answer.most for answer in answers]
        write(task, logits, [answer.ids for answer in answers], most, keeps=keeps, said=said)
        for answer, one in zip(answers, spoken, strict=True):
            one.finish()
            read = 0 if task.backbone.objective.has_decoder else len(answer.ids)
            room = answer.most if window is None else min(answer.most, window - read)
            answer.is_cut = len(answer.written) >= room and not one.has_stopped
            answer.pieces.put(None)


@contextmanager
def _told(answers: Sequence[Answer]) -> Iterator[None]:
    """Tell those who wait for ``answers`` of an error; the next ones can still be written."""
    try:
        yield
    except (InputError, *_FAULTS) as error:
        if not isinstance(error, InputError):
            what = one_line(f"{type(error).__name__}: {error}")
            announce(f"an answer was not written: {what}")
        for answer in answers:
            answer.pieces.put(error)
