"""Losses and hits of examples, and what they add up to by client."""

from itertools import pairwise

import numpy as np
import pytest
from torch.nn import functional as F

from fedtailor.data.federation import Federation
from fedtailor.engine.scoring import Portion, Scoring, evaluate_one, evaluations
from fedtailor.methods.fedavg import FedAvg
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation
from tests.text import tiny_bert, topics_federation

METHOD = FedAvg()
FEDERATION = digits_federation()


def expected(task: Task, federation: Federation, rows: np.ndarray) -> np.ndarray:
    """Each example alone: its loss, whether it is a hit, and one prediction."""
    found = []
    for row in rows:
        batch = federation.dataset.batch(np.array([row]))
        logits = task.logits(task.state, batch)
        hit = (logits.argmax(1) == batch["labels"]).item()
        found.append((F.cross_entropy(logits, batch["labels"]).item(), hit, 1))
    return np.array(found, dtype=np.float64)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_stand_in_the_order_of_the_rows_whatever_shares_a_batch(batch_size: int) -> None:
    task = Task(digits_backbone())
    rows = np.array([5, 900, 17, 3, 1200, 44, 8])
    found = Scoring(METHOD, task, FEDERATION).scores(task.state, rows, batch_size)
    np.testing.assert_allclose(found, expected(task, FEDERATION, rows), rtol=1e-5, atol=1e-6)


def test_a_mean_is_over_predictions_and_none_where_there_are_none() -> None:
    sums = np.zeros((2, 2, 3))
    sums[0] = [[3.0, 1.0, 4.0], [6.0, 2.0, 3.0]]
    sums[1, 1] = [5.0, 5.0, 5.0]
    scoring = Scoring(METHOD, Task(digits_backbone()), FEDERATION)
    validation, test = evaluations(scoring, "global", (7, 9), sums, ())
    assert (validation.model, validation.split, validation.clients) == (
        "global",
        "validation",
        (7, 9),
    )
    assert validation.num_examples == (4, 0)
    assert validation.loss == (0.75, None)
    assert validation.accuracy == (0.25, None)
    assert (test.split, test.loss, test.accuracy) == ("test", (2.0, 1.0), (2 / 3, 1.0))


def test_one_models_scores_go_to_the_clients_whose_examples_share_its_batches() -> None:
    task = Task(digits_backbone())
    scoring = Scoring(METHOD, task, FEDERATION)
    clients, sizes = (4, 1, 2), []

    def backwards(portions):
        for portion in reversed(list(portions)):
            sizes.append(portion.size)
            yield portion, scoring.one(task.state, portion)

    validation, test = evaluate_one(backwards, scoring, clients, batch_size=7)
    assert sorted(sizes) == [4, 5, 7, 7, 7]  # 18 test examples, 12 for validation
    for evaluation in (validation, test):
        assert evaluation.clients == clients
        for at, client in enumerate(clients):
            alone = expected(task, FEDERATION, FEDERATION.rows(client, evaluation.split))
            assert evaluation.num_examples[at] == len(alone)
            assert evaluation.loss[at] == pytest.approx(alone[:, 0].mean(), rel=1e-5)
            assert evaluation.accuracy[at] == alone[:, 1].mean()


@pytest.mark.slow
def test_examples_of_like_length_share_a_batch() -> None:
    federation = topics_federation()
    task = Task(tiny_bert())
    seen: list[Portion] = []

    def watched(portions):
        for portion in portions:
            seen.append(portion)
            yield portion, np.zeros((portion.size, 3))

    scoring = Scoring(METHOD, task, federation)
    evaluate_one(watched, scoring, range(5), batch_size=4)
    lengths = [federation.dataset.inputs.lengths(p.rows) for p in seen if p.split == 1]
    rows = np.concatenate([federation.rows(client, "test") for client in range(5)])
    by_client = federation.dataset.inputs.lengths(rows).tolist()
    assert np.concatenate(lengths).tolist() == sorted(by_client) != by_client
    assert all(a.max() <= b.min() for a, b in pairwise(lengths))
    found = scoring.scores(task.state, rows, batch_size=4)
    np.testing.assert_allclose(found, expected(task, federation, rows), rtol=1e-4, atol=1e-5)
