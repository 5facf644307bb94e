"""pFedGate's charts: which clients have alike gating layers, and the gates of every round."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report.charts.content import groups
from fedtailor.report.charts.parts import Figure
from fedtailor.report.charts.pfedgate import gates_by_round, gating_layers
from fedtailor.report.select import Entry, entries
from fedtailor.store.read import read
from fedtailor.store.tensors import tensor_names

MakeRun = Callable[..., Path]
Arrays = Mapping[str, NDArray[Any]]
L = 5
SEEN = np.array([1, 1, 0, 1, 1, 1], dtype=np.uint8)
GROUP = np.array([0, 1, 0, 0, 1, 1])  # whose gating layers are alike
GATES = np.array([[0.2, 0.4, 0.0, 0.6, 0.0], [0.3, 0.0, 0.0, 0.0, 0.5]], dtype=np.float32)


def private() -> dict[str, NDArray[Any]]:
    """Two groups of clients; the statistics, far larger, say otherwise."""
    rng = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {"__seen__": SEEN}
    for name, scale in (("linear.weight", 1.0), ("post.weight", 1e-4)):
        base = rng.normal(size=(2, L, 8))[GROUP] + 0.01 * rng.normal(size=(6, L, 8))
        found[f"gate.{name}"] = (scale * base).astype(np.float32)
    found["gate.post.running_mean"] = 1e6 * rng.normal(size=(6, L)).astype(np.float32)
    found["gate.post.bias"] = np.ones((6, L), dtype=np.float32)  # nobody's differs
    found["gate.budget"] = np.arange(6) * 1000
    return found


def observed(number: int) -> dict[str, NDArray[Any]]:
    return {
        "clients": np.array([1, 4]),
        "client/gates": GATES * (1 if number else 0.5),
        "client/sparsity": np.array([0.45, 0.25], dtype=np.float32),
    }


def prepare(
    path: Path, tensors: Arrays, sparsity: Any = 0.5, rounds: tuple[int, ...] = (0, 2, 4, 6, 8)
) -> None:
    """Give pFedGate's trials of a run gating layers and gates."""
    experiment = json.loads((path / "experiment.json").read_text())
    for method in experiment["methods"]:
        if method["name"] == "pfedgate":
            method["sparsity"] = sparsity
    (path / "experiment.json").write_text(json.dumps(experiment))
    for trial in (path / "methods/pfedgate").iterdir():
        save_file(dict(tensors), trial / "private.safetensors")
        for number in rounds:
            save_file(observed(number), trial / f"diagnostics-{number:06d}.safetensors")


def prepared(path: Path, tensors: Arrays, **options: Any) -> Entry:
    prepare(path, tensors, **options)
    (entry,) = entries([read(path)])
    return entry


@pytest.fixture
def gated(make_run: MakeRun) -> Path:
    return make_run(methods=("pfedgate",))


def clustering(entry: Entry) -> Figure | None:
    return gating_layers([entry], 0, groups([entry]))


def gates(entry: Entry) -> Figure | None:
    return gates_by_round([entry], 0, groups([entry]))


def leaves(entry: Entry) -> list[int]:
    figure = clustering(entry)
    assert figure is not None
    return [int(leaf["name"]) for leaf in figure.charts[0].rows["leaves"]]


def test_clients_with_like_gating_layers_stand_side_by_side(gated: Path) -> None:
    order = leaves(prepared(gated, private()))
    assert sorted(order) == [0, 1, 3, 4, 5]
    assert len({int(GROUP[k]) for k in order[:2]}) == 1
    assert np.count_nonzero(np.diff(GROUP[order])) == 1


def test_every_tensor_counts_whatever_its_scale(gated: Path) -> None:
    tensors = private()
    tensors["gate.linear.weight"][:] = 3.0
    order = leaves(prepared(gated, tensors))
    assert np.count_nonzero(np.diff(GROUP[order])) == 1


def test_joins_have_the_heights_of_wards_method(gated: Path) -> None:
    tensors = {"__seen__": SEEN, "gate.linear.weight": np.zeros((6, 1, 1), np.float32)}
    x = np.array([0, 1, 0, 4, 9, 20], dtype=np.float64)  # client 2 never took part
    tensors["gate.linear.weight"][:, 0, 0] = x
    figure = clustering(prepared(gated, tensors))
    assert figure is not None
    heights = sorted(top["y"] for top in figure.charts[0].rows["tops"])
    # the joins' distance is sqrt(2 |a| |b| / (|a| + |b|)) times that of the means
    joins = [(1, 1, 1.0), (2, 1, 3.5), (3, 1, 9 - 5 / 3), (4, 1, 20 - 14 / 4)]
    ward = [np.sqrt(2 * a * b / (a + b)) * apart for a, b, apart in joins]
    assert heights == pytest.approx(np.array(ward) / x[[0, 1, 3, 4, 5]].std(), rel=1e-3)


def test_the_caption_says_how_far_labels_agree(gated: Path) -> None:
    tensors = private()
    labels = np.array([0, 0, 0, 1, 1, 1])  # as the partition's
    for name in ("gate.linear.weight", "gate.post.weight"):
        tensors[name] = np.broadcast_to(labels[:, None, None], tensors[name].shape).astype("f4")
    figure = clustering(prepared(gated, tensors))
    assert figure is not None
    assert "10 pairs" in figure.caption
    assert "rank correlation of 1.00" in figure.caption


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_clients_are_no_cluster(gated: Path, count: int) -> None:
    tensors = private() | {"__seen__": (np.arange(6) < count).astype(np.uint8)}
    assert clustering(prepared(gated, tensors)) is None


def test_the_axis_starts_near_the_lowest_join(gated: Path) -> None:
    tensors = private() | {"__seen__": np.array([1, 1, 0, 0, 0, 0], dtype=np.uint8)}
    for found, starts_above in ((tensors, True), (private(), False)):
        figure = clustering(prepared(gated, found))
        assert figure is not None
        tree = figure.charts[0]
        low = tree.spec["layer"][0]["encoding"]["y"]["scale"]["domainMin"]
        assert (low > 0) == starts_above
        assert low < min(top["y"] for top in tree.rows["tops"])
        assert ("starts above 0" in figure.caption) == starts_above


def test_a_run_without_labels_has_the_tree_alone(make_run: MakeRun) -> None:
    figure = clustering(prepared(make_run(methods=("pfedgate",), is_lm=True), private()))
    assert figure is not None
    assert len(figure.charts) == 1
    assert "labels" not in figure.caption


def test_missing_tensors_are_refused(gated: Path) -> None:
    entry = prepared(gated, {"__seen__": SEEN, "gate.budget": np.arange(6)})
    with pytest.raises(InputError, match=r"no tensors of a gating layer"):
        clustering(entry)
    trial = entry.trials[0].folder
    save_file({"gate.linear.weight": np.zeros((6, 2))}, trial / "private.safetensors")
    with pytest.raises(InputError, match="lacks the tensors __seen__"):
        clustering(entry)
    (trial / "private.safetensors").write_bytes(b"\x00")
    with pytest.raises(InputError, match="is damaged"):
        tensor_names(trial / "private.safetensors")
    (trial / "private.safetensors").unlink()
    assert clustering(entry) is None  # over Flower it lies at the sites, and has no checksum here
    commit = replace(entry.trials[0].commit, checksums={"private": "0"})
    entry = replace(entry, trials=[replace(entry.trials[0], commit=commit)])
    with pytest.raises(InputError, match=r"private\.safetensors is missing"):
        clustering(entry)
    save_file({"clients": np.array([1])}, trial / "diagnostics-000004.safetensors")
    with pytest.raises(InputError, match="round 4 lacks client/gates, client/sparsity"):
        gates(entry)


def test_the_budget_must_be_known(gated: Path) -> None:
    with pytest.raises(InputError, match="no sparsity for 'pfedgate'"):
        gates(prepared(gated, private(), sparsity=None))


@pytest.mark.parametrize("sparsity", ["0.5", [0.5, "x"], [], -1, True, {}, float("nan")])
def test_a_sparsity_of_another_type_is_refused(gated: Path, sparsity: Any) -> None:
    with pytest.raises(InputError, match=r"experiment\.json: methods\.pfedgate: sparsity"):
        gates(prepared(gated, private(), sparsity=sparsity))


def test_a_run_not_evaluated_yet_has_no_gates(gated: Path) -> None:
    assert gates(prepared(gated, private(), rounds=())) is None
