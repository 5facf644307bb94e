"""What attackers send, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedtailor import random
from fedtailor.errors import InputError
from fedtailor.uploads.attacks import AttackConfig, attack_uploads, flipped

BASE = np.array([1.0, -2.0, 0.5])
X = np.random.default_rng(2).normal(size=(5, 3)) + BASE
ATTACKERS = (1, 4)
HONEST = X[[0, 2, 3]] - BASE


def sent(kind: str, attackers: tuple[int, ...] = ATTACKERS, **settings: float) -> np.ndarray:
    values = torch.tensor(X)
    uploads = {"a": values[:, :2].clone(), "b": values[:, 2].clone()}
    base = torch.tensor(BASE)
    attack = AttackConfig(kind, **settings)  # type: ignore[arg-type]
    unchanged = [{"a": base[:2], "b": base[2]}] * 5
    attack_uploads(attack, uploads, unchanged, attackers, random.key(0))
    found = np.column_stack([uploads["a"].numpy(), uploads["b"].numpy()])
    honest = [row for row in range(5) if row not in attackers]
    np.testing.assert_array_equal(found[honest], X[honest])
    return found[list(attackers)] - BASE


def test_attacks_on_uploads() -> None:
    mean, std = HONEST.mean(0), HONEST.std(0, ddof=1)
    np.testing.assert_allclose(sent("sign-flip"), [-mean, -mean])
    np.testing.assert_allclose(sent("inner-product"), [-2 * mean, -2 * mean])
    np.testing.assert_allclose(sent("little-is-enough"), [mean + 1.5 * std] * 2)
    np.testing.assert_allclose(sent("mimic"), [HONEST[0], HONEST[0]])
    np.testing.assert_allclose(sent("free-rider"), np.zeros((2, 3)), atol=1e-12)
    np.testing.assert_allclose(sent("scaling", strength=3.0), 3 * (X[[1, 4]] - BASE))
    first, second = sent("gaussian", strength=0.1)
    assert 0 < abs(first).max() < 1
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(sent("gaussian", strength=0.1), [first, second])


def test_without_honest_members_each_attacker_knows_its_own_update_alone() -> None:
    everyone = tuple(range(5))
    np.testing.assert_allclose(sent("sign-flip", everyone), BASE - X)
    for kind in ("little-is-enough", "mimic"):
        np.testing.assert_allclose(sent(kind, everyone), X - BASE)


@pytest.mark.parametrize(
    ("kind", "times"),
    [("sign-flip", -2.0), ("inner-product", -2.0), ("scaling", 2.0), ("backdoor", 2.0)],
)
def test_a_strength_reaches_a_product_of_factors_once(kind: Any, times: float) -> None:
    rng = np.random.default_rng(0)
    A, B = torch.tensor(rng.normal(size=(3, 2, 4))), torch.tensor(rng.normal(size=(3, 5, 2)))
    uploads = {"A": A.clone(), "B": B.clone()}
    zeros = [{"A": torch.zeros(2, 4), "B": torch.zeros(5, 2)}] * 3
    attack = AttackConfig(kind, strength=2.0)
    attack_uploads(attack, uploads, zeros, [1], random.key(0), [("A", "B")])
    torch.testing.assert_close((uploads["B"] @ uploads["A"])[1], times * B[1] @ A[1])


def test_labels_are_turned_round() -> None:
    batch = {"labels": torch.tensor([0, 1, 9]), "x": torch.ones(3)}
    assert flipped(batch, 10)["labels"].tolist() == [9, 8, 0]


def test_who_attacks_depends_on_the_seed_alone() -> None:
    attack = AttackConfig("sign-flip", fraction=0.2)
    assert len(attack.attackers(0, 20)) == 4
    assert attack.attackers(0, 20) == attack.attackers(0, 20) != attack.attackers(1, 20)
    assert AttackConfig("sign-flip", clients=(3, 5)).attackers(0, 20) == {3, 5}
    assert AttackConfig().attackers(0, 20) == frozenset()
    later = AttackConfig("sign-flip", first_round=3, last_round=4)
    assert [later.is_on(number) for number in range(2, 6)] == [False, True, True, False]


def test_bad_settings_are_told() -> None:
    with pytest.raises(InputError, match=r"strength = 2.0 is for the kinds .* is 'mimic'"):
        AttackConfig("mimic", strength=2.0).check(5, 10, rounds=3, batch_size=8)
    with pytest.raises(InputError, match=r"clients has 5; the 5 clients are 0 to 4"):
        AttackConfig("sign-flip", clients=(1, 5)).check(5, 10, rounds=3, batch_size=8)
    with pytest.raises(InputError, match=r"clients lists client 3 twice; list each client once"):
        AttackConfig("sign-flip", clients=(1, 3, 2, 3)).check(5, 10, rounds=3, batch_size=8)
    with pytest.raises(InputError, match=r"target = 10; the 10 classes are 0 to 9"):
        AttackConfig("backdoor", target=10).check(5, 10, rounds=3, batch_size=8)
    with pytest.raises(InputError, match=r"poisoned are for the kind 'backdoor'; .* 'sign-flip'"):
        AttackConfig("sign-flip", poisoned=0.1).check(5, 10, rounds=3, batch_size=8)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (AttackConfig("mimic", fraction=0.1), r"fraction = 0\.1 of 5 clients is nobody; .* 0\.2 "),
        (AttackConfig("mimic", first_round=4), r"first_round = 4, .* 3 rounds; allowed: 1 to 3"),
        (AttackConfig("mimic", first_round=3, last_round=2), r"last_round = 2 .* 3 and more"),
        (AttackConfig("backdoor", first_round=5, last_round=4), r"last_round = 4 is before"),
        (AttackConfig("backdoor", poisoned=0.05), r"poisoned = 0\.05 of a batch of 8 .* 0\.125 "),
    ],
)
def test_an_attack_that_never_comes_is_refused(attack: AttackConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attack.check(5, 10, rounds=3, batch_size=8)
    AttackConfig("backdoor", first_round=4).check(5, 10, rounds=3, batch_size=8)  # documented
