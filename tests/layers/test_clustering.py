"""Soft clusters of planted groups of updates."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.layers.clustering import likeness, mixture_assignments

F64 = NDArray[np.float64]


def planted(sizes: tuple[int, ...], noise: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, F64]:
    """The Gram matrix of updates around one centre a group, and the groups."""
    rng = np.random.default_rng(seed)
    centres = 0.01 * np.eye(len(sizes), 40)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    updates = centres[groups] + 0.01 * noise * rng.normal(size=(len(groups), 40)) / 6
    return torch.tensor(updates @ updates.T), groups


def test_groups_of_clients_are_found_without_any_assignments() -> None:
    gram, groups = planted((5, 4, 6))
    p = mixture_assignments(gram, torch.full((15, 3), 1 / 3), 3, 1e-2, seed=1)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    labels = p.argmax(1).numpy()
    assert len({(g, c) for g, c in zip(groups, labels, strict=True)}) == len(set(labels)) == 3
    assert p.max(1).values.min() > 0.99


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_labels_carry_over_from_the_last_assignments(order: tuple[int, ...]) -> None:
    gram, groups = planted((5, 4, 6), seed=1)
    last = torch.full((15, 3), 0.15)
    for client, group in enumerate(groups):
        last[client, order[group]] = 0.7
    labels = mixture_assignments(gram, last, 3, 1e-2, seed=1).argmax(1).tolist()
    assert labels == [order[group] for group in groups]


@pytest.mark.parametrize("seed", range(6))
def test_newcomers_are_assigned_to_the_clusters_that_are_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(2, 40))
    groups = rng.permutation(np.repeat([0, 1], 5))
    models = 3 * centres + rng.normal(size=40)  # what both have learned
    both = torch.tensor(np.concatenate([models, centres[groups] + rng.normal(size=(10, 40)) / 2]))
    gram = both @ both.T
    found = mixture_assignments(gram[2:, 2:], likeness(gram, 2), 2, 1e-2, seed=seed)
    assert found.argmax(1).tolist() == groups.tolist()


def test_a_cluster_without_clients_gets_none() -> None:
    gram, groups = planted((3, 3), noise=1.0)
    last = torch.zeros(6, 3)
    last[torch.arange(6), torch.tensor(2 * groups)] = 1.0
    p = mixture_assignments(gram, last, 2, 1e-2, seed=0)
    assert not p[:, 1].any()
    assert p.argmax(1).tolist() == (2 * groups).tolist()


def test_equal_updates_leave_the_assignments_alone() -> None:
    last = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]])
    for gram in (torch.zeros(3, 3), torch.full((3, 3), 1e-4)):
        torch.testing.assert_close(
            mixture_assignments(gram.double(), last, 2, 1e-2, seed=0).float(), last
        )


def test_a_larger_reg_covar_makes_assignments_softer() -> None:
    gram, groups = planted((6, 6), noise=3.0)
    last = torch.full((12, 2), 0.2)
    last[torch.arange(12), torch.tensor(groups)] = 0.8
    sharp, soft = (
        mixture_assignments(gram, last, 2, reg, seed=0).max(1).values.mean() for reg in (1e-2, 3.0)
    )
    assert soft < sharp - 0.05


def test_too_few_components_hide_groups() -> None:
    gram, groups = planted((4, 4, 4, 4, 4), noise=0.5)
    start = torch.full((20, 5), 1 / 5)
    for components, perfect in ((4, True), (1, False)):
        labels = mixture_assignments(gram, start, components, 1e-2, seed=0).argmax(1).tolist()
        pairs = set(zip(groups.tolist(), labels, strict=True))
        assert (len(pairs) == len(set(labels)) == 5) == perfect


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_updates_than_clusters_leave_the_assignments_alone(count: int) -> None:
    gram, _ = planted((1,) * count)
    for last in (torch.full((count, 3), 1 / 3), torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])):
        p = mixture_assignments(gram, last[:count], 3, 1e-2, seed=0)
        torch.testing.assert_close(p.float(), last[:count])
