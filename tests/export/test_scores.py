"""What a model's test accuracy is worth: beside always answering the most frequent class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.export.scores import ModelScores
from fedtailor.inference.onboard import onboard
from fedtailor.runs.trained import TrainedMethod, open_trained
from tests.inference.conftest import NEW
from tests.small import digits

pytestmark = pytest.mark.slow

EXPERIMENT = """
name = "digits"
rounds = 2
data = {name = "digits", limit = 300}
split = {scheme = "dirichlet", clients = 3, alpha = 0.3, min_examples = 20}
model = {name = "lenet", pretrained = false, image_size = 16, width = 0.5}
local = {batch_size = 8, steps = 25}
engine = {executor = "sequential"}
[methods.fedavg]
optimiser = {lr = 1e-9}
[methods.local]
optimiser = {name = "adam", lr = 3e-3}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which FedAvg learns nothing, and every client alone learns much."""
    folder = tmp_path_factory.mktemp("scores")
    (folder / "digits.toml").write_text(EXPERIMENT)
    return ft.run(folder / "digits.toml", folder / "run").path


def majority(trained: TrainedMethod, client: int) -> tuple[str, float]:
    """The most frequent class of a client's training examples, and its share of the test ones."""
    federation = trained.federation
    labels = federation.dataset.labels
    assert labels is not None
    train, test = (labels[federation.rows(client, split)] for split in ("train", "test"))
    most = np.bincount(train).argmax()
    return str(most), 100 * float((test == most).mean())


def reached(trained: TrainedMethod, client: int) -> float:
    (test,) = [one for one in ModelScores.read(trained).of(client) if one.split == "test"]
    assert test.accuracy is not None
    return 100 * test.accuracy


def test_export_and_predict_say_that_a_model_is_no_better_than_its_most_frequent_class(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedavg = open_trained(run, "fedavg")
    answer, share = majority(fedavg, 1)
    assert reached(fedavg, 1) <= share
    line = (
        f"fedtailor: on test examples fedavg at client 1 ({reached(fedavg, 1):.1f} %) is no better "
        f"than always answering '{answer}' ({share:.1f} %)"
    )
    Image.fromarray(digits().inputs.values[0, 0]).save(tmp_path / "a.png")  # type: ignore[union-attr]

    def told(label: str, *options: str) -> list[str]:
        capsys.readouterr()
        whose = [str(run), "--method", label, "--client", "1"]
        assert main(["export", *whose, "--out", str(tmp_path / label)]) == 0
        exported = [one for one in capsys.readouterr().err.splitlines() if "fedtailor:" in one]
        assert main(["predict", *whose, "--input", str(tmp_path / "a.png")]) == 0
        predicted = [one for one in capsys.readouterr().err.splitlines() if "fedtailor:" in one]
        assert predicted == exported
        return exported

    assert told("fedavg") == [line]
    assert told("local") == []
    cards = [(tmp_path / label / "README.md").read_text() for label in ("fedavg", "local")]
    for card, poor in zip(cards, (True, False), strict=True):
        assert f", {answer}, has an accuracy of {share:.1f} % on the test examples." in card
        assert ("This model is no better." in card) == poor
    assert main(["export", str(run), "--method", "fedavg", "--out", str(tmp_path / "all")]) == 0
    assert "the global model of fedavg (" in capsys.readouterr().err


def test_of_several_clients_those_are_counted_whose_model_is_no_better(run: Path) -> None:
    fedavg = open_trained(run, "fedavg")
    poor = [k for k in range(3) if reached(fedavg, k) <= majority(fedavg, k)[1]]
    assert 1 in poor
    said = ModelScores.read(fedavg).doubts([0, 1, 2])
    assert said is not None
    assert f"for {len(poor)} of 3 clients: {', '.join(map(str, poor))}" in said
    assert ModelScores.read(open_trained(run, "local")).doubts([1]) is None


def test_a_client_that_joined_is_judged_by_its_own_examples(run: Path) -> None:
    joined = onboard(run, "fedavg", NEW, "lagos")
    trained = open_trained(run, "fedavg")
    (score,) = [one for one in ModelScores.read(trained).of("lagos") if one.split == "test"]
    assert score.majority == joined.scores["majority"]["test"]["accuracy"]
    assert score.accuracy == joined.scores[joined.kept]["test"]["accuracy"]
