from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.flower.states import States
from fedtailor.params import Params


def state(value: float) -> Params:
    return {"b": torch.full((2,), value, dtype=torch.bfloat16), "a": torch.tensor(value)}


def value(states: States, base: int) -> float:
    found = states.read(3, base, state(0.0))
    assert list(found) == ["b", "a"]
    return found["a"].item()


def test_a_round_starts_from_the_one_that_counted(tmp_path: Path) -> None:
    states = States(tmp_path)
    assert value(states, 0) == 0.0
    states.write(3, 0, 0, 1, state(1.0))
    assert value(states, 0) == 0.0
    assert value(states, 1) == 1.0
    states.write(3, 1, 1, 2, state(2.0))
    states.write(3, 1, 1, 2, state(2.5))  # the round is repeated
    states.write(3, 1, 1, 4, state(4.0))  # it came to nothing
    assert value(states, 1) == 1.0
    assert value(states, 4) == 4.0
    states.write(3, 4, 4, 5, state(5.0))
    assert sorted(path.name[:12] for path in (tmp_path / "client-3").iterdir()) == [
        "round-000004", "round-000005",
    ]  # fmt: skip


def test_the_state_of_the_best_round_stays_until_another_one_is_better(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.write(3, 0, 0, 1, state(1.0))
    for base, number in ((1, 2), (2, 4), (4, 5), (4, 5)):
        states.write(3, base, 1, number, state(number))
        assert value(states, 1) == 1.0
    assert len(list((tmp_path / "client-3").iterdir())) == 3
    states.write(3, 5, 5, 7, state(7.0))
    with pytest.raises(InputError, match="round 1 is missing"):
        value(states, 1)


def test_a_round_with_noise_is_answered_again_for_the_same_tensors_alone(tmp_path: Path) -> None:
    states, received = States(tmp_path), {"w": torch.ones(2, 2).T, "n": torch.tensor(1)}
    states.spend(3, 1, 0, received, "so")
    again = dict(reversed(received.items()))  # a stopped server reads its state from a file
    states.spend(3, 1, 0, again, "so")
    changed = {**received, "n": torch.tensor(2)}
    for base, other, how in ((1, received, "so"), (0, changed, "so"), (0, received, "otherwise")):
        with pytest.raises(InputError, match="a round is answered once, with its noise"):
            states.spend(3, 1, base, other, how)
    states.spend(3, 2, 1, received, "otherwise")
    with pytest.raises(InputError, match="round 1 came after one for round 2"):
        states.spend(3, 1, 0, received, "so")
    states.spend(4, 1, 0, received, "so")


def test_an_update_is_for_a_second_pass_alone(tmp_path: Path) -> None:
    states = States(tmp_path)
    for end in (states.take_update, lambda client: states.keep(client, state(1.0))):
        states.write_update(3, state(2.0))
        end(3)
        assert not [*tmp_path.rglob("update*")]


def test_an_old_order_cannot_undo_a_later_round(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.write(3, 0, 0, 5, state(5.0))
    with pytest.raises(InputError, match="a request for round 4 came after one for round 5"):
        states.write(3, 0, 0, 4, state(4.0))
    assert value(states, 5) == 5.0


@pytest.mark.parametrize(
    ("best", "message"),
    [
        (0, "round 0 as the best one came after one with round 1"),
        (3, "names round 3 as the best one, and its state is not at this node"),
    ],
)
def test_the_state_of_the_best_round_is_not_given_up_for_one_that_is_not_here(
    best: int, message: str, tmp_path: Path
) -> None:
    states = States(tmp_path)
    for base, number in ((0, 1), (1, 2), (2, 4)):
        states.write(3, base, min(base, 1), number, state(number))
    with pytest.raises(InputError, match=message):
        states.write(3, 4, best, 9, state(9.0))
    assert value(states, 1) == 1.0


def test_a_state_that_is_missing_or_of_another_model_is_told(tmp_path: Path) -> None:
    states = States(tmp_path)
    with pytest.raises(InputError, match="private state of round 2 is missing at this node"):
        value(states, 2)
    states.write(3, 0, 0, 2, {"a": torch.zeros(3)})
    with pytest.raises(InputError, match="the private state of round 2 is of another model"):
        value(states, 2)


def test_a_state_that_is_damaged_is_told(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.write(3, 0, 0, 2, state(2.0))
    (path,) = tmp_path.rglob("round-000002.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"the private state of round 2 is damaged: {path}"):
        value(states, 2)


def test_nothing_is_kept_of_a_client_without_private_tensors(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.write(3, 0, 0, 1, {})
    assert states.read(3, 1, {}) == {}
    assert not list(tmp_path.iterdir())


def test_after_a_roll_back_the_states_of_later_rounds_are_not_used(tmp_path: Path) -> None:
    old, new = States(tmp_path / "a"), States(tmp_path / "b", [(tmp_path / "a", 2)])
    old.write(3, 0, 0, 2, state(2.0))
    old.write(3, 2, 2, 3, state(9.0))
    assert value(new, 2) == 2.0
    new.write(3, 2, 2, 3, state(3.0))
    new.write(3, 3, 2, 4, state(4.0))
    assert value(new, 3) == 3.0
    (tmp_path / "b/client-3/round-000003.safetensors").unlink()
    with pytest.raises(InputError, match="private state of round 3 is missing at this node"):
        value(new, 3)
    assert value(old, 3) == 9.0
