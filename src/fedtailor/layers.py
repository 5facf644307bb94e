"""Modules and module surgery that two or more methods, or every task, use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import random
from .errors import InputError
from .params import Params, stack
from .parts import require_blocks, train_layers, train_only

if TYPE_CHECKING:
    from .task import Backbone, Task

BatchNormMode = Literal["train", "frozen"]
Trainable = Literal["full", "head", "lora"]


class StepContext:
    """What a training step's forward pass needs beside the state: set before, read after it."""

    def __init__(self) -> None:
        self.enter(training=False)

    def enter(
        self, *, training: bool, key: Tensor | None = None, weight: Tensor | None = None
    ) -> None:
        """Begin a forward pass. ``weight`` ``[b]`` is 0 for padding examples, None without any."""
        self.training = training
        self.key = key
        self.weight = weight
        self.buffers: Params = {}

    def leave(self) -> Params:
        """The new values of state buffers that the pass has recorded; the context forgets it."""
        buffers = self.buffers
        self.enter(training=False)
        return buffers

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set a training step aside for a forward pass in evaluation mode."""
        before = dict(vars(self))
        self.enter(training=False)
        yield
        vars(self).update(before)


class Stepwise(nn.Module):
    """A module that follows the training step. Its task sets ``step`` and ``path``.

    ``state_buffers`` names the registered buffers that are part of the task's state: they are sent,
    kept and averaged as parameters are, but not trained.
    """

    step: StepContext
    path: str
    state_buffers: tuple[str, ...] = ()

    def record(self, name: str, value: Tensor) -> None:
        """Hand back the new value of a state buffer; the buffer itself stays as it is."""
        self.step.buffers[f"{self.path}.{name}"] = value.detach()


def bind(model: nn.Module, step: StepContext) -> list[str]:
    """Give every `Stepwise` module of ``model`` its ``step`` and ``path``; the state buffers'
    names."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, Stepwise):
            module.step, module.path = step, path
            names += [f"{path}.{name}" if path else name for name in module.state_buffers]
    return names


class KeyedDropout(Stepwise):
    """Dropout whose mask depends on (key, layer, position) alone.

    The same client, round and step drop the same activations, alone or batched with others and
    however much padding surrounds them. At most 4 dimensions of at most 65,536 each.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if not self.step.training or self.step.key is None:
            return x
        key = random.fold_in(self.step.key, self.layer)
        kept = random.bernoulli(key, x.shape, 1.0 - self.p)
        return x * (kept.to(x.dtype) * (1.0 / (1.0 - self.p)))


def key_dropout(model: nn.Module) -> None:
    """Replace every active dropout in ``model`` by a `KeyedDropout`, in place.

    Raises:
        InputError: a dropout that this can't stand for (whole channels, alpha, inside an RNN).
    """
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            if not isinstance(module, nn.Dropout):
                raise InputError(
                    f"{name} is a {type(module).__name__}; only nn.Dropout can be trained here"
                )
            found.append((name, module.p))
        elif isinstance(module, nn.RNNBase) and module.dropout > 0:
            raise InputError(f"{name} drops out between its layers; set its dropout to 0")
    for layer, (name, p) in enumerate(found):
        replace(model, name, KeyedDropout(p, layer))


def masked_moments(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``[C]``, biased variance ``[C]`` and the number of values behind each, a channel.

    ``x`` is ``[b, C, ...]``; examples whose ``weight`` ``[b]`` is 0 are left out.
    """
    w = x.new_ones(x.shape[0]) if weight is None else weight.to(x.dtype)
    axes = [0, *range(2, x.dim())]
    count = w.sum() * x[0, 0].numel()
    w = w.view(-1, *[1] * (x.dim() - 1))
    mean = (x * w).sum(axes) / count.clamp(min=1)
    centred = x - mean.view(1, -1, *[1] * (x.dim() - 2))
    return mean, (centred.square() * w).sum(axes) / count.clamp(min=1), count


class TracedBatchNorm(Stepwise):
    """Batch normalisation as a function: the batch's statistics leave padding out, and the new
    running statistics are recorded, not written. With ``trained`` False (frozen parameters, or
    frozen statistics) it uses its running statistics in training, too."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.state_buffers = ("running_mean", "running_var") if trained else ()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eps = norm.eps
        self.momentum = float(norm.momentum or 0.0)

    def reset_parameters(self) -> None:
        """Unit scale, no shift, and the statistics of standardised inputs; in place."""
        for name, start in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            if getattr(self, name) is not None:
                getattr(self, name).data.fill_(start)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.trained and self.step.training):
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        dtype, x = x.dtype, x.float() if x.dtype == torch.bfloat16 else x
        shape = (1, -1, *[1] * (x.dim() - 2))
        per_channel = x.numel() // x.shape[1]
        if self.step.weight is None and per_channel > 1:  # PyTorch's own kernel: no padding
            axes = [0, *range(2, x.dim())]
            var, mean = torch.var_mean(x.detach(), axes, correction=0)
            count = mean.new_tensor(per_channel)
            y = F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        else:
            mean, var, count = masked_moments(x, self.step.weight)
            scale = torch.rsqrt(var + self.eps)
            if self.weight is not None:
                scale = scale * self.weight
            shift = -mean * scale if self.bias is None else self.bias - mean * scale
            y = x * scale.view(shape) + shift.view(shape)
        unbiased = var * count / (count - 1).clamp(min=1)
        for name, old, new in (
            ("running_mean", self.running_mean, mean),
            ("running_var", self.running_var, unbiased),
        ):
            self.record(name, torch.lerp(old, new.to(old.dtype), self.momentum))
        return y.to(dtype)


def trace_batch_norm(model: nn.Module, mode: BatchNormMode) -> None:
    """Replace every batch normalisation in ``model``, in place. One whose parameters are frozen, or
    every one with ``mode`` frozen, keeps its running statistics as they are.

    Raises:
        InputError: one without running statistics, or with cumulative ones (momentum None).
    """
    everything = all(parameter.requires_grad for parameter in model.parameters())
    for name, norm in list(model.named_modules()):
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        if norm.running_mean is None or norm.momentum is None:
            raise InputError(
                f"{name} must have track_running_stats=True and a momentum; batches are padded"
            )
        trained = norm.weight.requires_grad if norm.affine else everything
        replace(model, name, TracedBatchNorm(norm, trained and mode == "train"))


class Chain(nn.Module):
    """The modules of an nn.Sequential, one after the other, beside which others may stand."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        for name, module in chain.named_children():
            self.add_module(name, module)
        self._chain = [name for name, _ in chain.named_children()]

    def forward(self, input: Any) -> Any:
        for name in self._chain:
            input = self._modules[name](input)  # type: ignore[misc]
        return input


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` at ``path`` of ``model``, in place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def check_rank(backbone: Backbone, rank: int) -> None:
    """Raise InputError if ``rank`` exceeds a dimension of a layer that is to be adapted."""
    for path in (path for block in require_blocks(backbone) for path in block):
        layer = backbone.model.get_submodule(path)
        if not isinstance(layer, nn.Linear):
            raise InputError(f"{path} is a {type(layer).__name__}; only nn.Linear can be adapted")
        limit = min(layer.in_features, layer.out_features)
        if rank > limit:
            raise InputError(
                f"rank {rank} is larger than the layer {path} "
                f"({layer.out_features} x {layer.in_features}); allowed: 1 to {limit}"
            )


def choose_trainable(
    backbone: Backbone,
    trainable: Trainable,
    rank: int,
    alpha: float,
    layers: Sequence[str] = (),
) -> nn.Module:
    """Make all parameters, the task head, or LoRA and the head trainable; in place.

    LoRA comes from PEFT (N(0, 1/rank) for A, zeros for B) on the backbone's projections. ``layers``
    restricts ``full``, as in `train_layers`.

    Raises:
        InputError: if there is no head, no recognised block, no such layer, or the rank is too
            large.
    """
    model = backbone.model
    if trainable == "full":
        return train_layers(backbone, layers)
    if layers:
        raise InputError(f"layers goes with trainable = 'full'; trainable is {trainable!r}")
    if trainable == "head" and not backbone.head:
        raise InputError(
            f"model {backbone.name!r} has no recognised task head; name its modules in model.head"
        )
    if trainable == "lora":
        add_lora(backbone, rank, alpha)
    heads = tuple(f"{path}." for path in backbone.head)
    return train_only(model, lambda name: name.startswith(heads) or ".lora_" in name)


def add_lora(backbone: Backbone, rank: int, alpha: float) -> None:
    """Inject PEFT's LoRA into the backbone's projections, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    check_rank(backbone, rank)
    targets = [path for block in backbone.blocks for path in block]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets), backbone.model
    )
    for path in targets:
        layer: Any = backbone.model.get_submodule(path)
        nn.init.normal_(layer.lora_A["default"].weight, std=rank**-0.5)


def lora_pairs(state: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by projection, from PEFT's names."""
    marker = ".lora_A.default.weight"
    paths = [name.removesuffix(marker) for name in state if name.endswith(marker)]
    return {path: (state[path + marker], state[f"{path}.lora_B.default.weight"]) for path in paths}


def lora_factors(task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """(A ``[r, d_in]``, B ``[d_out, r]`` times the scaling) of the LoRA that PEFT added to the
    task's model, by projection. A factor that ``state`` lacks is the model's own, frozen; where it
    lacks both there is none."""
    own = {name: p.detach() for name, p in task.model.named_parameters() if ".lora_" in name}
    factors = {}
    for path, (A, B) in lora_pairs({name: state.get(name, p) for name, p in own.items()}).items():
        if any(name.startswith(f"{path}.lora_") for name in state):
            layer: Any = task.model.get_submodule(path)
            factors[path] = A, layer.scaling["default"] * B
    return factors


def fresh_state(task: Task, key: Tensor) -> Params:
    """The task's initial state, drawn anew from ``key``: as if built with another seed.

    Every module is reset by its own ``reset_parameters``, transformers' by its model's
    initialisation, LoRA as in `add_lora`. What has no way to be reset keeps its values.
    """
    model = copy.deepcopy(task.model).cpu()  # where it is drawn, whatever the task's device
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int(key))
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for module in model.modules():
            if callable(initialise := getattr(module, "_init_weights", None)):
                module.apply(initialise)
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                nn.init.normal_(parameter, std=len(parameter) ** -0.5)
            elif ".lora_B." in name:
                nn.init.zeros_(parameter)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensors[name].detach().clone().to(task.device) for name in task.state}


def different_starts(task: Task, count: int, jitter: float, key: Tensor) -> Params:
    """``count`` models to start from, stacked ``[count, ...]``; the first is the task's own.

    The others are drawn anew. Pretrained models and LoRA are copied instead, with noise on every
    trained tensor of ``jitter`` times its root mean square.
    """
    copies = copied(task)
    starts = [task.state]
    for number in range(1, count):
        own = random.fold_in(key, number)
        starts.append(_jittered(task, jitter, own) if copies else fresh_state(task, own))
    return stack(starts)


def copied(task: Task) -> bool:
    """Whether `different_starts` copies the task's own start."""
    return task.backbone.pretrained or any(".lora_" in name for name in task.trained)


def _jittered(task: Task, jitter: float, key: Tensor) -> Params:
    state = dict(task.state)
    for index, name in enumerate(sorted(task.trained)):
        std = jitter * state[name].double().square().mean().sqrt().item()
        noise = random.normal(random.fold_in(key, index), tuple(state[name].shape), std)
        state[name] = state[name] + noise.to(state[name])
    return state
