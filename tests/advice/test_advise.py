"""Advice follows from the closest setting that was measured."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.advice.advise import Advice, advise, advise_for
from fedtailor.advice.measured import Measured, Population, Setting, measured_settings
from fedtailor.advice.probe import lines
from fedtailor.cli import main
from fedtailor.objectives import OBJECTIVES
from fedtailor.results import Best
from fedtailor.runs.experiment import configured_method

EXPERIMENT = ft.Experiment(
    {"fedper": ft.FedPer()}, model=ft.ModelConfig(name="lenet", pretrained=False)
)


LORA = ft.Local(trainable="lora", optimiser=ft.Optimiser("adam", lr=3e-3))
TEXTS = ft.Experiment({"local": LORA}, model=ft.ModelConfig())
MINE = Population(20, 60, 0.25)


def method(accuracy: float, over: float, behind: float, **settings: str) -> Measured:
    """One whose intervals are four points wide."""
    return Measured(
        accuracy=accuracy, decile=0.5, worse_off=0.25,
        over_alone=(over, over - 0.02, over + 0.02),
        over_best=(-behind, -behind - 0.02, -behind + 0.02),
        bytes=1000, cpu_seconds=1.0, seeds=(0,),
        settings=tuple(f"{key}={value}" for key, value in settings.items()),
    )  # fmt: skip


def setting(clients: Population, **methods: Measured) -> Setting:
    named = {name.replace("_", "-"): one for name, one in methods.items()}
    settings = ("split.alpha=0.3",)
    chosen = next(iter(named))
    return Setting("digits", "image", "lenet", False, (), 0.3, 10, settings, clients, chosen, named)


SETTINGS = (
    setting(
        Population(20, 60, 0.25),
        fedavg_ft=method(0.82, 0.08, 0.0, finetune_lr="0.3"), fedper=method(0.81, 0.07, 0.01),
        ditto=method(0.77, 0.03, 0.05), local=method(0.74, 0.0, 0.08),
        fedavg=method(0.6, -0.1, 0.2),
    ),
    setting(Population(20, 60, 0.8), fedavg=method(0.8, 0.2, 0), local=method(0.6, 0, 0.2)),
    setting(Population(20, 600, 0.1), local=method(0.9, 0, 0), ditto=method(0.9, 0.005, 0)),
)  # fmt: skip


def test_the_choice_of_validation_data_and_the_best_on_test_data_come_first() -> None:
    advice = advise_for(Population(15, 80, 0.3), "image", EXPERIMENT, SETTINGS)
    assert advice.setting is SETTINGS[0]
    assert advice.methods == ["fedavg-ft", "fedper", "ditto"]
    other = replace(SETTINGS[0], chosen="ditto")
    chosen = advise_for(Population(15, 80, 0.3), "image", EXPERIMENT, [other])
    assert chosen.methods == ["ditto", "fedavg-ft", "fedper"]
    assert not advice.alone_is_as_good
    (row,) = [line for line in advice.lines("mine.toml") if line.startswith("fedavg-ft")]
    assert " ".join(row.split()[1:]) == (
        "82.0 % +8.0 [+6.0, +10.0] 25 % of clients whole model 1 kB"
    )


def test_the_command_has_the_measured_settings_of_methods_that_the_file_lacks() -> None:
    advice = advise_for(Population(20, 60, 0.25), "image", EXPERIMENT, SETTINGS)
    command = shlex.split(
        " ".join(advice.command("my file.toml", ["rounds=3"], advice.labels())).replace("\\ ", "")
    )
    assert command[:5] == ["fedtailor", "run", "my file.toml", "--set", "rounds=3"]
    changes = ft.load("quickstart", [part for part in command[4::2] if part != "--set"]).methods
    assert list(changes) == ["fedavg-ft", "fedper", "ditto", "local"]
    assert changes["fedavg-ft"].finetune_lr == 0.3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("clients", "first", "as_good"),
    [(Population(20, 60, 0.7), "fedavg", False), (Population(25, 500, 0.1), "ditto", True),
     (Population(20, 60, None), "fedavg-ft", False)],
)  # fmt: skip
def test_other_clients_get_other_advice(clients: Population, first: str, as_good: bool) -> None:
    advice = advise_for(clients, "image", EXPERIMENT, SETTINGS)
    assert (advice.methods[0], advice.alone_is_as_good) == (first, as_good)


@pytest.mark.parametrize(("examples", "is_closest"), [(90.0, True), (120.0, False)])
def test_the_same_data_set_makes_a_setting_closer(examples: float, is_closest: bool) -> None:
    """By as much as 1.7 times as many examples make it farther."""
    same = replace(SETTINGS[0], data="fashion-mnist", clients=Population(20, examples, 0.25))
    mine = replace(EXPERIMENT, data=replace(EXPERIMENT.data, name="fashion-mnist"))
    advice = advise_for(MINE, "image", mine, [*SETTINGS[:2], same])
    assert (advice.setting is same) == is_closest


def sent(one: Measured, number: int) -> Measured:
    return replace(one, bytes=number)


def test_of_methods_as_good_as_the_best_the_most_accurate_are_named() -> None:
    """Not those that send least: training alone sends nothing."""
    one = setting(
        Population(20, 60, 0.1),
        fedrep=sent(method(0.93, 0.023, 0.0), 900), fedper=sent(method(0.929, 0.022, 0.001), 800),
        fedavg_ft=method(0.92, 0.014, 0.009), ditto=sent(method(0.91, 0.002, 0.018), 10),
        local=sent(method(0.908, 0.0, 0.02), 0), pfedgate=sent(method(0.904, -0.004, 0.019), 700),
    )  # fmt: skip
    advice = advise_for(one.clients, "image", EXPERIMENT, [replace(one, chosen="fedavg-ft")])
    assert advice.methods == ["fedavg-ft", "fedrep", "fedper"]
    assert advice.labels()[-1] == "local"
    said = advice.lines("x.toml")
    assert "Training alone was as good there as fedavg-ft, which validation data chose." in said
    assert "Clearly ahead of training alone: fedrep, fedper." in said
    assert any("900 B" in line for line in said)


@pytest.mark.parametrize("chosen", ["local", "pfedgate"])
def test_what_is_not_above_training_alone_is_not_named(chosen: str) -> None:
    one = setting(
        MINE, ditto=method(0.75, 0.01, 0.0), local=method(0.74, 0.0, 0.01),
        pfedgate=method(0.735, -0.005, 0.015),
    )  # fmt: skip
    of = replace(one, chosen=chosen)
    advice = advise_for(MINE, "image", EXPERIMENT, [of])
    assert (advice.methods, advice.labels()) == (["ditto"], ["ditto", "local"])
    said = "\n".join(advice.lines("x.toml"))
    assert ("Validation data chose training alone" in said) == (chosen == "local")
    assert ("as good there as pfedgate" in said) == (chosen == "pfedgate")
    assert "Clearly ahead" not in said
    none = replace(of, methods={k: v for k, v in of.methods.items() if k != "ditto"})
    nothing = advise_for(MINE, "image", EXPERIMENT, [none])
    said = "\n".join(nothing.lines("x.toml"))
    assert nothing.methods == []
    assert "No method was ahead of it" in said
    assert 'fedtailor run x.toml \\\n  --set \'methods=["fedavg", "local"]\'' in said


def test_a_setting_with_pairs_of_texts_speaks_for_pairs() -> None:
    texts = replace(SETTINGS[0], modality="text", model="minilm", pretrained=True)
    far = replace(texts, clients=Population(8, 40, 1.0, pairs=True), file="papers/fedhft/pairs")
    mine = replace(MINE, pairs=True)
    assert advise_for(MINE, "text", TEXTS, [texts, far]).setting is texts
    advice = advise_for(mine, "text", TEXTS, [texts, far])
    assert advice.setting is far
    said = "\n".join(advice.lines("x.toml"))
    assert "The measurement: fedtailor run papers/fedhft/pairs" in said
    alone = "\n".join(advise_for(mine, "text", TEXTS, [texts]).lines("x.toml"))
    assert "Nothing was measured with pairs of texts and a pretrained model." in alone


def test_a_score_is_shown_by_its_metric_and_in_its_unit() -> None:
    numbers = Population(8, 40, None, "regression")
    methods = {
        label: replace(method(0.0, over, 0.0), accuracy=None, decile=None, score=score)
        for label, score, over in (("fedavg", 0.25, 0.05), ("local", 0.3, 0.0))
    }
    one = replace(
        SETTINGS[0], modality="text", model="minilm", pretrained=True, clients=numbers,
        task="regression", metric="rmse", methods=methods, chosen="fedavg",
    )  # fmt: skip
    advice = advise_for(numbers, "text", TEXTS, [one])
    said = advice.lines("x.toml")
    (header,) = [line for line in said if line.startswith("method ")]
    (row,) = [line for line in said if line.startswith("fedavg ")]
    assert "rmse measured" in header
    assert row.split()[1:5] == ["0.250", "+0.050", "[+0.030,", "+0.070]"]
    for without, is_doubted in ((0.3, False), (0.2, True)):
        advice = advise_for(numbers, "text", TEXTS, [replace(one, without_model=without)])
        doubt = "No method was better there than an answer without a model"
        assert (doubt in "\n".join(advice.lines("x.toml"))) == is_doubted


@pytest.mark.parametrize(("seeds", "said"), [((0,), "1 seed"), ((0, 1), "2 seeds")])
def test_few_seeds_are_said(seeds: tuple[int, ...], said: str) -> None:
    of = {label: replace(one, seeds=seeds) for label, one in SETTINGS[0].methods.items()}
    lines = advise_for(MINE, "image", EXPERIMENT, [replace(SETTINGS[0], methods=of)]).lines("x")
    assert any(f"The figures rest on {said}" in line for line in lines)
    full = {label: replace(one, seeds=(0, 1, 2)) for label, one in of.items()}
    lines = advise_for(MINE, "image", EXPERIMENT, [replace(SETTINGS[0], methods=full)]).lines("x")
    assert not any("The figures rest on" in line for line in lines)
    assert any(line.endswith("10 rounds, 3 seeds") for line in lines)


CHAT = Population(6, 50, None, "causal-lm")


def language_model(perplexity: float, over: float, sent: int, *settings: str) -> Measured:
    return Measured(
        perplexity=perplexity, worse_off=0.0, over_alone=(over, over - 0.05, over + 0.05),
        over_best=(over - 0.3, over - 0.32, over - 0.28), bytes=sent, cpu_seconds=1.0,
        seeds=(0, 1, 2), settings=settings,
    )  # fmt: skip


def test_language_models_get_the_advice_of_language_models() -> None:
    one = Setting(
        "chitchat", "text", "smollm2-135m", True, ("o_proj",), None, 10, ("preset=chat",), CHAT,
        "fedsq",
        {
            "fedsq": language_model(110.0, 0.3, 5000, 'layers=["model.layers.29"]'),
            "fedavg": language_model(116.0, 0.25, 1000, 'trainable="lora"'),
            "fedmerge": language_model(118.0, 0.2, 1000, 'trainable="lora"'),
            "fedalt": language_model(158.0, 0.02, 1500),
            "local": language_model(160.0, 0.0, 0, 'trainable="lora"'),
        },
        "causal-lm",
    )  # fmt: skip
    own = ft.Experiment({"local": LORA}, model=ft.ModelConfig(name="smollm2-135m"))
    known = [replace(SETTINGS[0], modality="text", pretrained=True), one]
    advice = advise_for(CHAT, "text", own, known)
    assert advice.setting is one
    assert advice.methods == ["fedsq", "fedavg", "fedmerge"]
    assert advice.settings_of("fedsq") == ('layers=["model.layers.29"]',)
    said = advice.lines("x.toml")
    text = "\n".join(said)
    assert "chitchat (its own clients), smollm2-135m (pretrained), 10 rounds, 3 seeds" in text
    (row,) = [line for line in said if line.startswith("fedavg")]
    assert " ".join(row.split()) == "fedavg 116.0 -22 % [-26, -18] 0 % of clients LoRA 1 kB"
    assert "accuracy" not in text
    other = replace(own, model=ft.ModelConfig(name="tiny-gpt2"))
    elsewhere = advise_for(CHAT, "text", other, known)
    assert elsewhere.methods == ["fedavg", "fedmerge"]
    assert elsewhere.left_out == ["fedsq"]
    assert any("not measured with your model" in x for x in elsewhere.lines("x"))
    assert advise_for(MINE, "text", own, known).setting is known[0]


def test_what_was_not_measured_is_said() -> None:
    far = advise_for(Population(5000, 60, 0.25), "image", EXPERIMENT, SETTINGS)
    assert any(
        "far from yours, by the number of clients: take" in line for line in far.lines("x.toml")
    )
    unlabelled = Population(20, 60, None, "causal-lm")
    said = advise_for(unlabelled, "image", EXPERIMENT, SETTINGS).lines("x.toml")
    assert "Nothing was measured for the task causal-lm." in said[-1]


def test_figures_of_another_kind_are_an_order_alone() -> None:
    one = setting(
        MINE,
        pfedgate=method(0.82, 0.08, 0.0), fedper=method(0.81, 0.07, 0.01),
        fedsq=method(0.8, 0.06, 0.02), ditto=method(0.79, 0.05, 0.03), local=method(0.74, 0, 0.08),
    )  # fmt: skip
    advice = advise_for(MINE, "text", TEXTS, [one])
    assert advice.settings_of("ditto") == (
        "trainable=lora", "optimiser.name=adam", "optimiser.lr=0.003",
    )  # fmt: skip
    without = replace(TEXTS, methods={"fedsdg": ft.FedSDG()})
    adapted = advise_for(MINE, "text", without, [one]).settings_of("ditto")
    assert adapted == ("trainable=lora",)
    assert advice.methods == ["fedper", "ditto"]  # others can't train an adapter
    said = advice.lines("x.toml")
    assert any("Nothing was measured with texts and a pretrained model." in line for line in said)
    assert any("network from random weights: only their order is a hint" in line for line in said)
    assert any(line.startswith("left out          pfedgate, fedsq: ") for line in said)
    (row,) = [line for line in said if line.startswith("ditto")]
    assert " ".join(row.split()) == "ditto +5.0 [+3.0, +7.0] 25 % of clients whole model 1 kB"


def test_other_layers_are_trained_at_the_rate_of_ones_own_file() -> None:
    """A rate that was measured for two blocks is too high for all of them."""
    one = replace(
        setting(
            MINE, local=method(0.7, 0, 0.1),
            fedper=method(0.8, 0.1, 0, **{"optimiser.lr": "0.01", "head_passes": "2"}),
        ),
        modality="text", model="minilm", pretrained=True, targets=("layer.5",),
    )  # fmt: skip
    advice = advise_for(MINE, "text", TEXTS, [one])
    assert advice.settings_of("fedper") == (
        "trainable=lora", "optimiser.name=adam", "optimiser.lr=0.003", "head_passes=2",
    )  # fmt: skip
    assert any("the adapter of your local:" in line for line in advice.lines("x"))
    assert advice.settings_of("fedsq") == ()  # an adapter's rate is none for a whole model
    same = replace(TEXTS, model=replace(TEXTS.model, targets=("layer.5",)))
    assert advise_for(MINE, "text", same, [one]).settings_of("fedper") == (
        "optimiser.lr=0.01", "head_passes=2",
    )  # fmt: skip


def test_settings_of_the_same_kind_come_first() -> None:
    far, ditto = (
        Population(500, 9, 0.9),
        {"ditto": method(0.8, 0.1, 0), "local": method(0.7, 0, 0.1)},
    )
    pictures = setting(MINE, **ditto)
    others = [replace(pictures, modality="text"), replace(pictures, clients=far, pretrained=True)]
    same = replace(others[1], modality="text")
    known = [pictures, *others, same]
    for left, nearest in ((known, same), (known[:3], others[1]), (known[:2], others[0])):
        advice = advise_for(MINE, "text", TEXTS, left)
        assert advice.setting is nearest
        said = "\n".join(advice.lines("x.toml"))
        assert ("accuracy measured" in said) == (nearest is same)
        assert ("Nothing was measured with" in said) == (nearest is not same)


def test_the_measured_settings_can_be_read() -> None:
    for one in measured_settings():
        assert one.methods["local"].over_alone == (0, 0, 0)
        split = ft.load(one.file, list(one.settings)).split
        assert one.alpha == (split.alpha if split.scheme == "dirichlet" else None)
        for label, of in one.methods.items():
            assert (of.perplexity is not None) == OBJECTIVES[one.task].generates, label


@pytest.mark.parametrize(
    "one", measured_settings(), ids=lambda one: " ".join([one.file, *one.settings])
)
def test_the_measured_settings_are_those_of_the_experiments(one: Setting) -> None:
    """What the advice hands out is the method that was measured."""
    methods = ft.load(one.file, list(one.settings)).methods
    advice = Advice(one.clients, one.kind, one, 0.0, ())
    for label in one.methods:
        handed_out, measured = configured_method(label, advice.settings_of(label)), methods[label]
        if measured.optimiser.name == "sgd":  # which has no eps
            usual = replace(measured.optimiser, eps=handed_out.optimiser.eps)
            measured = replace(measured, optimiser=usual)
        assert handed_out == measured, label


def test_measured_language_models_are_advised_by_validation() -> None:
    """The setting of the chat messages is there, and names no method that it ranks low."""
    own = ft.Experiment({"local": LORA}, model=ft.ModelConfig(name="smollm2-135m"))
    advice = advise_for(CHAT, "text", own)
    assert advice.setting is not None
    assert advice.setting.settings == ("preset=chat",)
    assert advice.setting.num_seeds == 3
    assert advice.methods[0] == advice.setting.chosen
    assert not {"local", "fedsdg"} & set(advice.methods)


TOML = """
rounds = 1
data = {name = "digits"}
split = {scheme = "dirichlet", clients = 6, alpha = 0.5, min_examples = 5}
model = {name = "lenet", width = 0.25, image_size = 16, pretrained = false}
local = {batch_size = 16, steps = 2}
[methods.fedper]
"""


def test_a_probe_names_what_was_ahead_of_training_alone() -> None:
    advice = advise_for(MINE, "image", EXPERIMENT, SETTINGS)
    scores = {"fedper": 0.8, "local": 0.7, "fedavg": 0.75, "ditto": 0.7}
    best = Best("fedper", "accuracy", 0.8, (2,), scores, {"fedper": "26 of 40 clients"})
    said = lines(advice, best, 2, "x.toml", ["rounds=9"])
    assert "fedper: 26 of 40 clients never trained so soon." in said
    assert said[0] == "After 2 rounds, with one seed:"
    assert said[1].split(maxsplit=1) == ["method", "accuracy on validation data (%)"]
    assert [line.split() for line in said[3:5]] == [["fedper", "80.0"], ["fedavg", "75.0"]]
    assert any('methods=["fedper", "fedavg", "local"]' in line for line in said)
    losses = {"fedper": 0.7, "local": 0.7, "fedavg": 0.75}
    none = lines(advice, Best("local", "loss", 0.7, (2,), losses), 1, "x.toml")
    assert none[-1].startswith("None was ahead of training alone")


@pytest.mark.slow
def test_the_command_looks_at_a_file_and_at_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    assert main(["advise", str(file), "--probe", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert "worst client" not in err  # test examples play no part
    assert said["clients"]["number"] == 6
    assert {"local", "fedavg"} <= said["probe"]["scores"].keys()
    run = ft.run(file, tmp_path / "run")
    found, kept = advise(ft.load(file), file), advise(ft.load(file), run.path)
    assert kept.clients == found.clients
    assert main(["advise", str(run.path), "--set", "split.clients=3"]) == 2
    assert "a run has its clients" in capsys.readouterr().err
    assert main(["advise", str(file), "--probe", "1", "--set", "split.validation=0"]) == 2
    assert "split.validation is 0; set it to 0.2" in capsys.readouterr().err
