"""Rules that make one upload of all, beside plain NumPy and under a method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.params import Params
from fedtailor.uploads.robust import combined
from fedtailor.uploads.rules import COMBINATIONS, Robust
from tests.small import last_round

C, F = 9, 2
X = np.random.default_rng(1).normal(size=(C, 12))
X[3] += 100  # two uploads that are not like the others
X[6] -= 1e20


def uploads() -> Params:
    values = torch.tensor(X)
    return {"a": values[:, :5].reshape(C, 5, 1), "b": values[:, 5:11], "c": values[:, 11]}


def vector(robust: Robust, state: Params | None = None) -> np.ndarray:
    found = combined(robust, uploads(), state or {}, "abc")
    return torch.cat([found[name].reshape(-1) for name in "abc"]).numpy()


def test_rules_by_coordinate() -> None:
    ordered = np.sort(X, 0)
    np.testing.assert_allclose(vector(Robust("median", F)), np.median(X, 0))
    np.testing.assert_allclose(vector(Robust("trimmed-mean", F)), ordered[F : C - F].mean(0))
    expected = []
    for column in X.T:
        order = np.argsort(abs(column - np.median(column)), kind="stable")[: C - F]
        expected.append(column[order].mean())
    np.testing.assert_allclose(vector(Robust("meamed", F)), expected)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    z = vector(Robust("geometric-median", F, steps=100))
    at_z = np.linalg.norm(X - z, axis=1)
    directions = (X - z) / at_z[:, None]
    np.testing.assert_allclose(directions.sum(0), 0, atol=1e-6)  # the gradient of the sum


def test_centred_clipping_moves_by_clipped_differences() -> None:
    state = {"a": torch.ones(5, 1), "b": torch.ones(6), "c": torch.tensor(1.0)}
    v = np.ones(12)
    for _ in range(3):
        difference = X - v
        distance = np.linalg.norm(difference, axis=1)
        v = v + (difference * np.minimum(1, 2.0 / distance)[:, None]).mean(0)
    robust = Robust("centred-clipping", F, radius=2.0, steps=3)
    np.testing.assert_allclose(vector(robust, state), v, atol=1e-4)


def test_bulyan_takes_what_is_near_the_median_of_the_selected() -> None:
    left, rows = list(range(C)), []
    f = 1  # 9 >= 4 f + 3
    for _ in range(C - 2 * f):
        scores = []
        for i in left:
            d = sorted(((X[i] - X[j]) ** 2).sum() for j in left if j != i)
            scores.append(sum(d[: max(1, len(left) - f - 2)]))
        rows.append(left.pop(int(np.argmin(scores))))
    chosen = X[sorted(rows)]
    keep = len(chosen) - 2 * f
    expected = []
    for column in chosen.T:
        order = np.argsort(abs(column - np.median(column)), kind="stable")[:keep]
        expected.append(column[order].mean())
    np.testing.assert_allclose(vector(Robust("bulyan", f)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", COMBINATIONS)
def test_under_a_method_that_needs_only_the_mean(rule: str) -> None:
    robust = Robust(rule, attackers=1)  # type: ignore[arg-type]
    plain = last_round(FedAvg(), (9,) * 7)[0].server
    other = last_round(FedAvg(robust=robust), (9,) * 7)[0].server
    assert other.keys() == plain.keys()
    assert all(value.isfinite().all() for value in other.values())
    assert not torch.equal(other["head.weight"], plain["head.weight"])


def test_other_methods_refuse_them_by_name() -> None:
    with pytest.raises(InputError, match=r"'median'.* fedsdg .* 'krum'"):
        last_round(FedSDG(robust=Robust("median")), (9,) * 5)
