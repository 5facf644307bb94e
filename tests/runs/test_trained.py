"""A finished run, opened again: its states are those that the report's numbers belong to."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engine.scoring import Scoring
from fedtailor.errors import InputError
from fedtailor.params import Params
from fedtailor.runs.experiment import Experiment, parse
from fedtailor.runs.trained import TrainedMethod, Which, open_trained
from tests.small import digits, digits_backbone, same_bits, without_checksum

pytestmark = pytest.mark.slow  # what they share takes seconds

SGD = {"optimiser": {"name": "sgd", "lr": 0.6}}  # so high that the last round is not the best
# each step multiplies the weights by -6, until the loss is not finite any more
WILD = {"optimiser": {"name": "sgd", "lr": 1.0, "weight_decay": 7.0}}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": SGD,  # nothing is private
    "fedper": {"optimiser": {"name": "sgd", "lr": 2.0}},  # private heads
    "fedavg-ft": SGD,  # fine-tuned before use
    "fedala": SGD,  # private, and merged with what is received before use
    "fedalt": {
        "optimiser": {"name": "sgd", "lr": 0.8}
    },  # private, and rows by client at the server
}


def experiment(methods: dict[str, dict[str, Any]], **more: Any) -> Experiment:
    return parse({
        "rounds": 6,
        "methods": methods,
        "split": {"clients": 5, "scheme": "dirichlet", "alpha": 0.5, "min_examples": 8,
                  "max_examples": 40},
        "local": {"batch_size": 8, "steps": 3},
        "cohort": {"size": 2},
        "engine": {"executor": "sequential", "device": "cpu"},
        **more,
    })  # fmt: skip


def run(chosen: Experiment, out: Path) -> Path:
    return ft.run(chosen, out, data=digits(), backbone=digits_backbone()).path


def opened(out: Path, label: str, which: Which = "best") -> TrainedMethod:
    return open_trained(out, label, which=which, data=digits(), backbone=digits_backbone())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(METHODS), tmp_path_factory.mktemp("runs") / "run")


def lines(trained: TrainedMethod, model: str, number: int) -> dict[str, Any]:
    """The test results of a model at a round."""
    text = (trained.folder / "clients.jsonl").read_text()
    key = {"round": number, "model": model, "split": "test"}
    (line,) = (one for one in map(json.loads, text.splitlines()) if key.items() <= one.items())
    return line


def assert_scores(trained: TrainedMethod, state: Params, client: int, line: dict[str, Any]) -> None:
    context = trained.method, trained.task, trained.federation
    rows = trained.federation.rows(client, "test")
    loss, hits, count = Scoring(*context).scores(state, rows, 64).sum(0)
    at = line["clients"].index(client)
    assert count == line["num_examples"][at] > 0
    assert hits / count == line["accuracy"][at]
    if line["model"] == "global" or trained.label == "fedavg":  # in batches of several clients
        assert math.isclose(loss / count, line["loss"][at], rel_tol=1e-6)
    else:
        assert loss / count == line["loss"][at]


@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("which", ["best", "last"])
def test_states_score_what_was_written_at_their_round(
    finished: Path, label: str, which: Which
) -> None:
    trained = opened(finished, label, which)
    last = opened(finished, label, "last")
    assert last.round == 6
    assert (trained.round < 6) == (which == "best")
    line = lines(trained, "personal", trained.round)
    for client in range(5):
        assert_scores(trained, trained.client_state(client), client, line)
    if which == "best" and (trained.folder / "private.safetensors").exists():
        changed = [k for k in range(5)
                   if not same_bits(trained.private_state(k), last.private_state(k))]  # fmt: skip
        assert 2 <= len(changed) < 5
    if label != "fedper":  # which has no global model
        line = lines(trained, "global", trained.global_round)
        assert_scores(trained, trained.global_state(), 3, line)


def test_the_global_model_has_a_best_round_of_its_own(finished: Path) -> None:
    rounds = {label: (opened(finished, label).round, opened(finished, label).global_round)
              for label in ("fedavg-ft", "fedalt")}  # fmt: skip
    assert any(personal != shared for personal, shared in rounds.values()), rounds


def test_an_unknown_seed_is_told_with_those_that_exist(finished: Path) -> None:
    label = next(path.name for path in (finished / "methods").iterdir())
    with pytest.raises(InputError, match=r"no seed 7 in .*; allowed: [0-9, ]+$"):
        open_trained(finished, label, seed=7)


@pytest.mark.parametrize("label", ["fedper", "fedalt", "fedavg-ft", "fedmerge"])
def test_novel_clients_join_again(tmp_path: Path, label: str) -> None:
    methods = METHODS | {"fedmerge": {"models": 3, **SGD}}  # rows at the server, nothing private
    out = run(experiment({label: methods[label]}, cohort={"size": 2, "novel": 2}), tmp_path)
    trained = opened(out, label)
    line = lines(trained, "novel", trained.round)
    assert len(line["clients"]) == 2
    for client in line["clients"]:
        state = trained.client_state(client)
        assert_scores(trained, state, client, line)
        assert not same_bits(state, trained.server | trained.private_state(client))


def test_other_data_are_refused(finished: Path) -> None:
    other = replace(digits(), digest="other")
    given = {"data": other, "backbone": digits_backbone()}
    trained = open_trained(finished, "fedavg-ft", **given)
    with pytest.raises(
        InputError, match=r"the data, their split or clients' names are not those of"
    ):
        trained.client_state(0)


def test_a_run_that_diverged_keeps_its_best_round(tmp_path: Path) -> None:
    keep = {"size": 2, "above_norm": "keep"}
    chosen = experiment({"fedper": WILD, "fedavg": SGD}, cohort=keep)
    out = run(chosen, tmp_path / "run")
    trained = opened(out, "fedper")
    assert trained.commit.diverged
    assert trained.round < opened(out, "fedper", "last").round
    line = lines(trained, "personal", trained.round)
    for client in range(5):
        assert_scores(trained, trained.client_state(client), client, line)


def test_a_missing_file_of_the_best_round_is_told(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (path,) = out.glob("methods/fedper/seed-0/private-best-*")
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing; restore it"):
        opened(out, "fedper").client_state(0)
    (path,) = out.glob("methods/fedper/seed-0/round-*")
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing; restore it"):
        opened(out, "fedper")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("partitions/seed-0.json", '{"clients": 5}', "lacks digest, task, modality, classes; need"),
        ("experiment.json", '{"format": 6, "name": 1, "rounds": 1, "seeds": 1, "methods": []}',
         "name = 1: input should be a valid string"),
        ("methods/fedper/seed-0/commit.json", "{}", "lacks round, rounds, finished, bytes"),
        ("methods/fedper/seed-0/private.safetensors", "x", "is damaged: "),
        ("methods/fedper/seed-0/server.safetensors", 99 * "x", "is damaged: "),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_told_in_one_line(
    finished: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / name).write_text(content)
    with pytest.raises(InputError) as caught:
        opened(copy, "fedper", "last").client_state(0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_factory_that_names_no_function_is_told(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    path = without_checksum(copy / "experiment.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"factory": "x"}}))
    with pytest.raises(InputError, match="'x'"):
        open_trained(copy, "fedper")
