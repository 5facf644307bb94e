"""W&B's offline files hold the run's numbers, each once."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from fedtailor.trackers.follow import track
from fedtailor.trackers.trial import trials
from tests.trackers.conftest import points_of

Grow = Callable[[int], Path]


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of a ``.wandb`` file: a LevelDB log of blocks of 32 KiB after seven bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_offline_files_hold_every_point_once(
    grow: Grow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    run = grow(4)
    track(run, "wandb", "mine")
    track(grow(8), "wandb", "mine")
    track(run, "wandb", "mine")
    wandb.teardown()  # as at the end of a process; files are written in the background until then
    part = trials(run)[1]
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{part.key}.wandb")
    every = list(records(file))
    (about,) = (record.run for record in every if record.WhichOneof("record_type") == "run")
    assert (about.project, about.run_group, about.display_name) == (
        "mine", "letters", "fedsdg-seed-0",
    )  # fmt: skip
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["split.clients"] == 6
    rows = []
    for record in every:
        if record.WhichOneof("record_type") == "history":
            items = {
                (i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item
            }
            rows.append((items["_step"], {k: v for k, v in items.items() if not k.startswith("_")}))
    assert rows == list(points_of(part).items())
    summary: dict[str, object] = {}
    for record in every:
        for item in record.summary.update:
            summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
    assert {name: summary[name] for name in part.result()} == part.result()
