"""Messages on their way through Flower."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedtailor.flower.codec import Limits, pack, unpack
from fedtailor.flower.messages import RoundRequest
from tests.flower.grid import DirectGrid
from tests.small import same_bits


def test_flower_keeps_its_identity_where_the_grid_of_these_tests_sets_it() -> None:
    assert {"_task_id", "_run_id", "_node_id"} <= vars(TaskIdentity).keys()
    DirectGrid({})
    assert Message(RecordDict(), 5, MessageType.TRAIN).metadata.src_node_id == 1


def test_a_message_survives_flowers_own_encoding() -> None:
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    order = RoundRequest("e", "r", "fedper", 0, 2, "train", ())
    sent = {"w": torch.ones(2, dtype=torch.bfloat16), "m": torch.tensor(True)}
    data = recorddict_to_proto(pack(order, [sent, {}])).SerializeToString()
    proto: Any = type(recorddict_to_proto(RecordDict()))
    again, received = unpack(
        recorddict_from_proto(proto.FromString(data)), RoundRequest, Limits(1000, 2, 1000)
    )
    assert asdict(again) == asdict(order)
    assert same_bits(received[0], sent)
    assert received[1] == {}
