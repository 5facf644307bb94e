"""An export's base model: how it is built, where its weights come from; its adapter for PEFT."""

from __future__ import annotations

import copy
import errno
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import InputError
from ..models.config import ModelConfig
from ..models.inputs import ImageInputs, ModuleInputs
from ..models.packages import BUILTIN, quiet
from ..models.pooled import Pooled
from ..models.source import locate
from ..params import Params
from ..task.backbone import Backbone
from ..user_code import FROM_PYTHON, file_of

WEIGHTS = "model.safetensors"
HEAD_FILE = "head.safetensors"
OWN_CODE = "code"  # the folder for the user's own files

_DEFAULTS = {field.name: field.default for field in fields(Backbone)}
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Network:
    """A base model before any training; ``data`` is `runs.manifest.data_manifest` of the run's."""

    backbone: Backbone
    config: ModelConfig
    data: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        return self.backbone.model

    @property
    def tensors(self) -> Params:
        """All of its tensors by name, each once."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: value.detach() for name, value in named.items()}

    @property
    def stored(self) -> frozenset[str]:
        """The names of those that the architecture alone does not tell."""
        return frozenset(self.tensors.keys() & self.model.state_dict().keys())

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own module."""
        return self.config.factory is not None or self.config.name.startswith(FROM_PYTHON)

    @cached_property
    def own_code(self) -> dict[str, Path]:
        """The files that define the classes of a module that was given from Python, by the names of
        their Python modules; classes of installed packages are not among them. Raises InputError
        where a class is in no file, or is this library's."""
        for name in ("prepare", "logits"):
            function = getattr(self.backbone, name)
            if function is not _DEFAULTS[name] and not isinstance(function, ModuleInputs):
                raise InputError(
                    f"the backbone has a function {name!r} of its own, which no export can take "
                    f"along; let the module's forward do its work"
                )
        found = {}
        for kind in {type(module) for module in self.model.modules()}:
            file = getattr(sys.modules[kind.__module__], "__file__", None)
            if file is None or kind.__module__.startswith("fedtailor."):
                raise InputError(
                    f"the class {kind.__qualname__} of {kind.__module__} is in no file that an "
                    f"export can take along; define it in a file of its own, or set model.factory"
                )
            if not any(part in _INSTALLED for part in Path(file).parts):
                found[kind.__module__] = Path(file)
        return found

    @property
    def factory_place(self) -> str:
        """The place of ``model.factory``'s file in an export."""
        assert self.config.factory is not None
        return own_place(file_of(self.config.factory).stem)

    @property
    def is_transformer(self) -> bool:
        """Whether the library transformers builds it."""
        builtin = BUILTIN.get(self.config.name)
        ours = builtin is not None and (builtin.network is not None or builtin.build is not None)
        return not self.is_own and not ours

    @property
    def pooling(self) -> str | None:
        """How a text classifier with a head of ours pools its tokens; None: there is none."""
        return self.model.pooling if isinstance(self.model, Pooled) else None

    @property
    def name(self) -> str | None:
        """The hub name or the folder of the pretrained weights; None: they must be stored."""
        if not self.is_transformer or not self.config.pretrained or self.config.name in BUILTIN:
            return None
        source = locate(self.config)
        return str(Path(source).resolve()) if Path(source).is_dir() else source

    def about(self, source: str | None, weights: bool, whole: bool = False) -> dict[str, Any]:
        """How ``base.py`` builds it. Its files are at ``source``, a folder relative to the export
        or a hub name, with its ``weights``, too; ``whole``: in transformers' own architecture."""
        outputs = self.backbone.objective.num_outputs(len(self.data["classes"])) or 0
        about = {"source": source, "weights": weights, "outputs": outputs}
        if self.config.factory is not None:
            function = self.config.factory.rpartition(":")[2]
            return about | {"kind": "module", "file": self.factory_place, "function": function}
        if self.is_own:
            code = {module: own_place(module) for module in self.own_code}
            return about | {"kind": "pickled", "code": code}
        if self.is_transformer:
            pooling = None if whole else self.pooling
            about |= {"auto_class": self._auto_class(whole), "pooling": pooling}
            if isinstance(self.model, Pooled):
                about["head_bias"] = self.model.head.bias is not None
            return about | {"kind": "transformers"}
        if self.config.name == "efficientnet-lite0":
            return about | {"kind": "efficientnet"}
        prepare: Any = self.backbone.prepare
        about |= {"kind": "built-in", "name": self.config.name}
        picture = [prepare.channels, *prepare.size]
        return about | {"picture": picture, "width": self.config.width}

    def _auto_class(self, whole: bool) -> str:
        if self.pooling and not whole:
            return "AutoModel"
        return self.backbone.objective.auto_classes[self.data["modality"]]

    def inputs(self) -> dict[str, Any]:
        """How ``base.py`` turns a batch into the arguments of its forward."""
        prepare: Any = self.backbone.prepare
        if isinstance(prepare, ModuleInputs):
            return {"kind": "module", "arguments": list(prepare.arguments)}
        if self.is_own:
            return {"kind": "module", "arguments": None}  # any, by name
        if not isinstance(prepare, ImageInputs):
            return {"kind": "text", "positions": prepare.max_length}
        return {
            "kind": "image",
            "size": list(prepare.size),
            "channels": prepare.channels,
            "mean": list(prepare.mean),
            "std": list(prepare.std),
            "argument": prepare.argument,
            "options": {"interpolate_pos_encoding": True} if prepare.interpolate else {},
        }

    def write(self, tensors: Params, folder: Path, weights: bool, whole: bool = False) -> None:
        """Write it into ``folder``, in Hugging Face's format if transformers builds it; without
        ``weights`` its configuration alone. ``whole``: with the head, as in transformers."""
        if not self.is_transformer:
            if weights:
                folder.mkdir(parents=True, exist_ok=True)
                write_tensors(folder / WEIGHTS, tensors)
            return
        import transformers
        from transformers.pytorch_utils import Conv1D

        part: Any = self.model.encoder if isinstance(self.model, Pooled) else self.model
        config = copy.deepcopy(part.config)
        if hasattr(config, "use_cache"):
            config.use_cache = True
        if tensors.keys() - self.tensors.keys():
            config.tie_word_embeddings = False  # a merged adapter on the tied head
        if self.data["classes"]:
            config.id2label = dict(enumerate(self.data["classes"]))
            config.label2id = {name: number for number, name in enumerate(self.data["classes"])}
        elif outputs := self.backbone.objective.num_outputs(0):
            config.num_labels = outputs
        if self.backbone.tokenizer is not None and config.pad_token_id is None:
            config.pad_token_id = self.backbone.tokenizer.pad_token_id
        with torch.device("meta"), quiet():
            auto = getattr(transformers, self._auto_class(whole))
            like: Any = auto.from_config(config)
        config.architectures = [type(like).__name__]
        config.save_pretrained(str(folder))
        if ends := sorted(self.backbone.ends) if self.backbone.objective.writes else []:
            pad = config.pad_token_id
            generation = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=pad)
            generation.save_pretrained(str(folder))
        if not weights:
            return
        if self.pooling:
            prefix = f"{like.base_model_prefix}." if whole else ""
            tensors = {
                name.replace("encoder.", prefix, 1).replace("head.", "score.", 1): value
                for name, value in tensors.items()
                if whole or name.startswith("encoder.")
            }
        transposed = {f"{p}.weight" for p, m in like.named_modules() if isinstance(m, Conv1D)}
        known = like.state_dict().keys()
        write_tensors(
            folder / WEIGHTS,
            {n: v.t() if n in transposed else v for n, v in tensors.items() if n in known},
        )

    def write_image_processor(self, out: Path) -> None:
        """Write the file by which transformers prepares pictures as this library does."""
        about = self.inputs()
        channels = about["channels"]

        def by_channel(values: Sequence[float]) -> list[float]:
            return [*values] if len(values) == channels else [values[0]] * channels

        height, width = about["size"]
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": channels == 3,
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": by_channel(about["mean"]),
            "image_std": by_channel(about["std"]),
        }
        (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def write_adapter(
    network: Network,
    lora: Mapping[str, tuple[Tensor, Tensor]],
    magnitudes: Mapping[str, Tensor],
    out: Path,
    base: str | None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` for ``peft.PeftModel``, for
    the model called ``base`` or in that folder. ``lora`` has A ``[r, d_in]`` and B ``[d_out, r]``
    by projection, any scaling inside B, and ``magnitudes`` DoRA's m ``[d_out]``, or none."""
    from peft import LoraConfig

    strip = network.backbone.encoder_prefix
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for path, (A, B) in lora.items():
        name = f"base_model.model.{path.removeprefix(strip)}"
        ranks[path.removeprefix(strip)] = len(A)
        tensors[f"{name}.lora_A.weight"] = A
        tensors[f"{name}.lora_B.weight"] = B
        if path in magnitudes:
            tensors[f"{name}.lora_magnitude_vector"] = magnitudes[path]
    rank = next(iter(ranks.values()))
    others = {path: client_rank for path, client_rank in ranks.items() if client_rank != rank}
    # B holds the scaling already, so alpha = rank: PEFT's factor alpha / rank is 1
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(ranks), rank_pattern=others,
        alpha_pattern=dict(others), base_model_name_or_path=base,
        task_type=network.backbone.objective.peft_task,
        use_dora=bool(magnitudes), inference_mode=True,
    )  # fmt: skip
    config.save_pretrained(str(out))
    write_tensors(out / "adapter_model.safetensors", tensors)


def own_place(module: str) -> str:
    """The place in an export for the file of a module of the user's own, apart from ours.

    >>> own_place("package.model")
    'code/package/model.py'
    """
    return f"{OWN_CODE}/{module.replace('.', '/')}.py"


def write_tensors(path: Path, tensors: Params) -> None:
    """Write a safetensors file that transformers reads, too."""
    plain = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format)
             for n, v in tensors.items()}  # fmt: skip
    path.touch()
    mode = path.stat().st_mode  # that of any new file; safetensors lets only the owner read
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), path.name) from None
    path.chmod(mode)
