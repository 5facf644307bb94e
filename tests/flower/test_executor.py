"""A round over a Grid, and replies that are not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Error, Message, MessageType
from safetensors.torch import load_file

from fedtailor.flower import serve
from tests.flower.grid import QUICK, experiment, grid, orders, rewritten
from tests.small import digits_backbone

SPOILT = {  # by client: what happens to its reply of the first round, and the words that name it
    1: ("bytes", "the checksum is wrong"),
    2: ("schema", "schema version 10; version 9"),
    3: ("shape", "conv.weight of its upload is float32 (5, 1, 3, 3); it must be float32 (6, 1"),
    4: ("values", "conv.weight holds values that are not finite"),
    5: ("loss", "its loss is nan"),
    6: ("client", "client 77 was not asked for, or is reported on twice"),
    7: ("late", "no reply in 0.2 s"),
    8: ("raises", "RuntimeError: no memory"),
    9: ("round", "a report on train, round 3, instead of train, round 1"),
}


@pytest.mark.slow
def test_the_round_goes_on_without_what_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = {"scheme": "iid", "clients": 13, "max_examples": 12}
    chosen = experiment("fedper", rounds=2, split=split, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=13)
    direct.change = _spoilt
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    folder = out / "methods/fedper/seed-0"
    first, second = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert first["cohort"] == [0, 10, 11, 12]
    assert second["cohort"] == list(range(13))
    told = capsys.readouterr().err
    refused = list(map(json.loads, (folder / "refused.jsonl").read_text().splitlines()))
    reasons = {line["client"]: line["reason"] for line in refused}
    for client, (_, reason) in SPOILT.items():
        assert reason in reasons[client]
        assert f"round 1: without client {client}: " in told
    assert all(v.isfinite().all() for v in load_file(folder / "server.safetensors").values())
    bases = {
        request.client: request.base for order in orders(direct, 2) for request in order.requests
    }
    assert bases == {client: int(client not in SPOILT) for client in range(13)}


def _spoilt(message: Message, reply: Message) -> Message | None:
    """The reply of a node with one client in the first round."""
    metadata = message.metadata
    client = metadata.dst_node_id - 100
    if metadata.message_type != MessageType.TRAIN or metadata.group_id != "1":
        return reply
    what, _ = SPOILT.get(client, ("", ""))
    if what == "raises":
        return Message(Error(2, "Traceback\nRuntimeError: no memory\n"), reply_to=message)
    if what == "late":
        return None
    if what:
        reply.content = rewritten(reply.content, what)
    return reply
