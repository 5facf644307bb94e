"""The endpoint, asked by OpenAI's own client, beside what ``predict`` says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
import torch

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.errors import InputError
from fedtailor.runs.trained import open_trained
from fedtailor.serving import writer
from fedtailor.serving.models import Models
from fedtailor.serving.server import ModelServer
from fedtailor.serving.writer import Answer
from tests import kinds

ASKED = ["the ward has", "each patient", "where is the bed now", "night"]
KEY = "tailor-made"


@pytest.fixture(scope="module")
def models() -> Models:
    found = Models.of_run(open_trained(kinds.finished("instruct") / "run", "fedsdg"))
    drawn = torch.Generator().manual_seed(0)
    states = {
        name: {
            key: value + 0.5 * torch.randn(value.shape, generator=drawn)
            for key, value in found.read(name).items()
        }
        for name in "abc"  # so that each says something else
    }
    return replace(found, read=states.__getitem__)


@contextmanager
def serving(models: Models, **options: Any) -> Iterator[ModelServer]:
    with ModelServer(models, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[ModelServer]:
    with serving(models, key=KEY, most=12) as one:
        yield one


@pytest.fixture
def client(server: ModelServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}v1", api_key=KEY, max_retries=0) as made:
        yield made


def predicted(models: Models, name: str, asked: str) -> str:
    model = ft.inference.model.PersonalModel(models.opened, name, models.state(name) or {})
    return model.predict([asked], max_new_tokens=8)[0]


def said(client: openai.OpenAI, name: str, asked: str) -> str:
    found = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": asked}], max_tokens=8
    )
    assert found.model == name
    return found.choices[0].message.content or ""


@pytest.mark.slow
def test_each_clients_answers_are_those_of_predict(client: openai.OpenAI, models: Models) -> None:
    assert [one.id for one in client.models.list()] == ["run", "base", "a", "b", "c"]
    answers = {(n, t): said(client, n, t) for n in ("run", "a", "b", "c") for t in ASKED}
    assert answers == {(n, t): predicted(models, n, t) for n, t in answers}
    assert len({tuple(answers[name, text] for text in ASKED) for name in "abc"}) == 3


@pytest.mark.slow
def test_clients_that_ask_at_once_get_what_each_gets_alone(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And share a batch, where their states have the same tensors."""
    shared: list[int] = []
    together = writer.Together

    def counted(task: Any, predict: Any, states: Any) -> Any:
        shared.append(len(states))
        return together(task, predict, states)

    monkeypatch.setattr(writer, "Together", counted)
    pairs = [(name, text) for name in ("a", "b", "c", "base") for text in ASKED]
    made = writer.Writer(models, together=16, waiting=16)
    asked = [Answer(name, text, 8) for name, text in pairs]
    for answer in asked:
        made.ask(answer)
    made.start()
    found = {}
    for pair, answer in zip(pairs, asked, strict=True):
        found[pair] = "".join(iter(answer.pieces.get, None))  # type: ignore[arg-type]
    assert shared == [12]
    for name, text in pairs:
        if name != "base":
            assert found[name, text] == predicted(models, name, text)


@pytest.mark.slow
def test_the_base_is_the_untouched_model(client: openai.OpenAI, models: Models) -> None:
    task = models.opened.task
    tokens = task.backbone.tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED[0]}], add_generation_prompt=True, return_dict=False
    )
    plain: Any = kinds.backbone("instruct").model
    with torch.no_grad():
        written = plain.generate(
            input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)).long(),
            max_new_tokens=8, do_sample=False, eos_token_id=3, pad_token_id=0, use_cache=False,
        )[0, len(tokens) :]  # fmt: skip
    right = task.backbone.tokenizer.decode(written, skip_special_tokens=True)
    assert said(client, "base", ASKED[0]) == right


@pytest.mark.slow
def test_an_answer_comes_in_pieces(client: openai.OpenAI, models: Models) -> None:
    stream = client.chat.completions.create(
        model="b", messages=[{"role": "user", "content": [{"type": "text", "text": ASKED[2]}]}],
        max_completion_tokens=8, stream=True, stream_options={"include_usage": True},
        temperature=0, presence_penalty=0.0, logit_bias={}, logprobs=False, seed=7,
        response_format={"type": "text"}, parallel_tool_calls=True,
    )  # fmt: skip
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == predicted(models, "b", ASKED[2])
    assert len(chunks) > 3
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert last.usage is not None
    assert (reasons[-1] == "length") == (last.usage.completion_tokens == 8)


def test_a_text_is_completed(client: openai.OpenAI, models: Models) -> None:
    found = client.completions.create(model="c", prompt=ASKED[1], max_tokens=8)
    assert found.choices[0].text == predicted(models, "c", ASKED[1])
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    pieces = client.completions.create(model="c", prompt=ASKED[1], max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == found.choices[0].text


def test_an_answer_ends_before_a_text_that_stops_it(client: openai.OpenAI, models: Models) -> None:
    """Also where that comes in several tokens; what looks like its beginning is said later."""
    whole = predicted(models, "b", ASKED[2])
    assert len(whole) > 8
    asked: Any = {"model": "b", "messages": [{"role": "user", "content": ASKED[2]}]}
    for stop, left in ((whole[3:6], whole[: whole.find(whole[3:6])]), (whole[-1:] + "!", whole)):
        stream = client.chat.completions.create(
            **asked, max_completion_tokens=8, stop=stop, stream=True
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == left
        if left != whole:
            assert chunks[-1].choices[0].finish_reason == "stop"


USER = [{"role": "user", "content": "night"}]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": "d"}, openai.NotFoundError, "unknown model 'd'; allowed: a, b, base, c, run"),
        ({"model": None}, openai.BadRequestError, "the field model is missing: whose model answer"),
        ({"temperature": 0.7}, openai.BadRequestError, "temperature = 0.7: answers are the most"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs = 2: there is no such field"),
        ({"stop": [*"abcde"]}, openai.BadRequestError, "stop = .*a list of 4 at most"),
        ({"stop": ""}, openai.BadRequestError, "stop = .*must not be empty"),
        ({"max_tokens": 13}, openai.BadRequestError, "max_tokens = 13: allowed: 1 to 12"),
        ({"max_tokens": True}, openai.BadRequestError, "max_tokens = True: allowed: 1 to 12"),
        ({"messages": []}, openai.BadRequestError, "ends with what the user says"),
        ({"messages": [*USER, {"role": "tool", "content": "a"}]}, openai.BadRequestError, "a role"),
        ({"messages": [{"role": "user", "content": "bed " * 40}]}, openai.BadRequestError,
         "more than 39 tokens"),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_said(
    given: dict[str, Any], error: type[Exception], words: str, client: openai.OpenAI
) -> None:
    for stream in (False, True):
        with pytest.raises(error, match=words):
            client.chat.completions.create(**{
                "model": "a", "messages": USER, "stream": stream, **given
            })  # fmt: skip


def ask(server: ModelServer, path: str, content: bytes = b"", **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)) as connection:
        connection.request("POST" if content else "GET", path, content or None, named)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


JSON = {"Content_Type": "application/json"}


def test_requests_need_the_key_and_are_bounded(server: ModelServer) -> None:
    bearer = {"Authorization": f"Bearer {KEY}"}
    for wrong in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
        status, found = ask(server, "/v1/models", **wrong)
        assert (status, found["error"]["code"]) == (401, "invalid_api_key")
    assert ask(server, "/v1/files", **bearer)[0] == 404
    assert ask(server, "/v1/completions", b"{}", **bearer, Content_Type="text/plain")[0] == 415
    for content in (b"[]", b"{", b"[" * 100_000, b"\xff"):
        assert ask(server, "/v1/completions", content, **bearer, **JSON)[0] == 400
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{JSON_HEAD}Authorization: Bearer {KEY}\r\n"
    for length, status in (("9" * 30, 413), ("1048577", 413), ("-1", 411), ("", 411)):
        with socket.create_connection(server.server_address[:2], timeout=10) as one:
            one.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert one.makefile("rb").readline().split()[1] == str(status).encode()


JSON_HEAD = "Content-Type: application/json\r\n"


def test_without_a_key_no_page_from_elsewhere_is_answered(models: Models) -> None:
    with serving(models) as server:
        assert ask(server, "/v1/models")[0] == 200
        status, found = ask(server, "/v1/models", Host="evil.example")
        assert (status, found["error"]["message"]) == (421, "this endpoint has another address")
    with pytest.raises(InputError, match=r"in reach of others; give a key .*FEDTAILOR_SERVE_KEY"):
        ModelServer(models, "0.0.0.0", 0)


def test_too_many_that_wait_are_told(models: Models) -> None:
    with serving(models, together=1, waiting=1, most=12) as server:

        def once(_: int) -> int:
            content = json.dumps({"model": "a", "prompt": "night", "max_tokens": 12}).encode()
            return ask(server, "/v1/completions", content, **JSON)[0]

        with ThreadPoolExecutor(8) as pool:
            statuses = [*pool.map(once, range(8))]
    assert {*statuses} == {200, 429}


@pytest.mark.slow
def test_what_writes_no_texts_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    run = str(kinds.finished("regression") / "run")
    assert main(["serve", run, "--method", "fedsdg"]) == 2
    assert "models for 'regression', which write no texts; use fedt" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["serve", run, "--port", "70000"])
    assert "--port: '70000': must be a whole number from 0 to 65535" in capsys.readouterr().err
