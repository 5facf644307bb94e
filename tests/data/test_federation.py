from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import pad_and_stack
from fedtailor.errors import InputError
from tests.small import SIZES, digits_federation, reseeded

FEDERATION = digits_federation()


@given(st.integers(0, 50), st.integers(1, 5))
def test_cohorts_are_distinct_clients_drawn_by_round_and_seed(round_: int, size: int) -> None:
    cohort = FEDERATION.cohort(round_, size)
    assert len(set(cohort)) == size
    assert set(cohort) <= set(range(5))
    assert cohort == FEDERATION.cohort(round_, size)


def test_every_pair_of_clients_is_drawn_equally_often() -> None:
    """By the chi-squared test of 10 pairs: a fair draw stays below 27.9 999 times in 1,000."""
    drawn = Counter(tuple(sorted(FEDERATION.cohort(number, 2))) for number in range(3000))
    assert len(drawn) == 10
    assert sum((count - 300) ** 2 / 300 for count in drawn.values()) < 27.9


@pytest.mark.parametrize(
    ("clients", "rounds", "size", "novel", "each"),
    [
        (40, 4, 4, 0, 1),
        (40, 30, 4, 0, 3),
        (6, 20, 4, 2, 20),
        (5, 9, 1, 0, 2),
        (7, 5, 2, 3, 2),
        (5, 7, 1, 0, 1),
    ],
)
def test_every_client_has_equally_many_turns(
    clients: int, rounds: int, size: int, novel: int, each: int
) -> None:
    federation = digits_federation((1,) * clients)
    turns = [federation.turns(number, rounds, size, novel) for number in range(1, rounds + 1)]
    counts = Counter(client for one in turns for client in one)
    assert turns[0]  # of whom the costs are measured
    taking_part = set(range(clients)) - federation.novel(novel)
    assert counts == dict.fromkeys(taking_part, each)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1
    for client in taking_part:  # a client's turns stand for all rounds, each for one part of them
        parts = [one[client] for one in turns if client in one]
        assert [number for part in parts for number in part] == [*range(1, rounds + 1)]


@given(st.integers(0, 4), st.integers(1, 9), st.integers(1, 3))
def test_an_epoch_sees_every_example_once(client: int, batch_size: int, epochs: int) -> None:
    local = LocalConfig(batch_size=batch_size, epochs=epochs)
    steps = list(FEDERATION.batches(client, 1, local))
    assert len(steps) == FEDERATION.num_steps(client, local)
    images = torch.cat([batch["pixel_values"] for batch in steps])
    assert len(images) == epochs * SIZES[client]
    own = FEDERATION.dataset.batch(FEDERATION.rows(client, "train"))["pixel_values"]
    for image in own:
        assert (images == image).flatten(1).all(1).sum() >= epochs


def test_local_steps_go_on_over_epochs() -> None:
    local = LocalConfig(batch_size=16, steps=7)
    steps = list(FEDERATION.batches(1, 1, local))  # 3 examples: one batch an epoch
    assert [len(batch["labels"]) for batch in steps] == [3] * 7
    assert len(list(FEDERATION.batches(2, 1, local, passes=2))) == 14


def test_batches_change_with_round_purpose_and_seed_and_with_nothing_else() -> None:
    local = LocalConfig(batch_size=8)

    def labels(federation=FEDERATION, round_=1, purpose="train") -> list[float]:
        steps = federation.batches(2, round_, local, purpose=purpose)
        return torch.cat([batch["pixel_values"].flatten() for batch in steps]).tolist()

    assert labels() == labels()
    assert labels() != labels(round_=2)
    assert labels() != labels(purpose="personalise")
    assert labels() != labels(federation=reseeded(FEDERATION, 1))


def test_padding_is_marked_and_only_where_there_is_some() -> None:
    local = LocalConfig(batch_size=8)
    clients = [list(FEDERATION.batches(k, 1, local)) for k in (2, 0, 1)]  # 5, 3 and 1 steps
    stacked = pad_and_stack(clients)
    assert len(stacked) == 5
    assert stacked[4]["weight"].sum(1).tolist() == [8, 0, 0]
    for number, batch in enumerate(stacked):
        for row, steps in enumerate(clients):
            size = len(steps[number]["labels"]) if number < len(steps) else 0
            if size:
                assert batch["labels"][row, :size].equal(steps[number]["labels"])
            if "weight" in batch:
                assert batch["weight"][row].sum() == size
    assert "weight" not in pad_and_stack([clients[0][:2]] * 2)[0]


def test_a_sample_of_clients_stands_for_all() -> None:
    assert FEDERATION.evaluation_clients(None) == (0, 1, 2, 3, 4)
    assert len(FEDERATION.evaluation_clients(2)) == 2
    assert FEDERATION.evaluation_clients(2) == FEDERATION.evaluation_clients(2)


def test_novel_clients_are_not_in_the_sample_and_leave_it_as_large() -> None:
    for seed in range(9):
        federation = reseeded(FEDERATION, seed)
        sample = federation.evaluation_clients(2, novel=3)
        assert len(sample) == 2
        assert not federation.novel(3) & set(sample)
        assert len(federation.evaluation_clients(1, novel=3)) == 1


def test_an_empty_client_is_refused_by_number() -> None:
    with pytest.raises(InputError, match="client 1 has no training examples"):
        digits_federation((3, 0, 2)).check()


def test_few_shapes_for_a_gpu() -> None:
    def batch(sizes: list[int]) -> dict[str, torch.Tensor]:
        mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        ids = torch.ones(mask.shape, dtype=torch.int64) * mask
        other = torch.ones(len(sizes), 3)
        return {"input_ids": ids, "attention_mask": mask.float(), "labels": other}

    one = [batch([20, 37]), batch([5])]
    for most, length in ((0, 37), (38, 38), (512, 40)):
        first, second = pad_and_stack([one], most)
        for padded in (first, second):
            assert padded["input_ids"].shape == (1, 2, length)
            assert padded["labels"].shape == (1, 2, 3)  # not by tokens
        assert first["input_ids"].sum() == 57
        assert second["weight"].tolist() == [[1, 0]]
