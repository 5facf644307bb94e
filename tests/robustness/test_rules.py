"""Krum and Multi-Krum by hand, and under a method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.params import Params
from fedtailor.robustness.distances import squared_distances
from fedtailor.robustness.rules import Robust, krum_scores
from fedtailor.runs.experiment import parse
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


def last_server(robust: Robust, clients: int = 5) -> Params:
    return last_round(FedAvg(robust=robust), (9,) * clients)[0].server


def test_one_client_and_no_attackers_is_the_method_itself() -> None:
    plain = last_server(Robust(), clients=1)
    for rule in ("krum", "multi-krum"):
        other = last_server(replace(Robust(), rule=rule), clients=1)
        assert same_bits(plain, other)


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


def test_bad_settings_are_told() -> None:
    with pytest.raises(InputError, match=r"attackers = 2 under .* at least 7 clients; .* 0 to 1"):
        last_server(Robust("krum", attackers=2))
    with pytest.raises(InputError, match=r"keep = 6 is more than the 5.* allowed: 1 to 5"):
        last_server(Robust("multi-krum", keep=6))
    with pytest.raises(InputError, match=r"keep = 2 is for rule 'multi-krum'; the rule is 'krum'"):
        last_server(Robust("krum", keep=2))
    with pytest.raises(InputError, match=r"attackers = 1 without a rule; .* 'krum', "):
        last_server(Robust(attackers=1))
    with pytest.raises(InputError, match=r"methods\.fedavg\.robust\.rule = 'mean'"):
        parse({"methods": {"fedavg": {"robust": {"rule": "mean"}}}})
    experiment = parse({"methods": {"fedavg": {"robust": {"rule": "krum", "attackers": 1}}}})
    assert experiment.methods["fedavg"].robust == Robust("krum", 1)
