"""A new client of a finished run: its name, its number, what it may bring and what is kept."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import save_file

import fedtailor as ft
from fedtailor.data import Data
from fedtailor.data.table import Images
from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.joining import join_requests
from fedtailor.engine.prepare import client_works, memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.inference.model import load_model
from fedtailor.inference.onboard import onboard, read_result
from fedtailor.methods.fedavg import FedAvg
from fedtailor.optim import Optimiser
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig
from tests import kinds
from tests.engine.test_privacy import backbone
from tests.inference.conftest import FEDERATION, NEW
from tests.small import digits_backbone, digits_federation, without_checksum

pytestmark = pytest.mark.slow  # what they share takes seconds


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    kept = ("ditto", "fedavg", "scaffold")
    labels = [path.name for path in (finished / "methods").iterdir() if path.name not in kept]
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns(*labels))
    return tmp_path / "run"


def joined(run: Path, label: str, name: str = "lagos", **options: bool) -> ft.Onboarded:
    return onboard(run, label, NEW, name, backbone=digits_backbone(), **options)


def test_a_new_client_is_found_by_its_name(run: Path) -> None:
    first, second = joined(run, "ditto"), joined(run, "ditto", "St. José 2")
    assert (first.number, second.number) == (3, 4)
    folder = run / "methods/ditto/seed-0/onboarded"
    assert read_result(folder / "lagos") == first
    assert sorted(path.name for path in (folder / "lagos").iterdir()) == [
        "result.json", "state.safetensors",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"lagos has joined already; --overwrite replaces it"):
        joined(run, "ditto")
    assert joined(run, "ditto", overwrite=True) == first
    model = load_model(run, "ditto", "St. José 2", backbone=digits_backbone())
    assert model.client == "St. José 2"
    with pytest.raises(InputError, match=r"no client oslo; .* or by name: St. José 2, lagos"):
        load_model(run, "ditto", "oslo", backbone=digits_backbone())
    kept, most = (first.scores[name]["test"]["accuracy"] for name in (first.kept, "majority"))
    assert kept is not None
    assert most is not None
    assert first.note.endswith("no better than the most frequent class") == (kept <= most)


def test_a_client_keeps_its_number_over_a_kill_while_it_was_replaced(run: Path) -> None:
    first, other = joined(run, "ditto", "oslo"), joined(run, "ditto", "rome")
    folder = run / "methods/ditto/seed-0/onboarded"
    (folder / "oslo").rename(folder / ".oslo.old")
    assert joined(run, "ditto", "oslo").number == first.number != other.number
    assert not list(folder.glob(".*.old"))


def test_held_out_rows_that_the_run_was_trained_on_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onboard(run, "ditto", FEDERATION, "lagos", backbone=digits_backbone())
    said = re.search(
        r"(\d+) of (\d+) held-out rows of lagos were training rows", capsys.readouterr().err
    )
    assert said is not None
    assert 0 < int(said[1]) < int(said[2])
    joined(run, "ditto", "oslo")
    assert "were training rows" not in capsys.readouterr().err


def test_a_name_that_means_a_client_of_the_federation_is_refused(run: Path) -> None:
    for name in ("2", "../lagos", "", ".hidden", "lagos ", "x" * 101, "\ud800"):
        with pytest.raises(InputError, match=r"client name .*: allowed are up to 100 letters"):
            joined(run, "ditto", name)


def test_a_name_that_is_too_long_for_a_folder_is_refused(run: Path) -> None:
    with pytest.raises(InputError, match=r"client name '日+' has 300 bytes; allowed: 240"):
        joined(run, "ditto", "日" * 100)


def test_no_row_is_held_out_that_the_run_before_was_trained_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = joined(run, "ditto").num_examples
    content = json.loads(without_checksum(run / "experiment.json").read_text())
    content["start_from"]["run"] = "runs/spring"
    (run / "experiment.json").write_text(json.dumps(content))
    assert joined(run, "ditto", overwrite=True).num_examples == counts
    assert "were training rows of runs/spring can't be checked" in capsys.readouterr().err
    hashes = np.sort(NEW.fingerprints(np.arange(50)))
    manifest = without_checksum(run / "partitions/seed-0.json")
    about = json.loads(manifest.read_text())
    del about["trained"]  # the checksum of the file as it was
    manifest.write_text(json.dumps(about))
    save_file({"before": hashes[:40]}, run / "partitions/seed-0-trained.safetensors")
    fewer = joined(run, "ditto", overwrite=True).num_examples
    assert fewer["train"] == counts["train"]
    gone = sum(counts.values()) - sum(fewer.values())
    said = f"{gone} held-out rows were training rows of runs/spring, left out: lagos ({gone})\n"
    assert gone > 1
    assert capsys.readouterr().err == f"fedtailor: {said}"


def test_where_nothing_is_kept_by_client_the_global_model_is_returned(run: Path) -> None:
    result = joined(run, "fedavg")
    assert result.kept == "global"
    assert list(result.scores) == ["majority", "global"]
    assert result.note.startswith("fedavg keeps nothing by client, so there is nothing to fit")
    variates = joined(run, "scaffold")
    assert variates.kept == "global"
    assert variates.note.startswith("what scaffold keeps by client does not change its predictions")


def test_data_that_differ_from_the_runs_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data = 3: must be a file's name, a Data or a Dataset"):
        onboard(run, "ditto", 3, "lagos", backbone=digits_backbone())  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"data = 3: must be a Data, as from Data.from_pandas, or a Dataset"
    ):
        ft.run(run, data=3)  # type: ignore[arg-type]
    classes = [*NEW.classes[:9], "ten"]
    with pytest.raises(InputError, match=r"new client has classes .*'ten'\]; the run has"):
        onboard(run, "ditto", replace(NEW, classes=classes), "lagos", backbone=digits_backbone())
    with (tmp_path / "new.csv").open("w") as file:
        rows = ["oslo", "ten"], ["lagos", "1"], ["lagos", "one"], ["lagos", "two"], ["lagos", "one"]
        csv.writer(file).writerows([["text", "site", "label"], *(["x", *row] for row in rows)])
    source = Data({"path": str(tmp_path / "new.csv"), "client": "site"})
    with pytest.raises(InputError) as caught:
        onboard(run, "ditto", source, "lagos", backbone=digits_backbone())
    assert str(caught.value) == (
        f"unknown label 'one' in row 3 of {tmp_path / 'new.csv'}; allowed: 0, 1, 2, 3, 4, 5, 6, 7, "
        "8, 9; 3 rows have such labels: 'one' (2), 'two' (1); correct these labels, or leave their "
        "rows out"
    )
    assert not (run / "methods/ditto/seed-0/onboarded").exists()


def test_a_client_joins_the_last_round_s_models_on_request(tmp_path: Path) -> None:
    experiment = ft.Experiment(
        {"fedavg": ft.FedAvg(optimiser=Optimiser("sgd", lr=5.0))},
        rounds=3,
        split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
        local=ft.LocalConfig(batch_size=16, steps=1),
    )
    run, model = tmp_path / "run", {"backbone": digits_backbone()}
    ft.run(experiment, run, data=FEDERATION, **model)
    best = load_model(run, "fedavg", **model)
    last = load_model(run, "fedavg", which="last", **model)
    assert best.trained.global_round < last.trained.global_round == 3
    assert any((best.state[name] != last.state[name]).any() for name in best.state)
    result = onboard(run, "fedavg", NEW, "lagos", which="last", **model)
    assert result.round == read_result(run / "methods/fedavg/seed-0/onboarded/lagos").round == 3
    joined = load_model(run, "fedavg", "lagos", **model)
    assert all((joined.state[name] == last.state[name]).all() for name in last.state)
    with pytest.raises(InputError, match="lagos joined after the training and has one model"):
        load_model(run, "fedavg", "lagos", which="last", **model)


def test_of_rows_of_several_clients_the_new_ones_are_taken(run: Path) -> None:
    assert NEW.labels is not None
    owners = np.arange(len(NEW.inputs)) % 2
    named = replace(NEW, groups=owners, client_names=("lagos", "oslo"), digest="named")
    inputs, words = NEW.inputs.values, [("lagos", "oslo")[owner] for owner in owners]
    arrays = ft.Data.from_arrays(inputs, NEW.labels, words)
    result = onboard(run, "ditto", arrays, "oslo", backbone=digits_backbone())
    assert sum(result.num_examples.values()) == len(NEW.inputs) / 2
    with pytest.raises(InputError, match="has rows of lagos, too; give those of 'oslo' alone"):
        onboard(run, "ditto", named, "oslo", backbone=digits_backbone(), overwrite=True)
    with pytest.raises(InputError, match=r"no rows of client 'rome', but of lagos \(25\), oslo"):
        onboard(run, "ditto", arrays, "rome", backbone=digits_backbone())


def test_a_client_with_one_row_keeps_the_global_model(run: Path) -> None:
    one = replace(NEW, inputs=Images(NEW.inputs.values[:1]), labels=NEW.labels[:1], num_train=1)
    result = onboard(run, "ditto", replace(one, digest="one"), "lagos", backbone=digits_backbone())
    assert dict(result.num_examples) == {"train": 1, "validation": 0, "test": 0}
    assert result.kept == "global"
    assert "no validation examples to check the fitted model" in str(result)


@pytest.mark.parametrize("level", ["client", "record"])
def test_a_client_with_one_row_joins_a_run_whose_budget_is_spent(
    level: Literal["client", "record"], tmp_path: Path
) -> None:
    """It sends nothing, so its account is no matter."""
    privacy = PrivacyConfig(level, noise=0.7, clip=1.0, secret=False)
    experiment = ft.Experiment(
        {"fedavg": FedAvg()}, rounds=2, split=ft.SplitConfig(3), engine=EngineConfig("sequential"),
        local=ft.LocalConfig(batch_size=16, steps=1), privacy=privacy,
    )  # fmt: skip
    given = {"data": FEDERATION, "backbone": backbone(), "summary": False}
    spent = ft.run(experiment, tmp_path / "first", **given).history()["epsilon"].iloc[-1]
    tight = replace(experiment, privacy=replace(privacy, epsilon=float(spent)))
    out = ft.run(tight, tmp_path / "run", **given).path
    one = replace(NEW, inputs=Images(NEW.inputs.values[:1]), labels=NEW.labels[:1], num_train=1)
    result = onboard(out, "fedavg", replace(one, digest="one"), "lagos", backbone=backbone())
    assert result.kept == "global"


@pytest.mark.parametrize("name", ["pfedgate", "feddpa", "fedala"])
def test_a_joining_client_is_fitted_as_a_novel_one_is_evaluated(name: str) -> None:
    """`cohort.novel`: the same key, batches and passes."""
    method = ft.METHODS[name]()
    task, federation = Task(digits_backbone(), method.adapt), digits_federation()
    plan = Plan(
        1, cohort=CohortConfig(novel=1), engine=EngineConfig("sequential", cache_mb=0),
        evaluate=EvaluateConfig(novel_passes=2),
    )  # fmt: skip
    (last,) = rounds(method, task, federation, plan)
    (client,) = federation.novel(1)
    joining = client_works(method, task, federation, plan).join
    store = memory_states(method, task, federation)
    (request,) = join_requests(federation, plan.local, [client], 1, 2, store.read)
    received = method.send_new(task, last.server, client)
    fitted = joining.candidates(received, None, request)["fitted"]
    novel = {e.split: e for e in last.evaluations if e.model == "novel"}
    for sums, split in zip(fitted.sums, ("validation", "test"), strict=True):
        assert sums[0] / sums[2] == novel[split].loss[0]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["classification", "instruct"])
def test_a_second_text_of_a_new_client_is_read(kind: str, tmp_path: Path) -> None:
    rows = [["a bed", "for the patient", ("night", "noon")[n % 2]] for n in range(12)]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["ask", "more", "said"], *rows])
    data = ft.DataConfig(path=str(path), task=kind, text="ask", text_pair="more", label="said")
    model = kinds.save_model(tmp_path / "model", kind, kinds.MODELS.get(kind, kinds.ENCODER))
    experiment = ft.Experiment(
        {"fedavg": FedAvg()}, rounds=1, data=data, split=ft.SplitConfig(2),
        model=ft.ModelConfig(str(model)), engine=EngineConfig("sequential"),
    )  # fmt: skip
    out = ft.run(experiment, tmp_path / "run", summary=False).path
    result = onboard(out, "fedavg", path, "lagos")
    assert result.data == json.loads((out / "partitions/seed-0.json").read_text())["data"]
    if kind == "classification":
        one = ft.Data.from_csv(str(path), text="ask", label="said")
        with pytest.raises(InputError, match="inputs 'no pairs of texts'; the run has 'pairs of"):
            onboard(out, "fedavg", one, "oslo")
