import torch

from fedtailor import random


def test_numbers_depend_on_the_key_alone_and_not_on_batching() -> None:
    keys = torch.stack([random.key(0, client) for client in range(3)])
    batched = torch.func.vmap(lambda k: random.normal(k, (4, 5)))(keys)
    for client in range(3):
        assert batched[client].equal(random.normal(random.key(0, client), (4, 5)))
    assert not batched[0].equal(batched[1])


def test_draws_are_uniform_and_uncorrelated() -> None:
    u = random.uniform(random.key("u"), (200_000,))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi2 = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi2 < 45  # 19 degrees of freedom: 0.9993 quantile
    v = random.uniform(random.fold_in(random.key("u"), 1), (200_000,))
    assert torch.corrcoef(torch.stack([u, v]))[0, 1].abs() < 0.01
    assert torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1].abs() < 0.01


def test_normal_has_its_moments() -> None:
    z = random.normal(random.key("n"), (200_000,), std=2.0)
    assert abs(z.mean()) < 0.02
    assert abs(z.std() - 2.0) < 0.02
    assert abs(((z / 2) ** 4).mean() - 3.0) < 0.1
    assert z.isfinite().all()


def test_numpy_generators_differ_by_purpose() -> None:
    assert random.generator(0, "a").integers(1 << 40) != random.generator(0, "b").integers(1 << 40)
    assert random.generator(0, "a").integers(1 << 40) == random.generator(0, "a").integers(1 << 40)


def test_coins_depend_on_key_and_position_alone_and_come_up_as_often_as_told() -> None:
    keys = torch.stack([random.key(0, client) for client in range(3)])
    small = torch.func.vmap(lambda k: random.bernoulli(k, (4, 5, 6), 0.5))(keys)
    for client in range(3):
        large = random.bernoulli(random.key(0, client), (5, 7, 9), 0.5)
        assert small[client].equal(large[:4, :5, :6])
    assert not small[0].equal(small[1])
    for p in (0.1, 0.5, 0.9):
        coins = random.bernoulli(random.key("coins"), (400, 1000), p).float()
        assert abs(coins.mean() - p) < 4 * (p * (1 - p) / 400_000) ** 0.5
        for columns in (coins[:, :-1], coins[:, 1:]), (coins[:-1], coins[1:]):
            pair = torch.stack([part.flatten() for part in columns])
            assert torch.corrcoef(pair)[0, 1].abs() < 0.01
