"""A method of the user's own: `[methods.mine] class = "mine.py:Mine"`."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.errors import InputError
from fedtailor.runs.experiment import load
from fedtailor.runs.manifest import open_run
from fedtailor.runs.merge import merge
from tests import forked
from tests.cli.conftest import EXPERIMENT

SOURCE = '''
"""Mine: FedAvg, as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

import fedtailor as ft


@dataclass(frozen=True)
class Mine(ft.FineTuning):
    """FedAvg whose clients train ``times`` as long."""

    name: ClassVar[str] = "mine"
    needs_only_mean: ClassVar[bool] = True
    times: Annotated[int, Ge(1)] = 1

    def local(self, task, state, batches, context):
        return ft.train(task, state, [*batches] * self.times, context, self.optimiser)


class NotOne:
    """Not a method."""


class Plain(ft.FineTuning):
    """Not a dataclass."""

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Nameless(ft.FineTuning):
    """Without a name."""


@dataclass(frozen=True)
class Wordy(Mine):
    """With a word where True or False stands."""

    needs_only_mean: ClassVar[bool] = "no"


@dataclass(frozen=True)
class Needy(Nameless):
    """Without a default."""

    name: ClassVar[str] = "needy"
    mu: float
'''
METHODS = """
[methods.mine]
class = "code/mine.py:Mine"
trainable = "lora"
rank = 2
optimiser = {name = "adam", lr = 1e-3}
[methods.fedavg]
trainable = "lora"
rank = 2
optimiser = {name = "adam", lr = 1e-3}
[tune]
candidates = 2
[tune.space.mine]
times = [1, 2]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(EXPERIMENT.partition("[methods")[0] + METHODS)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(f"{SOURCE}\n# {tmp_path}\n")  # a module of its own
    return file


def logs(out: Path, label: str) -> list[bytes]:
    folder = out / "methods" / label / "seed-0"
    return [(folder / name).read_bytes() for name in ("history.jsonl", "clients.jsonl")]


FAULTY = """
import sys
from dataclasses import dataclass
from typing import ClassVar

import fedtailor as ft

@dataclass(frozen=True)
class Mine(ft.FedAvg):
    name: ClassVar[str] = "mine"

    def {hook}(self, *arguments):
        {body}
"""
DIGITS = """
rounds = 2
data = {name = "digits", limit = 40}
split = {clients = 2}
model = {name = "cnn", pretrained = false, width = 0.1, image_size = 16}
methods.mine.class = "mine.py:Mine"
engine.executor = "%s"
"""
HERE = "mine.py, line 13: "


@pytest.mark.parametrize(
    ("hook", "body", "said", "executor"),
    [
        ("local", "assert False", f"{HERE}AssertionError", "processes"),
        ("local", "raise StopIteration", f"{HERE}RuntimeError: generator", "vectorised"),
        ("aggregate", "sys.exit(3)", f"{HERE}SystemExit: 3", "sequential"),
        ("adapt", "import no_such", f"{HERE}ModuleNotFoundError", "sequential"),
        ("send", "return None", " (or what uses its values: params.py", "sequential"),
        ("local", "return {}", "mine.local returns {}; it must return a state", "sequential"),
        (
            "local",
            "state, loss = super().local(*arguments); state.pop('head.weight'); return state, loss",
            "mine.local returns a state that lacks head.weight",
            "processes",
        ),
        ("aggregate", "return {}", "mine.aggregate returns a state that lacks", "sequential"),
        (
            "aggregate",
            "return {} if arguments[3].round > 1 else super().aggregate(*arguments)",
            "mine.aggregate returns a state that lacks",
            "sequential",
        ),
        ("num_trained", "return -1", "mine.num_trained is -1; it must be 0 to 10", "sequential"),
        (
            "aggregate",
            "return {n: v.double() for n, v in super().aggregate(*arguments).items()}",
            "mine.aggregate returns conv1.weight as torch.float64",
            "sequential",
        ),
        ("init_server", "return {}", "a client of mine receives no tensor", "sequential"),
        ("upload", "return {'x': 1}", "mine.upload returns a state with 'x': 1", "sequential"),
        (
            "upload",
            "import torch; return torch.eye(2)",
            "mine.upload returns tensor([[1., 0.],         [0., 1.]]); it must return a state",
            "sequential",
        ),
        (
            "init_server",
            "return dict(list(super().init_server(*arguments).items())[1:])",
            "a client of mine lacks conv1.weight: it has 3,954 of 4,029 scalars",
            "sequential",
        ),
        ("is_private", "return", "mine.is_private of conv1.weight returns None", "sequential"),
        (
            "inference_params",
            "return {}",
            "inference_params returns a state that lacks",
            "sequential",
        ),
        ("global_state", "return {}", "global_state returns a state that lacks", "sequential"),
        (
            "global_state",
            "return {f'x.{n}': v for n, v in arguments[1].items()}",
            "global_state returns a state that lacks",
            "sequential",
        ),
        ("finetune_passes", "return 1", "mine.finetune_passes is <bound method", "sequential"),
        (
            "local",
            "state, loss = super().local(*arguments); return state, loss.long()",
            "mine.local returns a loss of torch.int64",
            "sequential",
        ),
    ],
)
def test_a_faulty_hook_is_said_in_one_line(
    hook: str, body: str, said: str, executor: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FAULTY.format(hook=hook, body=body))
    Path("mine.toml").write_text(DIGITS % executor)
    assert main(["run", "mine.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("fedtailor: ")
    assert said in lines[-1]
    assert not any(line.startswith("Traceback") for line in lines)


@pytest.mark.slow
def test_it_runs_and_goes_on_as_the_built_in_ones_do(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", str(file), "--out", str(out)]) == 0
    assert logs(out, "mine") == logs(out, "fedavg")
    assert "mine" in ft.compare(out)
    (method,) = (
        m
        for m in json.loads((out / "experiment.json").read_text())["methods"]
        if m["label"] == "mine"
    )
    assert (method["class"], len(method["sha256"])) == ("mine.py:Mine", 64)
    shutil.rmtree(tmp_path / "code")  # the run directory holds a copy
    shutil.rmtree(out / "methods/mine/seed-0")
    assert main(["run", str(out)]) == 0
    assert logs(out, "mine") == logs(out, "fedavg")
    adapter = tmp_path / "adapter"
    assert main(["export", str(out), "--method", "mine", "--out", str(adapter)]) == 0


@pytest.mark.slow
def test_a_changed_file_is_refused_by_name(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    few = ["--set", "rounds=1", "--set", 'methods=["mine"]']
    assert main(["run", str(file), "--out", str(out), *few]) == 0
    capfd.readouterr()
    (tmp_path / "code/mine.py").write_text(SOURCE + "\nX = 1\n")
    assert main(["run", str(file), "--out", str(out), *few]) == 2
    copy = out / "methods/mine/mine.py"
    assert capfd.readouterr().err == (
        f"fedtailor: methods.mine: mine.py has changed since {out} was begun; restore it ({copy} "
        "is a copy), or choose another --out\n"
    )
    copy.write_text(SOURCE + "\nY = 1\n")
    with pytest.raises(InputError, match=r"methods\.mine: .*mine\.py has changed: its sha256 was"):
        open_run(out)


@pytest.mark.slow
def test_it_is_merged_with_its_file(file: Path, tmp_path: Path) -> None:
    runs = [
        ft.run(file, tmp_path / str(k), settings={"rounds": 1}, part=f"{k}/2").path for k in (1, 2)
    ]
    shutil.rmtree(tmp_path / "code")
    out = merge(runs, tmp_path / "out")
    assert open_run(out).methods["mine"].name == "mine"
    assert logs(out, "mine") == logs(out, "fedavg")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods.mine.time": 2}, "unknown key 'time' in methods.mine; did you mean 'times'"),
        ({"methods.mine.times": 0}, "methods.mine.times = 0: input should be greater"),
        ({"methods.mine.name": "fedavg"}, "the class is called 'mine'; leave name out"),
        ({"methods.mine.class": "code/mine.py:NotOne"}, "NotOne is not a class that derives from"),
        ({"methods.mine.class": "code/mine.py:Plain"}, "Plain must be a frozen dataclass"),
        ({"methods.mine.class": "code/mine.py:Nameless"}, "Nameless has no name"),
        ({"methods.mine.class": "code/mine.py:Needy"}, "Needy needs a default for mu"),
        ({"methods.mine.class": "code/mine.py:Wordy"}, "Wordy.needs_only_mean = 'no': it must be"),
        ({"methods.mine.class": "mine.py:Mine"}, r"methods.mine: no file .*mine.py"),
    ],
)
def test_what_is_no_method_is_refused(file: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(file, change)


@pytest.mark.slow
def test_it_is_tuned(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "tune"
    assert main(["tune", str(file), "--set", "rounds=1", "--out", str(out)]) == 0
    best = tomllib.loads((out / "best.toml").read_text())["methods"]["mine"]
    assert best["class"] == f"{tmp_path / 'code/mine.py'}:Mine"
    assert load(out / "best.toml").methods["mine"].times == best["times"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_processes_and_ranks_run_it_too(file: Path, tmp_path: Path) -> None:
    settings = {"rounds": 1, "engine.executor": "processes", "engine.clients_per_step": None}
    result = ft.run(file, tmp_path / "processes", settings=settings)
    assert logs(result.path, "mine") == logs(result.path, "fedavg")
    said = tmp_path / "said.txt"
    more = ("--set", "rounds=1", "--set", "engine.executor=auto")
    work = forked.command(file, *more, "--set", "engine.clients_per_step=none")
    assert forked.run(2, work, said) == [0, 0], said.read_text()
    assert logs(file.with_suffix(""), "mine") == logs(result.path, "mine")
