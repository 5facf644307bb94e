"""Export of a client's model, or the global one, in PEFT's adapter format."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .errors import InputError
from .history import write_atomically
from .method import Method
from .params import Params, encode
from .task import Task

HEAD_FILE = "head.safetensors"


def export_adapter(method: Method, task: Task, state: Params, out: Path) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` for ``peft.PeftModel``.

    ``state`` is all of the task's tensors (received and private). The update of every projection is
    exported as it acts, rank and scaling included; the task head's parameters stand beside it in
    ``head.safetensors``, under the model's own names.

    Raises:
        InputError: the method trains no adapter.
    """
    from peft import LoraConfig

    state = method.in_use(task, state)
    factors = method.lora(task, state)
    if not factors:
        raise InputError(f"{method.name} as configured trains no adapter; nothing to export")
    out.mkdir(parents=True, exist_ok=True)
    strip = task.backbone.encoder_prefix
    rank = next(iter(factors.values()))[0].shape[0]
    tensors: dict[str, Tensor] = {}
    for path, (A, B) in factors.items():
        name = f"base_model.model.{path.removeprefix(strip)}"
        tensors[f"{name}.lora_A.weight"] = A
        tensors[f"{name}.lora_B.weight"] = B
    targets = [path.removeprefix(strip) for path in factors]
    # B holds the scaling already, so alpha = rank: PEFT's factor alpha / rank is 1
    LoraConfig(r=rank, lora_alpha=rank, target_modules=targets).save_pretrained(str(out))
    write_atomically(out / "adapter_model.safetensors", encode(tensors))
    head = {name: value for name, value in state.items() if task.in_head(name)}
    if head:
        write_atomically(out / HEAD_FILE, encode(head))
    return out
