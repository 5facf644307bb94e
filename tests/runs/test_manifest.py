"""What a run directory says of its data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.runs.run import dry_run
from fedtailor.runs.trained import open_trained
from fedtailor.store.read import read
from tests.runs.conftest import EXPERIMENT, run
from tests.small import digits, digits_backbone, without_checksum


@pytest.mark.slow
def test_changed_data_are_refused(finished: Path, unfinished: Path) -> None:
    for out in (finished, unfinished):
        path = out / "partitions/seed-0.json"
        before = path.read_text()
        without_checksum(path)
        changed = {**json.loads(path.read_text()), "digest": "of other data"}
        path.write_text(json.dumps(changed))
        with pytest.raises(ft.InputError, match="have changed since"):
            run(out)
        with pytest.raises(ft.InputError, match="have changed since"):
            dry_run(EXPERIMENT, out, data=digits(), backbone=digits_backbone())
        assert json.loads(path.read_text()) == changed
        path.write_text(before)


@pytest.mark.slow
def test_who_holds_how_much_is_kept_by_client(finished: Path) -> None:
    dataset = digits()
    parts = partition(dataset, EXPERIMENT.split, 0)
    kept = read(finished).partitions[0]
    assert kept.digest == parts.digest
    assert kept.labels is not None
    for client in range(3):
        splits = (parts.train[client], parts.validation[client], parts.test[client])
        sizes = (kept.train[client], kept.validation[client], kept.test[client])
        assert sizes == tuple(map(len, splits))
        held = np.bincount(dataset.labels[np.concatenate(splits)], minlength=10)
        assert kept.labels[client].tolist() == held.tolist()


def test_named_clients_keep_their_names(tmp_path: Path) -> None:
    dataset = digits()
    groups = np.arange(len(dataset.inputs)) % 2
    named = replace(dataset, groups=groups, client_names=("lagos", "berlin"))
    experiment = replace(EXPERIMENT, split=ft.SplitConfig(scheme="natural", max_examples=30))
    out = tmp_path / "run"
    ft.run(experiment, out, data=named, backbone=digits_backbone())
    assert json.loads((out / "partitions/seed-0.json").read_text())["names"] == ["lagos", "berlin"]
    lines = (out / "methods/fedsdg/seed-0/clients.jsonl").read_text().splitlines()
    assert all(json.loads(line)["names"] == ["lagos", "berlin"] for line in lines)
    trained = open_trained(out, "fedsdg", data=named, backbone=digits_backbone())
    assert [trained.number(client) for client in ("berlin", "0", 1)] == [1, 0, 1]
    with pytest.raises(ft.InputError, match="no client 'berln'; did you mean 'berlin'"):
        trained.number("berln")


@pytest.mark.slow
def test_renamed_clients_are_refused(tmp_path: Path) -> None:
    dataset = digits()
    groups = np.arange(len(dataset.inputs)) % 2
    begun = replace(dataset, groups=groups, client_names=("lagos", "berlin"))
    renamed = replace(begun, client_names=("lagos", "rome"))
    experiment = replace(EXPERIMENT, split=ft.SplitConfig(scheme="natural", max_examples=30))
    out = tmp_path / "run"
    ft.run(experiment, out, data=begun, backbone=digits_backbone())
    more = replace(experiment, rounds=experiment.rounds + 1)
    with pytest.raises(ft.InputError, match=r"client 1 was 'berlin' when .* and is 'rome' now"):
        ft.run(more, out, data=renamed, backbone=digits_backbone())
    trained = open_trained(out, "fedsdg", data=renamed, backbone=digits_backbone())
    with pytest.raises(ft.InputError, match="clients' names are not those of"):
        _ = trained.federation
    manifest = without_checksum(out / "partitions/seed-0.json")
    content = json.loads(manifest.read_text())
    del content["names"]  # a run of before names were kept
    manifest.write_text(json.dumps(content))
    ft.run(more, out, data=renamed, backbone=digits_backbone())


def test_what_the_majority_class_gets_right_is_kept(finished: Path) -> None:
    dataset = digits()
    parts = partition(dataset, EXPERIMENT.split, 0)
    kept = read(finished).partitions[0]
    assert kept.names is None
    for client in range(3):
        counts = np.bincount(dataset.labels[parts.train[client]], minlength=10)
        assert kept.majority[client] == counts.argmax()
        correct = (dataset.labels[parts.test[client]] == counts.argmax()).sum()
        assert kept.majority_correct[client] == correct
