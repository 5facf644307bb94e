"""Flower's Grid, asked with patience: what the SuperLink can't answer now is asked again.

Under load, with a full disk, or while it is restarted, the SuperLink answers nothing, or with an
error that passes. The pauses between two tries grow up to a limit. What is waited for is said once,
and then at growing intervals.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import RetryState
from flwr.supercore.run import RunNotRunningException
from sqlalchemy.exc import DBAPIError, OperationalError

from ..errors import GO_ON, InputError, say
from .codec import words

T = TypeVar("T")

# how Flower, and what it stands on, say that something went wrong between here and its store
TROUBLE = (httpx.HTTPError, grpc.RpcError, DBAPIError, sqlite3.Error, OSError, ObjectPushError)
_PASSING_STATUS = {408, 425, 429}  # beside 500 and above
_PASSING_CODES = {
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED),
    *(grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED),
}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries
_FIRST_WORD, _LONGEST_SILENCE = 10.0, 600.0  # seconds between two lines about the same trouble
_FORGOTTEN = 60.0  # seconds without a failure, after which the next one is said at once


class OutageError(InputError):
    """The SuperLink did not answer for too long, or refuses to."""


class Trouble:
    """Says that something fails: at once, then at growing intervals, and when it is over. So it
    does where it fails and works by turns."""

    def __init__(self, what: str) -> None:
        """``what`` begins each line."""
        self._what = what
        self._lock = threading.Lock()
        self._begin: float | None = None
        self._last, self._next, self._silence = -_FORGOTTEN, 0.0, _FIRST_WORD
        self._is_said = False

    def failed(self, reason: str) -> None:
        """Note a failure."""
        now = time.monotonic()
        with self._lock:
            if now >= self._last + _FORGOTTEN:
                self._begin, self._next, self._silence = None, now, _FIRST_WORD
            self._begin = now if self._begin is None else self._begin
            self._last, seconds = now, now - self._begin
            if now < self._next:
                return
            self._next, self._is_said = now + self._silence, True
            self._silence = min(2 * self._silence, _LONGEST_SILENCE)
        far = f", for {seconds:.0f} s now" if seconds >= 1 else ""
        say(f"{self._what}: {reason}{far}")

    def over(self) -> None:
        """Note that it works."""
        with self._lock:
            begin, self._begin = self._begin, None
            is_said, self._is_said = self._is_said, False
        if is_said and begin is not None:
            seconds = time.monotonic() - begin
            say(f"{self._what}: over after {seconds:.0f} s")


class PatientGrid:
    """A Grid whose calls are repeated for up to ``limit`` seconds while the SuperLink fails."""

    def __init__(self, grid: Grid, limit: float) -> None:
        self._grid = grid
        self._limit = limit
        self._trouble = Trouble("waiting for Flower's SuperLink")
        self._closed = threading.Event()
        each_request = getattr(grid, "_retry_invoker", None)
        if isinstance(each_request, RetryInvoker):
            self._teach(each_request)

    def node_ids(self) -> set[int]:
        """The nodes that are there."""
        return self._patiently(lambda: set(self._grid.get_node_ids()))

    def push(self, message: Message) -> str:
        """Send a message; its number, or "" where Flower has not stored it. A message that is sent
        again is stored once."""
        numbers = self._patiently(lambda: list(self._grid.push_messages([message])))
        return numbers[0] if numbers and numbers[0] else ""

    def pull(self, number: str) -> list[Message]:
        """The answer to the message of this number, if it is there."""
        return self._patiently(lambda: list(self._grid.pull_messages([number])))

    def close(self) -> None:
        """Repeat no call any more."""
        self._closed.set()

    def _patiently(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, in the end. Raises OutageError where it failed for too long, or
        fails for good, and InputError where Flower has ended the run."""
        start, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                answer = call()
            except RunNotRunningException:
                raise InputError(f"Flower has ended this run; {GO_ON}") from None
            except TROUBLE as error:
                reason = reason_of(error)
                if not passes(error):
                    raise OutageError(f"Flower's SuperLink refuses: {reason}") from error
                left = start + self._limit - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    raise OutageError(
                        f"Flower's SuperLink has failed for {self._limit:g} s: {reason}; {GO_ON}"
                    ) from error
                self._trouble.failed(reason)
                self._closed.wait(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._trouble.over()
                return answer

    def _teach(self, each_request: RetryInvoker) -> None:
        """Let Flower's own grid repeat each request of a call in the same way: half a call can't be
        repeated without loss. Flower gives up at once at an error of the SuperLink, and its
        heartbeats with it, and otherwise tries for ever."""
        gives_up, ended = each_request.should_giveup, threading.Event()

        def should_giveup(error: Exception) -> bool:
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
            if status and passes(error):
                return False
            # Flower interrupts this process then
            if status == httpx.codes.UNAUTHORIZED and not ended.is_set():
                ended.set()
                say(f"Flower has ended this run, since it heard nothing of it; {GO_ON}")
            return gives_up is not None and gives_up(error)

        def on_backoff(state: RetryState) -> None:
            if state.exception is not None:
                self._trouble.failed(reason_of(state.exception))

        def on_success(state: RetryState) -> None:
            if state.tries > 1:
                self._trouble.over()

        each_request.should_giveup = should_giveup
        each_request.on_backoff, each_request.on_success = on_backoff, on_success
        each_request.on_giveup = None
        each_request.wait_function = time.sleep
        each_request.max_time = self._limit


def passes(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, grpc.RpcError):
        return not isinstance(error, grpc.Call) or error.code() in _PASSING_CODES
    if isinstance(error, DBAPIError):
        return isinstance(error, OperationalError)
    return True


def reason_of(error: Exception) -> str:
    """An error of the SuperLink in words fit for a log."""
    if isinstance(error, httpx.HTTPStatusError):
        answer = error.response
        said = answer.text if answer.is_closed else ""
        return words(f"HTTP {answer.status_code} {answer.reason_phrase} {said}".strip())
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return words(f"{error.code().name} {error.details() or ''}".strip())
    if isinstance(error, DBAPIError):
        return words(error.orig)
    return words(f"{type(error).__name__}: {error}".rstrip(": "))
