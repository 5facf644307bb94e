"""Export of a client's model, or the global one, in PEFT's adapter format."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..errors import InputError
from ..method import Method
from ..params import Params, encode
from ..task.task import Task
from .directory import write_atomically
from .trained import Which, open_trained

HEAD_FILE = "head.safetensors"


def export_adapter(method: Method, task: Task, state: Params, out: Path) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` for ``peft.PeftModel``.

    ``state`` is all of the task's tensors (received and private). The update of every projection is
    exported as it acts, rank and scaling included; the task head's parameters stand beside it in
    ``head.safetensors``, under the model's own names.

    Raises:
        InputError: the method trains no adapter, or none that alone makes the model.
    """
    from peft import LoraConfig

    state = method.inference_params(task, state)
    factors = method.lora(task, state)
    if not factors:
        raise InputError(
            f"{method.name} as configured trains no adapter, or several that no one adapter can "
            f"stand for; nothing to export"
        )
    out.mkdir(parents=True, exist_ok=True)
    strip = task.backbone.encoder_prefix
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for path, (A, B) in factors.items():
        name = f"base_model.model.{path.removeprefix(strip)}"
        ranks[path.removeprefix(strip)] = len(A)
        tensors[f"{name}.lora_A.weight"] = A
        tensors[f"{name}.lora_B.weight"] = B
    rank = next(iter(ranks.values()))
    others = {path: client_rank for path, client_rank in ranks.items() if client_rank != rank}
    # B holds the scaling already, so alpha = rank: PEFT's factor alpha / rank is 1
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(ranks), rank_pattern=others,
        alpha_pattern=dict(others),
    )  # fmt: skip
    config.save_pretrained(str(out))
    write_atomically(out / "adapter_model.safetensors", encode(tensors))
    head = {name: value for name, value in state.items() if task.in_head(name)}
    if head:
        write_atomically(out / HEAD_FILE, encode(head))
    return out


def export(
    out: Path,
    label: str,
    seed: int | None,
    client: str | int | None,
    target: Path,
    which: Which = "best",
) -> Path:
    """Write the model of a finished run's client, or the global one, as a PEFT adapter.

    ``which``: the state of the reported round, or of the last one.

    Raises:
        InputError: no such method, seed or client; an unfinished run; nothing to export.
    """
    trained = open_trained(out, label, seed, which=which)
    state = trained.global_state() if client is None else trained.client_state(client)
    return export_adapter(trained.method, trained.task, state, target)
