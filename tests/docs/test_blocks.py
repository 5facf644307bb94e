"""Every block of code on the documentation's pages is right, the tutorials apart, which are run.

Commands are read by the programs' own parsers, and their files exist; experiment files are loaded.
Python runs, with small data.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from fedtailor.cli.main import _parser, main
from fedtailor.runs import builtin, tune
from fedtailor.runs.experiment import load
from tests.docs.pages import Block, blocks

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/methods").glob("*.md")),
]
PROGRAM = re.compile(  # at the beginning of the first line that is no comment
    r"(#.*\n)*(\.venv/bin/)?"
    r"(fedtailor|python3?|pip|make|source|torchrun|tensorboard|flwr|flower-\w+|mkdir|echo) "
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(64, 16)})])
        self.classifier = nn.Linear(16, 10)

    def forward(self, pixel_values):
        return self.classifier(self.blocks[0]["proj"](pixel_values.flatten(1)).relu())

def make():
    return Net()
"""


def of_page(name: str, language: str) -> list[Block]:
    """The blocks of a page in one language. A block without a language has commands, or shows what
    is printed or what a file holds."""
    return [
        block
        for block in blocks((ROOT / name).read_text())
        if (block.language or ("bash" if PROGRAM.match(block.content) else "text")) == language
    ]


def commands(block: Block) -> list[list[str]]:
    """Its commands, without what follows a pipe or a redirection."""
    lines = [
        shlex.split(line, comments=True) for line in block.content.replace("\\\n", "").splitlines()
    ]
    ends = [min((line.index(s) for s in ("|", ">", ">>") if s in line), default=None)
            for line in lines]  # fmt: skip
    return [line[:end] for line, end in zip(lines, ends, strict=True) if line[:end]]


def check_fedtailor(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    if arguments[0] in ("run", "layers", "tune", "advise"):
        name = Path(next(a for a in arguments[1:] if not a.startswith("-")))
        if name.stem in builtin.experiments():
            settings = options.set if "set" in options else ()
            assert load(builtin.find(name, builtin.experiments()), settings).methods


def check_pip(arguments: Sequence[str]) -> None:
    pinned = (ROOT / "requirements/data.txt").read_text().split()
    for option, value in zip(["", *arguments], arguments, strict=False):
        if option in ("-c", "-r"):
            assert (ROOT / value).exists(), value
        elif "==" in value:
            assert value in pinned, value
        elif extra := re.search(r"\[(\w+)\]", value):
            assert extra[1] in EXTRAS, value


def check(command: Sequence[str]) -> None:
    program, *arguments = command
    match Path(program).name:
        case "fedtailor":
            check_fedtailor(arguments)
        case "pip":
            check_pip(arguments)
        case "make":
            rules = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{a}:", rules, re.M) for a in arguments), arguments
        case "torchrun":
            from torch.distributed.run import get_args_parser

            options = get_args_parser().parse_args(arguments)
            assert options.module
            assert options.training_script == "fedtailor"
            check_fedtailor(options.training_script_args)
        case "python" | "python3" if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), arguments[1]
        case "python":
            assert Path(arguments[0]).name == "use.py" or (ROOT / arguments[0]).exists()
        case "mkdir" | "echo" | "source":
            pass
        case other:  # another project's program
            assert other == "tensorboard" or shutil.which(other, path=Path(sys.executable).parent)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_are_those_that_the_programs_know(path: Path) -> None:
    for block in of_page(str(path.relative_to(ROOT)), "bash"):
        for command in commands(block):
            check(command)


def code(page: str, number: int = 0) -> str:
    return of_page(page, "python")[number].content


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages speak of."""
    monkeypatch.chdir(tmp_path)
    (own,) = (b.content for b in of_page("docs/python.md", "python") if '"""Mine' in b.content)
    Path("mine.py").write_text(own)
    Path("my_metrics.py").write_text(code("docs/metrics.md"))
    Path("net.py").write_text(NET)
    return tmp_path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_experiment_files_are_valid(path: Path, folder: Path) -> None:
    for number, block in enumerate(of_page(str(path.relative_to(ROOT)), "toml")):
        content = tomllib.loads(block.content)
        if "project" in content or "superlink" in content:  # Flower's files
            continue
        file = folder / f"file-{number}.toml"
        methods = "" if "methods" in content else "[methods.fedavg]\n[methods.fedprox]\n"
        file.write_text(block.content + methods)
        if "tune" in content:
            assert tune.load(file).spaces
        else:
            experiment = load(file)
            assert experiment.methods
            for preset in content.get("presets", {}):
                assert load(file, {"preset": preset}) != experiment


def digits(rounds: int = 1) -> ft.Experiment:
    return ft.Experiment(
        methods={"fedavg": ft.FedAvg()},
        data=ft.DataConfig("digits", limit=300),
        split=ft.SplitConfig(clients=3, validation=0.2),
        model=ft.ModelConfig(factory="net.py:make"),
        rounds=rounds,
    )


def exec_block(content: str, names: dict[str, Any]) -> dict[str, Any]:
    names.setdefault("ft", ft)
    exec(compile(content, "page", "exec"), names)
    return names


DIGITS = """
rounds = 2
[data]
name = "digits"
limit = 300
[split]
clients = 3
[model]
factory = "net.py:make"
[methods.fedavg]
"""


@pytest.mark.slow
def test_python_about_metrics_and_runs_runs(folder: Path) -> None:
    names: dict[str, Any] = {"experiment": digits(6)}
    own, given, judge, on_round, patience = (
        b.content for b in of_page("docs/metrics.md", "python")
    )
    exec_block(own, names)
    labels, probabilities = np.array([3, 3, 1, 0]), np.eye(4)[[3, 0, 1, 0]]
    assert names["rare_recall"](labels, probabilities) == 0.5
    assert exec_block(judge, {})["is_short"]("a bed?", "here", "it is")
    exec_block(given, names)
    for run_of in (on_round, patience):
        shutil.rmtree("runs")
        exec_block(run_of, names)
    Path("mine.toml").write_text(DIGITS)
    shutil.rmtree("runs")
    run_file = next(b for b in of_page("docs/python.md", "python") if "mine.toml" in b.content)
    exec_block(run_file.content, names)
    assert ft.Result(Path("runs/mine")).history()["round"].max() == 30
    data = ft.Data.from_arrays(
        [np.zeros((8, 8), np.uint8)] * 60, ["a", "b"] * 30, ["c", "d", "e"] * 20
    )
    for page in ("docs/models.md", "docs/torchrun.md"):
        shutil.rmtree("runs")
        names |= {"net": exec_block(NET, {})["make"](), "data": data, "dataset": data}
        names["experiment"] = replace(digits(), split=ft.SplitConfig(scheme="natural"))
        exec_block(code(page), names)


@pytest.fixture
def notes() -> pd.DataFrame:
    words = {"no": "a broken arm", "yes": "fever for three days"}
    rows = [
        (f"{words[answer]}, day {day}", answer, hospital)
        for hospital in ("berlin", "lagos", "oslo", "rome")
        for day in range(8)
        for answer in words
    ]
    return pd.DataFrame(rows, columns=["note", "diagnosis", "hospital"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_python_about_texts_runs_from_a_data_frame_to_an_export(
    folder: Path, notes: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one round, and without the hub."""
    python = [block.content for block in of_page("docs/python.md", "python")]
    first, _, clients, predict, best, both, data, *_, conformance = python
    names: dict[str, Any] = {"frame": notes, "frame_for_test": notes}
    exec_block(first.replace("    model=ft", "    rounds=1,\n    model=ft"), names)
    assert names["result"].best.label in ("fedsdg", "local")
    for copy in ("runs/other", "runs/quickstart"):
        shutil.copytree("runs/hospitals", copy)
    for block in (clients, predict, best, both, code("docs/predict.md")):
        exec_block(block, names)
    assert set(names["personal"].index) == {"berlin", "lagos", "oslo", "rome"}
    assert Path("both.html").exists()
    notes.to_csv("notes.csv", index=False)
    names |= {"images": np.zeros((20, 8, 8), np.uint8), "labels": ["a", "b"] * 10}
    names |= {"texts": ["one", "two"] * 10, "clients": ["c", "d"] * 10}
    exec_block("".join(line for line in data.splitlines(True) if "from_hub" not in line), names)
    exec_block(code("docs/run-directory.md"), names)
    assert "check_method(Mine())" in conformance  # tests/testing checks methods of users' files
    (export,) = of_page("docs/export.md", "bash")
    assert main(commands(export)[0][1:]) == 0
    monkeypatch.setattr(sys, "path", [*sys.path])
    for block in of_page("docs/export.md", "python"):
        exec_block(block.content, names)


@pytest.mark.slow
def test_python_about_files_and_sites_runs(folder: Path) -> None:
    (experiment, *_) = of_page("docs/flower.md", "toml")
    Path("experiment.toml").write_text(experiment.content)
    names: dict[str, Any] = {"__file__": str(folder / "client.py")}
    for block in of_page("docs/flower.md", "python"):
        exec_block(block.content, names)
    assert names["app"] is not None
