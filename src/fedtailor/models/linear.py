"""GPT-2's Conv1D modules as linear layers. Exports take this file along."""

from __future__ import annotations

from torch import nn


def linearise(model: nn.Module) -> nn.Module:
    """Replace every ``Conv1D`` by an ``nn.Linear``, in place; return ``model``. In GPT-2,
    ``attn.c_attn``, ``attn.c_proj``, ``mlp.c_fc`` and ``mlp.c_proj`` are Conv1D modules, whose
    weight is ``[in, out]``. Paths and outputs stay the same; the weights are transposed."""
    from transformers.pytorch_utils import Conv1D

    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            d_in, d_out = module.weight.shape
            linear = nn.Linear(d_in, d_out, device="meta")
            linear.weight = nn.Parameter(module.weight.detach().t().contiguous())
            linear.bias = nn.Parameter(module.bias.detach())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, linear)
    return model
