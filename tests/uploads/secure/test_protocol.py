"""The protocol with real keys: sums, clients that leave, and servers and clients that cheat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedtailor.errors import TooFewUploadsError
from fedtailor.uploads.secure import shamir
from fedtailor.uploads.secure.client import Side
from fedtailor.uploads.secure.config import SecureAggregationConfig
from fedtailor.uploads.secure.fixed_point import FixedPoint, OutOfRangeError
from fedtailor.uploads.secure.keys import ProtocolError, add_masks
from fedtailor.uploads.secure.messages import Masks, Setting, Weighing
from fedtailor.uploads.secure.server import Exchange
from fedtailor.uploads.secure.simulation import Simulation

RANGE = 4.0
WEIGHING = Weighing(lambda client: 1 + client % 5, lambda own, total, count: own / total)


class Leaving(Simulation):
    """Clients of which some are gone from a step on."""

    def __init__(self, gone: Mapping[str, Sequence[int]]) -> None:
        super().__init__(WEIGHING)
        self.gone = gone

    def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Mapping[int, Any]:
        gone = self.gone.get(step, ())
        return super().ask(step, setting, {k: m for k, m in messages.items() if k not in gone})


def exchange(
    clients: int, gone: Mapping[str, Sequence[int]] | None = None, **config: Any
) -> Exchange:
    setting = Setting("run/1", tuple(range(clients)), SecureAggregationConfig(**config))
    return Exchange(setting, Leaving(gone or {}))


def masked(values: np.ndarray, masks: Masks) -> np.ndarray:
    return add_masks(values, masks.plus, masks.minus)


@pytest.mark.parametrize(
    ("clients", "neighbours"),
    [(2, None), (3, None), (12, None), pytest.param(200, None, marks=pytest.mark.slow), (24, 8)],
)
def test_the_sum_is_exact_to_a_step_with_a_third_of_the_clients_gone(
    clients: int, neighbours: int | None
) -> None:
    """Half of those before they have masked anything, and half after that."""
    rng = np.random.default_rng(clients)
    gone = rng.permutation(clients)[: int(0.3 * clients)].tolist()
    early, late = gone[: len(gone) // 2], gone[len(gone) // 2 :]
    round_ = exchange(clients, {"share": early}, threshold=0.6, neighbours=neighbours)
    masks = round_.open(range(clients), WEIGHING)
    assert sorted(masks) == sorted({*range(clients)} - {*early})
    values = rng.uniform(-RANGE, RANGE, (clients, 40))
    values[:, 0], values[:, 1] = RANGE, -RANGE  # the largest sums that can be
    there, total = sorted(masks.keys() - {*late}), np.zeros(40, np.uint32)
    numbers = FixedPoint(RANGE, clients)
    for k in there:
        whole = numbers.encoded(values[k], masks[k].weight)
        sent = masked(whole, masks[k])
        assert not (sent == whole).any()
        total += sent
    left = round_.close(there)
    mean = numbers.decoded(masked(total, left), left.weight)
    weights = np.array([masks[k].weight for k in there])
    expected = weights @ values[there] / weights.sum()
    assert np.abs(mean - expected).max() <= numbers.step * clients / weights.sum()


def test_too_few_clients_are_refused_at_every_step() -> None:
    def run(gone: str) -> None:
        round_ = exchange(10, {gone: range(5)}, threshold=0.7)
        round_.open(range(10), WEIGHING)
        round_.close(range(10))

    for name, said in (("keys", "keys"), ("share", "shares"), ("sign_list", "signatures")):
        with pytest.raises(TooFewUploadsError, match=f"{said} of 5 of 10 clients are there; 7 mu"):
            run(name)
    round_ = exchange(10, threshold=0.7)
    round_.open(range(10), WEIGHING)
    with pytest.raises(TooFewUploadsError, match="values of 6 of 10 clients are there"):
        round_.close(range(6))
    late = exchange(10, {"reveal": range(4)}, threshold=0.7)
    late.open(range(10), WEIGHING)
    with pytest.raises(TooFewUploadsError, match="6 shares of client 0's masks are there, 7 are"):
        late.close(range(10))


def test_a_second_pass_keeps_the_least_of_those_that_were_drawn() -> None:
    """Of ten, seven must stay to the end; seven of the eight that are left for it, and not six."""
    setting = Setting("run/1", tuple(range(8)), SecureAggregationConfig(0.7), drawn=10)
    assert (setting.least, replace(setting, drawn=0).least) == (7, 6)
    late = Exchange(setting, Leaving({"reveal": [0]}))
    late.open(range(8), WEIGHING)
    assert late.close(range(7)).clients == 8
    few = Exchange(setting, Leaving({}))
    few.open(range(8), WEIGHING)
    with pytest.raises(TooFewUploadsError, match="values of 6 of 10 clients are there; 7 must"):
        few.close(range(6))
    with pytest.raises(ProtocolError, match="6 clients are left; 7 must stay"):
        few.clients.ask("sign_list", setting, {0: tuple(range(6))})
    six = replace(setting, clients=tuple(range(6)))
    with pytest.raises(ProtocolError, match="a round of 6 clients, of 10 that are drawn; 7 must"):
        few.clients.ask("keys", six, {0: None})


def test_lists_that_differ_are_caught_before_any_share_is_told() -> None:
    """The server tells half of the clients that client 0 has left, to get both of its secrets."""
    round_ = exchange(6, threshold=0.6)
    round_.open(range(6), WEIGHING)
    ask, setting = round_.clients.ask, round_.setting
    lists = {k: tuple(range(6)) if k < 3 else tuple(range(1, 6)) for k in range(6)}
    signatures = tuple(ask("sign_list", setting, lists).items())
    for client in range(6):
        with pytest.raises(ProtocolError, match="3 clients have signed the same list as client"):
            ask("reveal", setting, {client: signatures})
    with pytest.raises(ProtocolError, match="a second list"):
        ask("sign_list", setting, {0: lists[5]})


def test_a_server_that_lets_one_client_count_alone_gets_no_sum() -> None:
    """It tells the others of far more examples than there are, so that they count for nothing."""

    class Unfair(Leaving):
        def ask(self, step: str, setting: Setting, messages: Mapping[int, Any]) -> Any:
            if step == "mask":
                more = {k: replace(m, total=10**9) for k, m in messages.items() if k != 0}
                messages = {**messages, **more}
            return super().ask(step, setting, messages)

    round_ = exchange(5, threshold=0.6)
    round_.clients = Unfair({})
    masks = round_.open(range(5), WEIGHING)
    assert masks[0].weight == 1 / 15
    assert masks[1].weight < 1e-8
    whole = np.arange(9, dtype=np.uint32)
    total = sum(masked(whole, one) for one in masks.values())
    assert not (masked(total, round_.close(range(5))) == 5 * whole).any()  # type: ignore[arg-type]


def test_a_client_tells_one_of_the_two_shares_of_each_peer_and_then_forgets() -> None:
    round_ = exchange(5, threshold=0.6)
    round_.open(range(5), WEIGHING)
    held = dict(round_.clients._held)  # type: ignore[attr-defined]
    told = {}
    ask, setting, there = round_.clients.ask, round_.setting, (0, 1, 2, 3)
    signatures = tuple(ask("sign_list", setting, dict.fromkeys(there, there)).items())
    told = ask("reveal", setting, dict.fromkeys(there, signatures))
    for peer in range(5):
        shares = {k: int(dict(told[k])[peer], 16) for k in (1, 2, 3)}
        secret = held[peer].own if peer in there else held[peer].mask
        assert shamir.join(shares) == int(secret, 16)
    assert not any(round_.clients._held[k] for k in there)  # type: ignore[attr-defined]


def test_keys_that_another_one_has_signed_are_refused() -> None:
    setting = Setting("run/1", (0, 1, 2), SecureAggregationConfig(0.6))
    clients = Leaving({})
    keys = clients.ask("keys", setting, dict.fromkeys((0, 1, 2)))
    forged = replace(keys[2], mask=keys[0].mask)
    with pytest.raises(ProtocolError, match="the keys of client 2 are not signed by it"):
        clients.ask("share", setting, {0: (keys[1], forged)})
    with pytest.raises(ProtocolError, match="two clients have the same key"):
        clients.ask("share", setting, {0: (keys[1], replace(keys[1], client=2))})


def test_another_round_has_other_masks_and_its_signatures_do_not_count() -> None:
    one = exchange(3, threshold=0.6)
    first = one.open(range(3), WEIGHING)
    again = Exchange(replace(one.setting, name="run/2"), one.clients)
    second = again.open(range(3), WEIGHING)
    assert not {*first[0].plus, *first[0].minus} & {*second[0].plus, *second[0].minus}
    ask, there = one.clients.ask, (0, 1, 2)
    signed = ask("sign_list", one.setting, dict.fromkeys(there, there))
    with pytest.raises(ProtocolError, match="0 clients have signed"):
        ask("reveal", again.setting, {0: tuple(signed.items())})


def test_who_was_not_drawn_has_no_keys() -> None:
    setting = Setting("run/1", (0, 1), SecureAggregationConfig(0.6))
    with pytest.raises(ProtocolError, match="client 7 was not drawn"):
        Side(setting, 7, bytes, lambda client: b"").keys(None, None)


def test_every_subset_of_shares_that_is_large_enough_gives_the_secret() -> None:
    secret = 2**248 - 1
    shares = shamir.split(secret, 3, [4, 0, 199, 7])
    for left_out in shares:
        assert shamir.join({k: v for k, v in shares.items() if k != left_out}) == secret
    assert shamir.join({4: shares[4], 0: shares[0]}) != secret


@pytest.mark.parametrize(("value", "most"), [(4.1, 8.0), (np.nan, np.nan), (np.inf, np.inf)])
def test_a_value_out_of_the_range_is_not_sent(value: float, most: float) -> None:
    """The server hears only that it is, and its client how large."""
    with pytest.raises(OutOfRangeError) as error:
        FixedPoint(RANGE, 2).encoded(np.array([0.0, value]), 0.5)
    assert str(error.value) == (
        "a value is beyond secure_aggregation.range = 4, and a larger range needs a new run"
    )
    np.testing.assert_equal(error.value.most, most)
