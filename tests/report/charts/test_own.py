"""The charts of single methods: what they show."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.report.charts.content import groups
from fedtailor.report.charts.fedhft import short_names
from fedtailor.report.charts.own import own_figures
from fedtailor.report.select import entries
from fedtailor.store.read import read_all
from tests.report.charts.test_pfedgate import GATES, GROUP, prepare, private
from tests.report.conftest import K

MakeRun = Callable[..., Path]
LAYERS = [f"net.layer.{i}.{part}.dense" for i in (0, 10, 2) for part in ("attention", "output")]
SENT = np.linspace(0, 1, 40)


def observe(run: Path, rounds: tuple[int, ...], *, sent: float = 1.0) -> Path:
    """Give FedHFT's trials of a run what two clusters sent; even clients are in the second one."""
    assigned = np.stack([np.arange(K) % 2 == 1, np.arange(K) % 2 == 0], 1).astype(np.float32)
    for folder in run.glob("methods/fedhft/seed-*"):
        for number in rounds:
            shares = np.tile(np.maximum(SENT, 1 - sent), (2, 1))
            found = {f"server/sent.{name}": shares for name in LAYERS}
            found |= {"server/assignments": assigned, "server_clients": np.arange(K)}
            save_file(found, folder / f"diagnostics-{number:06d}.safetensors")
    return run


def _own(path: Path) -> dict[str, dict]:
    found = entries(read_all([path]))
    return {one["figure"]: one for one in own_figures(found, groups(found))}


def _rows(chart: dict, name: str) -> list[dict]:
    columns = chart["data"][name]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_pfedgates_tree_stands_above_the_labels_of_the_same_clients(make_run: MakeRun) -> None:
    run = make_run(methods=("pfedgate",), seeds=(0,))
    prepare(run, private())
    tree, labels = _own(run)["clustering"]["charts"]
    leaves = _rows(tree, "leaves")
    order = [int(leaf["name"]) for leaf in leaves]
    assert sorted(order) == [0, 1, 3, 4, 5]  # client 2 never took part
    assert np.count_nonzero(np.diff(GROUP[order])) == 1
    assert [leaf["key"] for leaf in leaves] == [f"0:{client}" for client in order]
    assert max(top["clients"] for top in _rows(tree, "tops")) == 5
    cells = _rows(labels, "cells")
    assert {cell["name"] for cell in cells if cell["class"] == "a"} == {"0", "1"}
    assert [cell["share"] for cell in cells if cell["name"] == "4"] == pytest.approx([33.3, 66.7])


def test_pfedgates_histogram_and_dropped_blocks_are_the_whole(make_run: MakeRun) -> None:
    run = make_run(methods=("pfedgate",), seeds=(0,))
    prepare(run, private(), sparsity=[0.5, 0.3])
    figure = _own(run)["gates-by-round"]
    assert figure["rounds"] == [0, 2, 4, 6, 8]
    histogram, lines = figure["charts"]
    last = [bar for bar in _rows(histogram, "chosen") if bar["round"] == 8]
    dropped = 100 * (GATES == 0).mean()
    assert sum(bar["share"] for bar in last) + dropped == pytest.approx(100)
    assert all(any(bar["from"] <= g <= bar["to"] for bar in last) for g in GATES[GATES > 0])
    of_last = {row["series"]: row["value"] for row in _rows(lines, "lines") if row["round"] == 8}
    assert of_last == {
        "blocks left out": pytest.approx(dropped),
        "parameters kept (at most 30 %)": pytest.approx(45),  # client 1
        "parameters kept (at most 50 %)": pytest.approx(25),  # client 4
    }


def test_fedhfts_rows_are_shown_unless_all_are_sent(make_run: MakeRun) -> None:
    run = observe(make_run(methods=("fedhft",), seeds=(0,)), (2, 4))
    figure = _own(run)["kept-rows"]
    sent, alike, layers = (_rows(c, n) for c, n in zip(
        figure["charts"], ("lines", "lines", "chosen"), strict=True))  # fmt: skip
    assert {(row["series"], row["round"]) for row in sent} == {
        ("0", 2), ("1", 2), ("0", 4), ("1", 4)
    }  # fmt: skip
    assert all(row["value"] == pytest.approx(50) for row in sent)  # shares go evenly from 0 to 1
    assert all(row["value"] == pytest.approx(20) for row in alike)
    assert len(layers) == 2 * 2 * 6
    names = [row["layer"] for row in layers][:6]
    assert names == [f"{i}.{part}" for i in (0, 2, 10) for part in ("attention", "output")]
    assert not _own(observe(make_run("all", methods=("fedhft",), seeds=(0,)), (2,), sent=0.0))
    assert not _own(make_run("new", methods=("fedhft",)))  # nothing evaluated yet
    where = run / "methods/fedhft/seed-0/diagnostics-000002.safetensors"
    save_file({"server_clients": np.arange(K)}, where)
    with pytest.raises(InputError, match="round 2 lacks server/sent"):
        _own(run)


def test_paths_are_cut_down_to_what_tells_them_apart() -> None:
    assert short_names(["a.b.dense"]) == ["dense"]
    ends = ("attention.output.dense", "output.dense")
    assert short_names([f"bert.{i}.{end}" for i in (0, 1) for end in ends]) == [
        "0.attention.output", "0.output", "1.attention.output", "1.output",
    ]  # fmt: skip
