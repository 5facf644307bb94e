import json
import math
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.errors import InputError
from fedtailor.store.format import FORMAT
from fedtailor.store.read import read, read_all

MakeRun = Callable[..., Path]


def test_only_committed_bytes_are_read(make_run: MakeRun) -> None:
    whole, cut = read(make_run("a", tail=b"")), read(make_run("b"))
    assert [t.history for t in whole.trials] == [t.history for t in cut.trials]
    assert [t.evaluations for t in whole.trials] == [t.evaluations for t in cut.trials]
    assert [t.timings for t in whole.trials] == [t.timings for t in cut.trials]


def test_a_run_holds_every_method_and_seed(make_run: MakeRun) -> None:
    run = read(make_run())
    assert [(t.label, t.seed) for t in run.trials] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedsdg", 0),
        ("fedsdg", 1),
    ]
    assert run.partitions[1].digest.startswith("d1-1")
    assert run.trials[0].history[3].cohort == [4, 5]
    assert run.trials[0].costs.down == {"float32": 4000, "header": 0}
    assert run.objective.has_classes


def test_methods_not_begun_are_left_out(make_run: MakeRun) -> None:
    path = make_run(done=3)
    shutil.rmtree(path / "methods/fedsdg/seed-1")
    run = read(path)
    assert len(run.trials) == 3
    assert run.trials[0].progress == "round 3 of 8"


def _error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    assert "no directory" in _error(tmp_path / "nowhere")
    assert "is not a run directory: it has no experiment.json" in _error(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "environment.json",
        "partitions/seed-1.json",
        "partitions/seed-1.safetensors",
        "methods/fedavg/seed-0/history.jsonl",
        "methods/fedavg/seed-0/costs.json",
    ],
)
def test_a_missing_file_is_named(make_run: MakeRun, name: str) -> None:
    path = make_run()
    (path / name).unlink()
    assert f"{Path(name).name} is missing" in _error(path)


def test_a_run_without_a_committed_round_is_refused(make_run: MakeRun) -> None:
    path = make_run()
    shutil.rmtree(path / "methods")
    assert "no committed round yet" in _error(path)


def test_damaged_files_are_refused(make_run: MakeRun) -> None:
    path = make_run()
    log = path / "methods/fedavg/seed-0/history.jsonl"
    text = log.read_bytes()
    log.write_bytes(text[:40])
    assert "holds 40 bytes, fewer than the" in _error(path)
    log.write_bytes(b"!" + text[1:])
    assert "history.jsonl line 1 is not valid JSON" in _error(path)
    log.write_bytes(text.replace(b'"cohort"', b'"kohort"', 1))
    assert "history.jsonl line 1 lacks cohort; needed: round, cohort" in _error(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "experiment.json",
            {"format": FORMAT, "name": "x"},
            "lacks rounds, seeds, methods; needed: name",
        ),
        ("experiment.json", {"name": "x"}, "the run format 1 of an older version of fedtailor"),
        ("experiment.json", {"format": FORMAT + 1}, "of a newer version of fedtailor"),
        (
            "experiment.json",
            {
                "format": FORMAT,
                "name": "x",
                "rounds": 1,
                "seeds": [0],
                "methods": [{"name": "fedavg"}],
            },
            "a method lacks label",
        ),
        (
            "methods/fedavg/seed-0/commit.json",
            {"round": 1, "rounds": 2, "finished": False, "bytes": {}, "diverged": None, "best": {}},
            "must hold bytes of history, clients, timings",
        ),
        ("methods/fedavg/seed-0/costs.json", [1], "must hold an object, not list"),
        ("environment.json", [1], "must hold an object, not list"),
    ],
)
def test_unusable_json_is_refused(
    make_run: MakeRun, name: str, value: object, message: str
) -> None:
    path = make_run()
    (path / name).write_text(json.dumps(value))
    assert message in _error(path)


def test_the_same_directory_twice_is_refused(make_run: MakeRun) -> None:
    path = make_run()
    with pytest.raises(InputError, match="is given twice"):
        read_all([path, path / ".." / path.name])


def test_different_tasks_are_refused(make_run: MakeRun) -> None:
    with pytest.raises(InputError, match="different tasks have no measure in common"):
        read_all([make_run("a"), make_run("b", is_lm=True)])


def test_observations_are_read_up_to_the_last_committed_round(make_run: MakeRun) -> None:
    path = make_run(done=3)
    folder = path / "methods/fedsdg/seed-0"
    for number in (2, 3, 4):
        found = {"server/weights": np.full((2, 2), number), "server_clients": np.arange(2)}
        save_file(found, folder / f"diagnostics-{number:06d}.safetensors")
    trial = next(t for t in read(path).trials if (t.label, t.seed) == ("fedsdg", 0))
    assert [number for number, _ in trial.diagnostics()] == [2, 3]
    assert trial.diagnostics()[1][1]["server/weights"].tolist() == [[3, 3], [3, 3]]
    (folder / "diagnostics-000003.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"diagnostics-000003\.safetensors is damaged"):
        trial.diagnostics()


TRIAL = "methods/fedavg/seed-0/"


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("experiment.json", ["methods"], {}, "methods = {}: input should be an instance of Se"),
        ("experiment.json", ["methods", 0, "label"], 1, "label = 1: input should be a valid str"),
        ("experiment.json", ["methods", 0, "label"], "../x", "'../x' can't name a folder; allowed"),
        ("experiment.json", ["methods", 0, "label"], "fedsdg", "the labels ['fedsdg', 'fedsdg'] m"),
        ("experiment.json", ["seeds"], [0, 0], "the seeds [0, 0] must differ"),
        ("experiment.json", ["seeds", 0], "0", "seeds[0] = '0': input should be a valid integer"),
        ("experiment.json", ["evaluate"], [], "evaluate = []: input should be a valid dictionary"),
        ("experiment.json", ["evaluate", "select"], 3, "evaluate: select = 3: input should be a"),
        ("experiment.json", ["schedule"], 3.5, "schedule = 3.5: input should be a valid dict"),
        ("experiment.json", ["schedule"], {"name": 1}, "schedule: name = 1: input should be a val"),
        ("experiment.json", ["faults"], "x", "faults = 'x': input should be a valid dictionary"),
        ("experiment.json", ["methods", 0, "optimiser"], 2, "optimiser = 2: input should be a"),
        ("experiment.json", ["methods", 0, "robust"], [], "robust = []: input should be a valid"),
        ("partitions/seed-0.json", ["trained"], 3, "trained = 3: input should be a valid string"),
        ("partitions/seed-0.json", ["clients"], "6", "clients = '6': input should be a valid int"),
        ("partitions/seed-0.json", ["clients"], 7, "must be whole numbers [7, 3]"),
        ("partitions/seed-0.json", ["names"], ["a"], "has 1 names for 6 clients"),
        ("partitions/seed-0.json", ["omissions"], [{}], "omission lacks text"),
        ("partitions/seed-0.json", ["modality"], "sound", "should be 'text' or 'image'"),
        ("partitions/seed-0.json", ["picture"], [1, 8], "[1, 8]: value should have at least 3"),
        ("environment.json", ["versions", "torch"], 2, "versions = 2: input should be a valid str"),
        (f"{TRIAL}commit.json", ["best"], {"global": 3}, "best.global must hold an object"),
        (f"{TRIAL}commit.json", ["in_flight"], ["2"], "in_flight[0] = '2': input should be a"),
        (f"{TRIAL}commit.json", ["round"], 1e999, "round = inf: input should be a valid integer"),
        (f"{TRIAL}commit.json", ["bytes"], [1], "bytes = [1]: input should be a valid dictionary"),
        (f"{TRIAL}commit.json", ["bytes", "clients"], -1, "should be greater than or equal to 0"),
        (f"{TRIAL}costs.json", ["trained"], 10**40, "should be less than or equal to 10000000000"),
        (f"{TRIAL}costs.json", ["down"], {"float32": "4"}, "down = '4': input should be a valid"),
        (f"{TRIAL}history.jsonl", ["cohort"], [1, 1], "[1, 1]: must differ and be below 6"),
        (f"{TRIAL}history.jsonl", ["norms"], [[1.0]], "norms[0] = [1.0]: input should be a valid"),
        (f"{TRIAL}history.jsonl", ["notes"], [3], "notes[0] = 3: input should be a valid string"),
        (f"{TRIAL}history.jsonl", ["losses"], [], "losses has 0 values for 2 clients"),
        (f"{TRIAL}clients.jsonl", ["clients", 0], 9, "must differ and be below 6"),
        (f"{TRIAL}clients.jsonl", ["loss", 0], 1e300, "loss has 1e+300; at most 1e+60 is read"),
        (f"{TRIAL}clients.jsonl", ["loss"], "x", "loss = 'x': 'str' instances are not allowed"),
        (f"{TRIAL}clients.jsonl", ["accuracy", 0], {}, "accuracy[0] = {}: input should be a valid"),
        (f"{TRIAL}timings.jsonl", ["executor"], 3, "executor = 3: input should be a valid string"),
        (f"{TRIAL}timings.jsonl", ["seconds"], None, "seconds = None: input should be a valid dic"),
        (f"{TRIAL}timings.jsonl", ["seconds", "train"], math.nan, "seconds = nan: input should be"),
    ],
)  # fmt: skip
def test_values_of_another_type_or_size_are_refused(
    make_run: MakeRun, name: str, place: list[Any], value: object, message: str
) -> None:
    path = make_run(tail=b"") / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    *parents, last = place
    reduce(lambda values, key: values[key], parents, lines[0])[last] = value
    text = "\n".join(map(json.dumps, lines)) + "\n"
    path.write_text(text)
    if path.suffix == ".jsonl":  # all of it is committed
        commit = path.with_name("commit.json")
        content = json.loads(commit.read_text())
        content["bytes"][path.stem] = len(text)
        commit.write_text(json.dumps(content))
    run = path.parents[len(Path(name).parts) - 1]
    assert message in _error(run)
