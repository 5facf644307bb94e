"""Changes to a model in place: a module takes another's place, or is added beside the others."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InputError


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` in the place of the module at ``path`` of ``model``."""
    if not hasattr(module, "weight"):
        module.register_parameter("weight", None)  # T5 looks whether it is a tensor
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def beside(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Add ``module`` to ``model`` as a child that the model's forward pass doesn't call.

    Returns:
        ``model``; for an ``nn.Sequential``, whose forward calls every child, a `Chain` instead.

    Raises:
        InputError: the model has something of that name.
    """
    if hasattr(model, name):
        raise InputError(
            f"the model has a {name!r} of its own, and the method adds one; rename the model's"
        )
    if type(model).forward is nn.Sequential.forward:
        model = Chain(model)  # type: ignore[arg-type]
    model.add_module(name, module)
    return model


class Chain(nn.Module):
    """The modules of an ``nn.Sequential``, one after the other. Modules added later don't run."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        for name, module in chain.named_children():
            self.add_module(name, module)
        self._chain = [name for name, _ in chain.named_children()]

    def forward(self, input: Any) -> Any:
        for name in self._chain:
            input = self._modules[name](input)  # type: ignore[misc]
        return input
