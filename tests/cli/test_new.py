"""``fedtailor new``: a table becomes an experiment file that runs as it is."""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.cli.new import _ask, _ask_columns
from fedtailor.data import load_data
from fedtailor.data.survey import survey
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from fedtailor.models import load_tokenizer
from fedtailor.runs.draft import draft
from fedtailor.runs.experiment import load

SIZES = {"berlin": 24, "lagos": 20, "oslo": 14, "turin": 3}


@pytest.fixture
def visits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of four hospitals, one of them too small, in the working folder."""
    lines = ["report,outcome,hospital"]
    for name, size in SIZES.items():
        for row in range(size):
            good = row % 2
            words = "clean and kind" if good else "dirty and rude"
            lines.append(f"the ward was {words} on day {row},{'ok' if good else 'bad'},{name}")
    monkeypatch.chdir(tmp_path)
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    return Path("visits.csv")


def test_it_says_what_it_saw_and_the_file_loads(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(visits)]) == 0
    said = capsys.readouterr().out
    assert "classes: 2 (bad 31, ok 30)" in said
    assert "clients: 3, by 'hospital', with 14 to 24 rows" in said
    assert "left out, with fewer than 10 rows: turin (3)" in said
    assert said.endswith("wrote visits.toml; now: fedtailor run visits.toml\n")
    assert "# fixed once the run has begun; for more, begin" in Path("visits.toml").read_text()
    experiment = load(Path("visits.toml"))
    assert experiment.data.client == "hospital"
    assert experiment.split.scheme == "natural"
    assert list(experiment.methods) == ["local", "fedavg", "fedper", "fedsdg"]


def test_clients_of_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"the food on day {row // 2} was fine,{row % 4},{row % 2}shop" for row in range(24)]
    Path("food.csv").write_text("\n".join(["text,label,shop", *rows]) + "\n")
    assert main(["new", "food.csv", "--client", "shop"]) == 0
    assert "clients: 2, by 'shop', with 12 rows each\n" in capsys.readouterr().out
    assert "# 2 clients of 12 rows\n" in Path("food.toml").read_text()


def test_many_clients_of_few_rows_are_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"the food {row} was fine,{row % 2},user{row // 5}" for row in range(1500)]
    Path("food.csv").write_text("\n".join(["text,label,user", *rows]) + "\n")
    assert main(["new", "food.csv"]) == 0
    experiment = load(Path("food.toml"))
    assert (experiment.data.client, experiment.split.min_examples) == ("user", 3)
    assert (experiment.cohort.size, experiment.evaluate.every) == (20, 5)


@pytest.mark.slow
def test_the_file_runs_as_it_is(visits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(visits)]) == 0
    assert main(["run", "visits.toml", "--set", "rounds=1"]) == 0
    assert "fedsdg" in capsys.readouterr().out


def test_without_a_client_column_rows_are_divided_at_random(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(visits), "--client", "none", "--out", "mine.toml", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["roles"] == {
        "source": "report",
        "label": "outcome",
        "client": None,
        "task": "classification",
        "pair": None,
    }
    split = load(Path("mine.toml")).split
    assert (split.scheme, split.clients) == ("dirichlet", 2)


def test_names_that_differ_in_capital_letters_are_pointed_out(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with visits.open("a") as file:
        file.write("the ward was clean and kind,Ok,Oslo\n")
    assert main(["new", str(visits), "--label", "outcome"]) == 0
    said = capsys.readouterr().out
    assert "clients that differ in capital letters alone count as different: Oslo and oslo" in said
    assert "classes that differ in capital letters alone count as different: Ok and ok" in said


def test_rows_without_a_client_are_left_out_by_new_and_by_run(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with visits.open("a") as file:
        file.write("the ward was clean and kind,ok,\nthe ward was dirty,bad, \n")
    assert main(["new", str(visits)]) == 0
    said = capsys.readouterr().out
    assert "\nwithout a client, which the run leaves out: 2 rows\n" in said
    assert "clients: 3, by 'hospital', with 14 to 24 rows" in said
    data = load_data(load("visits.toml").data, load_tokenizer(ft.ModelConfig("minilm")))
    assert len(data.inputs) == sum(SIZES.values())
    assert [one.text for one in data.omissions] == ["2 rows without a client, left out"]


def test_a_column_that_may_name_the_clients_comes_with_the_command(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visits.write_text(visits.read_text().replace("hospital", "praxis", 1))
    assert main(["new", str(visits), "--label", "outcome"]) == 0
    said = capsys.readouterr().out
    hint = next(line for line in said.splitlines() if line.startswith("if column praxis"))
    command = hint.partition(": fedtailor ")[2].split()
    assert main(command) == 0
    assert "clients: 3, by 'praxis'" in capsys.readouterr().out


def test_rows_of_many_lines_are_pointed_out(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with visits.open("a") as file:
        file.write('"the ward was\nclean\nand kind",ok,oslo\n')
    assert main(["new", str(visits)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("visits.csv: 62 rows in 64 lines: cells have line ends, or a quote was")


def test_without_labels_it_writes_a_language_models_experiment(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(visits), "--label", "none"]) == 0
    assert "a language model, trained on the texts alone" in capsys.readouterr().out
    experiment = load(Path("visits.toml"))
    assert (experiment.data.task, experiment.data.label) == ("causal-lm", None)
    assert experiment.model.name == "smollm2-135m"
    assert experiment.data.client == "hospital"
    command = ["new", str(visits), "--label", "none", "--client", "none", "--overwrite"]
    assert main(command) == 0
    assert load(Path("visits.toml")).split.scheme == "iid"
    assert main([*command, "--model", "minilm"]) == 2
    assert "model 'minilm' is not for 'causal-lm'" in capsys.readouterr().err


def test_instructions_are_for_a_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "When is breakfast?", "response": "From 7 to 11.", "hotel": "harbour"}
    rows = [row, {**row, "hotel": "alpine"}] * 20
    Path("hotels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["new", "hotels.jsonl", "--client", "hotel"]) == 0
    experiment = load(Path("hotels.toml"))
    assert (experiment.data.task, experiment.model.name) == ("instruct", "smollm2-135m")
    assert experiment.model.targets  # the last blocks
    assert experiment.data.max_length == 64  # the template's words, too
    assert list(experiment.methods) == ["local", "fedavg", "fedsdg"]  # no head is private


def test_every_method_can_be_named(visits: Path) -> None:
    table = survey(str(visits))
    roles = table.roles(None, None, None)
    for name, method in METHODS.items():
        if method.needs_public:
            with pytest.raises(InputError, match="needs public examples"):
                draft(table, roles, "mine", "minilm", [name])
        else:
            assert f"[methods.{name}]" in draft(table, roles, "mine", "minilm", [name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.csv"], "no file 'nowhere.csv'"),
        (["."], "a folder without JSON files or pictures"),
        (["hospitals.xlsx"], "can't read 'hospitals.xlsx'; allowed: .csv, .tsv, "),
        (["visits.csv", "--out", "runs/zz/oct.toml"], "no folder runs/zz for --out runs/zz/oct.to"),
        (
            ["visits.csv", "--label", "outcom"],
            "unknown column 'outcom' in visits.csv; did you mean",
        ),
        (["visits.csv", "--methods", "fedsgd"], "unknown method 'fedsgd'; did you mean 'fedsdg'"),
        (
            ["visits.csv", "--label", "report"],
            "input and --label are both column 'report', so the input would give the label away",
        ),
        (
            ["visits.csv", "--label", "outcome,outcome"],
            "--label names column 'outcome' twice; name it once",
        ),
        (["visits.csv", "--model", "nope"], "unknown model 'nope'; a hub model is written owner/m"),
        (["visits.csv", "--model", "lenet"], "model 'lenet' is for image data, not text data"),
        (["visits.csv", "--out", "visits.csv", "--overwrite"], "name ends with .toml"),
    ],
)
def test_a_mistake_is_one_line(
    visits: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hospitals.xlsx").write_text("a sheet")
    assert main(["new", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("visits.toml").exists()


TEXTS = [f"the ward was clean on day {day}" for day in range(40)]
WORDS = [["the", "ward"]] * 40


@pytest.mark.parametrize(
    ("columns", "arguments", "said"),
    [
        ({"score": [0.5, 1.5]}, "", "for each row\nnumbers to predict: 0.5 to 1.5, mean 1, st"),
        ({"days": [7, 41, 93]}, "--task regression", "numbers to predict: 7 to 93, mean 46"),
        (
            {"days": [*range(39), 1]},
            "--label days",
            "one row, too few to learn from: is 'days' the",
        ),
        ({"days": [*range(39), 1]}, "--label days", "column; --task regression predicts numbers\n"),
        ({"tags": ["a|b", "b", "c|a"]}, "", "labels: 3 (a 27, b 27, c 13)\ncolumn 'tags' of"),
        ({"tags": ["a|b", "b", "c|a"]}, "", "labels are split at '|'\n"),
        (
            {"tags": ["a|b", "b", "c|a", ""]},
            "",
            "split at '|'; an empty cell is unknown, [] says that no label holds\nwithout a label",
        ),
        (
            {"tokens": WORDS, "tags": [["O", "B-X"]] * 38 + [["I-X", "B-Y"], ["I-Y", "B-Z"]]},
            "",
            "half of the tags have at most one word, too few",
        ),
        ({"a": [0, 1], "b": ["no", "no", "yes"], "c": [0]}, "", "3 (a 20, b 13, c 0)"),
        ({"label": ["x", "y"], "a": [0, 1], "b": [1, 0]}, "--label a,b", "labels: 2 (a 20, b 20)"),
        ({"label": ["x", "y"], "a": [0, 1], "b": [1, 0]}, "", "classes: 2 (x 20, y 20)"),
        ({"outcome": ["x", "y"], "a": [0, 1], "b": [1, 0]}, "", "classes: 2 (x 20, y 20)"),
        ({"tokens": WORDS, "tags": [["O", "B-X"]] * 39 + [["O"]]}, "", "tags: 2 (B-X 39, O 40)"),
        ({"messages": [[{"role": "user", "content": "a"}]]}, "", "learned\nclients: no"),
        (
            {"question": TEXTS, "context": TEXTS, "answers": [{"text": []}]},
            "",
            "no training row has",
        ),
        ({"score": [0.5]}, "", "all training rows have the number 0.5; there is nothing to learn"),
        ({"tags": [["a"]]}, "", "has 1 label; the task 'multi-label' needs two or more"),
        ({"a": [0, 1]}, "--task multi-label --label a", "says 0 or 1, or no or yes, of one label"),
        ({"tokens": WORDS, "tags": [["O", "O"]]}, "", "holds one class only ('O'); there is noth"),
        (
            {"price": ["1,234"]},
            "--task regression --label price",
            "holds '1,234' in row 1: the task",
        ),
        (
            {"price": ["5 kg"]},
            "--task regression --label price",
            "needs numbers such as 1234.5, of",
        ),
        (
            {"price": ["nan", "1"]},
            "--task regression --label price",
            "holds 'nan' in row 1: the ta",
        ),
        (
            {"price": ["1_000"]},
            "--task regression --label price",
            "holds '1_000' in row 1: the task",
        ),
        ({"days": [7, 41], "age": [7, 8]}, "--task regression", "numbers to predict with --label"),
        (
            {"tokens": WORDS, "tags": [["O", "B-X"]]},
            "--task token-classification --text tokens --label tokens",
            "input and --label are both column 'tokens', so the input would give the label away",
        ),
    ],
)
def test_it_reads_what_is_to_be_predicted_as_the_run_does(
    columns: dict[str, list[Any]],
    arguments: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"text": TEXTS, **columns}
    rows = [{name: some[n % len(some)] for name, some in columns.items()} for n in range(40)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["new", "t.jsonl", "--out", "t.toml", *arguments.split()])
    printed, told = capsys.readouterr()
    assert said in (told if code else printed), printed + told
    assert Path("t.toml").exists() == (code == 0)
    assert told.count("\n") == (code > 0)


def test_pictures_of_several_sizes_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    labels = ["image,labels,ward"]
    for number in range(20):
        folder = Path("pictures", "ab"[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (12 + number, 30)).save(folder / f"{number}.png")
        labels.append(f"{folder}/{number}.png,{'a|b' if number % 3 else 'b'},{number % 2}")
    Path("table.csv").write_text("\n".join(labels) + "\n")
    for name in ("pictures", "table.csv"):
        assert main(["new", name, "--out", "e.toml", "--overwrite"]) == 0
        assert "\npictures: all become squares of 22 x 22 pixels\n" in capsys.readouterr().out
        config = load(Path("e.toml")).data
        assert (config.picture_size, config.image) == (22, "image")
        assert load_data(config).inputs.values.shape == (20, 1, 22, 22)
    Path("pictures/a/0.png").write_bytes(b"none")
    assert main(["new", "pictures", "--out", "e.toml", "--overwrite"]) == 2
    assert "0.png) is no picture that can be read" in capsys.readouterr().err


@pytest.mark.slow
def test_in_a_terminal_it_asks_and_takes_the_guess_for_return(visits: Path) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "fedtailor", "new", str(visits)]
    source = str(Path(ft.__file__).parents[1])
    process = subprocess.Popen(
        command,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**os.environ, "PYTHONPATH": source},
    )
    os.close(inside)
    os.write(terminal, b"reprot\n\n\nnone\n\nlocal,fedprox\n")
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(terminal)
    assert process.wait() == 0, said.decode()
    assert b"unknown column 'reprot'; did you mean 'report'?" in said
    assert b"column that names the client, or none [hospital]: " in said
    experiment = load(Path("visits.toml"))
    assert list(experiment.methods) == ["local", "fedprox"]
    assert experiment.split.scheme == "dirichlet"


def test_one_row_without_a_label_is_one_row(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, said in (
        (1, "\nwithout a label, which the run leaves out: 1 row\n"),
        (2, "\nwithout a label, which the run leaves out: 2 rows\n"),
    ):
        with visits.open("a") as file:
            file.write("the ward was closed,,berlin\n")
        assert main(["new", str(visits), "--out", f"{count}.toml"]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "pair"),
    [(["", "", "", ""], ("premise", "hypothesis")), (["hypothesis", "", ""], ("hypothesis", None)),
     (["", "none", "", ""], ("premise", None))],
)  # fmt: skip
def test_at_a_terminal_return_takes_what_yes_takes(
    answers: list[str],
    pair: tuple[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [f"{text},{text} too,{n / 7},{'ab'[n % 2]}" for n, text in enumerate(TEXTS)]
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["hypothesis,premise,score,site", *lines]))
    names = "task", "text", "text_pair", "label", "client"
    options = argparse.Namespace(**dict.fromkeys(names))
    given = iter(answers)
    monkeypatch.setattr("builtins.input", lambda _: next(given))
    _ask_columns(survey(str(file)), options)
    assert (options.text, options.text_pair) == pair
    assert (options.label, options.client) == ("score", "site")
    assert not [*given]


def test_answers_that_end_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    with pytest.raises(InputError, match="so nothing is written; --yes accepts the guesses"):
        _ask("column of labels", "label")
