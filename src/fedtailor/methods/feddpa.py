"""FedDPA: a shared and a private LoRA, mixed for every example by how familiar it looks.

Dual-Personalizing Adapter for Federated Foundation Models. Y. Yang, G. Long, T. Shen, J. Jiang,
M. Blumenstein. NeurIPS 2024 (arXiv 2403.19211).

Global adapter: LoRA (A_g, B_g) and the task head, trained and averaged as in FedAvg.
Local adapter (A_l, B_l) of client m, trained alone in the global one's place, with a frozen head:
    T:  starts from the first global adapter that m receives, is kept, and trained in every round
    F:  starts from the current global adapter whenever it is to be used; thrown away afterwards
In use, for an example x with representation r(x), s = lora_alpha / rank:
    w(x) = lambda mean_i cos(r(x), r(x_i)),  x_i the client's training examples, w >= 0
    y = W0 x + (1 - w) s B_g A_g x + w s B_l A_l x        in every adapted layer

A client keeps a_m, the mean of its r(x_i) / ||r(x_i)||. The mean of cos(r(x), r(x_i)) then is
<r(x), a_m> / ||r(x)||. r is the input of the head's first linear layer (without a head: of the last
adapted projection) in the pretrained model without adapters, averaged over positions; for language
models that of the last token. With ``weighting="fixed"`` w is lambda for every example.

Differs from the paper:
- This follows the paper's abstract and others' descriptions of it. Unverified are lambda = 0.5,
  that r comes from the model without adapters, where the local adapter of T starts, and that it is
  trained without the global one beside it.
- a_m is the mean over all examples of the client's last round. The paper draws a few of them, whose
  mean has the same expected value.
- A negative w is 0, and so is that of a client that has not trained yet.
- The paper's language models have no head; here a head is part of the global adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.lora import Alpha, Rank, base_params, fuse, lora_factors, lora_names
from ..layers.parts import projections
from ..layers.trainable import choose_trainable
from ..method import Method, Portable
from ..optim import ClientContext, LearningRate, Optimiser, Passes, train
from ..params import CACHED, PACKED, Batch, Params, add_prefix, count, pick, strip_prefix
from ..task.backbone import Backbone
from ..task.task import Task

_OWN = "own."  # a client's local adapter and what it keeps for it


def representation(task: Task, batch: Batch) -> Tensor:
    """r / ||r|| of every example, by the model before any training, ``[b, d]``."""
    if (cached := batch.get(f"{CACHED}representation")) is not None:
        return cached
    batch = {name: value for name, value in batch.items() if name != PACKED}  # r is by example
    inputs: list[Tensor] = []
    layer = task.model.get_submodule(_layer_path(task))
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    task.pretrained_logits(batch)
    handle.remove()
    x, mask = inputs[0].float(), batch.get("attention_mask")
    if x.dim() == 3 and mask is not None and mask.numel() == x[:, :, 0].numel():
        mask = mask.flatten(1)
        x = x.reshape(*mask.shape, -1)
        if task.backbone.objective.generates:
            mask = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return F.normalize((mask[:, :, None] * x).sum(1), dim=1)
    examples = len(next(iter(batch.values())))
    return F.normalize(x.reshape(examples, -1, x.shape[-1]).mean(1), dim=1)


def _layer_path(task: Task) -> str:
    """The path of the linear layer whose input is r."""
    for head in task.backbone.head:
        for path, module in task.model.get_submodule(head).named_modules(prefix=head):
            if isinstance(module, nn.Linear):
                return str(path)
    paths = projections(task.backbone)
    reading = [path for path in paths if ".decoder." not in f".{path}"]  # none: it has no other
    return (reading or paths)[-1]


def mixed(shared: Params, local: Params, w: Tensor) -> Params:
    """(1 - w) B_g A_g + w B_l A_l, as one adapter of twice the rank; ``w`` is a scalar."""
    both = {}
    for name_A, name_B in lora_names(local):
        A, B, weight = fuse(
            (shared[name_A], shared[name_B], 1 - w), (local[name_A], local[name_B], w)
        )
        both[name_A], both[name_B] = weight[:, None] * A, B
    return both


@dataclass(frozen=True)
class FedDPA(Method):
    """FedDPA-T or FedDPA-F: two LoRAs; ``lam`` is lambda.

    ``optimiser.lr`` is the learning rate of the global adapter, ``lr_private`` that of the local
    one (None: the same).
    """

    name: ClassVar[str] = "feddpa"
    family: ClassVar[str] = "adapter"
    needs_only_mean: ClassVar[bool] = True

    form: Literal["T", "F"] = "T"
    weighting: Literal["instance", "fixed"] = "instance"
    lam: Annotated[float, Ge(0), Le(1)] = 0.5
    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)
    lr_private: LearningRate | None = None
    local_passes: Passes = 1  # of F: over the client's data, before use

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", self.rank, self.lora_alpha)

    def is_private(self, task: Task, name: str) -> bool:
        return name.startswith(_OWN)

    def num_trained(self, task: Task) -> int:
        return super().num_trained(task) + count(_lora(task.state))

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        if self.form == "F":
            return {}
        private = {**_lora(task.state), "trained": torch.zeros(())}
        if self.weighting == "instance":
            layer: Any = task.model.get_submodule(_layer_path(task))
            private["anchor"] = torch.zeros(layer.in_features)
        return add_prefix(private, _OWN)

    def steps_on_batch(self, passes: int) -> int:
        return 2 if self.form == "T" else 1

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        trained, loss = train(task, state, batches, context, self.optimiser)
        if self.form == "T":
            private = strip_prefix(state, _OWN)
            start = {
                name: torch.where(private["trained"] > 0, private[name], shared)
                for name, shared in _lora(state).items()
            }
            trained |= self._train_local(task, {**state, **start}, batches, context.subkey(1))
        return trained, loss

    def _train_local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        """The private tensors, with the local adapter trained from the one in ``state``."""
        rate = self.lr_private or self.optimiser.lr
        tuned, loss = train(
            task, pick(state, task.state), batches, context, self.optimiser,
            lr=lambda name: rate if _is_lora(name) else None,
        )  # fmt: skip
        private = {**_lora(tuned), "trained": torch.ones_like(loss)}
        if self.weighting == "instance":
            private["anchor"] = _anchor(task, batches)
        return add_prefix(private, _OWN)

    @property
    def finetune_passes(self) -> int:
        return self.local_passes if self.form == "F" else 0

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        return {**state, **self._train_local(task, state, batches, context)}

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        local = strip_prefix(state, _OWN)
        if not local:
            return task.logits(state, batch)
        if self.weighting == "fixed":
            return task.logits({**state, **mixed(state, local, self.lam * local["trained"])}, batch)
        w = (self.lam * representation(task, batch) @ local["anchor"]).clamp(min=0)  # [b]

        def one(w: Tensor, example: Batch) -> Tensor:
            alone = {name: value[None] for name, value in example.items()}
            return task.logits({**state, **mixed(state, local, w)}, alone)[0]

        return torch.func.vmap(one)(w, batch)

    def precompute(self, task: Task, batch: Batch) -> Params:
        features = task.features(batch)
        if self.weighting == "fixed":
            return features
        return {**features, "representation": representation(task, batch)}

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        local = strip_prefix(state, _OWN)
        if local and self.weighting == "instance":
            return {}  # the weights depend on the example: no single adapter does the same
        both = mixed(state, local, self.lam * local["trained"]) if local else state
        return lora_factors(task, both)

    def portable(self, task: Task, state: Params) -> Portable:
        local = strip_prefix(state, _OWN)
        if not local or self.weighting == "fixed":
            return super().portable(task, state)
        tensors = {**add_prefix(base_params(task, state), "/head/"), "/anchor": local["anchor"]}
        for which, adapter in (("shared", _lora(state)), ("local", _lora(local))):
            for path, (A, B) in lora_factors(task, adapter).items():
                tensors |= {f"{path}/{which}_A": A, f"{path}/{which}_B": B}
        settings = {"lam": self.lam, "layer": _layer_path(task).removesuffix(".base_layer")}
        return Portable("lora_by_example", tensors, settings=settings)


def _is_lora(name: str) -> bool:
    return ".lora_" in name


def _lora(state: Params) -> Params:
    """The adapter that the task uses, which has no prefix."""
    return {n: v for n, v in state.items() if _is_lora(n) and not n.startswith(_OWN)}


def _anchor(task: Task, batches: Sequence[Batch]) -> Tensor:
    """a_m over the real examples of ``batches``, ``[d]``."""
    total, number = [], []
    for batch in batches:
        r = representation(task, batch)
        real = batch["weight"] if "weight" in batch else torch.ones_like(r[:, 0])
        total.append(torch.where(real[:, None] > 0, r, 0.0).sum(0))
        number.append(real.sum())
    return torch.stack(total).sum(0) / torch.stack(number).sum().clamp(min=1)
