"""HeteroFL: every client trains a sub-model of the width that it can afford.

HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients.
E. Diao, J. Ding, V. Tarokh. ICLR 2021.

Client k has width r_k. Of a hidden layer of d units (channels) it has the first ceil(r_k d), and so
the upper left block W^k of a weight W ``[d_out, d_in]``; the model's inputs and outputs stay whole.
    client k:  W^k <- gradient steps from W^k on a network whose hidden layers are
               phi(BN(Scaler(x W^k + b^k))),  Scaler(z) = z / r_k
    server:    W[i, j] <- mean of W^k[i, j] over the round's clients that have it; an element that
               no client of the round has stays as it is

Differs from the paper:
- Equation numbers are left out, since the paper's text was not at hand.
- Which axes can be cut, and which together, is found by trying (`layers.submodel.find_groups`).
  Transformers are cut in the feed-forward's inner dimension and in the pooler; the width between
  blocks stays.
- The scaler divides by the share of a layer's units that the client has, ceil(r_k d) / d, and not
  at all where that layer isn't cut. A client uses its own sub-model with the scaler, as it was
  trained. The whole model needs none, as in the paper.
- Batch normalisation is the library's: running statistics are trained, sent and averaged as
  parameters are. The paper's static one has none until the end of training, when the server asks
  all clients for their statistics.
- Left out: the masked cross-entropy, which takes classes that a client doesn't have out of its
  loss, and widths that are drawn anew in each round (here a client's width is fixed).
- ``weights="examples"`` is not in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le, MinLen
from torch import Tensor, nn

from ..errors import InputError
from ..layers.per_client import entry_of
from ..layers.submodel import Group, coverage, find_groups, kept_units, pad_to_full, slice_submodel
from ..layers.trainable import choose_trainable
from ..method import Cohort, Method, Portable, Server
from ..optim import ClientContext, train
from ..params import Batch, Params, constant, pick
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.task import Task

Width = Annotated[float, Gt(0), Le(1)]
_KEPT = "kept units"  # of each group, int64: which part of an upload at full shape was sent


@dataclass(frozen=True)
class HeteroFL(Method):
    """FedAvg on sub-models: ``widths`` are the clients' r, in turn."""

    name: ClassVar[str] = "heterofl"
    family: ClassVar[str] = "sparse"
    released: ClassVar[str] = "which units a client has"
    by_token: ClassVar[bool] = True

    widths: Annotated[tuple[Width, ...], MinLen(1)] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    weights: Literal["uniform", "examples"] = "uniform"  # of the clients that have an element
    scaler: bool = True
    layers: tuple[str, ...] = ()  # patterns of module paths to train; (): all

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "full", 1, 1.0, self.layers)

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if min(self.widths) < 1 and not self._groups(task):
            raise InputError(
                f"found no trained layer of model {task.backbone.name!r} whose width can be cut; "
                f"heterofl.widths is {list(self.widths)}; allowed for this model: [1.0]"
            )

    def _groups(self, task: Task) -> tuple[Group, ...]:
        return find_groups(task) if min(self.widths) < 1 else ()

    def send(self, task: Task, server: Server, client: int) -> Params:
        width = entry_of(self.widths, client)
        if width == 1:
            return server
        groups = self._groups(task)
        return slice_submodel(server, groups, [group.kept(width) for group in groups])

    def _scaled(self, task: Task, state: Params) -> Params:
        """The scaler, as a factor on weights and biases: (x W + b) / r = x (W / r) + b / r."""
        if not self.scaler:
            return state
        scaled = dict(state)
        groups = self._groups(task)
        for group, units in zip(groups, kept_units(state, groups), strict=True):
            for name in group.outputs if units < group.size else ():
                scaled[name] = state[name] * (group.size / units)
        return scaled

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def loss(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            return task.loss(self._scaled(task, state), batch, key)

        return train(task, state, batches, context, self.optimiser, loss=loss)

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        return task.logits(self._scaled(task, state), batch)

    def portable(self, task: Task, state: Params) -> Portable:
        """The sub-model, with the scaler in its weights."""
        return Portable("plain", self._scaled(task, state))

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        groups = self._groups(task)
        kept = constant((*kept_units(trained, groups),), torch.int64, task.device)
        return {**pad_to_full(trained, task.state), _KEPT: kept}

    def pack(self, task: Task, upload: Params) -> Params:
        submodel = slice_submodel(upload, self._groups(task), upload[_KEPT].tolist())
        return {name: value for name, value in submodel.items() if name != _KEPT}

    def unpack(self, task: Task, packed: Params) -> Params:
        return self.upload(task, {}, packed)

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        groups, kept = self._groups(task), upload[_KEPT].tolist()
        own = kept_units(received, groups)
        if kept != own:
            raise InputError(
                f"its sub-model has {kept} units of the layers that are cut; with its width "
                f"{entry_of(self.widths, client)} it must have {own}"
            )
        sent = pick(upload, received)
        within = pad_to_full(slice_submodel(sent, groups, own), sent)
        for name, value in sent.items():
            if not value.equal(within[name]):
                raise InputError(f"{name} holds values beyond the client's width; allowed there: 0")

    def unchanged(self, task: Task, server: Server, upload: Params) -> Params:
        whole = super().unchanged(task, server, upload)
        if _KEPT not in upload:
            return whole
        groups = self._groups(task)
        return pad_to_full(slice_submodel(whole, groups, upload[_KEPT].tolist()), whole)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        w = cohort.shares if self.weights == "examples" else torch.ones_like(cohort.shares)
        sums = weighted_sum(pick(uploads, server), w)
        total = coverage(server, self._groups(task), uploads[_KEPT].tolist(), w)
        return {
            name: torch.where(total[name] > 0, sums[name] / total[name], old).to(old.dtype)
            for name, old in server.items()
        }
