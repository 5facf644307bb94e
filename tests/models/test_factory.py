"""Models of one's own, named in an experiment file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.models import ModelConfig, load_model, load_tokenizer
from fedtailor.runs.experiment import load
from fedtailor.runs.trained import open_trained

CODE = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def backbone():
    import fedtailor
    return fedtailor.from_module(net(), head=["1"])

def number():
    return 3

def sized(width):
    return net()

def broken():
    return torch.nn.Linear("64", 10)

def wide():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(65, 10))

def few():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9))
"""
EXPERIMENT = """
rounds = 1
data = {name = "digits", limit = 60, limit_test = 20}
split = {clients = 2, min_examples = 5}
model = {factory = "net.py:net", head = ["1"]}
methods.fedavg = {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    return tmp_path


@pytest.mark.parametrize("function", ["net", "backbone"])
def test_the_function_makes_the_model_and_the_seed_its_weights(folder: Path, function: str) -> None:
    config = ModelConfig(factory=f"{folder / 'net.py'}:{function}")
    config = config if function == "backbone" else ModelConfig(factory=config.factory, head=("1",))
    assert load_tokenizer(config) is None
    one, again, other = (load_model(config, "classification", 10, seed) for seed in (0, 0, 1))
    assert one.head == ("1",)
    weights = [backbone.model.get_parameter("1.weight") for backbone in (one, again, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_a_run_keeps_the_file_and_is_opened_by_it(folder: Path) -> None:
    experiment = load(folder / "mine.toml")
    assert experiment.model.factory == f"{folder / 'net.py'}:net"
    run = ft.run(experiment, folder / "run").path
    assert (run / "factory/net.py").read_text() == CODE
    (folder / "net.py").write_text(CODE.replace("Linear(64", "Linear(65"))
    weight = open_trained(run, "fedavg").task.state["1.weight"]
    assert weight.shape == torch.Size([10, 64])
    with pytest.raises(InputError, match=r"net\.py has changed since .* was begun"):
        ft.run(experiment, run)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factory": "net.py"}, "'net.py' names no object; give FILE.py:NAME"),
        ({"factory": "nowhere.py:net"}, "no file nowhere.py"),
        ({"factory": "{}/net.py:new"}, "defines no 'new'"),
        (
            {"factory": "{}/net.py:number"},
            "returns a int; it must return an nn.Module",
        ),
        ({"factory": "{}/net.py:sized"}, "without arguments: missing a required argument: .width"),
        ({"factory": "{}/net.py:broken"}, r"net\.py.*: TypeError"),
        ({"factory": "{}/net.py:net", "pooling": "mean"}, "model.pooling = 'mean' does not apply"),
    ],
)
def test_bad_input_is_told(folder: Path, fields: dict[str, str], message: str) -> None:
    config = ModelConfig(**{name: value.format(folder) for name, value in fields.items()})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        load_model(config, "classification", 10, seed=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wide", r"net\.py:wide fails on these data \(pixel_values \[2, 1, 8, 8\].*64 and 65x10"),
        ("few", r"net\.py:few gives logits \[2, 9\] for .*; they must be \[2, 10\]"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_told(
    folder: Path, function: str, message: str
) -> None:
    experiment = load(folder / "mine.toml", [f"model.factory={folder}/net.py:{function}"])
    with pytest.raises(InputError, match=message):
        ft.run(experiment, folder / "run")
    assert not (folder / "run").exists()
