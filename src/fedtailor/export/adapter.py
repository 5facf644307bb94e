"""A client's LoRA in PEFT's adapter format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .network import Network, write_tensors

HEAD_FILE = "head.safetensors"


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
    write_tensors(out / "adapter_model.safetensors", dict(tensors))
