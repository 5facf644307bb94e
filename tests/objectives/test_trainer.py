"""Each kind of task trains and scores as transformers' own Trainer does, on one client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from sklearn import metrics
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.engine.rounds import rounds
from fedtailor.models import load_model
from fedtailor.objectives import OBJECTIVES
from tests import kinds

_LR = 0.05


class InOrder(transformers.Trainer):
    """A Trainer whose examples are whole batches, one after the other."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def for_trainer(kind: str, batch: Mapping[str, Tensor], scale: tuple[float, ...]) -> dict[str, Any]:
    """A batch with the labels that transformers' model computes its loss from."""
    batch = {**batch, "attention_mask": batch["attention_mask"].long()}
    if kind == "question-answering":
        assert batch["attention_mask"].all()
        start, end = batch["labels"].view(-1, 2).T
        windows = {n: value.flatten(0, 1) for n, value in batch.items() if n != "labels"}
        return {**windows, "start_positions": start, "end_positions": end}
    if kind == "causal-lm":
        real = batch["attention_mask"].bool()
        return {**batch, "labels": batch["input_ids"].masked_fill(~real, -100)}
    if kind == "multi-label":
        return {**batch, "labels": batch["labels"].float()}
    if kind == "regression":
        return {**batch, "labels": ((batch["labels"] - scale[0]) / scale[1]).float()}
    return dict(batch)


def scores(kind: str, outputs: Tensor, labels: Any, scale: tuple[float, ...]) -> dict[str, float]:
    """What scikit-learn and SciPy say of a client's examples."""
    if kind == "regression":
        predicted = scale[0] + scale[1] * outputs[:, 0].double().numpy()
        return {
            "rmse": metrics.mean_squared_error(labels, predicted) ** 0.5,
            "mae": metrics.mean_absolute_error(labels, predicted),
            "r2": metrics.r2_score(labels, predicted),
            "pearson": stats.pearsonr(labels, predicted).statistic,
            "spearman": stats.spearmanr(labels, predicted).statistic,
        }
    if kind == "multi-label":
        found = outputs.double().sigmoid().numpy()
        return {"map": metrics.average_precision_score(labels, found)}
    if kind == "classification":
        found = outputs.double().softmax(1).numpy()
        return {
            "macro_f1": metrics.f1_score(labels, found.argmax(1), average="macro"),
            "auc": metrics.roc_auc_score(labels, found[:, 1]),
        }
    if kind == "seq2seq":
        right = [
            row[: len(one)].numpy() == one
            for row, one in zip(outputs.argmax(2), labels, strict=True)
        ]
        return {"accuracy": float(np.concatenate(right).mean())}
    if kind == "token-classification":
        of_words = [row[row != -100] for row in labels]
        predicted = outputs.argmax(2)
        pairs = [
            (a, p[: len(r)][r != -100]) for a, p, r in zip(of_words, predicted, labels, strict=True)
        ]
        right = np.concatenate([a == b.numpy() for a, b in pairs])
        return {"accuracy": float(right.mean())}
    return {}


def balanced(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    """Cross-entropy with scikit-learn's weights of the client's own classes."""
    counts = balanced.labels  # type: ignore[attr-defined]
    weight = compute_class_weight("balanced", classes=np.unique(counts), y=counts)
    loss: Tensor = torch.nn.CrossEntropyLoss(torch.tensor(weight).float())(outputs.logits, labels)
    return loss


def huber(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    loss: Tensor = torch.nn.HuberLoss(delta=0.5)(outputs.logits[:, 0], labels)
    return loss


CASES = [  # kinds that compare two models: tests/oracles
    *((kind, kinds.MODELS.get(kind), None) for kind, of in OBJECTIVES.items() if not of.compares),
    ("seq2seq", kinds.BART, None),
    ("classification", None, balanced),
    ("regression", None, huber),
]
FAST = "question-answering"  # its targets are the furthest from transformers'


@pytest.mark.parametrize(
    ("kind", "architecture", "own_loss"),
    [pytest.param(*case, marks=[] if case[0] == FAST else pytest.mark.slow) for case in CASES],
    ids=lambda value: getattr(value, "model_type", getattr(value, "__name__", str(value))),
)
def test_a_client_trains_and_is_scored_as_by_the_trainer(
    kind: str, architecture: Any, own_loss: Any, tmp_path: Path
) -> None:
    folder = kinds.save_model(tmp_path / kind, kind, architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = kinds.source(kind)
    delta = 0.5 if own_loss is huber else None
    config = source.config(ft.DataConfig(max_length=32, huber_delta=delta))
    dataset = source.load(config, tokenizer)
    federation = ft.Federation(dataset, partition(dataset, ft.SplitConfig(1), 0))
    backbone = load_model(ft.ModelConfig(str(folder)), dataset.objective, dataset.num_classes, 0)
    local = ft.LocalConfig(batch_size=8)
    written = dataset.objective.writes  # whose metrics are of written texts
    names = () if written else tuple(dataset.objective.metrics)
    weights: Any = "balanced" if own_loss is balanced else None
    training = replace(local, class_weights=weights)
    plan = ft.Plan(1, training, evaluate=ft.EvaluateConfig(metrics=names))
    method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=_LR))
    task = ft.Task(backbone, method.adapt)
    auto = OBJECTIVES[kind].auto_classes["text"]
    model = getattr(transformers, auto).from_config(backbone.model.config)
    model.load_state_dict(backbone.model.state_dict())
    batches = [for_trainer(kind, one, dataset.scale) for one in federation.batches(0, 1, local)]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=1, num_train_epochs=1, max_grad_norm=0.0,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=_LR)
    trainer = InOrder(
        model, arguments, data_collator=lambda some: some[0], train_dataset=batches,
        optimizers=(optimiser, torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0)),
        compute_loss_func=own_loss,
    )  # fmt: skip
    balanced.labels = dataset.targets(federation.rows(0, "train"))  # type: ignore[attr-defined]
    trainer.train()
    (done,) = rounds(method, task, federation, plan)
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert done.train_loss == pytest.approx(np.mean(logged), rel=1e-4)  # which it rounds
    after = model.state_dict()
    for name, value in done.server.items():
        torch.testing.assert_close(value, after[name], atol=1e-5, rtol=1e-5)
    test = next(one for one in done.evaluations if one.split == "test")
    rows = federation.rows(0, "test")
    batch = for_trainer(kind, dataset.batch(rows), dataset.scale)
    with torch.no_grad():
        output = model.eval()(**batch)
    loss = huber(output, batch["labels"]) if own_loss is huber else output.loss  # never weighted
    assert test.loss[0] == pytest.approx(float(loss), abs=1e-5)
    labels = dataset.targets(rows)
    found = {"accuracy": test.accuracy, **test.metrics}
    outputs = output.get("logits")
    for name, value in scores(kind, outputs, labels, dataset.scale).items():
        assert found[name][0] == pytest.approx(value, abs=1e-5), name
