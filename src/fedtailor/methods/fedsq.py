"""FedSQ: training inside the activation pattern of the pretrained model, which stays fixed.

FedSQ: Optimized Weight Averaging via Fixed Gating. C. Pérez-Corral, J. I. Mestre, A.
Fernández-Hernández, M. F. Dolz, J. Duato, E. S. Quintana-Ortí. arXiv 2604.02990, 2026.

The pretrained weights are copied twice: w_SK (structural) is frozen, w_QK (quantitative) trained.
The paper's equations have no numbers; the tags are its definitions and the lines of algorithm 1:
    alpha_l(x) = 1[z_l^SK(x) > 0], from a forward pass of w_SK alone               (Def. 2)
    h_l(x)     = alpha_l(x) * z_l^QK(x)                                            (section III-B)
    client i:  w_i <- w_QK - eta grad l_i(w_QK), the layers of the schedule sigma  (Alg. 1, 10-12)
    server:    w_QK <- sum_i (n_i / n) w_i                                         (Alg. 1, 15)

Differs from the paper:
- The paper replaces every activation by ReLU's mask. Here a piecewise-linear activation uses, for
  z_QK, the slope and offset of the piece that z_SK is on, which for ReLU is the mask. A smooth one
  is phi(z_SK) + phi'(z_SK) (z_QK - z_SK). So the network starts as the pretrained one, unless
  trained batch normalisations use each batch's statistics. With the paper's rule for GELU and its
  like, ``smooth="mask"``, it does not.
- The paper doesn't say: an activation after a residual sum is gated by the structural copy's own
  sum; the structural copy normalises with running statistics; a max-pool takes its own maxima. With
  ``max_pool="structural"`` it takes those of the structural copy: only then is the network affine
  in every layer's w_QK. Products, attention and norms are not gated.
- Below the first trained layer both copies are one, and nothing is gated.
- sigma (``layers``) is an input here; `fedtailor layers` selects it as the paper describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import random
from ..layers.activation_patterns import Entry, Gates, MaxPool, Smooth
from ..layers.masks import pack_bits, unpack_bits
from ..layers.parts import train_layers
from ..method import Method, Portable
from ..optim import ClientContext, Optimiser, train
from ..params import CACHED, Batch, Params, add_prefix, pick, strip_prefix
from ..task.backbone import Backbone, sequences
from ..task.step import StepModule
from ..task.task import Reparametrise, Task

_GATES = "fedsq_gates"


@dataclass(frozen=True)
class FedSQ(Method):
    """FedSQ: only w_QK is trained and sent; w_SK is the model before any training.

    ``layers`` is sigma, patterns of module paths; (): all. ``cache`` says what is worked out once
    an example, since only w_SK counts for it: the masks, and the output of the layers below sigma.
    """

    name: ClassVar[str] = "fedsq"
    takes_checkpointing: ClassVar[bool] = False
    family: ClassVar[str] = "regularised"
    needs_only_mean: ClassVar[bool] = True

    layers: tuple[str, ...] = ()
    smooth: Smooth = "first-order"
    max_pool: MaxPool = "own"
    cache: Literal["masks+features", "masks", "none"] = "masks+features"
    optimiser: Optimiser = field(default=Optimiser(lr=1e-2, weight_decay=1e-4), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        model = train_layers(backbone, self.layers)
        trained = [n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad]
        gates = Gates(model, trained, self.smooth, self.max_pool, apart=(StepModule,))
        model.add_module(_GATES, gates)
        return model

    def check_batch(self, task: Task, batch: Batch) -> None:
        key = random.key(0).to(task.device)
        self.local(task, task.state, [batch], ClientContext(key))  # meets every activation

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def loss(w: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            return task.loss(w, batch, key, _gated(task))

        return train(task, state, batches, context, self.optimiser, loss=loss)

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        """The logits of the gated network, as it was trained: two forward passes."""
        return task.logits(state, batch, _gated(task))

    def portable(self, task: Task, state: Params) -> Portable:
        w_QK = add_prefix(pick(state, task.state), "quantitative/")
        trained = sorted({name.rpartition(".")[0] for name in task.trained})
        settings = {"trained": trained, "smooth": self.smooth, "max_pool": self.max_pool}
        return Portable("fixed_gates", w_QK, settings=settings)

    def precompute(self, task: Task, batch: Batch) -> Params:
        """alpha_l(x) as bits, if no activation is smooth, and the features below sigma."""
        if self.cache == "none":
            return {}
        features = task.features(batch) if self.cache == "masks+features" else {}
        gates = _gates(task)
        with gates.recording():
            task.pretrained_logits(batch)
        return {**features, **_packed(gates.tape)}

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """``agreement`` ``[l]``: for each activation, the share of units where z_QK is on the piece
        of z_SK."""
        gates = _gates(task)
        with gates.comparing(sequences(batch).get("attention_mask")) as agreement:
            self.predict(task, state, batch)
        return {"agreement": torch.stack(agreement)} if agreement else {}


def _gates(task: Task) -> Gates:
    gates = task.model.get_submodule(_GATES)
    assert isinstance(gates, Gates)
    return gates


def _gated(task: Task) -> Reparametrise:
    """Returns w_QK as it is, after setting the gates to those of w_SK for the next pass."""
    gates = _gates(task)

    def reparametrise(w_QK: Params, batch: Batch) -> Params:
        w_SK = partial(task.pretrained_logits, batch)
        gates.replay(_unpacked(strip_prefix(batch, CACHED)), w_SK)
        return w_QK

    return reparametrise


def _packed(tape: Sequence[Entry]) -> Params:
    """A pattern as bits and indices ``[b, ...]``; empty if a smooth activation is in it, whose
    pattern would be as large as the activation."""
    values = {
        f"gate{position}.{number}": value
        for position, entry in enumerate(tape)
        for number, value in enumerate(entry)
        if isinstance(value, Tensor)
    }
    if any(value.is_floating_point() for value in values.values()):
        return {}
    return {
        name: pack_bits(_as_rows(value)) if value.dtype == torch.bool else value.int()
        for name, value in values.items()
    }


def _unpacked(packed: Params) -> list[Entry]:
    """The inverse of `_packed`; other tensors are ignored."""
    tape: list[Entry] = []
    while entry := strip_prefix(packed, f"gate{len(tape)}."):
        parts = [entry[str(number)] for number in range(len(entry))]
        tape.append(tuple(partial(_mask, x) if x.dtype == torch.uint8 else x for x in parts))
    return tape


def _mask(bits: Tensor, like: Tensor) -> Tensor:
    return unpack_bits(bits, _as_rows(like).shape[-1]).reshape(like.shape)


def _as_rows(x: Tensor) -> Tensor:
    """``[b, ...]`` as ``[b, n]``; token sequences ``[b, L, d]`` keep L, which batches pad."""
    return x if x.dim() == 3 else x.flatten(1)
