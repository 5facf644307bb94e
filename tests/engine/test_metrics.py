"""Macro-F1 and AUC as scikit-learn has them; own functions; each executor has the same values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.metrics import Metrics
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.objectives import DEFAULT, CausalLM
from fedtailor.objectives.classification import auc, f1, macro_f1, matthews
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation

FEDERATION = digits_federation()
ALL = EvaluateConfig(metrics=("macro_f1", "auc", "brier"), confusion=True)


def brier(labels: np.ndarray, probabilities: np.ndarray) -> float:
    return -float(((np.eye(probabilities.shape[1])[labels] - probabilities) ** 2).sum(1).mean())


def drawn(seed: int, n: int, classes: int, present: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.r_[np.arange(present), rng.integers(0, present, n - present)]
    probabilities = rng.dirichlet(np.ones(classes), n).round(2)  # equal values, too
    return labels, probabilities


@pytest.mark.parametrize(("classes", "present"), [(2, 2), (5, 5), (10, 3), (3, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_macro_f1_is_that_of_the_classes_that_occur(seed: int, classes: int, present: int) -> None:
    labels, P = drawn(seed, 30, classes, present)
    expected = f1_score(labels, P.argmax(1), labels=np.unique(labels), average="macro")
    assert macro_f1(labels, P) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("classes", "present"), [(2, 2), (5, 5), (10, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_auc_is_the_mean_of_each_class_that_occurs_against_the_rest(
    seed: int, classes: int, present: int
) -> None:
    labels, P = drawn(seed, 30, classes, present)
    one_vs_rest = [roc_auc_score(labels == c, P[:, c]) for c in range(present)]
    expected = roc_auc_score(labels, P[:, 1]) if classes == 2 else np.mean(one_vs_rest)
    assert auc(labels, P) == pytest.approx(expected, abs=1e-12)


def spoils(labels: np.ndarray, probabilities: np.ndarray) -> float:
    probabilities[:] = np.eye(probabilities.shape[1])[labels]
    return 1.0


def test_a_metric_that_writes_into_its_arguments_changes_no_other(tmp_path: Path) -> None:
    labels, P = drawn(0, 30, 3, 3)
    expected = macro_f1(labels, P)
    config = EvaluateConfig(metrics=("spoils", "macro_f1"))
    with pytest.raises(ValueError, match="read-only"):
        Metrics(config, {"spoils": spoils})(labels, P)
    assert macro_f1(labels, P) == expected
    path = tmp_path / "mine.py"
    path.write_text("def spoils(labels, probabilities):\n    labels[0] = 1\n    return 1.0\n")
    with pytest.raises(InputError, match=r"mine\.py, line 2: ValueError: .* read-only"):
        Metrics(EvaluateConfig(metrics=(f"{path}:spoils",)))(labels, P)


def test_what_is_undefined_is_none_and_what_is_not_a_number_stays() -> None:
    metrics = Metrics(EvaluateConfig(metrics=("macro_f1", "auc"), confusion=True))
    one_class = metrics(np.array([1, 1]), np.array([[0.2, 0.8], [0.7, 0.3]]))
    assert one_class.values == (pytest.approx(2 / 3), None)
    assert one_class.confusion == ((0, 0), (1, 1))
    nobody = metrics(np.array([], np.int64), np.zeros((0, 2)))
    assert nobody.values == (None, None)
    diverged = metrics(np.array([0, 1]), np.array([[math.nan, math.nan], [0.3, 0.7]]))
    assert all(value is not None and math.isnan(value) for value in diverged.values)
    assert diverged.confusion == ((0, 0), (0, 1))


def last_round(method: Method, evaluate: EvaluateConfig, executor: str = "sequential") -> Round:
    engine = EngineConfig(executor, processes=2)  # type: ignore[arg-type]
    plan = Plan(2, LocalConfig(batch_size=8), engine=engine, evaluate=evaluate)
    task = Task(digits_backbone(), method.adapt)
    given = {"brier": brier} if evaluate.metrics else {}
    *_, last = rounds(method, task, FEDERATION, plan, metrics=given)
    return last


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg(), FedSDG(rank=2), FedAvgFT()], ids=lambda m: m.name)
def test_metrics_change_nothing_else_and_fit_accuracy(method: Method) -> None:
    """FedAvg's clients share batches; FedSDG's have their own models; FedAvg + FT's train first."""
    with_metrics, without = (last_round(method, e) for e in (ALL, EvaluateConfig()))
    assert len(with_metrics.evaluations) == 4
    for one, plain in zip(with_metrics.evaluations, without.evaluations, strict=True):
        assert (one.loss, one.accuracy) == (plain.loss, plain.accuracy)
        assert (plain.metrics, plain.confusion) == ({}, None)
        assert list(one.metrics) == ["macro_f1", "auc", "brier"]
        assert one.confusion is not None
        for at, client in enumerate(one.clients):
            counts = one.confusion[at]
            rows = FEDERATION.rows(client, one.split)
            labels = FEDERATION.dataset.labels[rows]
            assert counts.sum(1).tolist() == np.bincount(labels, minlength=10).tolist()
            assert counts.trace() / counts.sum() == pytest.approx(one.accuracy[at])
            true = np.repeat(np.repeat(np.arange(10), 10), counts.ravel())
            predicted = np.repeat(np.tile(np.arange(10), 10), counts.ravel())
            assert (confusion_matrix(true, predicted, labels=range(10)) == counts).all()
            expected = f1_score(true, predicted, labels=np.unique(true), average="macro")
            assert one.metrics["macro_f1"][at] == pytest.approx(expected)
            assert (one.metrics["auc"][at] is None) == (len(set(labels)) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vectorised", "processes"])
@pytest.mark.parametrize("method", [FedAvg(), FedSDG(rank=2)], ids=lambda m: m.name)
def test_every_executor_has_the_same_values(method: Method, executor: str) -> None:
    ours, theirs = last_round(method, ALL, executor), last_round(method, ALL)
    for one, other in zip(ours.evaluations, theirs.evaluations, strict=True):
        assert one.metrics["brier"] == pytest.approx(other.metrics["brier"], rel=1e-4)
        assert one.metrics["macro_f1"] == pytest.approx(other.metrics["macro_f1"], rel=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EvaluateConfig(metrics=("acu",)), "unknown metric 'acu' in evaluate.metrics; did you me"),
        (EvaluateConfig(metrics=("auc", "auc")), "names must differ from each other"),
        (EvaluateConfig(metrics=("x.py:loss",)), "and from loss and accuracy"),
        (
            EvaluateConfig(metrics=("no.py:f",)),
            "no file no.py; give FILE.py:NAME or package.module:NAME",
        ),
        (EvaluateConfig(select="auc"), "unknown metric 'auc' in evaluate.select; allowed: acc"),
    ],
)
def test_what_is_not_there_is_refused(config: EvaluateConfig, message: str) -> None:
    with pytest.raises(InputError) as raised:
        Metrics(config).check(DEFAULT)
    assert message in str(raised.value)


def test_a_misspelt_metric_is_unknown_also_where_no_text_is_written() -> None:
    with pytest.raises(InputError, match=r"unknown metric 'rougel'.*did you mean 'rougeL'"):
        Metrics(EvaluateConfig(metrics=("rougel",))).check(CausalLM())


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def share(labels, probabilities):\n    return (labels == 0).mean()\n")
    metrics = Metrics(EvaluateConfig(metrics=(f"{file}:share",)))
    metrics.check(DEFAULT)
    assert metrics.names == ("share",)
    assert metrics(np.array([0, 1, 0, 0]), np.full((4, 2), 0.5)).values == (0.75,)
    with pytest.raises(InputError, match=r"mine\.py defines no 'shar'"):
        Metrics(EvaluateConfig(metrics=(f"{file}:shar",))).check(DEFAULT)


@pytest.mark.parametrize("value", ["high", "0.5", [0.5, 0.5], np.ones(1), math.inf, 10**400, -1e61])
def test_a_function_must_return_one_number(value: object) -> None:
    metrics = Metrics(EvaluateConfig(metrics=("mine",)), {"mine": lambda labels, P: value})  # type: ignore[dict-item,return-value]
    with pytest.raises(InputError, match=r"metric 'mine' returned .*; it must"):
        metrics(np.array([0]), np.array([[0.5, 0.5]]))


def test_language_models_have_none() -> None:
    with pytest.raises(InputError, match="is not for causal-lm, which has loss, acc"):
        Metrics(EvaluateConfig(metrics=("auc",))).check(CausalLM())


def test_the_metrics_of_two_classes_are_those_of_their_counts() -> None:
    labels = np.array([1, 1, 1, 0, 0, 0, 0])
    predicted = np.array([1, 1, 0, 1, 0, 0, 0])  # 2 true, 1 false positives, 1 missed, 3 true 0
    P = np.eye(2)[predicted]
    assert f1(labels, P) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert matthews(labels, P) == pytest.approx((2 * 3 - 1 * 1) / (3 * 3 * 4 * 4) ** 0.5)
    none = np.eye(2)[[0] * 7]
    assert matthews(labels, none) == 0.0
    assert math.isnan(matthews(0 * labels, none))
    assert f1(labels, none) == 0.0
    assert math.isnan(f1(0 * labels, none))
    assert math.isnan(f1(labels, np.eye(3)[predicted]))
