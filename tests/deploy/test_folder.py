"""What a deployment's folder holds, and what may stand in it."""

from __future__ import annotations

import socket
import sys
import tomllib
from pathlib import Path

import pytest

from fedtailor.cli import main
from fedtailor.deploy.folder import add_site, at_site, init, open_folder
from fedtailor.engine.metrics import Metrics
from fedtailor.errors import InputError
from fedtailor.objectives import DEFAULT
from fedtailor.runs.experiment import load

EXPERIMENT = """
name = "wards"
rounds = 2
[data]
name = "20newsgroups"
max_length = 16
limit = 100
label = "topic"
classes = ["a", "b"]
[split]
scheme = "dirichlet"
clients = 20
alpha = 0.1
validation = 0.25
[presets.small]
local.steps = 1
[tune.space.all]
optimiser.lr = [0.1]
[methods.fedsdg]
"""


def made(folder: Path, sites: tuple[str, ...] = ("a", "b:3", "c"), text: str = EXPERIMENT) -> Path:
    path = folder / "wards.toml"
    path.write_text(text)
    init(folder / "dir", path, sites, "fed.example.org:8123", ["preset=small"])
    return folder / "dir"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_an_experiment_becomes_a_flower_app(tmp_path: Path) -> None:
    folder = made(tmp_path)
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for reference in app["components"].values():
        module, _, name = reference.partition(":")
        assert f"{name} = " in (folder / f"{module.replace('.', '/')}.py").read_text()
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    assert load_and_validate(folder / "pyproject.toml")[1] == []
    (folder / "keys").mkdir()
    (folder / "keys/secret.json").write_text("{}")
    assert b"secret" not in build_fab_from_disk(folder)


def test_the_experiment_keeps_what_all_places_have_in_common(tmp_path: Path) -> None:
    text = EXPERIMENT.replace("[split]", 'train_split = "rows"\ntest_split = "validation"\n[split]')
    deployment = open_folder(made(tmp_path, text=text))
    experiment = deployment.experiment
    assert (experiment.data.train_split, experiment.data.test_split) == ("train", "test")
    assert (experiment.name, experiment.rounds, experiment.local.steps) == ("wards", 2, 1)
    assert (experiment.data.name, experiment.data.limit) == (None, None)
    assert (experiment.data.label, experiment.data.classes) == ("topic", ("a", "b"))
    split = experiment.split
    assert (split.scheme, split.clients, split.validation) == ("natural", 5, 0.25)


def test_files_of_own_metrics_are_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def share(labels, probabilities):\n    return 0.5\n")
    text = EXPERIMENT + '[evaluate]\nmetrics = ["auc", "mine.py:share"]\n'
    folder = made(tmp_path, text=text)
    content = tomllib.loads((folder / "experiment.toml").read_text())
    assert content["evaluate"]["metrics"] == ["auc", "metrics/mine.py:share"]
    Metrics(open_folder(folder).experiment.evaluate).check(DEFAULT)


def test_the_file_of_an_own_model_is_in_the_folder_and_a_new_site_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n"
    )
    (tmp_path / "mine.py").write_text("def share(labels, probabilities):\n    return 0.5\n")
    text = EXPERIMENT + '[model]\nfactory = "net.py:net"\n[evaluate]\nmetrics = ["mine.py:share"]\n'
    folder = made(tmp_path, text=text)
    assert str(tmp_path) not in (folder / "experiment.toml").read_text()
    (tmp_path / "net.py").unlink()
    factory = open_folder(folder).experiment.model.factory
    assert factory == f"{folder / 'factory/net.py'}:net"
    assert main(["deploy", "add-site", str(folder), "--name", "new"]) == 0
    needs = "site new needs: deploy.toml experiment.toml factory/net.py metrics/mine.py\n"
    assert needs in capsys.readouterr().out


def test_metrics_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "m.py").write_text(f"def {place}(labels, p):\n    return 0.5\n")
    text = EXPERIMENT + '[evaluate]\nmetrics = ["x/m.py:x", "y/m.py:y"]\n'
    with pytest.raises(InputError, match=r"x/m\.py and .*y/m\.py differ, and both would"):
        made(tmp_path, text=text)
    assert not (tmp_path / "dir").exists()


def test_clients_are_numbered_in_the_order_of_the_sites(tmp_path: Path) -> None:
    deployment = open_folder(made(tmp_path))
    assert [deployment.clients(name) for name in "abc"] == [range(1), range(1, 4), range(4, 5)]
    assert (deployment.host, deployment.port) == ("fed.example.org", 8123)
    assert deployment.timeouts.reply == 3600
    with pytest.raises(InputError, match="unknown site 'd'; allowed: a, b, c"):
        deployment.clients("d")


def test_a_new_site_has_numbers_after_all_others(tmp_path: Path) -> None:
    deployment = open_folder(made(tmp_path))
    assert deployment.new_clients == range(5, 5)
    added = add_site(add_site(deployment, "d", 2), "e")
    assert [added.clients(name) for name in "abde"] == [
        range(1), range(1, 4), range(5, 7), range(7, 8),
    ]  # fmt: skip
    assert (added.total, added.new_clients) == (5, range(5, 8))
    assert added.experiment == deployment.experiment
    for name, clients, message in (
        ("d", 1, "site d is there already"),
        ("x/y", 1, "site name 'x/y': allowed"),
        ("f", 0, "sites.clients = 0: input should be greater than 0"),
    ):
        with pytest.raises(InputError, match=message):
            add_site(added, name, clients)
    assert open_folder(added.folder) == added


def test_data_of_another_site_are_refused_and_other_names_are_said(tmp_path: Path) -> None:
    folder = made(tmp_path, ("a", "b:2", "c"))
    deployment = open_folder(folder)
    assert deployment.whose("a", ()) == deployment.whose("a", ("a",)) == ""
    assert deployment.whose("b", ("b.0", "b.1")) == ""
    assert deployment.whose("b", ("b.0", "ward 7")) == (
        "in these data b.1 is 'ward 7'; names in the data stay here"
    )
    for site, names in {"a": ("b",), "b": ("b.0", "c"), "c": ("b.1",)}.items():
        with pytest.raises(InputError, match=f"'{names[-1]}', which is another site in deploy.tom"):
            deployment.whose(site, names)
    (folder / "deploy.toml").write_text(
        'sites = [{name = "late", new = true}, {name = "a"}, {name = "b", clients = 3}]'
    )
    late = open_folder(folder)
    assert late.names == ("a", "b.0", "b.1", "b.2", "late")
    assert late.whose("late", ("late",)) == ""


def test_a_site_names_its_own_data(tmp_path: Path) -> None:
    experiment = open_folder(made(tmp_path)).experiment
    (tmp_path / "own.csv").write_text("text,label\n")
    own = at_site(experiment, str(tmp_path / "own.csv"), ["label=ward", "limit=7"])
    assert (own.data.path, own.data.label) == (str(tmp_path / "own.csv"), "ward")
    assert (own.data.limit, own.data.classes) == (7, ("a", "b"))
    assert at_site(experiment, "owner/set", []).data.name == "owner/set"
    assert at_site(experiment, str(tmp_path), []).data.path == str(tmp_path)
    for data, setting, message in (
        ("none.csv", "limit=7", "no file 'none.csv'"),
        ("digits", "classes=a", "data.classes can't be set at a site"),
        ("digits", "labl=a", "unknown key 'labl' in data; did you mean 'label'"),
        ("digits", "limit", "--set takes key=value, got 'limit'"),
    ):
        with pytest.raises(InputError, match=message):
            at_site(experiment, data, [setting])


@pytest.mark.parametrize(
    ("text", "sites", "message"),
    [
        (EXPERIMENT.replace('classes = ["a", "b"]', ""), ["a"], "data.classes is missing"),
        (EXPERIMENT, ["a", "a"], "each name once"),
        (EXPERIMENT, ["a/b"], "site name 'a/b'"),
        (EXPERIMENT, ["a:0"], "write NAME, or NAME:CLIENTS"),
        (EXPERIMENT, ["a:²"], "write NAME, or NAME:CLIENTS"),
        (EXPERIMENT, ["a:" + 5000 * "9"], "write NAME, or NAME:CLIENTS"),
        (EXPERIMENT + "[cohort]\nnovel = 1\n", ["a", "b"], "cohort.novel = 1 is for runs in one"),
        (
            'start_from = "old"\n' + EXPERIMENT,
            ["a"],
            "start_from = 'old' is for runs in one process; leave it out",
        ),
        (EXPERIMENT + '[model]\nfactory = "net.py:net"\n', ["a"], r"model\.factory: no file .*net"),
        (
            EXPERIMENT + '[evaluate]\nmetrics = ["m.py:f"]\n',
            ["a"],
            r"evaluate\.metrics: no file .*m",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused(
    text: str, sites: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        made(tmp_path, tuple(sites), text)
    assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fed.example.org", "[::1]", "address = '[::1]:8123': the server listens by IPv4 alone"),
        ("clients = 3", "clients = 2", "has sites with 4 clients, experiment.toml has split.clie"),
        (":8123", "", "address = 'fed.example.org': must be HOST:PORT"),
        (":8123", ":²", "address = 'fed.example.org:²': must be HOST:PORT"),
        ("address", "adress", "unknown key 'adress'"),
        ("least = 0.5", "least = 2", "timeouts.least = 2: input should be less than"),
        ("clients = 3", "clients = 0", "sites.clients = 0: input should be greater than 0"),
        ("clients = 3", "port = 3", "unknown key 'port' in sites"),
        ('name = "b"', "", "sites must be tables"),
    ],
)
def test_a_deploy_toml_with_mistakes_is_refused(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    path = folder / "deploy.toml"
    path.write_text(path.read_text().replace(old, new))
    assert main(["deploy", "status", str(folder)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_folder_that_holds_something_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    before = sorted(folder.rglob("*"))
    given = ["--experiment", str(tmp_path / "wards.toml")]
    assert main(["deploy", "init", str(folder), *given]) == 2
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "no server was started here: fedtailor deploy server"),
        (["run"], "no server was started here"),
        (["server"], "certs/ca.crt is missing; fedtailor deploy certs"),
        (["client", "--site", "a", "--data", "digits"], "certs/ca.crt is missing"),
        (["client", "--site", "x", "--data", "digits"], "unknown site 'x'; allowed: a, b, c"),
        (["client", "--site", "a", "--data", "x.csv"], "no file 'x.csv'"),
        (["export", "--site", "a", "--out", "o"], "site a has no model of fedsdg, seed 0, client"),
        (
            ["export", "--site", "b", "--out", "o"],
            "several clients; name one: 1 (b.0), 2 (b.1), 3 (b.2)",
        ),
        (["export", "--site", "a", "--out", "o", "--client", "4"], "no client 4 at site a"),
        (["export", "--site", "a", "--out", "o", "--client", "b.1"], "no client b.1 at site a"),
        (["export", "--site", "a", "--out", "o", "--client", "d"], "no client 'd'; allowed: a, b."),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, *more = arguments
    assert main(["deploy", step, str(made(tmp_path)), *more]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = folder / "deploy.toml"
        path.write_text(path.read_text().replace("fed.example.org:8123", f"127.0.0.1:{port}"))
        assert main(["deploy", "server", str(folder), "--insecure"]) == 2
    warned, told = capsys.readouterr().err.splitlines()
    assert "--insecure: nothing is encrypted" in warned
    assert told == f"fedtailor: port {port} can't be used: Address already in use"


def test_flower_is_asked_for_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)  # as where it isn't installed
    assert main(["deploy", "status", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told == "fedtailor: fedtailor deploy needs Flower: pip install 'fedtailor[flower]'\n"


def test_a_method_of_ones_own_travels_with_the_folder(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\nfrom typing import ClassVar\nimport fedtailor as ft\n"
        '\n\n@dataclass(frozen=True)\nclass Mine(ft.FedAvg):\n    name: ClassVar[str] = "mine"\n'
    )
    (tmp_path / "mine.py").write_text(source)
    experiment = tmp_path / "own.toml"
    experiment.write_text(
        'data = {path = "x.csv", classes = ["no", "yes"]}\n[methods.mine]\nclass = "mine:Mine"\n'
    )
    made = init(tmp_path / "fed", experiment, ["a"], "127.0.0.1:8000")
    assert made.own_files == ["methods/mine/mine.py"]
    assert (made.folder / "methods/mine/mine.py").read_text() == source
    there = open_folder(made.folder).experiment
    assert there.as_dict()["methods"] == load(experiment).as_dict()["methods"]
    (made.folder / "methods/mine/mine.py").unlink()
    with pytest.raises(InputError, match=r"methods\.mine: no file .*methods/mine/mine\.py"):
        open_folder(made.folder)
