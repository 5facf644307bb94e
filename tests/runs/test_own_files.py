"""The user's own files in a run directory: a model's factory and metrics."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.errors import InputError
from fedtailor.export.folder import export_model
from fedtailor.export.templates.base import build
from fedtailor.runs.experiment import load
from fedtailor.runs.manifest import open_run
from fedtailor.runs.merge import merge
from fedtailor.runs.run import dry_run
from fedtailor.runs.trained import open_trained
from tests.forked import contents
from tests.small import without_checksum

NET = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
METRIC = """
def share(labels, probabilities):
    return float((labels == 0).mean())
"""
EXPERIMENT = """
rounds = 1
data = {name = "digits", limit = 60, limit_test = 20}
split = {clients = 2, min_examples = 5}
model = {factory = "net.py:net", head = ["1"]}
evaluate = {metrics = ["auc", "metric.py:share"]}
methods.fedavg = {}
methods.local = {}
"""


def experiment(folder: Path) -> Path:
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    (folder / "metric.py").write_text(METRIC)
    (folder / "mine.toml").write_text(EXPERIMENT)
    return folder / "mine.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return experiment(tmp_path / "here")


def change(run: Path, key: str, old: str, new: str) -> None:
    content = json.loads(without_checksum(run / "experiment.json").read_text())
    assert old in json.dumps(content[key])
    content[key] = json.loads(json.dumps(content[key]).replace(old, new))
    (run / "experiment.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_a_run_names_files_without_folders_and_goes_on_from_its_copies(
    file: Path, tmp_path: Path
) -> None:
    run = ft.run(file, tmp_path / "run").path
    text = (run / "experiment.json").read_text()
    assert str(tmp_path) not in text
    content = json.loads(text)
    assert content["model"]["factory"] == "net.py:net"
    assert content["evaluate"]["metrics"] == ["auc", "metric.py:share"]
    assert sorted(content["sources"]) == ["factory/net.py", "metrics/metric.py"]
    shutil.rmtree(file.parent)
    moved = run.rename(tmp_path / "moved")
    ft.run(moved, settings={"rounds": 2})
    assert open_trained(moved, "fedavg").task.state["1.weight"].shape == (10, 64)
    assert "share" in ft.compare(moved, metric="share")
    ft.run(moved, overwrite=True)
    assert (moved / "factory/net.py").read_text() == NET


@pytest.mark.slow
def test_what_a_file_imports_from_its_folder_is_a_part_of_it(file: Path, tmp_path: Path) -> None:
    here = file.parent
    (here / "net.py").write_text("from sizes import *" + NET.replace("(64, 10)", "(PIXELS, 10)"))
    (here / "sizes.py").write_text("import rows\nPIXELS = 8 * rows.ROWS\n")
    (here / "rows.py").write_text("ROWS = 8\n")
    (here / "metric.py").write_text("def share(*given):\n    import rows\n    return rows.ROWS\n")
    run = ft.run(file, tmp_path / "run").path
    (here / "rows.py").write_text("ROWS = 9\n")
    with pytest.raises(InputError, match=r"model\.factory: net\.py has changed since .* was begun"):
        ft.run(file, run, settings={"rounds": 2})
    shutil.rmtree(here)
    assert sorted(path.name for path in (run / "factory").iterdir()) == [
        "net.py", "rows.py", "sizes.py",
    ]  # fmt: skip
    ft.run(run, settings={"rounds": 2})
    assert re.search(r"^fedavg +8\.0", ft.compare(run, metric="share"), re.MULTILINE)
    out = export_model(run, "fedavg", tmp_path / "out")
    assert build(out, json.loads((out / "export.json").read_text())["network"])
    (run / "factory/rows.py").write_text("ROWS = 9\n")
    with pytest.raises(InputError, match=r"net\.py, or one of rows\.py, sizes\.py, has changed"):
        open_run(run)


def test_the_summary_names_the_factory(file: Path) -> None:
    assert dry_run(file).model == "net.py:net"


def test_a_model_in_a_package_is_kept_by_its_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownpackage").mkdir()
    (tmp_path / "ownpackage/network.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"model.factory": "ownpackage.network:net"}
    run = ft.run(file, tmp_path / "run", settings=settings).path
    assert not (run / "factory").exists()
    assert open_run(run).model.factory == "ownpackage.network:net"
    change(run, "sources", hashlib.sha256(NET.encode()).hexdigest(), "0" * 64)
    with pytest.raises(InputError, match=r"model\.factory: ownpackage\.network has changed"):
        open_run(run)


@pytest.mark.slow
def test_runs_of_the_same_files_in_other_folders_are_merged(tmp_path: Path) -> None:
    runs = [
        ft.run(experiment(tmp_path / f"machine{k}"), tmp_path / str(k), part=f"{k}/2").path
        for k in (1, 2)
    ]
    out = merge(runs, tmp_path / "out")
    assert open_run(out).model.factory == f"{out / 'factory/net.py'}:net"
    ft.run(out)


@pytest.mark.parametrize(
    ("name", "key", "copy"),
    [
        ("net.py", "model.factory", "factory/net.py"),
        ("metric.py", "evaluate.metrics", "metrics/metric.py"),
    ],
)
def test_a_changed_file_is_refused_by_name_and_the_run_stays_as_it_is(
    file: Path, tmp_path: Path, name: str, key: str, copy: str
) -> None:
    run = ft.run(file, tmp_path / "run").path
    before = contents(run)
    with (file.parent / name).open("a") as source:
        source.write("X = 1\n")
    message = rf"{key}: {name} has changed since .*run was begun; restore it \(.*{copy} is a copy"
    with pytest.raises(InputError, match=message):
        ft.run(file, run, settings={"rounds": 2, "seeds": [0, 1]})
    assert contents(run) == before
    (run / copy).write_text((file.parent / name).read_text())
    with pytest.raises(InputError, match=rf"{key}: .*{copy} has changed: its sha256 was"):
        open_run(run)


def test_a_run_that_was_killed_before_it_was_one_begins_anew(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "factory").mkdir(parents=True)
    (run / "factory/net.py").write_text("an older one")
    (run / "metrics").mkdir()
    (run / "metrics/metric.py.new").write_text("a part")
    ft.run(file, run)
    assert (run / "factory/net.py").read_text() == NET
    assert open_run(run).rounds == 1


def test_two_files_of_one_name_are_refused(file: Path, tmp_path: Path) -> None:
    (file.parent / "other").mkdir()
    (file.parent / "other/metric.py").write_text(METRIC.replace("share", "part"))
    metrics = ["metric.py:share", "other/metric.py:part"]
    with pytest.raises(InputError, match=r"metric\.py differ, and both would be copied to"):
        ft.run(file, tmp_path / "run", settings={"evaluate.metrics": metrics})
    assert not (tmp_path / "run").exists()


OUTSIDE = """
from dataclasses import dataclass
from typing import ClassVar

import fedtailor as ft

open({proof!r}, "w").close()

@dataclass(frozen=True)
class Mine(ft.FineTuning):
    name: ClassVar[str] = "mine"
"""


@pytest.mark.slow
@pytest.mark.parametrize("named", ["../../../outside.py", "{}/outside.py", "../outside", "in.py"])
def test_an_opened_run_runs_no_file_but_its_copies(tmp_path: Path, named: str) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "mine.py").write_text(OUTSIDE.format(proof=str(proof)))
    (tmp_path / "mine.toml").write_text(
        EXPERIMENT.replace("methods.fedavg = {}", 'methods.mine = {class = "mine.py:Mine"}')
        .replace(
            'factory = "net.py:net", head = ["1"]',
            'name = "cnn", pretrained = false, image_size = 16',
        )
        .replace('"auc", "metric.py:share"', '"auc"')
    )
    run = ft.run(tmp_path / "mine.toml", tmp_path / "run").path
    for place in (tmp_path / "outside.py", run / "methods/mine/in.py"):
        place.write_text(OUTSIDE.format(proof=str(proof)) + f"# {named}\n")
    proof.unlink()
    change(run, "methods", "mine.py:Mine", f"{named.format(tmp_path)}:Mine")
    with pytest.raises(InputError, match=r"names no file in .*run|has changed: its sha256"):
        open_run(run)
    assert not proof.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        (
            "model",
            "net.py:net",
            "../net.py:net",
            r"model.factory: '../net.py:net' names no file in",
        ),
        ("sources", "factory/net.py", "x", r"model.factory: .*net.py has no sha256 in experiment"),
        ("evaluate", "metric.py", "/metric.py", "evaluate.metrics: '/metric.py:share' names no"),
        ("sources", "metrics/metric.py", "x", r"evaluate.metrics: .*metric.py has no sha256"),
    ],
)
def test_a_model_and_metrics_are_only_its_copies_too(
    file: Path, tmp_path: Path, key: str, old: str, new: str, message: str
) -> None:
    run = ft.run(file, tmp_path / "run").path
    change(run, key, old, new)
    with pytest.raises(InputError, match=message):
        open_run(run)


@pytest.mark.slow
def test_the_best_settings_name_the_files_where_they_are(file: Path, tmp_path: Path) -> None:
    tune = "[tune]\ncandidates = 1\n[tune.space.all]\noptimiser.lr = [0.1]\n"
    file.write_text(EXPERIMENT + tune)
    assert main(["tune", str(file), "--out", str(tmp_path / "tune")]) == 0
    best = load(tmp_path / "tune/best.toml")
    assert best.model.factory == f"{file.parent / 'net.py'}:net"
    assert best.evaluate.metrics == ("auc", f"{file.parent / 'metric.py'}:share")
