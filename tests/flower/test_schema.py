"""Uploads of another form than the method's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flwr.app import Message, MessageType

from fedtailor.errors import InputError
from fedtailor.flower import serve
from fedtailor.flower.codec import WireError
from fedtailor.flower.schema import UploadSchema
from tests.flower.grid import QUICK, experiment, grid, rewritten
from tests.small import digits_backbone


def test_a_shape_without_bytes_is_refused_before_it_is_unpacked() -> None:
    """Padding it to the full rank would take gigabytes."""
    full, sent = torch.zeros(8, 6), torch.zeros(2, 6)
    schema = UploadSchema.of({"a": full, "bits": full}, {"a": sent, "bits": torch.zeros(6)})
    for rank in (0, 2, 8):
        schema.check_packed({"a": torch.zeros(rank, 6), "bits": torch.zeros(9)})
    with pytest.raises(WireError, match=r"a of its upload is float32 \(0, 21.*at most \(8, 6\)"):
        schema.check_packed({"a": torch.zeros(0, 1 << 31), "bits": torch.zeros(6)})


@pytest.mark.parametrize("what", ["shape", "missing"])
def test_an_upload_of_another_form_is_refused_in_a_cohort_of_two(what: str, tmp_path: Path) -> None:
    split = {"scheme": "iid", "clients": 2, "max_examples": 12}
    chosen = experiment("fedavg", rounds=1, split=split, cohort={})
    direct = grid(chosen, tmp_path / "clients")
    spoilt = {100}

    def change(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type == MessageType.TRAIN and metadata.dst_node_id in spoilt:
            reply.content = rewritten(reply.content, what)
        return reply

    direct.change = change
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    out = serve(direct, chosen, tmp_path / "out", **given)
    folder = out / "methods/fedavg/seed-0"
    assert json.loads((folder / "history.jsonl").read_text())["cohort"] == [1]
    spoilt.add(101)
    with pytest.raises(InputError, match="0 of 2 clients sent a usable update"):
        serve(direct, chosen, tmp_path / "none", **given)
