"""What the figures of FedHFT show, from run directories."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report.drawing import Drawing
from fedtailor.report.methods.fedhft import kept_rows, short_names
from fedtailor.report.page import write
from fedtailor.report.read import read
from fedtailor.report.select import Entry, entries

K, C = 6, 2
LAYERS = [f"net.layer.{i}.{part}.dense" for i in (0, 10, 2) for part in ("attention", "output")]
SENT = np.linspace(0, 1, 40)

MakeRun = Callable[..., Path]


def p_after(number: int) -> NDArray[np.float32]:
    """Even clients go to cluster 1, odd ones to cluster 0, the further the later."""
    to_one = 0.5 + (0.05 * number) * (-1.0) ** np.arange(K)
    return np.stack([1 - to_one, to_one], 1).astype(np.float32)


def observe(run: Path, rounds: tuple[int, ...], *, clusters: int = C, sent: float = 1.0) -> Path:
    for folder in run.glob("methods/fedhft/seed-*"):
        for number in rounds:
            found = {
                f"server/sent.{n}": np.tile(np.maximum(SENT, 1 - sent), (clusters, 1))
                for n in LAYERS
            }
            found["server/assignments"] = p_after(number)[:, :clusters]
            found["server_clients"] = np.arange(K)
            save_file(found, folder / f"diagnostics-{number:06d}.safetensors")
    return run


def entry(run: Path) -> Entry:
    (found,) = entries([read(run)])
    return found


def pictures(drawing: Drawing | None) -> list[NDArray[np.float64]]:
    assert drawing is not None
    return [np.asarray(axis.images[0].get_array()) for axis in drawing.figure.axes if axis.images]


def test_rows_are_sorted_in_each_layer_and_layers_stand_in_the_models_order(
    make_run: MakeRun,
) -> None:
    run = observe(make_run(methods=("fedhft",)), (2, 8))
    drawing = kept_rows(entry(run))
    maps = pictures(drawing)
    assert len(maps) == 2 * C  # seeds and clusters
    assert maps[0].shape[1] == len(LAYERS)
    np.testing.assert_allclose(maps[0][:, 0], np.linspace(1, 0, len(maps[0])), atol=1e-9)
    assert drawing is not None
    names = [text.get_text() for text in drawing.figure.axes[0].get_xticklabels()]
    assert names == [f"{i}.{part}" for i in (0, 2, 10) for part in ("attention", "output")]


def test_paths_are_cut_down_to_what_tells_them_apart() -> None:
    assert short_names(["a.b.dense"]) == ["dense"]
    ends = ("attention.output.dense", "output.dense")
    assert short_names([f"bert.{i}.{end}" for i in (0, 1) for end in ends]) == [
        "0.attention.output", "0.output", "1.attention.output", "1.output",
    ]  # fmt: skip


def test_there_is_nothing_to_show_without_a_mask(make_run: MakeRun) -> None:
    run = make_run(methods=("fedhft",))
    assert kept_rows(entry(run)) is None  # nothing evaluated yet
    observe(run, (2,), clusters=1, sent=0.0)
    assert kept_rows(entry(run)) is None
    observe(run, (2,), clusters=1, sent=0.5)
    assert kept_rows(entry(run)) is not None


def test_what_is_missing_is_named(make_run: MakeRun) -> None:
    run = make_run(methods=("fedhft",), seeds=(0,))
    folder = run / "methods" / "fedhft" / "seed-0"
    save_file({"server_clients": np.arange(K)}, folder / "diagnostics-000002.safetensors")
    with pytest.raises(InputError, match=r"round 2 lacks server/sent"):
        kept_rows(entry(run))


def test_the_page_holds_both_figures(make_run: MakeRun, tmp_path: Path) -> None:
    run = observe(make_run(methods=("fedavg", "fedhft")), (2, 8))
    text = write([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Which cluster each client belongs to: fedhft</h2>" in text
    assert "<h2>Rows sent by fedhft</h2>" in text
