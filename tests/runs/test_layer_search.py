"""Which layers to train: suffixes from the head down, on examples that no client trains on."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtailor.cli import main
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.engine.faults import FaultConfig
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.fedsq import FedSQ
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import load
from fedtailor.runs.layer_search import Candidate, choose, suffixes, try_suffixes
from fedtailor.uploads.attacks import AttackConfig
from tests.small import digits, digits_backbone
from tests.text import tiny_bert

ROWS = np.arange(100, 160)
PLAN = Plan(rounds=2, local=LocalConfig(batch_size=8), cohort=CohortConfig(size=3))


def tried(patience: int, method: FedAvg | FedSQ | None = None) -> list[Candidate]:
    method = method or FedAvg(optimiser=Optimiser(lr=0.05))
    found = try_suffixes(method, digits_backbone(0.0), digits(), ROWS, PLAN, patience=patience)
    return list(found)


def test_suffixes_end_with_the_whole_model() -> None:
    assert suffixes(digits_backbone()) == [
        ("head",),
        ("hidden", "head"),
        ("conv", "norm", "hidden", "head"),
    ]
    assert suffixes(tiny_bert())[:2] == [("classifier",), ("bert.pooler", "classifier")]


def test_every_suffix_is_trained_on_one_half_and_scored_on_the_other() -> None:
    found = tried(patience=9)
    assert [one.layers for one in found] == suffixes(digits_backbone())
    head, hidden, conv = 16 * 10 + 10, 54 * 16 + 16, 6 * 9 + 12
    assert [one.trained for one in found] == [head, head + hidden, head + hidden + conv]
    assert all(0 <= one.accuracy * 30 == pytest.approx(round(one.accuracy * 30)) for one in found)
    assert tried(patience=9) == found
    assert len({one.accuracy for one in found}) > 1


def test_what_is_simulated_in_rounds_plays_no_part() -> None:
    hidden = replace(PLAN, faults=FaultConfig(drop_before=0.9), attack=AttackConfig("sign-flip"))
    method = FedAvg(optimiser=Optimiser(lr=0.05))
    of = (method, digits_backbone(0.0), digits(), ROWS)
    assert list(try_suffixes(*of, hidden, patience=0)) == list(try_suffixes(*of, PLAN, patience=0))


def test_it_ends_when_more_layers_do_not_help() -> None:
    still = FedAvg(optimiser=Optimiser(lr=1e-9))  # nothing moves, so nothing gets better
    assert [one.layers for one in tried(1, still)] == suffixes(digits_backbone())[:2]
    assert len(tried(2, still)) == 3


def test_the_best_is_chosen_and_of_equals_the_smallest() -> None:
    a, b, c = Candidate(("x",), 5, 0.5), Candidate(("y",), 9, 0.7), Candidate(("z",), 8, 0.7)
    assert choose([a, b, c]) is c


def test_the_gated_network_can_be_calibrated_itself() -> None:
    assert len(tried(9, FedSQ(optimiser=Optimiser(lr=0.05)))) == 3


def test_what_cannot_be_calibrated_is_refused() -> None:
    backbone, dataset = digits_backbone(), digits()
    with pytest.raises(InputError, match="method 'fedsdg' has no field layers"):
        next(try_suffixes(FedSDG(), backbone, dataset, ROWS, PLAN))
    with pytest.raises(InputError, match="1 examples to choose layers with; at least 2"):
        next(try_suffixes(FedAvg(), backbone, dataset, ROWS[:1], PLAN))
    texts = replace(dataset, labels=None, task="causal-lm")
    with pytest.raises(InputError, match="causal-lm does not have"):
        next(try_suffixes(FedAvg(), backbone, texts, ROWS, PLAN))


EXPERIMENT = """
[data]
name = "digits"
limit = 300
[split]
clients = 3
validation = 0.4
[model]
name = "lenet"
pretrained = false
image_size = 16
width = 0.2
[local]
batch_size = 16
[methods.sdg]
name = "fedsdg"
[methods.avg]
name = "fedavg"
optimiser = {lr = 0.1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.slow
def test_the_command_prints_the_trials_and_the_line_for_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["layers", str(file), "--epochs", "2", "--patience", "9"]
    assert main([*command, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)
    assert [trial["layers"][0] for trial in trials][-1] == "conv1"
    (chosen,) = (trial for trial in trials if trial["chosen"])
    assert chosen["accuracy"] == max(trial["accuracy"] for trial in trials)
    assert main(command) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert tomllib.loads(line)["layers"] == chosen["layers"]
    again = load(file, [f"methods.avg.{line}"]).methods["avg"]
    assert again == FedAvg(layers=tuple(chosen["layers"]), optimiser=Optimiser(lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sgd"], "unknown method 'sgd'"),
        (["--method", "sdg"], "method 'fedsdg' has no field layers"),
        (["--set", "methods=[\"sdg\"]"], "no method of .* has a field layers"),
        (["--set", "split.validation=0"], "split.validation is 0: there are no examples"),
    ],
)  # fmt: skip
def test_the_command_refuses(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["layers", str(file), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_takes_at_least_one_epoch(file: Path) -> None:
    with pytest.raises(SystemExit):
        main(["layers", str(file), "--epochs", "0"])
