from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.data.sources import objective_of_data, read_columns
from fedtailor.engine.metrics import Metrics
from fedtailor.errors import InputError
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import checked, load, parse

FILE = """
rounds = 4
[data]
name = "20newsgroups"
[split]
scheme = "dirichlet"
clients = 20
alpha = 0.1
[methods.fedsdg]
lr_gate = 0.01
optimiser = {lr = 3e-4}
[methods.lora]
name = "fedavg"
trainable = "lora"
[presets.small]
rounds = 1
split.clients = 3
methods.fedsdg.rank = 2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def test_defaults_are_filled_in_and_nested_fields_keep_theirs(path: Path) -> None:
    experiment = load(path)
    assert experiment.name == "mine"
    assert list(experiment.methods) == ["fedsdg", "lora"]
    fedsdg = experiment.methods["fedsdg"]
    assert isinstance(fedsdg, FedSDG)
    assert fedsdg.lr_gate == 0.01
    assert fedsdg.optimiser == Optimiser("adam", lr=3e-4, clip=1.0)
    assert experiment.split.alpha == 0.1
    assert experiment.plan.rounds == 4


def test_settings_win_over_presets_and_presets_over_the_file(path: Path) -> None:
    experiment = load(path, ["preset=small", "split.clients=7", 'methods=["fedsdg", "local"]'])
    assert (experiment.rounds, experiment.split.clients) == (1, 7)
    assert list(experiment.methods) == ["fedsdg", "local"]
    assert experiment.methods["fedsdg"].rank == 2  # type: ignore[attr-defined]
    assert load(path, ["data.name=digits", "methods=fedsdg"]).data.name == "digits"
    assert load(path, ["seeds=[3, 4]"]).seeds == (3, 4)
    assert (
        load(path, ["methods.fedsdg.optimiser.clip=none"]).methods["fedsdg"].optimiser.clip is None
    )  # type: ignore[attr-defined]


def test_settings_reach_labels_with_a_dot_and_no_method_that_is_not_there(path: Path) -> None:
    dotted = path.read_text().replace("[methods.lora]", '[methods."lr0.1"]')
    path.write_text(dotted + 'methods."lr0.1".rank = 3\n')  # of the preset
    for given in ("methods.lr0.1.lora_alpha=9", 'methods."lr0.1".lora_alpha=9'):
        found = load(path, [given, "preset=small", 'methods=["lr0.1"]']).methods["lr0.1"]
        assert (found.rank, found.lora_alpha) == (3, 9)  # type: ignore[attr-defined]
    assert load(path, ["methods.fedsdg.rank=3", "methods=local"]).methods.keys() == {"local"}
    with pytest.raises(
        InputError, match=r"unknown method 'fedprx' in methods\.fedprx\.mu; did you"
    ):
        load(path, ["methods.fedprx.mu=0.5", "methods=fedprox"])


def test_presets_are_applied_left_to_right(path: Path) -> None:
    path.write_text(path.read_text() + "\n[presets.wide]\nsplit.alpha = 33\nrounds = 77\n")
    assert load(path, ["preset=wide"]).rounds == 77
    small = load(path, ["preset=small"])
    both = load(path, ["preset=wide,small"])
    assert (both.rounds, both.split.alpha) == (small.rounds, 33)
    assert load(path, ["preset=small, wide"]).rounds == 77
    with pytest.raises(InputError, match="unknown preset 'tiny'; allowed: small, wide"):
        load(path, ["preset=small,tiny"])


def test_what_is_written_reads_back_equal(path: Path) -> None:
    experiment = load(path)
    assert parse(experiment.as_dict()) == experiment


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("round=3", r"unknown key 'round'; did you mean 'rounds'\? fields: attack, cohort, data"),
        (
            "methods.fedsdg.learnig_rate=1",
            r"unknown key 'learnig_rate' in methods\.fedsdg; did you mean 'lr_",
        ),
        ("methods.fedsdg.optimiser.lrr=1", r"did you mean 'lr'"),
        ("methods.fedsgd.rank=1", r"unknown method 'fedsgd'; did you mean 'fedsdg'"),
        ("split.scheme=dirichlett", r"split\.scheme = 'dirichlett': input should be 'iid'"),
        ("split.clients=0", r"split\.clients = 0: input should be greater than 0"),
        ("split.alpha=high", r"split\.alpha = 'high': it must be a number"),
        ("methods.fedsdg.optimiser=3", r"methods\.fedsdg\.optimiser must be a table"),
        ("rounds.x=3", r"can't set 'rounds\.x': 'rounds' is a value"),
        ("preset=tiny", r"unknown preset 'tiny'; allowed: small"),
        ("seeds=[]", r"seeds = \[\]"),
        ("seeds=[1, 1]", r"each may stand there only once"),
        ("seeds=[99999999999999999999999]", r"seeds = "),
        ("methods=3", r"must be a list of labels"),
        ('methods=[["a"]]', r"must be a list of labels"),
        ('preset=["a"]', r"unknown preset"),
        ('methods.x.name=["x"]', r"unknown method"),
        ("split.clients=true", r"split\.clients = true: it must not be"),
        ("seeds=[true]", r"seeds = true: it must not be"),
        ("split.alpha=inf", r"split\.alpha must be finite"),
        ("public.limit=20", r"public names no data; set public\.name or public\.path"),
        ('start_from="a\\u0000"', r"start_from\.run = 'a\\x00': it must not hold a NUL"),
        ("start_from=\ud800", r"start_from\.run = '\\ud800': it must not hold half a surrogate"),
        ("rounds", r"--set takes key=value, got 'rounds'"),
        ("data.path= ", r"--set takes key=value, got 'data.path= '"),
        ('methods=["fedsdg", "fedsg"]', r"unknown method 'fedsg'; did you mean 'fedsdg'"),
        ("methods=[]", r"no methods; name at least one"),
        ("methods.a/b.name=local", r"can't name a folder"),
        ('name="../x"', r"name '\.\./x' can't name a folder"),
        (
            'engine.device=""',
            r"engine\.device = '': allowed are 'auto', 'cpu', 'cuda' and 'cuda:1'",
        ),
        ("engine.device=natural", r"engine\.device = 'natural': allowed are"),
        ("engine.device=xpu", r"engine\.device = 'xpu': allowed are"),
        ("engine.device=meta", r"engine\.device = 'meta': allowed are"),
        ("split.max_examples=2147483648", r"should be less than or equal to 2147483647"),
        ("data.max_length=1000000000", r"should be less than or equal to 1000000"),
        (
            "model.width=1e9",
            r"model\.width = 1000000000\.0: input should be less than or equal to 16",
        ),
        ("model.image_size=100000", r"should be less than or equal to 1024"),
        ("engine.clients_per_step=99999999999", r"should be less than or equal to 1000000"),
        ("local.batch_size=99999999999", r"should be less than or equal to 1000000"),
        ("split.clients=99999999999", r"should be less than or equal to 1000000000"),
        ("rounds=1000000000", r"should be less than or equal to 1000000"),
        ("methods.fedsdg.rank=1000000000", r"should be less than or equal to 4096"),
        ("methods.fedsdg.robust.bucket=99999999999", r"should be less than or equal to"),
        ("attack.strength=1e300", r"attack\.strength = 1e\+300: .* less than or equal to 1000000"),
        ("attack={kind='mimic', clients=[]}", r"attack\.clients = \[\]: name a client, or set"),
        ("faults.machines=[{flops_per_second=1e-300}]", r"greater than or equal to 1"),
        ("split.clients=0x" + "f" * 9999, r"split\.clients = a number of 39996 bits"),
        ("seeds=0,1", r"seeds = '0,1': it must be a list, such as \[0, 1\]"),
    ],
)
def test_bad_settings_are_told_in_one_line(path: Path, setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(path, [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", ["", "a\0", "a\nb", "a\x1b[2J", "..", "a/b", "\ud800", "x" * 999])
def test_a_label_or_a_name_must_be_fit_for_a_folder(label: str) -> None:
    for content in ({"methods": {label: {}}}, {"methods": {"local": {}}, "name": label}):
        with pytest.raises(InputError, match=r"can't name a folder; allowed: 1 to|must not hold"):
            parse(content)


def test_a_label_stands_once() -> None:
    with pytest.raises(InputError, match="a list of tables that have a label, a text"):
        parse({"methods": [{"label": True, "name": "local"}]})
    with pytest.raises(InputError, match="the labels 'a', 'a' must differ"):
        parse({"methods": [{"label": "a", "name": "local"}, {"label": "a", "name": "fedavg"}]})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no experiment file"):
        load(tmp_path / "none.toml")
    for content, message in {
        "rounds = ": "is not TOML",
        "methods.local.optimiser = {lr = 3,5}": "is not TOML: .*; a number has a point: 3.5",
        "rounds = " + 5000 * "9": "is not TOML: Exceeds the limit",
    }.items():
        (tmp_path / "bad.toml").write_text(content)
        with pytest.raises(InputError, match=message):
            load(tmp_path / "bad.toml")


@pytest.mark.parametrize("section", ["privacy", "secure_aggregation"])
def test_a_section_that_protects_nothing_is_refused(tmp_path: Path, section: str) -> None:
    path = tmp_path / "e.toml"
    path.write_text(f"methods.fedavg = {{}}\n[{section}]  # nothing yet\n")
    with pytest.raises(InputError, match=rf"\[{section}\] of .* is empty, so nothing is protected"):
        load(path)


def test_rows_that_a_client_could_hold_are_refused() -> None:
    def near(past: int, **data: Any) -> ft.Experiment:
        content = {"methods": {"fedmd": {}}, "data": {"name": "digits", **data}}
        return parse({**content, "public": {"name": "digits", "skip": past, "limit": 5}})

    assert near(110, skip=10, limit=100).has_public
    for past, data in ((109, {"skip": 10, "limit": 100}), (1000, {})):
        with pytest.raises(InputError, match="public names the clients' own data"):
            near(past, **data)


def test_data_are_found_in_the_current_folder_or_else_beside_the_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path.parent / "visits.csv").write_text("text,label\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    settings = {"data.name": "none", "data.path": "visits.csv"}
    assert load(path, settings).data.path == str(path.parent / "visits.csv")
    (elsewhere / "visits.csv").write_text("text,label\n")
    assert load(path, settings).data.path == "visits.csv"
    assert load(path, {**settings, "data.path": "nope.csv"}).data.path == "nope.csv"


def test_what_is_neither_a_file_nor_a_run_is_told() -> None:
    with pytest.raises(InputError, match=r"^runs/nope is no experiment file, and no run dire"):
        ft.run("runs/nope")


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (ft.Experiment({"m": ft.FedAvg(optimiser=Optimiser(lr=-1.0))}),
         "methods.m.optimiser.lr = -1.0: input should be greater than 0"),
        (ft.Experiment({"m": ft.FedAvg(optimiser=Optimiser("adma"))}),  # type: ignore[arg-type]
         "methods.m.optimiser.name = 'adma': input should be 'sgd', 'adam' or 'adamw'"),
        (ft.Experiment({"m": ft.FedAvg(trainable="lorra")}),  # type: ignore[arg-type]
         "methods.m.trainable = 'lorra': input should be 'full', 'head' or 'lora'"),
        (ft.Experiment({"m": ft.FedAvg()}, split=ft.SplitConfig(validation=1.5)),
         "split.validation = 1.5: input should be less than 1"),
    ],
)  # fmt: skip
def test_values_from_python_are_checked_before_anything_is_written(
    experiment: ft.Experiment, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        ft.run(experiment, tmp_path / "out")
    assert str(error.value) == message
    assert not (tmp_path / "out").exists()


def test_a_value_from_python_may_be_written_as_in_a_file() -> None:
    text: Any = "0.1"
    made = checked(ft.Experiment({"m": ft.FedAvg(optimiser=Optimiser(lr=text))}))
    assert made.methods["m"].optimiser.lr == 0.1


@pytest.mark.parametrize(
    "preset", ["", "cola", "qnli", "rte", "mrpc", "mnli,large", "imdb", "squad", "wikilingua"]
)
def test_the_data_sets_of_fedhft_are_asked_of_the_hub(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the download; all that is known before is checked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = Path(__file__).parents[2] / "experiments/papers/fedhft/tasks.toml"
    experiment = load(file, [f"preset={preset}"] if preset else [])
    assert experiment.split.clients == 50
    Metrics(experiment.evaluate).check(objective_of_data(experiment.data))
    with pytest.raises(InputError, match=f"data set '{experiment.data.name}' isn't in reach"):
        read_columns(experiment.data)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("fedmerge/flan", ""),
        ("fedmerge/rolebench", ""),
        ("flowertune/general-nlp", ""),
        *(("fedllm-bench/sets", preset) for preset in ("", "chatbot-it", "wildchat", "chatbot-pa")),
    ],
)
def test_the_data_of_language_models_are_asked_for(
    name: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the download; all that is known before is checked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = Path(__file__).parents[2] / f"experiments/papers/{name}.toml"
    experiment = load(file, [f"preset={preset}"] if preset else [])
    data, clients = experiment.data, experiment.split.clients
    assert clients
    Metrics(experiment.evaluate).check(objective_of_data(data))
    for method in experiment.methods.values():
        method.check_settings(clients, experiment.cohort.count(clients), experiment.rounds)
    missing = f"data set '{data.name}' isn't in reach" if data.name else str(data.path)
    with pytest.raises(InputError, match=missing):
        read_columns(data)
