"""Distances over many columns, and beside an upload that is far larger than the others."""

from __future__ import annotations

import torch

from fedtailor.stacked import squared_distances
from fedtailor.uploads.distances import directions_from

MANY = torch.randn(6, 215_000, generator=torch.Generator().manual_seed(0))


def test_distances_over_many_columns_and_tensors() -> None:
    expected = torch.cdist(MANY.double(), MANY.double()).square()
    got = squared_distances({"a": MANY[:, :175_000], "b": MANY[:, 175_000:].view(6, 200, 200)})
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-6)


def test_directions_from_a_centre() -> None:
    centre = {"a": MANY[0], "b": torch.zeros(())}
    uploads = {"a": MANY, "b": torch.ones(6)}
    r, products = directions_from(uploads, centre)
    difference = torch.cat([MANY - MANY[0], torch.ones(6, 1)], 1).double()
    torch.testing.assert_close(r, difference.norm(dim=1))
    unit = difference / difference.norm(dim=1, keepdim=True)
    torch.testing.assert_close(products, unit @ unit.T)
