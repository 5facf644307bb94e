"""The methods' maps of clients: what is in them, and that small differences can be seen."""

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.methods import METHODS
from fedtailor.report.charts import pictures as module
from fedtailor.report.charts.content import groups
from fedtailor.report.charts.pictures import PICTURES, pictures
from fedtailor.report.select import entries
from fedtailor.store.read import read_all
from tests.report.conftest import K, hold

MakeRun = Callable[..., Path]


def _pictures(path: Path) -> list[dict]:
    found = entries(read_all([path]))
    return pictures(found, groups(found))


def _values(picture: dict) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(picture["data"]), "<u2").astype(float)
    codes[codes == 65535] = np.nan
    shape = (len(picture["rounds"]), len(picture["clients"]), len(picture["columns"]))
    return (picture["low"] + picture["step"] * codes).reshape(shape)


def _weights(run: Path, when: int, x: np.ndarray, clients: list[int]) -> None:
    tensors = {"server/weights": x.astype(np.float32), "server_clients": np.array(clients)}
    save_file(tensors, run / f"methods/fedmerge/seed-0/diagnostics-{when:06d}.safetensors")


def test_values_come_back_by_round_client_and_column(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",), seeds=(0,))
    rng = np.random.default_rng(0)
    x = {when: 0.25 + 0.001 * rng.normal(size=(5, 4)) for when in (2, 4)}
    for when, values in x.items():
        _weights(run, when, values, [0, 1, 2, 4, 5])
    (picture,) = _pictures(run)
    assert picture["rounds"] == [2, 4]
    assert sorted(picture["clients"]) == [0, 1, 2, 4, 5]
    order = [[0, 1, 2, 4, 5].index(client) for client in picture["clients"]]
    for found, values in zip(_values(picture), x.values(), strict=True):
        np.testing.assert_allclose(found, values[order], atol=1e-6)
    low, high = picture["domain"]
    assert picture["neutral"] is None
    # the colours reach as far as the values of the last round, so that small differences are seen
    assert (low, high) == pytest.approx(np.percentile(x[4], (2, 98)), abs=1e-6)
    assert low < 0.25 < high < 0.26
    assert not picture["isFlat"]


def test_colours_of_gates_reach_as_far_to_both_sides(make_run: MakeRun) -> None:
    run = make_run(methods=("fedsdg",), seeds=(0,))
    for high in (0.505, 0.9):
        gates = np.full((2, 4), 0.473, np.float32)
        gates[0] = high
        tensors = {"client/gates": gates, "clients": np.array([0, 1])}
        save_file(tensors, run / "methods/fedsdg/seed-0/diagnostics-000008.safetensors")
        (picture,) = _pictures(run)
        assert picture["lastReach"] == pytest.approx([0.473, high])
        most = max(0.027, high - 0.5)
        assert picture["domain"] == pytest.approx([0.5 - most, 0.5 + most])


def test_clients_that_were_not_there_are_missing(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",), seeds=(0,))
    _weights(run, 2, np.full((2, 4), 0.25), [0, 1])
    _weights(run, 4, np.full((3, 4), 0.25), [0, 1, 5])
    (picture,) = _pictures(run)
    missing = np.isnan(_values(picture)).all(axis=2)
    assert missing[0].tolist() == [client == 5 for client in picture["clients"]]
    assert not missing[1].any()
    assert picture["isFlat"]


def test_clients_stand_by_true_cluster(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",), seeds=(0,))
    hold(run, 0, clusters=[1, 0, 1, 0, 1, 0])
    _weights(run, 2, np.eye(6), list(range(K)))
    (picture,) = _pictures(run)
    assert picture["clients"] == [1, 3, 5, 0, 2, 4]


def test_one_number_a_client_is_shown_from_the_largest_on(make_run: MakeRun) -> None:
    run = make_run(methods=("apfl",), seeds=(0,))
    hold(run, 0, clusters=[1, 0, 1, 0, 1, 0])
    mix = np.array([0.4, 0.6, 0.5, 0.7, 0.55], np.float32)
    tensors = {"client/mix": mix, "clients": np.array([0, 1, 2, 4, 5])}
    save_file(tensors, run / "methods/apfl/seed-0/diagnostics-000002.safetensors")
    (picture,) = _pictures(run)
    assert picture["clients"] == [4, 1, 5, 2, 0]
    assert _values(picture)[0, :, 0] == pytest.approx([0.7, 0.6, 0.55, 0.5, 0.4], abs=1e-4)
    assert picture["reach"] == pytest.approx([0.4, 0.7])
    assert picture["hasTruth"]
    assert not picture["isWhole"]


def test_rounds_and_columns_are_left_out_where_there_are_too_many(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CELLS", 5 * 4 * 3)
    monkeypatch.setattr(module, "_MAX_COLUMNS", 4)
    run = make_run(methods=("fedmerge",), seeds=(0,))
    for when in range(1, 9):
        _weights(run, when, np.full((5, 10), 0.1), [0, 1, 2, 4, 5])
    (picture,) = _pictures(run)
    assert (picture["rounds"][0], picture["rounds"][-1]) == (1, 8)
    assert len(picture["rounds"]) == 3
    assert picture["columns"] == [0, 3, 6, 9]


def test_pictures_are_those_of_methods_that_there_are() -> None:
    assert PICTURES.keys() <= METHODS.keys()
    for picture in PICTURES.values():
        assert len(picture.caption) > 100
