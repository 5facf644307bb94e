"""FedMerge's heat map of merging weights: what is drawn, from run directories written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report.drawing import Drawing
from fedtailor.report.methods.fedmerge import weight_heat_map
from fedtailor.report.page import write
from fedtailor.report.read import read
from fedtailor.report.select import entries
from tests.report.conftest import hold

MakeRun = Callable[..., Path]
CLIENTS = np.array([0, 1, 2, 4, 5])  # client 3 is not evaluated
ROUNDS = (2, 4, 6, 7, 8)
CLUSTERS = [1, 0, 1, 0, 0, 2]


def weights(number: int, seed: int) -> NDArray[np.float32]:
    """``[5, 3]``, different in every round."""
    a = np.random.default_rng(seed).normal(size=(len(CLIENTS), 3)) * number
    e = np.exp(a - a.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)).astype(np.float32)


def observe(run: Path, fixed: bool = False) -> None:
    for seed in (0, 1):
        folder = run / "methods" / "fedmerge" / f"seed-{seed}"
        for number in (*ROUNDS, 99):  # 99 was never committed
            w = weights(ROUNDS[0] if fixed else number, seed)
            found = {"server/weights": w, "server_clients": CLIENTS}
            save_file(found, folder / f"diagnostics-{number:06d}.safetensors")


def group(run: Path, clusters: list[int] | None) -> None:
    for seed in (0, 1):
        hold(run, seed, clusters=clusters)


def drawn(run: Path) -> Drawing:
    return weight_heat_map(entries([read(run)])[0])


def column_chunks(figure: Figure) -> list[tuple[str, NDArray[np.float64], int]]:
    """(title, values, borders) of every map, in order."""
    return [
        (axis.get_title(), np.asarray(axis.images[0].get_array()), len(axis.lines) // 2)
        for axis in figure.axes
        if axis.get_title()
    ]


def test_rounds_stand_side_by_side_and_clients_by_cluster(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",))
    observe(run)
    group(run, CLUSTERS)
    drawing = drawn(run)
    found = column_chunks(drawing.figure)
    assert [title for title, _, _ in found] == ["round 2", "round 4", "round 7", "round 8"] * 2
    order = [1, 3, 0, 2, 4]  # clients 1, 4; 0, 2; 5
    for at, (_, values, borders) in enumerate(found):
        expected = weights((2, 4, 7, 8)[at % 4], at // 4)[order]
        np.testing.assert_allclose(values, expected)
        assert borders == 2
    first = drawing.figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["1", "4", "0", "2", "5"]
    assert first.get_ylabel() == "seed 0: 5 clients"
    assert drawing.figure.axes[4].get_ylabel() == "seed 1: 5 clients"
    low = min(values.min() for _, values, _ in found)
    high = max(values.max() for _, values, _ in found)
    images = [axis.images[0] for axis in drawing.figure.axes[:8]]
    assert {image.get_clim() for image in images} == {(low, high)}
    assert {image.norm.vcenter for image in images} == {1 / found[0][1].shape[1]}
    assert "true cluster" in drawing.caption
    assert f"from {low:.3f} to {high:.3f}" in drawing.caption


def test_without_clusters_clients_stand_by_their_strongest_model(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",))
    observe(run)
    drawing = drawn(run)
    for at in (3, 7):  # the last round of each seed
        _, values, borders = column_chunks(drawing.figure)[at]
        strongest = values.argmax(1).tolist()
        assert strongest == sorted(strongest)
        assert borders == 0
    assert "strongest model" in drawing.caption


def test_weights_that_never_change_are_shown_once(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",))
    observe(run, fixed=True)
    drawing = drawn(run)
    assert [title for title, _, _ in column_chunks(drawing.figure)] == ["round 8"] * 2
    assert "never change" in drawing.caption


def test_the_page_has_the_map(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(methods=("fedmerge",))
    empty = drawn(run).figure
    assert column_chunks(empty) == []
    assert [text.get_text() for text in empty.texts] == ["no round is evaluated yet"]
    observe(run)
    write([run], tmp_path / "page.html")
    assert "Merging weights of fedmerge" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_an_observation_without_weights_is_refused(make_run: MakeRun) -> None:
    run = make_run(methods=("fedmerge",))
    observe(run)
    path = run / "methods" / "fedmerge" / "seed-0" / "diagnostics-000004.safetensors"
    save_file({"server_clients": CLIENTS}, path)
    with pytest.raises(InputError, match="round 4 lacks server/weights"):
        drawn(run)
