"""What methods cost at the shapes of large models, counted exactly without training.

    python -m evidence.accounting fedhft_upload model=bert-large rank=32 mask_ratio=0.5

Bytes are those of a client and a round, as they travel. Models have their shapes and no values.
LoRA is on the attention-output and the feed-forward-output projection of every block.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

import fedtailor as ft
from fedtailor import random
from fedtailor.engine.costs import wire_bytes
from fedtailor.layers.masks import drop_least
from fedtailor.layers.parts import projections
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.params import Params
from fedtailor.task.task import Task

SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {},  # transformers' defaults: 12 blocks of 768, 30,522 word pieces
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}


@cache
def backbone(model: str) -> ft.Backbone:
    """BERT for two classes, without values."""
    config = BertConfig(**SHAPES[model])
    with torch.device("meta"):
        network = BertForSequenceClassification(config)
    layers = [f"bert.encoder.layer.{i}" for i in range(config.num_hidden_layers)]
    blocks = tuple((f"{layer}.attention.output.dense", f"{layer}.output.dense") for layer in layers)
    return ft.Backbone(network, blocks=blocks, head=("classifier",))


def task_of(method: Method, model: str) -> Task:
    """The model as the method adapts it."""
    return Task(backbone(model), method.adapt, device="meta")


def traffic(method: Method, model: str) -> tuple[int, int]:
    """The bytes that a client receives and sends in a round."""
    task = task_of(method, model)
    received = method.send(task, method.init_server(task, 2, random.key(0)), 0)
    trained: Params = {**task.state, **received}
    masks: Params = {}
    if isinstance(method, FedHFT):
        ratio = torch.tensor(method.mask_ratio, dtype=torch.float64)
        for path in projections(task.backbone):  # how many rows travel does not depend on which
            rows = torch.arange(len(trained[f"{path}.B"]), dtype=torch.float32)
            masks[f"{path}.kept"] = drop_least(rows, ratio)
        trained |= {name: mask.to("meta") for name, mask in masks.items()}
    sent = method.upload(
        task,
        received,
        {name: value for name, value in trained.items() if not method.is_private(task, name)},
    )
    if masks:  # packing looks at the values
        sent = {name: torch.ones(value.shape) for name, value in sent.items()} | masks
    down, up = wire_bytes(received), wire_bytes(method.pack(task, sent))
    return sum(down.values()), sum(up.values())


def fedhft_upload(model: str, rank: int, mask_ratio: float) -> float:
    """How many times less a client of FedHFT sends than one of FedAvg on the full model."""
    ours = traffic(FedHFT(rank=rank, mask_ratio=mask_ratio), model)
    return traffic(FedAvg(), model)[1] / ours[1]


def fedhft_both_ways(model: str, rank: int, mask_ratio: float, clusters: int) -> float:
    """How many times less a client of FedHFT receives and sends than one of FedAvg on the full
    model; it receives all clusters' adapters."""
    ours = traffic(FedHFT(rank=rank, mask_ratio=mask_ratio, clusters=clusters), model)
    return sum(traffic(FedAvg(), model)) / sum(ours)


def fedhft_memory(model: str, rank: int, clusters: int) -> float:
    """How many times less memory training takes than FedAvg's on the full model: float32 weights,
    gradients and both of Adam's moments, and no activations."""
    full, ours = task_of(FedAvg(), model), task_of(FedHFT(rank=rank, clusters=clusters), model)
    return _training_scalars(full) / _training_scalars(ours)


def _training_scalars(task: Task) -> int:
    weights = sum(p.numel() for p in task.model.parameters())
    buffers = sum(task.state[name].numel() for name in task.buffers)
    return weights + buffers + 3 * sum(task.state[name].numel() for name in task.trained)


def fedsdg_added(model: str) -> float:
    """The shared and the private LoRA of FedSDG, in percent of the backbone's parameters."""
    task = task_of(FedSDG(), model)
    factors = [value for name, value in task.state.items() if name.endswith((".A", ".B"))]
    added = sum(factor.numel() for factor in factors)
    return 100 * added / sum(p.numel() for p in backbone(model).model.parameters())


def fedsdg_traffic(model: str) -> float:
    """What a client of FedSDG sends and receives, over what one of FedAvg on the same LoRA does."""
    return sum(traffic(FedSDG(), model)) / sum(traffic(FedAvg(trainable="lora"), model))


FUNCTIONS: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (fedhft_upload, fedhft_both_ways, fedhft_memory, fedsdg_added, fedsdg_traffic)
}


def command(function: str, arguments: Mapping[str, Any]) -> str:
    """What a reader types to count."""
    return " ".join(
        ["python -m evidence.accounting", function, *(f"{k}={v}" for k, v in arguments.items())]
    )


def _number(key: str, text: str) -> float:
    """The value of a setting.

    Raises:
        ValueError: it is not allowed.
    """
    if key == "mask_ratio":
        allowed, ok = "0 to below 1", re.fullmatch(r"0?\.\d+|0", text)
    else:
        allowed, ok = "a whole number, at least 1", re.fullmatch(r"[1-9]\d{0,3}", text)
    if not ok:
        raise ValueError(f"{key}={text}; allowed: {allowed}")
    return float(text) if key == "mask_ratio" else int(text)


def main() -> None:
    """Print a count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", choices=sorted(FUNCTIONS))
    parser.add_argument(
        "settings", nargs="*", metavar="key=value",
        help=f"model: {' or '.join(SHAPES)}; rank, clusters: whole numbers; mask_ratio: below 1",
    )  # fmt: skip
    options = parser.parse_args()
    function = FUNCTIONS[options.count]
    needed = list(signature(function).parameters)
    given = dict(setting.partition("=")[::2] for setting in options.settings)
    if given.keys() != set(needed):
        parser.error(f"{options.count} takes {', '.join(f'{key}=...' for key in needed)}")
    if given["model"] not in SHAPES:
        parser.error(f"model={given['model']}; allowed: {', '.join(SHAPES)}")
    try:
        numbers = {key: _number(key, text) for key, text in given.items() if key != "model"}
        value = function(model=given["model"], **numbers)
    except (ValueError, ft.InputError) as error:
        parser.error(str(error))
    print(" ".join((function.__doc__ or "").split()))
    print(f"{value:.4g}")


if __name__ == "__main__":
    main()
