"""The result of a run, for Python code and notebooks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.runs.trained import open_trained
from tests.small import digits, digits_backbone, without_checksum

EXPERIMENT = ft.Experiment(
    methods={"fedsdg": ft.FedSDG(rank=2), "local": ft.Local(optimiser=ft.Optimiser("adam"))},
    rounds=2,
    seeds=(0, 1),
    split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
    local=ft.LocalConfig(steps=2),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    out = tmp_path_factory.mktemp("runs") / "a & b"
    return ft.run(EXPERIMENT, out, data=digits(), backbone=digits_backbone())


@pytest.mark.slow
def test_the_table_has_the_numbers_of_the_comparison(result: ft.Result) -> None:
    rows = json.loads(ft.compare(result, as_json=True))["rows"]
    table = result.table()
    assert list(table.index) == ["fedsdg", "local"]
    for row in rows:
        assert table.loc[row["label"], "accuracy"] == row["personal_model"]["mean"]["mean"]
        assert table.loc[row["label"], "accuracy_seed_std"] == row["personal_model"]["mean"]["std"]
        assert table.loc[row["label"], "rounds"] == tuple(row["personal_model"]["rounds"])
        assert table.loc[row["label"], "bytes_up"] == row["bytes_up"]
    assert table["global"].isna().tolist() == [False, True]  # Local has no global model


@pytest.mark.slow
def test_clients_stand_at_the_reported_round(result: ft.Result) -> None:
    clients = result.clients()
    assert len(clients) == 2 * 2 * 3 + 2 * 3  # personal and global models of fedsdg, local's
    personal = clients[clients["model"] == "personal"]
    means = personal.groupby(["method", "seed"])["accuracy"].mean().groupby("method").mean()
    for label, mean in means.items():
        assert result.table().loc[label, "accuracy"] == pytest.approx(mean)
    for _, row in clients.iterrows():
        folder = result.path / "methods" / row["method"] / f"seed-{row['seed']}"
        lines = map(json.loads, (folder / "clients.jsonl").read_text().splitlines())
        (line,) = [
            line
            for line in lines
            if (line["round"], line["model"], line["split"]) == (row["round"], row["model"], "test")
        ]
        assert line["loss"][line["clients"].index(row["client"])] == row["loss"]
    assert set(result.clients("local", 1)["method"]) == {"local"}
    held_out = result.clients("local", 1, split="validation")
    assert (held_out["num_examples"] != result.clients("local", 1)["num_examples"]).any()


@pytest.mark.slow
def test_clients_have_their_names_if_they_have_names(result: ft.Result, tmp_path: Path) -> None:
    assert "name" not in result.clients()
    manifest = result.path / "partitions/seed-0.json"
    content = manifest.read_text()
    named = {
        **json.loads(without_checksum(manifest).read_text()),
        "names": ["berlin", "lagos", "lima"],
    }
    manifest.write_text(json.dumps(named))
    try:
        assert result.clients("local", 0)["name"].tolist() == ["berlin", "lagos", "lima"]
    finally:
        manifest.write_text(content)


def test_the_history_has_every_round(result: ft.Result) -> None:
    history = result.history("fedsdg", 0)
    assert history["round"].tolist() == [1, 2]
    assert history["personal_test"].max() <= 1
    reported = result.clients("fedsdg", 0)["round"].iloc[0]
    best = history.set_index("round")["personal_validation"]
    assert best[reported] == best.max()


def test_the_best_method_is_chosen_on_validation(result: ft.Result) -> None:
    held_out = result.clients(split="validation")
    personal = held_out[held_out["model"] == "personal"]
    means = personal.groupby(["method", "seed"])["accuracy"].mean().groupby("method").mean()
    assert result.best.label == means.idxmax()
    assert result.best.score == pytest.approx(means.max())
    assert dict(result.best.scores) == pytest.approx(dict(means))
    assert str(result.best).startswith(f"{means.idxmax()}: accuracy ")


def test_its_model_is_that_of_the_reported_round(result: ft.Result) -> None:
    trained = open_trained(result, "fedsdg", 1, data=result.data, backbone=result.backbone)
    batch = trained.federation.batch(trained.federation.rows(2, "test"))
    hits = result.model("fedsdg", 2, 1).logits(batch).argmax(1) == batch["labels"]
    clients = result.clients("fedsdg", 1).set_index(["model", "client"])
    assert hits.float().mean().item() == pytest.approx(clients.loc[("personal", 2), "accuracy"])


@pytest.mark.slow
def test_it_shows_itself_and_stands_for_its_path(result: ft.Result, tmp_path: Path) -> None:
    assert "fedsdg" in repr(result)
    assert "<p><b>" in result._repr_html_()
    assert "a &amp; b" in result._repr_html_()
    assert result.report() == result.path / "report.html"
    page = ft.write_report(result, str(tmp_path / "page.html"))
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert ft.open_result(str(result.path)) == result
    assert ft.compare(str(result.path)) == ft.compare([result])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda result: result.clients("fedsgd"), "unknown method 'fedsgd'; did you mean 'fedsdg'"),
        (lambda result: result.clients(0), "unknown method 0; allowed: fedsdg, local"),
        (lambda result: result.clients(split="tset"), "unknown split 'tset'; did you mean 'test'"),
        (lambda result: result.model("", 0), "unknown method ''"),
        (lambda result: result.history(seed=7), r"no seed 7 in .*; allowed: 0, 1$"),
        (lambda result: ft.Result(result.path / "methods").table(), "is not a run directory"),
    ],
)
def test_what_is_not_there_is_refused(result: ft.Result, use: object, message: str) -> None:
    assert callable(use)
    with pytest.raises(InputError, match=message):
        use(result)


def test_a_run_without_a_round_says_so(tmp_path: Path, result: ft.Result) -> None:
    (tmp_path / "experiment.json").write_bytes((result.path / "experiment.json").read_bytes())
    assert repr(ft.open_result(tmp_path)).endswith("has no committed round yet, so there is "
                                                   "nothing to show")  # fmt: skip


@pytest.mark.slow
def test_a_file_and_settings_run_into_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("[methods.local]\n[split]\nclients = 3\n[local]\nsteps = 1")
    monkeypatch.chdir(tmp_path)
    given = {"data": digits(), "backbone": digits_backbone()}
    result = ft.run("mine.toml", settings={"rounds": 1}, **given)  # type: ignore[arg-type]
    assert result.path == Path("runs/mine")
    assert result.history()["round"].tolist() == [1]
    again = ft.run("runs/mine", **given)  # type: ignore[arg-type]
    assert again.path == result.path
    other = ft.run("mine.toml", "other", settings="rounds=2", **given)  # type: ignore[arg-type]
    assert len(other.history()) == 2
    assert len(ft.run("runs/mine", settings={"rounds": 2}, **given).history()) == 2  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a run directory: it goes on there"):
        ft.run("runs/mine", "elsewhere")
    with pytest.raises(InputError, match="the run's data were given from Python; give them again"):
        ft.run("runs/mine", settings={"rounds": 3})
    with pytest.raises(InputError, match="the run's model was given from Python; give it again"):
        ft.run("runs/mine", settings={"rounds": 3}, data=given["data"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="settings are for files"):
        ft.run(EXPERIMENT, settings="rounds=3")


def test_its_signature_is_that_of_the_function_that_runs() -> None:
    assert {"experiment", "out", "settings", "data"} <= inspect.signature(ft.run).parameters.keys()
