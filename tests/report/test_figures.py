"""The figures of every comparison draw what the logs say."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedtailor.report.figures import ahead, confusion, convergence, cost, distribution, labels
from fedtailor.report.read import read
from fedtailor.report.select import Entry, entries
from fedtailor.report.table import table
from tests.report.conftest import correct, hold

MakeRun = Callable[..., Path]
Expected = Callable[[str, int, str], NDArray[np.float64]]
METHODS = ("fedavg", "local")


@pytest.fixture
def shown(make_run: MakeRun) -> list[Entry]:
    return entries([read(make_run(methods=METHODS))])


def split_lines(axis: Axes) -> tuple[list[Line2D], list[Line2D]]:
    """An axis' curves, and the marks on them."""
    lines = axis.get_lines()
    curves = [line for line in lines if line.get_linestyle() != "None"]
    return curves, [line for line in lines if line not in curves]


def mean_accuracy(label: str, seed: int, split: str, number: int) -> float:
    """In percent, over the clients with examples."""
    values = correct(label, seed, split, number, "personal")
    return 100 * float(np.mean([value for value in values if value is not None]))


def test_curves_are_means_over_clients_and_seeds_and_marks_the_reported_rounds(
    shown: list[Entry],
) -> None:
    drawing = convergence(shown, "accuracy")
    for axis, split in zip(drawing.figure.axes, ("validation", "test"), strict=True):
        assert axis.get_title() == split
        curves, marks = split_lines(axis)
        for label, curve in zip(METHODS, curves, strict=True):
            values = [
                np.mean([mean_accuracy(label, seed, split, number) for seed in (0, 1)])
                for number in range(0, 9, 2)
            ]
            assert list(curve.get_xdata()) == [0, 2, 4, 6, 8]
            np.testing.assert_allclose(curve.get_ydata(), values)
        assert [mark.get_xdata().tolist() for mark in marks] == [[4]] * len(METHODS)  # the best
        for curve, mark in zip(curves, marks, strict=True):
            assert mark.get_ydata() == curve.get_ydata()[2]
    names = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert names == list(METHODS)


def test_every_clients_result_is_a_dot_and_the_curves_sort_them(
    shown: list[Entry], expected: Expected
) -> None:
    box, curve = distribution(shown, "accuracy").figure.axes
    for label, dots, line in zip(METHODS, box.collections, curve.get_lines(), strict=True):
        results = np.sort(100 * expected(label, 4, "personal").ravel())
        np.testing.assert_allclose(dots.get_offsets()[:, 0], results)
        y = np.asarray(line.get_ydata())
        np.testing.assert_allclose(y, np.percentile(results, np.linspace(0, 100, len(results))))
    assert [tick.get_text() for tick in box.get_yticklabels()] == list(METHODS)


def test_costs_are_the_bytes_of_a_client_until_the_reported_round(
    shown: list[Entry], expected: Expected
) -> None:
    (axis,) = cost(shown, "accuracy", ["bytes"]).figure.axes
    for at, (label, traffic) in enumerate(zip(METHODS, (4 * 12_000 / 6, 0.0), strict=True)):
        seeds, mean = axis.collections[2 * at : 2 * at + 2]
        results = 100 * expected(label, 4, "personal").mean(1)
        np.testing.assert_allclose(seeds.get_offsets(), [(traffic, result) for result in results])
        np.testing.assert_allclose(mean.get_offsets(), [(traffic, results.mean())])


def test_each_cost_has_an_axis_with_the_front(shown: list[Entry], expected: Expected) -> None:
    bytes_, flops, cpu, _ = cost(shown, "accuracy", ("bytes", "flops", "cpu")).figure.axes
    results = [100 * expected(label, 4, "personal").mean() for label in METHODS]
    # 4 rounds of 3 steps, over 6 clients; 8 rounds of 1.5 processor seconds
    for axis, spent in ((bytes_, (8000, 0)), (flops, (12_000, 12_000)), (cpu, (12, 12))):
        means = [axis.collections[at].get_offsets()[0] for at in (1, 3)]
        np.testing.assert_allclose(means, list(zip(spent, results, strict=True)))
        (line,) = axis.get_lines()
        assert results[0] > results[1]
        on_front = [1, 0] if axis is bytes_ else [0]  # by cost
        np.testing.assert_allclose(line.get_xdata(), [spent[k] for k in on_front])
        np.testing.assert_allclose(line.get_ydata(), [results[k] for k in on_front])


def test_leads_over_training_alone_have_their_intervals(make_run: MakeRun) -> None:
    comparison = table([read(make_run(methods=("fedavg", "local", "fedsdg")))])
    drawing = ahead(comparison, ["fedsdg", "local", "fedavg"])
    assert drawing is not None
    (axis,) = drawing.figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["fedsdg", "fedavg"]
    (verdict,) = comparison.verdicts
    found = {one.method: one for one in verdict.against_alone}
    points = axis.get_lines()[1:]
    for line, interval in zip(points, axis.collections, strict=True):
        one = found[["fedsdg", "fedavg"][int(line.get_ydata()[0])]]
        assert line.get_xdata()[0] == pytest.approx(100 * one.value)
        ends = interval.get_segments()[0][:, 0]
        np.testing.assert_allclose(ends, [100 * one.low, 100 * one.high])
    assert ahead(table([read(make_run("b", methods=("fedavg",)))]), ["fedavg"]) is None


def test_labels_are_counted_by_client_and_class_in_the_order_of_the_clusters(
    make_run: MakeRun,
) -> None:
    run = make_run(seeds=(0,))
    counts = np.array([[60, 0, 0], [50, 0, 0], [40, 0, 0], *[[0, 10, 20]] * 3], dtype=np.float64)
    for clusters, order in ((None, range(6)), ([1, 0, 1, 0, 1, 0], (1, 3, 5, 0, 2, 4))):
        hold(run, 0, clusters=clusters)
        drawing = labels(read(run))
        (image,) = drawing.figure.axes[0].images
        shown = np.ma.filled(np.ma.asarray(image.get_array()), np.nan)
        np.testing.assert_allclose(np.nan_to_num(shown), counts[list(order)].T)
        ticks = drawing.figure.axes[0].get_xticklabels()
        assert [int(tick.get_text()) for tick in ticks] == list(order)
        assert ("cluster" in drawing.caption) == (clusters is not None)


def test_a_language_models_clients_are_shown_by_their_number_of_examples(
    make_run: MakeRun,
) -> None:
    drawing = labels(read(make_run(seeds=(0,), is_lm=True)))
    (area,) = drawing.figure.axes[0].collections
    heights = area.get_paths()[0].vertices[:, 1]
    assert heights.max() == 60
    assert drawing.figure.axes[0].get_ylabel() == "training examples"


def test_the_confusion_is_that_of_the_reported_rounds(make_run: MakeRun) -> None:
    run = make_run()
    assert confusion(entries([read(run)])[0]) is None
    for seed in (0, 1):
        counts = np.zeros((6, 3, 3), np.int32)
        counts[:, 0, 2] = 1 + seed
        for number, factor in ((4, 1), (8, 100)):  # round 4 is reported
            name = f"confusion-{number:06d}.safetensors"
            path = run / "methods/fedsdg" / f"seed-{seed}" / name
            save_file({"personal/test": factor * counts, "personal/clients": np.arange(6)}, path)
    drawing = confusion(entries([read(run)])[1])
    assert drawing is not None
    axis = drawing.figure.axes[0]
    assert [text.get_text() for text in axis.texts] == ["18"]  # six clients with two seeds
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b", "c"]
