"""Epsilons are those of prv-accountant: `make test-oracles` runs this."""

from __future__ import annotations

import pytest
from prv_accountant.dpsgd import DPSGDAccountant

from fedtailor.uploads.accounting import Account
from fedtailor.uploads.record_accounting import RecordAccount

# of Poisson samples: their rate, the noise, steps, delta, and epsilon
SETTINGS = [
    (0.05, 1.0, 1000, 1e-5, 10.987),
    (0.02, 0.8, 300, 1e-6, 4.489),
    (0.2, 2.5, 200, 1e-4, 4.757),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "about"), SETTINGS)
def test_of_clients_and_of_records(
    rate: float, noise: float, steps: int, delta: float, about: float
) -> None:
    """Records have a coarser grid, which adds up to 0.1 %."""
    theirs = DPSGDAccountant(noise, rate, steps, eps_error=0.05, delta_error=delta / 1000)
    _, estimate, _ = theirs.compute_epsilon(delta, steps)
    assert estimate == pytest.approx(about, abs=1e-3)
    of_clients = Account(noise, delta, 100_000, round(100_000 * rate), steps, True, "remove")
    assert of_clients.spent(steps).epsilon == pytest.approx(estimate, rel=1e-4)
    of_records = RecordAccount(noise, delta, 1000, rate, steps // 10, 10).spent(10).epsilon
    assert estimate * (1 - 1e-4) < of_records < estimate * 1.001
