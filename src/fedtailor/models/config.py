"""The fields of an experiment's ``[model]`` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from ..task.backbone import LoRAOptions
from ..task.quantised import Form

MOST_SIDE = 1024  # pixels; models of the hub take pictures of up to 600 or so


@dataclass(frozen=True)
class ModelConfig:
    """The model, and how its outputs become logits."""

    name: str = "minilm"  # built-in, hub name "owner/model", or a folder in Hugging Face's format
    revision: str | None = None  # of a hub model: a commit, a branch or a tag; None: the newest
    pretrained: bool = True  # False: the architecture with random weights
    # instead of a name: "file.py:function", which returns an nn.Module or `fedtailor.from_module`'s
    # backbone; the path is relative to the experiment file
    factory: str | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"  # of weights that no method trains
    quantise: Form | None = None  # "nf4" or "int8": the linear layers of the blocks, frozen
    # how a conversation becomes a text: "alpaca", "chatml" or a template in Jinja's language
    chat_template: str | None = None
    # text classification: "mean" over the real tokens and a linear head, or "native", the
    # architecture's own classifier (decoders: the last real token); None: the built-in's, or native
    pooling: Literal["mean", "native"] | None = None
    # patterns of the projections to adapt, or "all-linear"; (): by model type
    targets: tuple[str, ...] = ()
    lora: LoRAOptions = field(default=LoRAOptions())
    head: tuple[str, ...] = ()  # patterns of the task head's modules; (): those with a usual name
    # in training, wherever the model has dropout, but not of attention weights
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    # of a model of transformers: PyTorch's fused kernels where its code allows, or plain products
    attention: Literal["sdpa", "eager"] = "sdpa"
    # "frozen": training uses the running statistics and leaves them as they are
    batch_norm: Literal["train", "frozen"] = "train"
    # the side, in pixels; None: the model's own
    image_size: Annotated[int, Gt(0), Le(MOST_SIDE)] | None = None
    # a factor on the channels of resnet9, cnn and lenet
    width: Annotated[float, Gt(0), Le(16)] = 1.0

    @property
    def rounding(self) -> str:
        """How weights are rounded that no method trains; empty: they are not."""
        return " and ".join(one for one in (self.quantise, self.dtype) if one not in (None, "fp32"))
