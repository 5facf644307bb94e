"""FedMask: weights stay frozen; clients learn binary masks of the last layers, and share those.

FedMask: Joint Computation and Communication-Efficient Personalized Federated Learning via
Heterogeneous Masking. A. Li, J. Sun, X. Zeng, M. Zhang, H. Li, Y. Chen. SenSys 2021.

Client k, scores s_k of the masked weights w, threshold tau, retained elements R_k (1 or 0):
    m_k = R_k 1[sigmoid(s_k) >= tau];  the layer works with the weights w m_k
    s_k <- s_k - eta dl/dm_k sigmoid'(s_k)        straight through the indicator
    once, after its first round: R_k = 0 for the share ``sparsity`` of least score
    up: m_k, R_k as bits
Server, element by element, over the clients of the round with R_k = 1, if there are two or more:
    m = 1[mean of m_k >= ``consensus``]; else m stays. An element that was never shared is free.
Client k, before training and in use, where R_k = 1 and m is not free:
    if m_k disagrees with m, s_k is mirrored at the threshold, so that m_k = m

Differs from the paper:
- This follows the paper's abstract and others' descriptions of it: frozen weights; real scores with
  a threshold; personal, structured sparse masks of the last layers after a one-shot start; only
  bits travel, and only elements that clients have in common are aggregated.
- The rest is this module's reading: the start of the scores, when the one-shot pruning takes place
  and by what it ranks, the inputs of a layer as its structure, the majority, how a received bit
  becomes a score, and all defaults. The optimiser is Adam, since the size of a score's gradient
  follows that of its weight.
- pFedGate (Chen et al., ICML 2023) calls the aggregation an intersection, which is ``consensus=1``.
- Biases, norms and all layers below stay frozen and unmasked.
- Clients with an element count alike, whatever their number of examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import InputError
from ..layers.masks import drop_least, pack_bits, unpack_bits
from ..layers.parts import train_layers, train_only, units
from ..method import Cohort, Method, Portable, Server
from ..optim import ClientContext, Optimiser, train
from ..params import Batch, Params
from ..task.backbone import Backbone
from ..task.quantised import check_frozen
from ..task.step import StepModule
from ..task.surgery import replace
from ..task.task import Task

Structure = Literal["inputs", "elements"]
_PRUNED = "has pruned"  # bool, private: whether the client has done the one-shot pruning
_MASKABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Masked(StepModule):
    """A frozen layer with the weights w m; ``scores`` (s) and ``kept`` (R) have the shape of w."""

    state_buffers = ("kept",)
    kept: Tensor

    def __init__(self, base: nn.Module, threshold: float, start: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        weight = base.get_parameter("weight")
        self.threshold = threshold
        self.scores = nn.Parameter(torch.full_like(weight, start))
        self.register_buffer("kept", torch.ones_like(weight, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.scores)
        m = self.kept * (p + ((p >= self.threshold).to(p.dtype) - p).detach())
        weight: Any = self.base.weight  # no Parameter inside a functional call
        y: Tensor = functional_call(self.base, {"weight": weight * m}, (x,))
        return y


def retain(scores: Tensor, sparsity: float, structure: Structure) -> Tensor:
    """The elements that are left when the share ``sparsity`` of least score, rounded down, is
    dropped; bool of the shape of ``scores`` ``[d_out, d_in, ...]``.

    With the structure ``inputs`` the elements of an input are dropped together, by their sum.

    >>> retain(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), 0.5, "elements")
    tensor([[ True, False],
            [False,  True]])
    """
    if structure == "elements":
        return drop_least(scores.flatten(), sparsity).view(scores.shape)
    left = drop_least(scores.movedim(1, 0).flatten(1).sum(1), sparsity)
    return left.view(1, -1, *[1] * (scores.dim() - 2)).expand(scores.shape)


@dataclass(frozen=True)
class FedMask(Method):
    """Masks on the layers that match ``layers``, by default the last two of the model.

    ``threshold`` is tau. Scores start at a distance of ``start`` above it: all weights are in use.
    """

    name: ClassVar[str] = "fedmask"
    family: ClassVar[str] = "sparse"
    released: ClassVar[str] = "which mask a client has"
    by_token: ClassVar[bool] = True

    layers: tuple[str, ...] = ()  # patterns of module paths to mask; (): the last two
    sparsity: Annotated[float, Ge(0), Lt(1)] = 0.2  # of the one-shot pruning
    structure: Structure = "inputs"  # what is pruned: whole inputs of a layer, or elements
    threshold: Annotated[float, Gt(0), Lt(1)] = 0.5
    start: Annotated[float, Gt(0), Le(1e6)] = 0.1
    consensus: Annotated[float, Gt(0), Le(1)] = 0.5
    optimiser: Optimiser = Optimiser("adam", lr=0.01, eps=1e-5)  # of the scores

    @property
    def _middle(self) -> float:
        """The score at the threshold."""
        return math.log(self.threshold / (1 - self.threshold))

    def adapt(self, backbone: Backbone) -> nn.Module:
        model = backbone.model
        last = tuple(path for unit in units(model)[-2:] for path in unit)
        train_layers(backbone, self.layers or last)
        check_frozen(model, model)
        chosen = [
            (path, module)
            for path, module in model.named_modules()
            if type(module) in _MASKABLE and module.get_parameter("weight").requires_grad
        ]
        if not chosen:
            raise InputError(
                f"fedmask.layers {list(self.layers or last)} holds no linear layer or convolution "
                f"of model {backbone.name!r}; only these can be masked"
            )
        for path, module in chosen:
            replace(model, path, Masked(module, self.threshold, self._middle + self.start))
        masked = {f"{path}.scores" for path, _ in chosen}
        return train_only(model, lambda name: name in masked)

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        if cohort_size < 2:
            raise InputError(
                "fedmask aggregates weights that two or more clients of a round use; the cohort "
                f"has {cohort_size}; allowed: 2 or more"
            )
        if self.robust.let_through(cohort_size) < 2:
            raise InputError(
                "fedmask aggregates weights that two or more clients of a round use; robust.rule = "
                f"{self.robust.rule!r} leaves one upload; allowed: 'none', or 'multi-krum' that "
                "keeps 2 or more"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name == _PRUNED or name in task.state

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {**task.state, _PRUNED: torch.tensor(False)}

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        server = {}
        for path in _paths(task):
            server[f"mask.{path}"] = torch.ones_like(task.state[f"{path}.kept"])
            server[f"shared.{path}"] = torch.zeros_like(task.state[f"{path}.kept"])
        return server

    def send(self, task: Task, server: Server, client: int) -> Params:
        return {name: pack_bits(value.flatten()) for name, value in server.items()}

    def _merged(self, task: Task, state: Params) -> Params:
        """The private tensors, with scores that agree with the received masks."""
        merged = {name: value for name, value in state.items() if self.is_private(task, name)}
        for path in _paths(task):
            if f"mask.{path}" in state:
                s, kept = state[f"{path}.scores"], state[f"{path}.kept"]
                m, shared = (_from_bits(state[f"{part}.{path}"], kept) for part in _SENT)
                wrong = kept & shared & (m != self._mask(s))
                merged[f"{path}.scores"] = torch.where(wrong, 2 * self._middle - s, s)
        return merged

    def _mask(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) >= self.threshold

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        new, loss = train(task, self._merged(task, state), batches, context, self.optimiser)
        for path in _paths(task):
            s, kept = new[f"{path}.scores"], new[f"{path}.kept"]
            left = retain(s, self.sparsity, self.structure)
            new[f"{path}.kept"] = torch.where(state[_PRUNED], kept, left)
            new[f"retained.{path}"] = new[f"{path}.kept"]
            new[f"mask.{path}"] = new[f"{path}.kept"] & self._mask(s)
        return {**new, _PRUNED: torch.ones_like(state[_PRUNED])}, loss

    def pack(self, task: Task, upload: Params) -> Params:
        packed = {}
        for path in _paths(task):
            retained = upload[f"retained.{path}"]
            packed[f"mask.{path}"] = pack_bits(upload[f"mask.{path}"][retained])
            if self.sparsity > 0:
                packed[f"retained.{path}"] = pack_bits(retained.flatten())
        return packed

    def unpack(self, task: Task, packed: Params) -> Params:
        upload: Params = {}
        for path in _paths(task):
            retained = torch.ones_like(task.state[f"{path}.kept"])
            if self.sparsity > 0:
                retained = _from_bits(packed[f"retained.{path}"], retained)
            mask = torch.zeros_like(retained)
            mask[retained] = _from_bits(packed[f"mask.{path}"], mask[retained])
            upload |= {f"mask.{path}": mask, f"retained.{path}": retained}
        return upload

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        for path in _paths(task):
            retained = upload[f"retained.{path}"]
            count, total = int(retained.sum()), retained.numel()
            scores = torch.zeros(retained.shape)
            allowed = int(retain(scores, self.sparsity, self.structure).sum())
            if count != allowed:
                raise InputError(
                    f"retained.{path} keeps {count} of {total} weights; with the sparsity "
                    f"{self.sparsity} it must keep {allowed}"
                )
            of_inputs = retained.movedim(1, 0).flatten(1)
            if self.structure == "inputs" and not of_inputs.eq(of_inputs[:, :1]).all():
                raise InputError(
                    f"retained.{path} keeps parts of inputs; with the structure 'inputs' it must "
                    "keep or drop whole ones"
                )

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        new = {}
        for path in _paths(task):
            holders = uploads[f"retained.{path}"].sum(0)
            votes = uploads[f"mask.{path}"].sum(0)
            agreed = votes >= self.consensus * holders.double() - 1e-9
            shared = holders >= 2
            new[f"mask.{path}"] = torch.where(shared, agreed, server[f"mask.{path}"])
            new[f"shared.{path}"] = server[f"shared.{path}"] | shared
        return new

    def global_state(self, task: Task, server: Server) -> Params | None:
        fresh = {**task.state, **self.send(task, server, 0)}
        return self._merged(task, fresh)

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        return task.logits(self._merged(task, state), batch)

    def portable(self, task: Task, state: Params) -> Portable:
        """The masks, multiplied into the weights."""
        merged, masked = self._merged(task, state), {}
        for path in _paths(task):
            w = task.original.model.get_parameter(f"{path}.weight").detach()
            m = merged[f"{path}.kept"] & self._mask(merged[f"{path}.scores"])
            masked[f"{path}.weight"] = w * m
        return Portable("plain", masked)


_SENT = ("mask", "shared")  # the bits of a masked layer that a client receives


def _paths(task: Task) -> list[str]:
    return [name.removesuffix(".scores") for name in sorted(task.trained)]


def _from_bits(bits: Tensor, like: Tensor) -> Tensor:
    """The mask, of the shape of ``like``."""
    return unpack_bits(bits, like.numel()).view(like.shape)
