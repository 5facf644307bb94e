"""The pictures of methods without scripts show the values of the last round."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fedtailor.report import save_figures
from fedtailor.report.charts.content import groups
from fedtailor.report.charts.pictures import pictures
from fedtailor.report.charts.still import still
from fedtailor.report.read import read_all
from fedtailor.report.select import entries

MakeRun = Callable[..., Path]


def _write(run: Path, method: str, when: int, name: str, values: np.ndarray) -> None:
    tensors = {f"client/{name}": values.astype(np.float32), "clients": np.arange(len(values))}
    save_file(tensors, run / f"methods/{method}/seed-0/diagnostics-{when:06d}.safetensors")


def test_dots_are_the_clients_of_the_last_round_the_largest_first(make_run: MakeRun) -> None:
    run = make_run(methods=("apfl",), seeds=(0,))
    last = np.array([0.2, 0.9, 0.4])
    for when, values in ((2, np.full(3, 0.5)), (4, last)):
        _write(run, "apfl", when, "mix", values)
    found = entries(read_all([run]))
    of = groups(found)
    drawing = still(pictures(found, of), of, "apfl")
    (axis,) = drawing.figure.axes
    np.testing.assert_allclose(axis.lines[0].get_ydata(), [0.9, 0.4, 0.2], atol=1e-4)
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "2", "0"]
    assert drawing.title.endswith(": apfl")
    names = [path.name for path in save_figures(run, run / "figures")]
    assert "apfl-clients-by-round.svg" in names


def test_blocks_that_are_left_out_stay_empty_in_a_map(make_run: MakeRun) -> None:
    run = make_run(methods=("pfedgate",), seeds=(0,))
    gates = np.array([[0.0, 1.5, 0.5], [1.0, 0.0, 2.0]])
    _write(run, "pfedgate", 4, "gates", gates)
    found = entries(read_all([run]))
    of = groups(found)
    (picture,) = pictures(found, of)
    axis = still([picture], of, "pfedgate").figure.axes[0]
    shown = np.ma.filled(axis.images[0].get_array(), np.nan)  # [blocks, clients]
    expected = np.where(gates == 0, np.nan, gates)[picture["clients"]].T
    np.testing.assert_allclose(shown, expected, atol=1e-4)


def test_ids_of_methods_whose_names_look_alike_differ(make_run: MakeRun) -> None:
    first, second = (make_run(name, methods=("apfl",), seeds=(0,)) for name in ("a b", "a-b"))
    for run in (first, second):
        _write(run, "apfl", 4, "mix", np.array([0.2, 0.9]))
    names = [path.name for path in save_figures([first, second], first / "figures")]
    assert len(names) == len(set(names)) == len(list((first / "figures").iterdir()))
