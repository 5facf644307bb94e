"""The endpoint: chat completions, completions and models, as OpenAI's clients ask for them.

Answers have the most probable tokens; what a request asks beyond that is refused, not passed over.
"""

from __future__ import annotations

import hmac
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from queue import Empty
from typing import Any

from ..errors import InputError, brief, unknown
from ..watch.bounded import BoundedHandler, BoundedServer
from .models import Models
from .writer import Answer, Writer

KEY = "FEDTAILOR_SERVE_KEY"  # of the environment
_MOST_BYTES = 1 << 20  # of a request
_PIECE = 5.0  # seconds between two looks whether anybody still waits
_MOST_STOPS = 4  # as OpenAI has it
_FEW = 50  # names of models that a message lists
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SHARED = {
    "model", "max_tokens", "stop", "stream", "stream_options", "user", "metadata", "store", "seed",
}  # fmt: skip
_FIELDS = {
    "/v1/chat/completions": {*_SHARED, "messages", "max_completion_tokens"},
    "/v1/completions": {*_SHARED, "prompt"},
}
_ALLOWED: dict[str, tuple[object, ...]] = {  # and their only values here, which many clients send
    **dict.fromkeys(("top_p", "n", "best_of"), (1,)),
    **dict.fromkeys(("temperature", "presence_penalty", "frequency_penalty"), (0,)),
    "logit_bias": ({},), "logprobs": (False,), "echo": (False,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip


@dataclass(eq=False)
class Refused(Exception):  # noqa: N818
    """A request that is not answered: why, and its status."""

    message: str
    status: HTTPStatus = HTTPStatus.BAD_REQUEST
    param: str | None = None
    code: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The refusal as OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ModelServer(BoundedServer):
    """Serves ``models``. Hosts that are not this machine's own need a ``key`` that requests bear.
    ``most``: tokens of an answer; ``together``: requests that share a batch; ``waiting``: that
    wait."""

    def __init__(
        self,
        models: Models,
        host: str,
        port: int,
        *,
        key: str | None = None,
        most: int = 512,
        together: int = 8,
        waiting: int = 32,
    ) -> None:
        super().__init__(host, port, _Handler)
        if not (key or self.is_local):
            self.server_close()
            key_of = f"a key that requests must bear, in the environment's {KEY}, or --key"
            raise InputError(f"--host {host} is in reach of others; give {key_of}")
        self.models, self.key, self.most = models, key, most
        self.writer = Writer(models, together, waiting)
        self.writer.start()


class _Handler(BoundedHandler):
    server: ModelServer

    def do_GET(self) -> None:  # noqa: N802
        try:
            self._check()
            if self.path != "/v1/models":
                raise self._no_path()
            about = {"object": "model", "created": int(time.time()), "owned_by": "fedtailor"}
            data = [{"id": name, **about} for name in self.server.models.names]
            self._send(HTTPStatus.OK, {"object": "list", "data": data})
        except Refused as refused:
            self._refuse(refused)

    def do_POST(self) -> None:  # noqa: N802
        try:
            self._check()
            if self.path not in _FIELDS:
                raise self._no_path()
            content = self._content()
            answer = self._answer(content)
            if not self.server.writer.ask(answer):
                busy = "too many requests wait; ask again later"
                raise Refused(busy, HTTPStatus.TOO_MANY_REQUESTS)
            try:
                self._respond(answer, content)
            finally:
                answer.is_gone = True
        except Refused as refused:
            self._refuse(refused)

    def _no_path(self) -> Refused:
        allowed = ", ".join(["GET /v1/models", *(f"POST {path}" for path in _FIELDS)])
        return Refused(f"no {brief(self.path)} here; allowed: {allowed}", HTTPStatus.NOT_FOUND)

    def _check(self) -> None:
        """Refuse a request without the key; without one, of a page that lets a name of its own
        point here."""
        key = self.server.key
        if key is not None:
            given = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                message = "the key is missing, or another one"
                raise Refused(message, HTTPStatus.UNAUTHORIZED, code="invalid_api_key")
            return
        if not self.server.accepts(self.headers.get("Host", "")):
            raise Refused("this endpoint has another address", HTTPStatus.MISDIRECTED_REQUEST)

    def _content(self) -> dict[str, Any]:
        length, kind = self.headers.get("Content-Length", ""), self.headers.get_content_type()
        if kind != "application/json":  # what a page elsewhere can't send without leave
            message = f"a request is application/json, not {brief(kind)}"
            raise Refused(message, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        if not (length.isascii() and length.isdigit()):
            raise Refused("a request needs a Content-Length", HTTPStatus.LENGTH_REQUIRED)
        if len(length) > 9 or int(length) > _MOST_BYTES:
            message = f"a request has at most {_MOST_BYTES:,} bytes"
            raise Refused(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            content = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise Refused("a request is a JSON object")
        return content

    def _answer(self, content: Mapping[str, Any]) -> Answer:
        given = {name: value for name, value in content.items() if value is not None}
        for name, value in given.items():
            if name in _ALLOWED:
                if not any(_is_same(value, one) for one in _ALLOWED[name]):
                    only = " or ".join(map(json.dumps, _ALLOWED[name]))
                    what = f"answers are the most probable text; allowed: {only}"
                    raise _wrong(name, value, what)
            elif name not in _FIELDS[self.path]:
                allowed = ", ".join(sorted({*_FIELDS[self.path], *_ALLOWED}))
                raise _wrong(name, value, f"there is no such field here; allowed: {allowed}")
        model, stream = given.get("model"), given.get("stream", False)
        if model not in self.server.models.names:
            names = self.server.models.names
            listed = names if len(names) <= _FEW else ["what GET /v1/models lists"]
            if model is None:
                what = "the field model is missing: whose model answers"
                raise Refused(f"{what}; allowed: {', '.join(listed)}", param="model")
            error = unknown("model", str(model), listed)
            raise Refused(str(error), HTTPStatus.NOT_FOUND, "model", "model_not_found")
        if not isinstance(stream, bool):
            raise _wrong("stream", stream, "allowed: true, false")
        if not isinstance(given.get("stream_options", {}), dict):
            raise _wrong("stream_options", given["stream_options"], "it must be an object")
        limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        most = given.get(limit, self.server.most)
        if type(most) is not int or not 1 <= most <= self.server.most:
            raise _wrong(limit, most, f"allowed: 1 to {self.server.most}")
        prompt = self._chat(given) if "messages" in _FIELDS[self.path] else _prompt(given)
        return Answer(str(model), prompt, most, _stops(given))

    def _chat(self, given: Mapping[str, Any]) -> str:
        if not self.server.models.opened.task.backbone.objective.joins_columns:
            raise Refused("this run's models write from a text; use /v1/completions")
        messages = given.get("messages")
        turns = []
        for one in messages if isinstance(messages, list) else ():
            role = _ROLES.get(str(one.get("role"))) if isinstance(one, dict) else None
            text = _text(one.get("content")) if role else None
            if role is None or text is None:
                roles = ", ".join(_ROLES)
                raise _wrong("messages", one, f"each has a text as content, and a role of {roles}")
            turns.append({"role": role, "content": text})
        if not turns or turns[-1]["role"] != "user":
            raise _wrong("messages", messages, "it is a list that ends with what the user says")
        return json.dumps(turns)

    def _respond(self, answer: Answer, content: Mapping[str, Any]) -> None:
        """Send an answer, whole or in pieces."""
        is_chat, pieces = "messages" in _FIELDS[self.path], self._pieces(answer)
        kind = "chat.completion" if is_chat else "text_completion"
        about = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if is_chat and content.get("stream") else ""),
            "created": int(time.time()),
            "model": answer.model,
        }

        def choice(text: str, reason: str | None, name: str) -> dict[str, Any]:
            said = {name: {"role": "assistant", "content": text}} if is_chat else {"text": text}
            return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

        def ended() -> tuple[str, dict[str, int]]:
            read, written = len(answer.ids), len(answer.written)
            counts = {"prompt_tokens": read, "completion_tokens": written}
            return "length" if answer.is_cut else "stop", {**counts, "total_tokens": read + written}

        if not content.get("stream"):
            text = "".join(pieces)
            reason, usage = ended()
            choices = [choice(text, reason, "message")]
            self._send(HTTPStatus.OK, {**about, "choices": choices, "usage": usage})
            return
        first = next(pieces, "")  # what is wrong with a request shows before the first piece
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for text in chain([first], pieces):
                self._event({**about, "choices": [choice(text, None, "delta")]})
        except Refused as refused:
            self._event(refused.content)
            return
        reason, usage = ended()
        self._event({**about, "choices": [choice("", reason, "delta")]})
        if (content.get("stream_options") or {}).get("include_usage"):
            self._event({**about, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _pieces(self, answer: Answer) -> Iterator[str]:
        """The texts of an answer, as they come; what goes wrong is a refusal."""
        while True:
            self.server.note(self.connection)  # it may take long
            try:
                piece = answer.pieces.get(timeout=_PIECE)
            except Empty:
                continue
            if piece is None:
                return
            if isinstance(piece, InputError):
                raise Refused(str(piece))
            if isinstance(piece, Exception):
                message = "the answer could not be written; the server prints why"
                raise Refused(message, HTTPStatus.INTERNAL_SERVER_ERROR)
            yield piece

    def _event(self, content: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _refuse(self, refused: Refused) -> None:
        self.close_connection = True  # what is left of the request is not read
        self._send(refused.status, refused.content)

    def _send(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        headers = {"Connection": "close"} if self.close_connection else {}
        self.send(status, "application/json", json.dumps(content).encode(), headers)


def _wrong(name: str, value: object, allowed: str) -> Refused:
    return Refused(f"{name} = {brief(value)}: {allowed}", param=name)


def _is_same(value: object, other: object) -> bool:
    """Whether two values of JSON are equal: there false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _text(content: object) -> str | None:
    """The text of a message, also one in parts; None for anything else."""
    if isinstance(content, str):
        return content
    texts = []
    for one in content if isinstance(content, list) and content else [None]:
        text = one.get("text") if isinstance(one, dict) else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def _stops(given: Mapping[str, Any]) -> list[str]:
    """The texts before which an answer ends."""
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise _wrong("stop", stop, f"it must be a text, or a list of {_MOST_STOPS} at most")
    if not all(isinstance(one, str) and one for one in stops):
        raise _wrong("stop", stop, "texts must not be empty")
    return stops


def _prompt(given: Mapping[str, Any]) -> str:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt.strip():
        raise _wrong("prompt", prompt, "it must be a text")
    return prompt
