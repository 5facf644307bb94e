"""Clipped updates and the noise on their mean, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtailor import random
from fedtailor.params import Params
from fedtailor.uploads.chain import UploadContext
from fedtailor.uploads.norms import norm
from fedtailor.uploads.private import Private

SERVER = {"a": torch.full((30, 40), 5.0), "b": torch.arange(4.0)}
AT = UploadContext(7, (), lambda state, upload: {n: state[n] for n in upload}, SERVER, round=3)
LINK = Private(clip=0.5, noise=1.2, cohort=2, method="fedavg")


def moved(by: float) -> Params:
    return {name: value + by for name, value in SERVER.items()}


@pytest.mark.parametrize(("by", "sent"), [(1e-4, 1e-4), (3.0, 0.5 / math.sqrt(1204))])
def test_an_update_is_cut_down_to_the_bound_and_a_shorter_one_is_sent_as_it_is(
    by: float, sent: float
) -> None:
    update = LINK.send(moved(by), AT)
    assert all(torch.allclose(v, torch.tensor(sent), rtol=3e-3) for v in update.values())
    assert norm(update.values()) <= 0.5
    received = LINK.receive(update, AT)
    assert all(received[name] is update[name] for name in update)  # no rounding a second time


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_what_a_hostile_client_sends_is_cut_down_at_the_server(value: float) -> None:
    received = LINK.receive({"a": torch.full((30, 40), value), "b": torch.ones(4)}, AT)
    assert norm(received.values()) <= 0.5


def test_the_mean_is_noised_as_numpy_draws_it() -> None:
    uploads = {name: torch.stack([0.1 * v, 0.3 * v]) for name, v in SERVER.items()}
    at = replace(AT, clients=(4, 9))
    made = LINK.total(uploads, at)
    draws = random.generator(7, 3, "privacy", "fedavg")
    for name in ("a", "b"):
        noise = 0.3 * torch.from_numpy(draws.standard_normal(SERVER[name].shape))
        expected = SERVER[name].double() * 1.2 + noise
        np.testing.assert_allclose(made[name][0].numpy(), expected.numpy(), rtol=1e-6)
        assert made[name].dtype == torch.float32
    assert all(made[n].equal(v) for n, v in LINK.total(uploads, at).items())  # the same again
    mean = {name: value.mean(0, keepdim=True) for name, value in uploads.items()}
    for name, value in LINK.total(mean, at).items():
        assert torch.allclose(value, made[name])


def test_noise_has_its_variance_and_none_is_like_another() -> None:
    zeros = {name: torch.zeros(1, *value.shape) for name, value in SERVER.items()}

    def noise(at: UploadContext, link: Private = LINK) -> torch.Tensor:
        return (link.total(zeros, at)["a"] - SERVER["a"]).double().flatten()

    draws = torch.stack([noise(replace(AT, round=number)) for number in range(100)])  # 120,000
    assert float(draws.std()) == pytest.approx(0.3, rel=0.01)
    assert abs(float(draws.mean())) < 0.3 * 5 / math.sqrt(draws.numel())
    others = [noise(replace(AT, seed=8)), noise(AT, replace(LINK, method="fedper"))]
    correlations = torch.corrcoef(torch.stack([*draws[:5], *others])).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.15


@pytest.mark.parametrize("present", [1, 3])
def test_the_sum_is_divided_by_the_usual_size_of_the_cohort(present: int) -> None:
    """So that whether a client is there changes nothing but its own part."""
    uploads = {name: torch.full((present, *v.shape), 0.5) for name, v in SERVER.items()}
    at = replace(AT, clients=tuple(range(present)))
    made, plain = LINK.total(uploads, at), LINK.total({n: 0 * v for n, v in uploads.items()}, at)
    for name, value in made.items():
        assert torch.allclose(value - plain[name], torch.tensor(0.5 * present / 2), atol=1e-5)
