"""Krum and Multi-Krum by hand, and under a method."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.params import Params
from fedtailor.runs.experiment import parse
from fedtailor.stacked import squared_distances
from fedtailor.uploads.rules import Robust, krum_scores
from tests.small import last_round, same_bits

V = np.random.default_rng(0).normal(size=(7, 12))
V[2] += 30  # two uploads that are not like the others
V[5] -= 30


def uploads() -> Params:
    values = torch.tensor(V)
    return {"a": values[:, :5].reshape(7, 5, 1), "b": values[:, 5:11], "c": values[:, 11]}


def kept(robust: Robust) -> list[int]:
    rows = robust.select(uploads())
    assert rows is not None
    return rows.tolist()


def test_scores_follow_the_paper() -> None:
    f = 2
    expected = []
    for i in range(7):
        distances = sorted(((V[i] - V[j]) ** 2).sum() for j in range(7) if j != i)
        expected.append(sum(distances[: 7 - f - 2]))
    found = krum_scores(squared_distances(uploads()), f)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_what_is_far_from_the_others_is_not_let_through() -> None:
    scores = krum_scores(squared_distances(uploads()), 2)
    assert kept(Robust("krum", attackers=2)) == [int(scores.argmin())]
    several = kept(Robust("multi-krum", attackers=2))
    assert len(several) == 7 - 2 - 2
    assert not {2, 5} & set(several)
    assert several == sorted(scores.argsort()[:3].tolist())
    assert kept(Robust("multi-krum", attackers=2, keep=5)) == [0, 1, 3, 4, 6]
    assert Robust().select(uploads()) is None


def test_distances_survive_a_large_common_part() -> None:
    """Uploads are often whole models: alike but for their last digits."""
    shifted = {name: value + 1e6 for name, value in uploads().items()}
    found = krum_scores(squared_distances(shifted), 2)
    expected = krum_scores(squared_distances(uploads()), 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("far", [1e20, 3e38, 1e300])
def test_a_huge_upload_does_not_hide_another_false_one(far: float) -> None:
    """Beside it, the distances of all others are nothing: only exact ones tell them apart."""
    values = torch.tensor(np.random.default_rng(0).normal(size=(7, 12)))
    values[0] += 100
    values[6] = far
    scores = krum_scores(squared_distances({"w": values}), 2)
    assert scores[[0, 6]].min() > scores[1:6].max()
    expected = krum_scores(squared_distances({"w": values[:6]}), 1)  # of as many neighbours
    torch.testing.assert_close(scores[:6], expected, rtol=1e-9, atol=0)
    (selected,) = Robust("krum", attackers=2).select({"w": values})
    assert 1 <= selected <= 5


def test_distances_of_two_huge_uploads_to_each_other_are_exact() -> None:
    values = torch.tensor(np.random.default_rng(0).normal(size=(7, 12)))
    values[5:] += 1e20
    values[6] = values[5]
    assert squared_distances({"w": values})[5, 6] == 0


def test_statistics_stay_in_the_range_of_those_that_are_not_false() -> None:
    values = torch.tensor([[1.0, 5.0], [-1.0, 2.0], [2.0, 3.0], [1e9, 4.0], [3.0, -1e9]])
    bounded = Robust("krum", attackers=1).bound(values)
    assert bounded.tolist() == [[1.0, 4.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [3.0, 2.0]]
    assert Robust("krum").bound(values) is values


def test_a_rule_without_some_of_its_cohort_withstands_fewer() -> None:
    rule = Robust("multi-krum", attackers=2, keep=5)
    assert rule.among(7) == rule
    assert rule.among(6) == Robust("multi-krum", attackers=1, keep=5)
    assert rule.among(4) == Robust("multi-krum", attackers=0, keep=4)
    with pytest.raises(InputError, match=r"2 uploads are there; with robust\.attackers = 2"):
        rule.among(2)
    assert Robust("krum").among(1) == Robust("krum")


def last_server(robust: Robust, clients: int = 5) -> Params:
    return last_round(FedAvg(robust=robust), (9,) * clients)[0].server


def test_one_client_and_no_attackers_is_the_method_itself() -> None:
    plain = last_server(Robust(), clients=1)
    for rule in ("krum", "multi-krum"):
        other = last_server(replace(Robust(), rule=rule), clients=1)
        assert same_bits(plain, other)


@pytest.mark.slow
def test_what_is_let_through_is_aggregated_by_the_method() -> None:
    everyone = last_server(Robust("multi-krum", keep=5))
    plain = last_server(Robust())
    for name, value in plain.items():  # summed as they come, or as one product
        torch.testing.assert_close(everyone[name], value, atol=1e-6, rtol=1e-6)
    assert not same_bits(plain, last_server(Robust("multi-krum", keep=3)))


def test_running_statistics_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the digits net, they make nearly all of the distance between two uploads."""
    scored: set[str] = set()

    def select(self: Robust, uploads: Params) -> None:
        scored.update(uploads)

    monkeypatch.setattr(Robust, "select", select)
    assert last_server(Robust("krum")).keys() - scored == {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("rule", ["krum", "bulyan", "median"])
@pytest.mark.parametrize("before", [(), ("bucketing",)])
@pytest.mark.parametrize("attackers", [1, 2, 5])
def test_the_smallest_cohort_is_told(rule: Any, before: Any, attackers: int) -> None:
    robust = Robust(rule, attackers, before=before, bucket=3 if before else 2)
    with pytest.raises(InputError) as caught:
        robust.check(1)
    least = int(re.findall(r"at least (\d+) clients", str(caught.value))[0])
    robust.check(least)
    with pytest.raises(InputError, match=f"at least {least} clients"):
        robust.check(least - 1)


def test_large_numbers_are_told_at_once() -> None:
    huge = Robust("bulyan", 10**9, before=("bucketing",), bucket=10**9)
    with pytest.raises(InputError, match=r"at least 4000000002000000001 clients"):
        huge.check(10**6)
    with pytest.raises(InputError, match="'mda' would try more than 200,000 subsets"):
        Robust("mda", attackers=10**8).check(10**9)


@pytest.mark.parametrize(
    ("robust", "message"),
    [
        (Robust("krum", keep=2), r"keep = 2 is for 'multi-krum'; robust\.rule is 'krum'"),
        (Robust("median", radius=1.0), r"radius = 1\.0 is for 'clip' and 'centred-clipping'"),
        (Robust("krum", bucket=3), r"bucket = 3 is for 'bucketing'; .* robust\.before \[\]"),
        (Robust("median", steps=3), r"steps = 3 is for 'geometric-median' and 'centred-"),
        *[
            (Robust(rule, before=before), rf"attackers = 0, with which '{idle}' withstands nobody")
            for rule, before, idle in [
                ("trimmed-mean", (), "trimmed-mean"),
                ("meamed", ("clip",), "meamed"),
                ("bulyan", (), "bulyan"),
                ("mda", (), "mda"),
                ("none", ("nnm",), "nnm"),
                ("median", ("nnm",), "nnm"),
            ]
        ],
    ],
)
def test_what_would_change_nothing_is_refused(robust: Robust, message: str) -> None:
    with pytest.raises(InputError, match=message):
        robust.check(7)


def test_bad_settings_are_told() -> None:
    with pytest.raises(InputError, match=r"attackers = 2 under .* at least 7 clients; .* up to 1"):
        last_server(Robust("krum", attackers=2))
    with pytest.raises(InputError, match=r"keep = 6 is more than the 5.* allowed: 1 to 5"):
        last_server(Robust("multi-krum", keep=6))
    with pytest.raises(InputError, match=r"attackers = 1 without a rule; .* 'krum', "):
        last_server(Robust(attackers=1))
    with pytest.raises(InputError, match=r"methods\.fedavg\.robust\.rule = 'mean'"):
        parse({"methods": {"fedavg": {"robust": {"rule": "mean"}}}})
    experiment = parse({"methods": {"fedavg": {"robust": {"rule": "krum", "attackers": 1}}}})
    assert experiment.methods["fedavg"].robust == Robust("krum", 1)
