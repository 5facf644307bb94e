"""Every kind of base model and every form: the export's logits are ours, without fedtailor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.export.folder import ClientModel, write_model
from fedtailor.method import Method
from fedtailor.models import ModelConfig, load_model
from fedtailor.optim import ClientContext
from fedtailor.params import Batch, Params
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.export.apart import logits_of
from tests.models.small import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    IMAGE,
    PICTURES,
    SEQUENCE,
    VIT,
    save,
    three_classes,
)
from tests.models.small import texts as ragged

CLASSES = ["a", "b", "c"]
PICTURE = (3, 16, 16)

FORMS: dict[str, Method] = {
    "full": ft.FedAvg(),
    "head": ft.FedAvg(trainable="head"),
    "lora": ft.FedAvg(trainable="lora", rank=2),
    "fedem": ft.FedEM(components=2),
    "fedem-lora": ft.FedEM(components=2, trainable="lora", rank=2),
    "pfedmoe": ft.PFedMoE(),
    "pfedmoe-lora": ft.PFedMoE(trainable="lora", rank=2),
    "feddpa": ft.FedDPA(rank=2),
    "fedalt": ft.FedALT(rank=2),
    "pfedgate": ft.PFedGate(),
    "pfedgate-sample": ft.PFedGate(evaluation="sample", pre_norm=False),
    "pfedgate-client": ft.PFedGate(evaluation="client", post_norm=False),
    "fedsq": ft.FedSQ(),
    "fedsq-structural": ft.FedSQ(max_pool="structural", smooth="mask"),
    "heterofl": ft.HeteroFL(widths=(0.5,)),
}
NOT_FOR_LM = ("head",)


class Base(NamedTuple):
    """A base model by its experiment's fields, and the names of the forms that it is tried with."""

    fields: dict[str, Any]
    forms: tuple[str, ...]
    task: str = "classification"
    modality: str = "text"


def bases(folder: Path) -> dict[str, Base]:
    """Base models whose files lie below ``folder``."""

    def saved(name: str, config: Any, auto: str) -> dict[str, Any]:
        return {"name": str(save(folder / f"{name}-{auto}", three_classes(config), auto))}

    few = ("full", "lora", "head", "fedem")
    some = (*few, "feddpa", "fedsq", "pfedgate")
    text, lm, picture = tuple(FORMS), tuple(n for n in FORMS if n not in NOT_FOR_LM), "image"
    return {
        "bert, mean": Base(
            saved("bert", ENCODERS["bert"], "AutoModel") | {"pooling": "mean"}, text
        ),
        "bert, native": Base(saved("bert", ENCODERS["bert"], SEQUENCE), text),
        "roberta": Base(saved("roberta", ENCODERS["roberta"], SEQUENCE), few),
        "distilbert": Base(saved("distilbert", ENCODERS["distilbert"], SEQUENCE), some),
        "gpt2, last": Base(saved("gpt2", DECODERS["gpt2"], SEQUENCE), some),
        "qwen2, last": Base(saved("qwen2", DECODERS["qwen2"], SEQUENCE), few),
        "gpt2": Base(saved("gpt2", DECODERS["gpt2"], CAUSAL), lm, "causal-lm"),
        "llama": Base(saved("llama", DECODERS["llama"], CAUSAL), ("full", "lora"), "causal-lm"),
        "vit": Base(saved("vit", VIT, IMAGE), text, modality=picture),
        "vit, larger": Base(
            saved("vit", VIT, IMAGE) | {"image_size": 24}, ("full", "lora"), modality=picture
        ),
        "swin": Base(
            saved("swin", PICTURES["swin"], IMAGE), ("full", "lora", "feddpa"), modality=picture
        ),
        "modernbert": Base(saved("modernbert", ENCODERS["modernbert"], SEQUENCE), ("full", "lora")),
        "resnet9": Base(
            {"name": "resnet9", "width": 0.1, "targets": ("*",)},
            (*some, "heterofl", "fedsq-structural"), modality=picture,
        ),
        "lenet": Base({"name": "lenet", "targets": ("hidden*",)}, some, modality=picture),
        "cnn": Base({"name": "cnn", "width": 0.1}, ("full",), modality=picture),
        "efficientnet": Base(
            {"name": "efficientnet-lite0", "targets": ("_fc",)},
            ("full", "head", "fedem", "lora"), modality=picture,
        ),
    }  # fmt: skip


def batch_for(base: Base) -> Batch:
    """A few examples; texts of different lengths."""
    if base.modality == "text":
        batch = {name: value[0, :3] for name, value in ragged().items()}
        batch["input_ids"] *= batch["attention_mask"].long()  # transformers knows padding by its id
        return batch if base.task == "classification" else without_labels(batch)
    pictures = torch.rand((4, *PICTURE), generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pictures, "labels": torch.tensor([0, 1, 2, 1])}


def without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def after_a_step(method: Method, task: Task, batch: Batch) -> Params:
    """A client's state after a local step that moves everything."""
    server = method.init_server(task, 2, key(0))
    state = {**method.send(task, server, 0), **method.init_client(task, 0, key(1))}
    trained, _ = method.local(task, state, [batch, batch], ClientContext(key(2)))
    return {name: trained.get(name, value).detach() for name, value in state.items()}


def model_of(base: Base, method: Method) -> tuple[ClientModel, Tensor]:
    """A client's model and its logits."""
    pretrained = not base.fields["name"].isidentifier() and "efficient" not in base.fields["name"]
    config = ModelConfig(**base.fields, pretrained=pretrained)
    experiment = ft.Experiment({"it": method}, model=config)
    data = {
        "task": base.task,
        "modality": base.modality,
        "picture": PICTURE if base.modality == "image" else None,
        "classes": CLASSES if base.task == "classification" else [],
        "clients": 2,
    }
    backbone = load_model(
        config, base.task, len(data["classes"]), 0, base.modality, picture=data["picture"]
    )
    task, batch = Task(backbone, method.adapt), batch_for(base)
    state = after_a_step(method, task, batch)
    with torch.no_grad():
        logits = method.predict(task, state, batch)
    return ClientModel(experiment, "it", 0, data, task, state, "0"), logits


class Pair(NamedTuple):
    exported: Tensor
    ours: Tensor


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The logits of all exports and ours, by base model and form."""
    out = tmp_path_factory.mktemp("bases")
    batches, ours = {}, {}
    for name, base in bases(out).items():
        for form in base.forms:
            model, logits = model_of(base, FORMS[form])
            for merge in (False, True) if form in ("full", "lora", "heterofl") else (False,):
                folder = out / f"{name}; {form}{'; merged' if merge else ''}"
                folder.mkdir()
                write_model(model, folder, merge)
                batches[folder], ours[folder.name] = without_labels(batch_for(base)), logits
    return {
        folder.name: Pair(exported, ours[folder.name])
        for folder, exported in logits_of(batches, out).items()
    }


def of_tokens(pair: Pair) -> tuple[Tensor, Tensor]:
    """Those of language models without those of padding, which mean nothing."""
    if pair.ours.dim() < 3:
        return pair.exported, pair.ours
    real = ragged()["attention_mask"][0, :3] > 0
    return pair.exported[real], pair.ours[real]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, by Swin's pooling
def test_logits_are_ours(pairs: dict[str, Pair]) -> None:
    wrong = {
        name: float((pair.exported - pair.ours).abs().max())
        for name, pair in pairs.items()
        if not torch.allclose(*of_tokens(pair), atol=1e-4 if "merged" in name else 1e-5, rtol=1e-5)
    }
    assert wrong == {}
    assert len(pairs) > 80
