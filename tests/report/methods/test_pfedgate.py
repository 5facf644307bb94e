import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.image import AxesImage
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report import drawing
from fedtailor.report.methods import FIGURES
from fedtailor.report.methods.pfedgate import clustering, gates_by_round
from fedtailor.report.read import read
from fedtailor.report.select import Entry, entries
from fedtailor.report.tensors import tensor_names
from tests.report.conftest import hold

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


def leaves(entry: Entry) -> list[int]:
    return [int(tick.get_text()) for tick in clustering(entry).figure.axes[1].get_xticklabels()]


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
    tree = clustering(prepared(gated, tensors)).figure.axes[0]
    heights = sorted(max(line.get_ydata()) for line in tree.lines)
    # the joins' distance is sqrt(2 |a| |b| / (|a| + |b|)) times that of the means
    joins = [(1, 1, 1.0), (2, 1, 3.5), (3, 1, 9 - 5 / 3), (4, 1, 20 - 14 / 4)]
    ward = [np.sqrt(2 * a * b / (a + b)) * apart for a, b, apart in joins]
    assert heights == pytest.approx(np.array(ward) / x[[0, 1, 3, 4, 5]].std(), rel=1e-5)


def test_the_strip_shows_shares_of_labels_in_the_tree_s_order(gated: Path) -> None:
    entry = prepared(gated, private())
    order = leaves(entry)
    (image,) = clustering(entry).figure.axes[1].get_images()
    assert isinstance(image, AxesImage)
    shown = np.ma.filled(np.ma.asarray(image.get_array()), np.nan).T
    labels = np.array([[60, 0, 0], [50, 0, 0], [40, 0, 0], *[[0, 10, 20]] * 3])[order]
    np.testing.assert_allclose(np.nan_to_num(shown), labels / labels.sum(1, keepdims=True))


def test_the_caption_says_how_far_labels_agree(gated: Path) -> None:
    tensors = private()
    labels = np.array([0, 0, 0, 1, 1, 1])  # as the partition's
    for name in ("gate.linear.weight", "gate.post.weight"):
        tensors[name] = np.broadcast_to(labels[:, None, None], tensors[name].shape).astype("f4")
    drawn = clustering(prepared(gated, tensors))
    assert "10 pairs" in drawn.caption
    assert "rank correlation of 1.00" in drawn.caption
    assert drawn.figure.axes[1].get_xlabel() == "clients: 5; left out, never took part: 1"


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_clients_are_no_cluster(gated: Path, count: int) -> None:
    tensors = private() | {"__seen__": (np.arange(6) < count).astype(np.uint8)}
    drawn = clustering(prepared(gated, tensors))
    assert f"took part: {count};" in drawn.figure.axes[0].texts[0].get_text()
    assert not drawn.figure.axes[0].lines
    assert "correlation" not in drawn.caption
    drawing.svg(drawn, "one")


def test_the_axis_starts_near_the_lowest_join(gated: Path) -> None:
    tensors = private() | {"__seen__": np.array([1, 1, 0, 0, 0, 0], dtype=np.uint8)}
    drawn = clustering(prepared(gated, tensors))
    (line,) = drawn.figure.axes[0].lines
    assert 0 < drawn.figure.axes[0].get_ylim()[0] < max(line.get_ydata())
    assert "starts above 0" in drawn.caption
    assert "starts above 0" not in clustering(prepared(gated, private())).caption


def test_a_run_without_labels_has_the_tree_alone(make_run: MakeRun) -> None:
    entry = prepared(make_run(methods=("pfedgate",), is_lm=True), private())
    drawn = clustering(entry)
    assert len(drawn.figure.axes) == 1
    assert "labels" not in drawn.caption


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
        gates_by_round(entry)


def test_histograms_hold_the_kept_gates_and_the_rest_is_dropped(gated: Path) -> None:
    figure = gates_by_round(prepared(gated, private())).figure
    column_chunks = [axis for axis in figure.axes if axis.get_title().startswith("round")]
    assert [axis.get_title().split()[1] for axis in column_chunks] == ["0", "2", "4", "6", "8"]
    for axis, factor in zip(column_chunks, (0.5, 1, 1, 1, 1), strict=True):
        shares, edges, _ = axis.patches[0].get_data()
        expected, _ = np.histogram(factor * GATES[GATES > 0].astype(np.float64), edges)
        np.testing.assert_allclose(shares, 10.0 * expected)
        assert sum(shares) == pytest.approx(50)
        assert axis.get_ylim()[1] >= max(shares)
        assert axis.get_title().endswith("50 % dropped")


def test_of_many_rounds_six_are_drawn(make_run: MakeRun) -> None:
    path = make_run(methods=("pfedgate",), rounds=20)
    entry = prepared(path, private(), rounds=(*range(0, 21, 2), 22))  # 22: not committed
    titles = [axis.get_title() for axis in gates_by_round(entry).figure.axes]
    rounds = [int(title.split()[1]) for title in titles if title.startswith("round")]
    assert (len(rounds), rounds[0], rounds[-1]) == (6, 0, 20)


def test_achieved_sparsity_stands_beside_each_client_s_budget(gated: Path) -> None:
    figure = gates_by_round(prepared(gated, private(), sparsity=[0.3, 0.5])).figure
    dropped, achieved = figure.axes[-2:]
    np.testing.assert_allclose(dropped.lines[0].get_ydata(), [50] * 5)
    lines = {str(line.get_label()): line.get_ydata() for line in achieved.lines}
    np.testing.assert_allclose(lines["s = 0.5"], [0.45] * 5, rtol=1e-6)  # client 1
    np.testing.assert_allclose(lines["s = 0.3"], [0.25] * 5, rtol=1e-6)  # client 4
    levels = [line.get_ydata()[0] for line in achieved.lines if line.get_linestyle() == "--"]
    assert levels == [0.3, 0.5]


def test_the_budget_must_be_known(gated: Path) -> None:
    with pytest.raises(InputError, match="no sparsity for 'pfedgate'"):
        gates_by_round(prepared(gated, private(), sparsity=None))


@pytest.mark.parametrize("sparsity", ["0.5", [0.5, "x"], [], -1, True, {}, float("nan")])
def test_a_sparsity_of_another_type_is_refused(gated: Path, sparsity: Any) -> None:
    with pytest.raises(InputError, match=r"experiment\.json: methods\.pfedgate: sparsity"):
        gates_by_round(prepared(gated, private(), sparsity=sparsity))


def test_a_run_not_evaluated_yet_says_so(gated: Path) -> None:
    drawn = gates_by_round(prepared(gated, private(), rounds=()))
    assert "no round is evaluated yet" in drawn.figure.texts[0].get_text()


def test_the_figures_are_the_same_each_time(gated: Path) -> None:
    entry = prepared(gated, private())
    assert FIGURES["pfedgate"] == (clustering, gates_by_round)
    for draw in FIGURES["pfedgate"]:
        assert drawing.svg(draw(entry), "one") == drawing.svg(draw(entry), "one")


def test_many_clients_are_drawn_without_their_numbers(gated: Path) -> None:
    K = 120
    file = gated / "partitions/seed-0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "clients": K}))
    sizes = dict.fromkeys(("train", "validation", "test"), [1] * K)
    hold(gated, 0, labels=[[1 + k % 3, 2, 0] for k in range(K)], **sizes)
    x = np.random.default_rng(1).normal(size=(K, 3, 4)).astype(np.float32)
    tensors = {"__seen__": np.ones(K, np.uint8), "gate.linear.weight": x}
    with matplotlib.rc_context(drawing.RC):
        figure = clustering(prepared(gated, tensors)).figure
    assert len(figure.axes[0].lines) == K - 1
    assert not figure.axes[1].get_xticklabels()
