import time

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.data.example_cache import ExampleCache, LastResults
from fedtailor.data.table import Dataset, Indices
from tests.small import digits_federation
from tests.text import topics_federation

pytestmark = pytest.mark.slow

Batch = dict[str, Tensor]


def squares(batch: Batch) -> Batch:
    x = batch["pixel_values"] if "pixel_values" in batch else batch["input_ids"][..., None].float()
    return {"squares": x.square(), "first": x.flatten(1)[:, :1].clone()} if x.dim() == 4 else {
        "squares": x.square()
    }  # fmt: skip


def everything(dataset: Dataset) -> Indices:
    return np.arange(len(dataset.inputs))


def test_results_stand_beside_the_batch_they_belong_to() -> None:
    dataset = digits_federation().dataset
    asked = []

    def compute(batch: Batch) -> Batch:
        asked.append(len(batch["labels"]))
        return squares(batch)

    precomputed = ExampleCache(compute, dataset, everything(dataset))
    rows = np.array([3, 1700, 4])
    for _ in range(2):
        batch = precomputed.add_to(dataset.batch(rows), rows)
        assert batch["cached.squares"].equal(batch["pixel_values"].square())
        assert batch["cached.first"].shape == (3, 1)
    assert sum(asked) < 100  # two blocks of neighbours, once each


def test_token_sequences_are_kept_at_their_own_length() -> None:
    dataset = topics_federation().dataset
    lengths = dataset.inputs.lengths(np.arange(400))
    rows = np.array([int(lengths.argmin()), int(lengths.argmax())])
    precomputed = ExampleCache(squares, dataset, everything(dataset))
    batch = precomputed.add_to(dataset.batch(rows), rows)
    assert lengths.min() < lengths.max()
    assert batch["cached.squares"][..., 0].equal(batch["input_ids"].float().square())
    short = precomputed.add_to(dataset.batch(rows[:1]), rows[:1])
    assert short["cached.squares"].shape == (1, lengths.min(), 1)


def test_the_limit_is_of_all_rows() -> None:
    dataset = digits_federation().dataset
    whole = len(dataset.inputs) * (64 + 1) * 4 / 1e6
    assert ExampleCache(squares, dataset, everything(dataset)).fits(whole * 1.01)
    assert not ExampleCache(squares, dataset, everything(dataset)).fits(whole * 0.99)
    assert not ExampleCache(lambda batch: {}, dataset, everything(dataset)).fits(1e9)


def test_rows_that_nobody_holds_cost_nothing() -> None:
    dataset = digits_federation().dataset
    used, asked = np.arange(0, 1700, 50), []

    def compute(batch: Batch) -> Batch:
        asked.append(len(batch["labels"]))
        return squares(batch)

    precomputed = ExampleCache(compute, dataset, used)
    held = len(used) * (64 + 1) * 4 / 1e6
    assert precomputed.fits(held * 1.01)
    rows = used[[33, 0, 20]]
    batch = precomputed.add_to(dataset.batch(rows), rows)
    assert batch["cached.squares"].equal(batch["pixel_values"].square())
    assert sum(asked) == len(used)


def test_the_time_of_all_rows_follows_from_a_chunk() -> None:
    dataset = digits_federation().dataset

    def compute(batch: Batch) -> Batch:
        time.sleep(0.032)
        return squares(batch)

    precomputed, rows = ExampleCache(compute, dataset, everything(dataset)), np.array([3])
    assert precomputed.seconds == 0
    precomputed.add_to(dataset.batch(rows), rows)  # with its 32 neighbours
    assert 0.001 <= precomputed.seconds / len(dataset.inputs) < 0.03  # not a chunk's


def test_the_next_cache_of_a_run_goes_on_with_results_that_are_the_same() -> None:
    dataset, last, asked = digits_federation().dataset, LastResults(), []

    def cache(factor: float, rows: Indices) -> ExampleCache:
        def compute(batch: Batch) -> Batch:
            asked.append(batch["labels"])
            return {"scaled": batch["pixel_values"] * factor}

        made = ExampleCache(compute, dataset, rows)
        assert made.fits(1e9)
        made.go_on_from(last)
        return made

    def scaled(made: ExampleCache) -> float:
        rows = np.arange(1000, 1010)
        batch = made.add_to(dataset.batch(rows), rows)
        return float((batch["cached.scaled"] / batch["pixel_values"]).nanmean())

    rows = everything(dataset)
    assert scaled(cache(2.0, rows)) == 2
    before, again = len(asked), cache(2.0, rows)
    assert again.seconds == 0
    assert scaled(again) == 2
    assert len(asked) == before + 1  # the first rows, to compare them
    assert scaled(cache(3.0, rows)) == 3
    fewer = cache(3.0, rows[1:])
    assert fewer.seconds > 0
    assert scaled(fewer) == 3


def test_a_vector_a_text_is_kept_whole() -> None:
    dataset = topics_federation().dataset
    rows = np.array([int(dataset.inputs.lengths(np.arange(400)).argmin())])

    def pooled(batch: Batch) -> Batch:
        return {"pooled": batch["input_ids"][:, :1].float() * torch.arange(48)}

    batch = ExampleCache(pooled, dataset, everything(dataset)).add_to(dataset.batch(rows), rows)
    assert batch["input_ids"].shape[1] < 48
    assert batch["cached.pooled"].equal(pooled(batch)["pooled"])


def test_results_that_are_not_by_token_are_not_kept() -> None:
    dataset = topics_federation().dataset

    def channels_first(batch: Batch) -> Batch:
        return {"by_channel": batch["input_ids"][:, None].expand(-1, 7, -1).float()}

    assert not ExampleCache(channels_first, dataset, everything(dataset)).fits(1e9)
    assert ExampleCache(squares, dataset, everything(dataset)).fits(1e9)
