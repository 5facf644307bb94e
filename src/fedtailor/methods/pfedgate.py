"""pFedGate: a private gating layer picks and scales blocks of the shared model, batch by batch.

Efficient Personalized Federated Learning via Sparse Model-Adaptation. D. Chen, L. Yao, D. Gao,
B. Ding, Y. Li. ICML 2023.

Client k with sparsity s, gating layer phi, batch x; W the sizes of the L blocks, d their sum:
    M, G = g_phi(x)                                         (section 5.2.1, each [L])
    I* = argmax_I  I . G   such that  I . W / d <= s,  I in {0, 1}^L            (6)
    M' = M I_ST,  I_ST = I* - stopgrad(G) + G                                   (appendix A)
    theta' = theta M', block by block                                           (5)
    theta <- theta - eta_g grad f(theta'),  phi <- phi - eta grad f(theta')     (algorithm 1)
    up: Delta_k[b] of the blocks b that any batch of the round kept, and which they are
Server:
    theta[b] <- theta[b] + sum_k n_k Delta_k[b] / sum_k n_k over the k that sent b

g_phi has two equal paths, one for M and one for G. Each is a switchable normalisation, a linear
layer, a batch normalisation, a sigmoid (for M times ``gate_max``), and the mean over the batch.

Differs from the paper:
- The gradient of theta passes through M' (chain rule); algorithm 1 leaves M' out.
- M is a sigmoid times ``gate_max`` = 2, so that all gates start near 1 and the model near theta.
  With the paper's 1 every layer starts at half its weights: a pretrained model is lost, and a
  random one learns much more slowly.
- ``sigmoid=False`` replaces the sigmoid by its tangent at 0, 1/2 + z/4. Without any function the
  gates would be 0: after the batch normalisation, z has mean 0 over every batch.
- The gate and the importance of a dropped block get no gradient, so that the backward pass can
  leave the block out, too. ``straight_through="dense"`` computes it, as in appendix A.
- Importances are rounded to 2^-20. With two examples in a batch all gates start at 0.5 but for
  float rounding, which must not decide what is kept. Of equal solutions the smallest is taken.
- d counts the shared parameters; the gating layer is not cut. A batch of one example, which has no
  batch statistics, is not trained on.
- The paper gives a picture's pixels to the gating layer; larger pictures are first averaged to
  ``pool x pool``. The paper has no text: here the tokens' embeddings before any training are the
  input, averaged over the real tokens after the normalisation.
- ``optimiser.clip`` bounds the norm of theta's and phi's gradient together. The paper clips the
  gradients of each step, too; it does not say whether theta's and phi's are clipped together.
- ``adaptation="client"``: there is one input, the mean, so that the batch normalisation after the
  linear layer is only its scale and shift. The paper doesn't say.
- ``evaluation="sample"`` and ``"client"`` (the mean of M and G over the training examples) are not
  in the paper, nor is ``solver="greedy"``, nor the value of ``min_sparsity``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt, MinLen
from torch import Tensor, nn

from ..errors import InputError
from ..layers.block_sparse.blocks import Blocks
from ..layers.block_sparse.choice import Choice, choose
from ..layers.block_sparse.forward import adapted, select
from ..layers.block_sparse.knapsack import greedy, knapsack
from ..layers.block_sparse.layers import gate_rows, gated
from ..layers.block_sparse.training import train_sparse
from ..layers.gate_input import GateInput
from ..layers.gating import (
    GatingLayer,
    batch_mean,
    gate_examples,
    gated_blocks,
    gating_layer,
    mean_gates,
    mean_input,
    without_single_examples,
)
from ..layers.lora import base_params
from ..layers.masks import pack_bits, unpack_bits
from ..layers.parts import train_only
from ..layers.per_client import entries_of, entry_of
from ..method import Cohort, Method, Portable, Server
from ..optim import MAY_MOVE, ClientContext, LearningRate, Optimiser, train
from ..params import Batch, Params, add, add_prefix, pick, strip_prefix, subtract
from ..stacked import weighted_sum
from ..task.backbone import Backbone
from ..task.surgery import beside
from ..task.task import Task
from ..torch_private import under_vmap

Budget = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class PFedGate(Method):
    """pFedGate: theta is shared, the gating layer phi private.

    ``sparsity`` is s, for all clients or for several in turn; ``blocks`` is B, ``min_sparsity``
    s_min (None: two fifths of the smallest s); ``optimiser.lr`` is eta_g and ``lr_gate`` eta.
    ``adaptation`` says what has gates of its own in training: a batch, or a client by the mean of
    its inputs. ``evaluation`` says the same of evaluation.
    """

    name: ClassVar[str] = "pfedgate"
    takes_parts: ClassVar[bool] = False
    recordable: ClassVar[bool] = False  # which blocks a batch trains is worked out in Python
    family: ClassVar[str] = "sparse"
    released: ClassVar[str] = "which blocks a client touched"
    sends_updates: ClassVar[bool] = True

    min_batch_size: ClassVar[int] = 2

    sparsity: Budget | Annotated[tuple[Budget, ...], MinLen(1)] = 0.5
    blocks: Annotated[int, Ge(2), Le(1000)] = 5
    min_sparsity: Annotated[float, Ge(0), Lt(1)] | None = None
    pre_norm: bool = True
    post_norm: bool = True
    sigmoid: bool = True
    gate_max: Annotated[float, Gt(0), Le(1e6)] = 2.0
    adaptation: Literal["batch", "client"] = "batch"
    evaluation: Literal["batch", "sample", "client"] = "batch"
    solver: Literal["exact", "greedy"] = "exact"
    straight_through: Literal["kept", "dense"] = "kept"
    pool: Annotated[int, Gt(0), Le(256)] = 28
    optimiser: Optimiser = field(default=Optimiser("sgd", lr=0.1, clip=10.0), kw_only=True)
    lr_gate: LearningRate = 0.1

    def first_share(self) -> float:
        """s_min, the share of a parameter that its first block has."""
        if self.min_sparsity is None:
            return 0.4 * min(entries_of(self.sparsity))
        return self.min_sparsity

    def adapt(self, backbone: Backbone) -> nn.Module:
        source = GateInput.of(backbone.model, backbone.name, self.pool)
        model = train_only(backbone.model, lambda name: True)
        blocks = Blocks.of(model, self.blocks, self.first_share())
        if self.straight_through == "kept":
            gate_rows(model, blocks)
        one_input = self.adaptation == "client"
        gate = GatingLayer(
            source, blocks, pre_norm=self.pre_norm, post_norm=self.post_norm,
            sigmoid=self.sigmoid, gate_max=self.gate_max, one_input=one_input,
            keep_means=self.evaluation == "client" and not one_input,
        )  # fmt: skip
        return beside(model, "gate", gate)

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.adaptation == "client" and self.evaluation != "client":
            raise InputError(
                f"adaptation 'client' learns one set of gates a client; evaluation must be "
                f"'client', not {self.evaluation!r}"
            )

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        blocks = gated_blocks(task)
        least, W = int(blocks.W[blocks.always].sum()), blocks.W[blocks.W > 0]
        for s in entries_of(self.sparsity):
            room = blocks.capacity(s)
            if room < least:
                raise InputError(
                    f"sparsity {s} can't be reached: with min_sparsity {self.first_share():g} the "
                    f"blocks that are always kept hold {least} of {blocks.d} parameters; "
                    f"allowed: {math.ceil(least / blocks.d * 1e4) / 1e4} or more, or a smaller "
                    "min_sparsity"
                )
            if room < W.min():
                raise InputError(
                    f"sparsity {s} of {blocks.d} parameters is room for {room}, and the smallest "
                    f"block has {W.min()}; raise sparsity or blocks"
                )

    def is_private(self, task: Task, name: str) -> bool:
        return name.startswith("gate.")

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        private = {n: value for n, value in task.state.items() if self.is_private(task, n)}
        capacity = gated_blocks(task).capacity(entry_of(self.sparsity, client))
        return {**private, "gate.budget": torch.full_like(private["gate.budget"], capacity)}

    def _gates(self, task: Task, state: Params, batch: Batch) -> tuple[Tensor, Choice, Params]:
        """In training: M' ``[L]``, I*, and new state buffers."""
        x, real, weight = gate_examples(task, state, batch)
        both, statistics = task.module_step("gate", state, batch, x, real, weight)
        M, G = batch_mean(both, weight)
        choice = self._choose(task, state, G)
        touched = state["touched"] | choice.kept
        return self._adjusted(M, G, choice.kept), choice, {**statistics, "touched": touched}

    def _choose(self, task: Task, state: Params, G: Tensor) -> Choice:
        """I* (6)."""
        blocks, solver = gated_blocks(task), knapsack if self.solver == "exact" else greedy
        kept, known = choose(
            lambda G, budget: solver(G, blocks.W, budget, blocks.always), G, state["gate.budget"]
        )
        return Choice(kept, known if self.straight_through == "kept" else None)

    def _adjusted(self, M: Tensor, G: Tensor, kept: Tensor) -> Tensor:
        """M' ``[L]`` (appendix A)."""
        I = kept.to(G.dtype)  # noqa: E741
        if self.straight_through == "kept":
            return M * I * (1 + G - G.detach())
        return M * (I + (G - G.detach()))

    def _adapted(self, task: Task, state: Params, gates: Tensor, choice: Choice) -> Params:
        """theta' (5), the tensors that a forward pass uses."""
        blocks = gated_blocks(task)
        selection = None if choice.known is None else select(task.model, blocks, choice.known)
        return adapted(task.model, blocks, state, gates, selection)

    def _loss(self, task: Task, state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
        """f(theta')."""
        gates, choice, buffers = self._gates(task, state, batch)
        theta = self._adapted(task, state, gates, choice)
        value, statistics = task.loss(theta, batch, key)
        return value, {**buffers, **statistics, **self._may_move(task, state, choice.kept)}

    def _may_move(self, task: Task, state: Params, kept: Tensor) -> Params:
        """The kept blocks, as masks of the parameters."""
        o = self.optimiser
        if o.name == "sgd" and not o.momentum and not o.weight_decay:
            return {}  # where the gradient is 0, plain SGD moves nothing
        masks = {
            name: gated(torch.ones_like(state[name]), kept.float()[place], sizes) > 0
            for name, place, sizes in gated_blocks(task).parts()
        }
        return add_prefix(masks, MAY_MOVE)

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        untouched = torch.zeros(len(gated_blocks(task).W), dtype=torch.bool, device=task.device)
        state = {**state, "touched": untouched}
        if self.adaptation == "client":
            state["gate.features"] = mean_input(task, batches)
        several = [without_single_examples(batch) for batch in batches]
        if self._can_train_sparse():
            trained, mean = train_sparse(
                task, gated_blocks(task), state, several, context, self.optimiser, self.lr_gate,
                partial(self._gates, task),
            )  # fmt: skip
        else:
            trained, mean = train(
                task, state, several, context, self.optimiser,
                lr=lambda name: self.lr_gate if self.is_private(task, name) else self.optimiser.lr,
                loss=partial(self._loss, task),
            )  # fmt: skip
        if "gate.means" in state:
            trained["gate.means"] = mean_gates(task, trained, batches)
        return trained, mean

    def _can_train_sparse(self) -> bool:
        """Whether a step can leave dropped blocks out: they have no gradient and no momentum, and
        Python knows them."""
        plain = self.optimiser.name == "sgd" and not self.optimiser.momentum
        return plain and self.straight_through == "kept" and not under_vmap()

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return {**subtract(pick(trained, received), received), "touched": trained["touched"]}

    def pack(self, task: Task, upload: Params) -> Params:
        numbers = upload["touched"].nonzero()[:, 0].tolist()
        values = gated_blocks(task).join(numbers, upload, {})
        statistics = pick(upload, upload.keys() & task.buffers)
        return {**statistics, "blocks": pack_bits(upload["touched"]), "values": values}

    def unpack(self, task: Task, packed: Params) -> Params:
        blocks = gated_blocks(task)
        touched = unpack_bits(packed["blocks"].to(task.device), len(blocks.W))
        sent = blocks.split(touched.nonzero()[:, 0].tolist(), packed["values"])
        zeros = {n: v.new_zeros(()).expand_as(v) for n, v in pick(task.state, blocks.names).items()}
        statistics = pick(packed, packed.keys() & task.buffers)
        return {**statistics, **blocks.whole(zeros, sent), "touched": touched}

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        """A budget holds for each batch. So over many batches a client may send all blocks that fit
        into it beside those that are always kept, and no others."""
        blocks, touched = gated_blocks(task), upload["touched"]
        W, sent, s = blocks.W, touched.cpu().numpy(), entry_of(self.sparsity, client)
        room = blocks.capacity(s) - int(W[blocks.always].sum())
        misfits, missing = ~blocks.always & (room < W) & sent, blocks.always & (W > 0) & ~sent
        if misfits.any():
            number = int(misfits.argmax())
            raise InputError(
                f"its upload has block {number} ({W[number]} parameters of "
                f"{blocks.places[number][0]}); beside the blocks that are always kept, its "
                f"sparsity {s} of {blocks.d} parameters has room for {room}"
            )
        if sent.any() and missing.any():
            number = int(missing.argmax())
            raise InputError(
                f"its upload lacks block {number} of {blocks.places[number][0]}, which every batch "
                "keeps; it must have all such blocks, or none at all"
            )
        for name, place, sizes in blocks.parts():
            if gated(upload[name], (~touched[place]).float(), sizes).any():
                raise InputError(
                    f"{name} holds values outside the blocks that were sent; allowed: 0"
                )

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        blocks = gated_blocks(task)
        sent = uploads["touched"].double().cpu()  # [c, L]
        shares = cohort.shares.cpu()[:, None]
        total = (shares * sent).sum(0)
        Omega = shares * sent / torch.where(total > 0, total, 1.0)
        trained = shares[:, 0] * sent.any(1)
        statistics = pick(uploads, server.keys() & task.buffers)
        moved = weighted_sum(statistics, trained / trained.sum().clamp(min=1e-12))
        return add(server, {**moved, **blocks.weighted_sum(uploads, Omega)})

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        logits = []
        for part in self._parts(batch):
            gates, choice = self._inference_gates(task, state, part)
            logits.append(task.logits(self._adapted(task, state, gates, choice), part))
        return torch.cat(logits)

    def portable(self, task: Task, state: Params) -> Portable:
        theta = base_params(task, state)
        blocks = gated_blocks(task)
        if self.evaluation == "client":  # one set of gates for all batches
            gates, _ = self._inference_gates(task, state, {})
            return Portable("plain", theta | {
                name: gated(state[name], gates[place], sizes)
                for name, place, sizes in blocks.parts()
            })  # fmt: skip
        source = gating_layer(task).source
        settings = {
            "gates_of": "row" if self.evaluation == "sample" else "batch",
            "single_row": "the gates that are predicted for that row alone",
            "gate_input": asdict(source),
            "gate_max": self.gate_max,
            "sigmoid": self.sigmoid,
            "solver": self.solver,
            "blocks": dict(zip(blocks.names, blocks.sizes, strict=True)),
        }
        gate = add_prefix(strip_prefix(state, "gate."), "gate/")
        if source.kind == "tokens":  # the gate sees the embedding before any training
            embedding = task.original.model.get_parameter(f"{source.path}.weight")
            gate["/embedding"] = embedding.detach()
        return Portable("gated_blocks", theta | gate, settings=settings)

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """The gates M' ``[L]`` and the sparsity that they reach, averaged over the batch's parts
        with gates of their own."""
        W = torch.from_numpy(gated_blocks(task).W).to(task.device)
        shown = [self._inference_gates(task, state, part) for part in self._parts(batch)]
        sparsity = torch.stack([(choice.kept * W).sum() / W.sum() for _, choice in shown])
        return {
            "gates": torch.stack([gates for gates, _ in shown]).mean(0),
            "sparsity": sparsity.mean(0),
        }

    def _parts(self, batch: Batch) -> list[Batch]:
        """The parts of a batch that have gates of their own."""
        if self.evaluation != "sample":
            return [batch]
        number = len(next(iter(batch.values())))
        return [{name: value[n : n + 1] for name, value in batch.items()} for n in range(number)]

    def _inference_gates(self, task: Task, state: Params, batch: Batch) -> tuple[Tensor, Choice]:
        """Outside training: M' ``[L]`` and I*."""
        if self.adaptation == "batch" and self.evaluation == "client":
            M, G = state["gate.means"]
        else:
            x, real, weight = gate_examples(task, state, batch)
            M, G = batch_mean(task.module("gate", state, x, real, weight), weight)
        choice = self._choose(task, state, G)
        return self._adjusted(M, G, choice.kept), choice
