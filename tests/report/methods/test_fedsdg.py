"""FedSDG's heat map of gates, from run directories written by hand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report.methods import FIGURES
from fedtailor.report.methods.fedsdg import gate_heat_map
from fedtailor.report.read import read
from fedtailor.report.select import Entry, entries

MakeRun = Callable[..., Path]
LOGITS = np.linspace(-2, 2, 24, dtype=np.float32).reshape(6, 4)  # as `make_run` writes them
ORDER = [5, 4, 3, 1, 0, 2]  # the strongest mean gate first; client 2 never took part


def entry(run: Path) -> Entry:
    (found,) = entries([read(run)])
    return found


def test_every_clients_gates_are_shown_by_block_the_strongest_client_first(
    make_run: MakeRun,
) -> None:
    drawing = gate_heat_map(entry(make_run(methods=("fedsdg",))))
    assert FIGURES["fedsdg"] == (gate_heat_map,)
    panels = [axis for axis in drawing.figure.axes if axis.get_title()]
    titles = [axis.get_title() for axis in panels]
    assert titles == ["seed 0, after round 8", "seed 1, after round 8"]
    gates = 1 / (1 + np.exp(-LOGITS[ORDER].astype(np.float64)))
    for axis in panels:
        (image,) = axis.images
        shown = np.ma.filled(np.ma.asarray(image.get_array()), np.nan)
        np.testing.assert_allclose(shown[:, :5], gates[:5].T)
        assert np.isnan(shown[:, 5]).all()
        assert [int(tick.get_text()) for tick in axis.get_xticklabels()] == ORDER
        highest = gates[:5].max()
        assert image.get_clim() == pytest.approx((1 - highest, highest))
        assert image.norm.vcenter == 0.5
        (hatched,) = (patch for patch in axis.patches if patch.get_hatch())
        assert hatched.get_x() == 4.5
    assert "They lie between 0.119 and 0.881. Colours go from 0.119 to 0.881." in drawing.caption


def test_gates_that_hardly_differ_stay_pale(make_run: MakeRun) -> None:
    run = make_run(methods=("fedsdg",), seeds=(0,))
    path = run / "methods/fedsdg/seed-0/private.safetensors"
    logits = np.full((6, 4), 0.01, np.float32)
    for seen in (1, 0):
        save_file({"gate_logits": logits, "__seen__": np.full(6, seen, np.uint8)}, path)
        (image,) = gate_heat_map(entry(run)).figure.axes[0].images
        assert image.get_clim() == pytest.approx((0.48, 0.52))


def test_missing_gates_are_refused(make_run: MakeRun) -> None:
    run = make_run(methods=("fedsdg",), seeds=(0,))
    save_file({"__seen__": np.ones(6, np.uint8)}, run / "methods/fedsdg/seed-0/private.safetensors")
    with pytest.raises(InputError, match="lacks the tensors gate_logits"):
        gate_heat_map(entry(run))
