"""FedMerge: the server keeps d models and sends every client its own weighted merge of them.

FedMerge: Federated Model Merging for Personalization. S. Chen, T. Zhou, G. Long, J. Jiang,
C. Zhang. AAAI 2026.

Down, client i:
    w_ij = exp(a_ij) / sum_k exp(a_ik)                                            (appendix D)
    theta_i = sum_j w_ij Theta_j                                                  (4)
Client i:
    theta_i <- theta_i - eta grad l(theta_i), step by step                        (7)
    up:  Delta_i, the change of theta_i
Server, p_i = n_i / n over the cohort:
    Theta_j <- Theta_j + sum_i c_ij Delta_i,   c_ij = p_i w_ij                    (8, 10)
    a_ij <- a_ij + lr_w p_i w_ij <Theta_j - theta_i, Delta_i>                     (9, 11; D)

Both updates use Theta and a from the start of the round. The inner product goes over the task head
alone.

A client that joins afterwards receives all Theta_j and finds its row w by gradient steps on
l(sum_j w_j Theta_j), from the mean row of the clients that have trained; the models stay as they
are. (Models that no client uses any more are still noise, and would spoil equal weights.)

Differs from the paper:
- c_ij is divided by sum_i p_i w_ij. As printed, equation 8 moves the merged models by about
  Delta / d; ``normalise=False`` restores it.
- Equation 11 has no rate, which is lr_w = 1. But p_i is about 1 / K and w_ij about 1 / d, so that
  the weights would hardly move. By default the rate is s / max_ij |..| for s = ``largest_step``:
  the same s serves any number of clients and models. ``lr_w`` is a fixed rate instead.
- Without a task head (LoRA on a causal language model) the inner product goes over the last block
  that is trained, the paper's "last few layers".
- The first of the d models is the one that every other method starts from, so that d = 1 is FedAvg.
  The others are drawn anew. LoRA and pretrained models are copied instead, with noise of ``jitter``
  times a tensor's root mean square: equal models would stay equal for ever.
- Running statistics of batch normalisation follow equations 4 and 8; variances stay >= 0.
- The server adds up 64 models or updates in float32, and everything else in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from .. import random
from ..errors import InputError
from ..layers.mixing import fit_logits, mixed
from ..layers.starts import diverse_inits, starts_from_copies
from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, LearningRate
from ..params import Batch, Params, add_prefix, strip_prefix, subtract
from ..stacked import products_with_offsets, ratio, weighted_sum, weighted_sums
from ..task.task import Task

_BANK = "bank."
_NEVER = -1e9  # the logit of a model that a client does not merge: its weight is 0
_LEAST = 1e-12  # of a mean weight: a new client may select models that no other client merges


def merge(models: Tensor, weights: Tensor) -> Tensor:
    """Equation 4: every client's merge of the models, W Theta ``[m, P]``.

    Args:
        models: Theta ``[d, P]``.
        weights: w ``[m, d]``, a client a row.

    >>> merge(torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    tensor([[2., 2.],
            [3., 4.]])
    """
    return weighted_sums(models, weights)


def merge_backward(
    models: Tensor,
    logits: Tensor,
    updates: Tensor,
    shares: Tensor,
    head: slice | Tensor | None = None,
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Equations 8 and 9 in their softmax form: updates of the models and of the clients' logits.

    Args:
        models: Theta ``[d, P]`` that the clients' models were merged from.
        logits: a ``[m, d]``.
        updates: Delta ``[m, P]``, a client a row.
        shares: p ``[m]``.
        head: the columns of the inner product, as a slice, a mask ``[P]`` or indices; None: all.
        normalise: divide by sum_i p_i w_ij; False: equation 8 as printed.

    Returns:
        The models' updates ``[d, P]``, of the clients' type, and the logits' updates, float64
        ``[m, d]`` and without a learning rate. A model to which no client gives weight stays as it
        is.

    >>> Theta, Delta = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    >>> merge_backward(Theta, torch.zeros(1, 2), Delta, torch.ones(1))
    (tensor([[1., 2.],
            [1., 2.]]), tensor([[ 0.5000, -0.5000]], dtype=torch.float64))
    """
    w = torch.softmax(logits.double(), 1).to(updates.device)  # [m, d]
    pw = shares.double().to(updates.device)[:, None] * w
    total = pw.sum(0)
    c = ratio(pw, total) if normalise else pw
    chosen = slice(None) if head is None else head
    S = products_with_offsets(updates[:, chosen], models[:, chosen])  # <Theta_j - Theta_1, Delta_i>
    # <Theta_j - theta_i, Delta_i> = S_ij - sum_k w_ik S_ik: theta_i is not needed again
    return weighted_sums(updates, c.T), pw * (S - (w * S).sum(1, keepdim=True))


@dataclass(frozen=True)
class FedMerge(FineTuning):
    """FedMerge: ``models`` (d) models on the server, one merged model a client.

    The weights w are learned (``weights="dynamic"``) or stay as they are drawn (``"fixed"``).
    In a round the logits a change by ``largest_step`` at most, or at the rate ``lr_w`` if that is
    given. ``optimiser.lr`` is the clients' eta. ``trainable`` chooses
    all parameters, the head, or LoRA and the head.
    """

    name: ClassVar[str] = "fedmerge"
    family: ClassVar[str] = "mixture"
    released: ClassVar[str] = "each client's weights of the models"
    sends_updates: ClassVar[bool] = True

    models: Annotated[int, Gt(0), Le(1000)] = 10
    weights: Literal["dynamic", "fixed"] = "dynamic"
    # how many models a client merges; None: all
    selected: Annotated[int, Gt(0), Le(1000)] | None = None
    lr_w: LearningRate | None = None  # None: the rate follows from largest_step
    largest_step: Annotated[float, Gt(0), Le(1e6)] = 1.0  # of a logit, each round
    normalise: bool = True  # c_ij over sum_i p_i w_ij; False: equation 8 as printed
    normalise_rows: bool = False  # each client's logits move by lr_w: the rule for language models
    inner: Literal["head", "all"] = "head"  # the parameters of the inner product
    # of copies: noise over a tensor's root mean square
    jitter: Annotated[float, Ge(0), Le(1e6)] = 0.1

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.selected is not None and self.selected > self.models:
            raise InputError(
                f"fedmerge: selected = {self.selected}; allowed: 1 to models = {self.models}"
            )

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        d = self.models
        equal = starts_from_copies(task) and self.jitter == 0 and d > 1
        if equal and self.weights == "dynamic" and self.selected in (None, d):
            raise InputError(
                f"fedmerge: jitter = 0 makes {d} equal copies, which stay equal for ever; "
                "allowed: a positive jitter, models = 1, or fixed weights"
            )

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        models = diverse_inits(task, self.models, self.jitter, key)
        shared = {n: value for n, value in models.items() if not self.is_private(task, n)}
        bank = add_prefix(shared, _BANK)
        return {**bank, "logits": self._first_logits(num_clients, random.fold_in(key, 0))}

    def _first_logits(self, num_clients: int, key: Tensor) -> Tensor:
        """a before any training, ``[K, d]``."""
        a = torch.zeros(num_clients, self.models, dtype=torch.float64)
        if self.selected is None:
            return a
        kept = random.uniform(key, tuple(a.shape)).argsort(dim=1)[:, : self.selected]
        return torch.full_like(a, _NEVER).scatter(1, kept, 0.0)

    def send(self, task: Task, server: Server, client: int) -> Params:
        w = torch.softmax(server["logits"][client], 0)  # [d]
        return weighted_sum(strip_prefix(server, _BANK), w)

    def send_new(self, task: Task, server: Server, client: int) -> Params:
        bank = {name: value for name, value in server.items() if name.startswith(_BANK)}
        if self.weights == "fixed":
            return bank
        a = server["logits"]
        trained = ((a != 0) & (a != _NEVER)).any(1)
        a = a[trained] if trained.any() else a
        return {**bank, "mean_weights": torch.softmax(a, 1).mean(0)}  # [d]

    def fit_row(
        self, task: Task, received: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        Theta = strip_prefix(received, _BANK)
        (a,) = self._first_logits(1, context.key.cpu())  # [d]
        if self.weights == "dynamic":
            a = fit_logits(
                a + received["mean_weights"].cpu().clamp(min=_LEAST).log(), batches, context,
                lambda w, batch, key: task.loss(mixed(Theta, w), batch, key)[0],
            )  # fmt: skip
        return weighted_sum(Theta, torch.softmax(a, 0))

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return subtract(trained, received)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        rows = torch.tensor(cohort.clients, device=server["logits"].device)
        a = server["logits"][rows]  # [c, d]
        scored = self._scored(task) if self.weights == "dynamic" else frozenset()
        g, new = torch.zeros_like(a), dict(server)
        for name, Delta in uploads.items():
            Theta = server[_BANK + name]  # [d, ...]
            # an inner product is a sum over tensors, so that the logits' updates add up
            columns = slice(None) if name in scored else slice(0, 0)
            moved, part = merge_backward(
                _table(Theta), a, _table(Delta), cohort.shares, columns, self.normalise
            )
            Theta = Theta + moved.view_as(Theta)
            variance = name in task.buffers and name.endswith("running_var")
            new[_BANK + name] = Theta.clamp(min=0) if variance else Theta
            g += part
        if self.normalise_rows:
            norms = g.norm(dim=1, keepdim=True)
            g = ratio(g, norms)
        bounded = self.largest_step * ratio(g, g.abs().max())
        step = bounded if self.lr_w is None else self.lr_w * g
        new["logits"] = server["logits"].index_copy(0, rows, a + step)
        return new

    def _scored(self, task: Task) -> frozenset[str]:
        """The parameters of the inner product: the head's, or else those of the last block that is
        trained, or else all."""
        if self.inner == "all":
            return task.trained
        for part in (task.backbone.head, *reversed(task.backbone.blocks)):
            prefixes = tuple(f"{path}." for path in part)
            if names := frozenset(name for name in task.trained if name.startswith(prefixes)):
                return names
        return task.trained

    def global_state(self, task: Task, server: Server) -> Params | None:
        bank = strip_prefix(server, _BANK)
        if task.state.keys() - bank.keys():
            return None  # a subclass keeps the others private
        even = torch.full((self.models,), 1 / self.models, dtype=torch.float64)
        return weighted_sum(bank, even)

    def server_diagnostics(self, task: Task, server: Server, clients: Sequence[int]) -> Params:
        return {"weights": torch.softmax(server["logits"][list(clients)], 1).float()}  # [n, d]


def _table(stacked: Tensor) -> Tensor:
    """``[n, ...]`` as ``[n, P]``."""
    return stacked.reshape(len(stacked), -1)
