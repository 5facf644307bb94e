"""A round over a Grid, and replies that are not used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Error, Message, MessageType
from safetensors.torch import load_file

from fedtailor.engine.config import EvaluateConfig
from fedtailor.engine.metrics import Metrics, MetricValues
from fedtailor.flower import serve
from fedtailor.flower.codec import WireError
from fedtailor.flower.executor import evaluation_of
from fedtailor.flower.messages import ClientReply
from tests.flower.grid import QUICK, experiment, grid, orders, rewritten
from tests.small import digits_backbone

SPOILT = {  # by client: what happens to its reply of the first round, and the words that name it
    1: ("bytes", "the checksum is wrong"),
    2: ("schema", "schema version 7; version 3"),
    3: ("shape", "conv.weight of its upload is float32 (5, 1, 3, 3); it must be float32 (6, 1"),
    4: ("values", "conv.weight holds values that are not finite"),
    5: ("loss", "its loss is nan"),
    6: ("client", "node 106 says nothing of it"),
    7: ("late", "no reply in 0.2 s"),
    8: ("raises", "RuntimeError: no memory"),
    9: ("round", "a report on train, round 3, instead of train, round 1"),
}


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
    assert "node 106 was not asked for it" in reasons[77]
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


GOOD = MetricValues((0.5, None), ((1, 0), (1, 2)))


@pytest.mark.parametrize(
    "second",
    [
        GOOD,
        None,
        replace(GOOD, values=(0.5,)),
        replace(GOOD, values=(0.5, float("inf"))),
        replace(GOOD, confusion=None),
        replace(GOOD, confusion=((1, 0), (1, -1))),
        replace(GOOD, confusion=((1, 0), (1, 3))),
        replace(GOOD, confusion=((1, 0),)),
    ],
)
def test_metrics_that_cannot_be_are_refused(second: MetricValues | None) -> None:
    metrics = Metrics(EvaluateConfig(metrics=("macro_f1", "auc"), confusion=True))
    values = (GOOD,) if second is None else (GOOD, second)
    reply = ClientReply(0, sums=((1.0, 2.0, 4.0), (1.0, 2.0, 4.0)), metrics=values)
    if second is GOOD:
        assert evaluation_of(reply, metrics).metrics == values
    else:
        with pytest.raises(WireError, match="its metrics can't be"):
            evaluation_of(reply, metrics)
