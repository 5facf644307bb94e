"""Public examples, from an experiment file to the method that reads them; the order of checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data.table import Dataset, Images
from fedtailor.errors import InputError
from fedtailor.runs.experiment import parse
from fedtailor.store.files import read_json
from fedtailor.task.backbone import Backbone
from tests import kinds
from tests.runs.conftest import EXPERIMENT
from tests.small import digits


class Flat(nn.Module):
    """One layer on pictures of one size."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.head = nn.Linear(pixels, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        y: Tensor = self.head(pixel_values.flatten(1))
        return y


def pictures(side: int, channels: int = 1) -> Dataset:
    """The digits, larger and in colour."""
    whole = digits()
    values = np.kron(whole.inputs.values, np.ones((1, channels, side // 8, side // 8)))  # type: ignore[union-attr]
    return replace(whole, inputs=Images(values.astype(np.uint8)))


def experiment(**public: Any) -> ft.Experiment:
    content = {
        "rounds": 1,
        "methods": {"fedmd": {"public_examples": 7}},
        "public": public,
        "split": {"clients": 3, "max_examples": 12},
    }
    return parse(content)


def go(out: Path, dataset: Dataset, **public: Any) -> Path:
    pixels = int(np.prod(dataset.inputs.values.shape[1:]))  # type: ignore[union-attr]
    backbone = Backbone(Flat(pixels), head=("head",), name="flat")
    return ft.run(experiment(**public), out, data=dataset, backbone=backbone).path


@pytest.mark.slow
def test_public_pictures_come_at_the_size_of_the_clients(tmp_path: Path) -> None:
    out = go(tmp_path / "run", pictures(16), name="digits", limit=20)
    server = load_file(out / "methods/fedmd/seed-0/server.safetensors")
    assert server["public.consensus"].shape == (7, 10)
    other = go(tmp_path / "other", pictures(16), name="digits", limit=20, skip=20)
    there = [read_json(o / "partitions/seed-0.json") for o in (out, other)]
    assert there[0]["public"] != there[1]["public"]
    assert there[0]["digest"] == there[1]["digest"]
    with pytest.raises(InputError, match=r"public\.limit is 20 in .* and 21 now"):
        go(out, pictures(16), name="digits", limit=21)


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({}, "fedmd needs public examples; name a data set in"),
        ({"name": "digits", "limit": 9}, "holds pictures of 1 x 8 x 8, the clients' data pictures "
                                         "of 3 x 8 x 8; they must be alike"),
        ({"name": "digits", "skip": 9999}, "skip = 9999 leaves none"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_the_clients_is_refused(
    tmp_path: Path, public: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        go(tmp_path / "new", pictures(8, channels=3), **public)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"fedhft": ft.FedHFT()}}, "fedhft.warmup_rounds is 5 and rounds is 2"),
        ({"evaluate": ft.EvaluateConfig(metrics=("f9",))}, "unknown metric 'f9'"),
        ({"cohort": ft.CohortConfig(novel=3)}, "cohort.novel = 3 leaves none of 3 clients"),
        ({"start_from": ft.StartConfig("nowhere")}, "no directory 'nowhere'"),
    ],
)
def test_what_needs_no_model_is_told_before_it_is_loaded(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("fedtailor.runs.build.load_model")
    experiment = replace(EXPERIMENT, **changes)
    with pytest.raises(ft.InputError, match=message):
        ft.run(experiment, tmp_path / "run", data=digits())


def test_clients_of_one_row_each_have_no_results(tmp_path: Path) -> None:
    texts = [f"bed {number} is free" for number in range(12)]
    data = ft.Data.from_arrays(texts, clients=[*map(str, range(12))], task="causal-lm")
    chosen = parse({
        "rounds": 1, "methods": {"fedavg": {}}, "split": {"scheme": "natural", "min_examples": 1},
        "model": {"name": kinds.model("causal-lm")},
    })  # fmt: skip
    few = r"such as 0\.2; 0\.2 of a client's rows, at most 1, is none"
    with pytest.raises(InputError, match=few):
        ft.run(chosen, tmp_path / "out", data=data)
    assert not (tmp_path / "out").exists()
