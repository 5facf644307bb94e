"""Who drops out, how much is done, and how fast machines are, by key."""

from __future__ import annotations

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.robustness.faults import ClientFaults, FaultConfig, Machine


def test_rates_are_obeyed_and_clients_have_their_own() -> None:
    own = ClientFaults((3,), drop_before=1.0, drop_after=0.0, partial=1.0)
    faults = FaultConfig(drop_before=0.3, drop_after=0.1, partial=0.4, by_client=(own,))
    fates = [faults.fate(0, round_, client) for round_ in range(1, 101) for client in range(20)]
    others = [fate for at, fate in enumerate(fates) if at % 20 != 3]
    assert np.mean([fate.drops_before for fate in others]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([fate.drops_after for fate in others]) == pytest.approx(0.1, abs=0.03)
    shares = [fate.share for fate in others]
    assert (min(shares) >= 0.4, max(shares) <= 1) == (True, True)
    assert np.mean(shares) == pytest.approx(0.7, abs=0.02)
    assert all(
        (fate.drops_before, fate.drops_after, fate.share) == (True, False, 1.0)
        for fate in fates[3::20]
    )


def test_machines_have_their_shares_of_the_clients() -> None:
    kinds = (Machine(share=3), Machine(share=1), Machine(share=1))
    own = ClientFaults((7, 9), machine=2)
    drawn = FaultConfig(machines=kinds).kinds(0, 20)
    assert np.bincount(drawn).tolist() == [12, 4, 4]
    assert not np.array_equal(drawn, FaultConfig(machines=kinds).kinds(1, 20))
    named = FaultConfig(machines=kinds, by_client=(own,)).kinds(0, 20)
    assert np.flatnonzero(named != drawn).tolist() == [k for k in (7, 9) if drawn[k] != 2]
    assert named[[7, 9]].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (FaultConfig(deadline=3.0), r"deadline = 3\.0 needs .* \[\[faults.machines\]\]"),
        (FaultConfig(by_client=(ClientFaults((5,)),)), "client 5; the 5 clients are 0 to 4"),
        (FaultConfig(by_client=(ClientFaults((1,)), ClientFaults((1,)))), "client 1 twice"),
        (FaultConfig(by_client=(ClientFaults(),)), "an entry without clients"),
        (FaultConfig(by_client=(ClientFaults((1,), machine=0),)), "machine 0, and there are 0"),
    ],
)
def test_what_does_not_go_together_is_told(faults: FaultConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        faults.check(5)
