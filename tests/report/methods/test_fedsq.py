"""FedSQ's figures draw what the logs say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.report.methods.fedsq import mask_agreement, rounds_to_best
from fedtailor.report.page import write
from fedtailor.report.read import read
from fedtailor.report.select import Entry, entries
from tests.report.conftest import correct

MakeRun = Callable[..., Path]


def agreement(seed: int, number: int) -> np.ndarray:
    """``[5 clients, 3 activations]``."""
    drawn = np.random.default_rng((seed, number)).uniform(size=(5, 3))
    return (1 - 0.1 * drawn).astype(np.float32)


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    path = make_run(methods=("fedavg", "fedsq"))
    for seed in (0, 1):
        for number in (2, 4, 10):  # round 10 was not committed
            shown = {"client/agreement": agreement(seed, number), "clients": np.arange(5)}
            folder = path / "methods" / "fedsq" / f"seed-{seed}"
            save_file(shown, folder / f"diagnostics-{number:06d}.safetensors")
    return path


def entry(path: Path) -> Entry:
    (found,) = (one for one in entries([read(path)]) if one.method == "fedsq")
    return found


def test_agreement_is_the_mean_over_clients_and_seeds(run: Path) -> None:
    drawing = mask_agreement(entry(run))
    assert drawing is not None
    lines = drawing.figure.axes[0].get_lines()
    assert len(lines) == 3
    for at, line in enumerate(lines):
        means = [np.mean([agreement(seed, n)[:, at] for seed in (0, 1)]) for n in (2, 4)]
        assert line.get_xdata() == pytest.approx([0, 2, 4])
        assert line.get_ydata() == pytest.approx([100, *(100 * mean for mean in means)])


def test_the_first_round_with_the_best_validation_is_marked(run: Path) -> None:
    drawing = rounds_to_best(entry(run))
    assert drawing is not None
    for label in ("fedavg", "fedsq"):
        best = []
        for seed in (0, 1):
            means = {
                number: np.mean(correct(label, seed, "validation", number, "personal"))
                for number in range(0, 9, 2)
            }
            best.append(
                (min(n for n in means if means[n] == max(means.values())), max(means.values()))
            )
        number, value = np.mean(best, axis=0)
        texts = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
        assert f"{label}: {100 * value:.1f}% at round {number:.3g}" in texts
    marked = [line for line in drawing.figure.axes[0].get_lines() if line.get_linestyle() == "None"]
    assert len(marked) == 4  # two methods, two seeds


def test_without_gated_activations_the_page_has_one_figure_less(
    make_run: MakeRun, run: Path, tmp_path: Path
) -> None:
    bare = make_run("bare", methods=("fedsq",))
    assert mask_agreement(entry(bare)) is None
    out = tmp_path / "page.html"
    for path, shown in ((bare, 0), (run, 1)):
        write([path], out)
        assert out.read_text().count("<h2>How well the fixed masks still fit: fedsq</h2>") == shown
        assert "<h2>Rounds to the best of fedsq and of the other methods</h2>" in out.read_text()
