"""Method: the one interface between a federated algorithm and everything that runs it."""

from __future__ import annotations

import math
import re
import sys
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .errors import InputError, brief
from .layers.lora import Alpha, Rank, base_params, lora_factors, lora_magnitudes, without_lora
from .layers.trainable import Trainable, choose_trainable
from .optim import ClientContext, Optimiser, train
from .params import Batch, Params, pick
from .stacked import weighted_sum
from .task.backbone import Backbone
from .task.task import Task
from .uploads.rules import Robust

Server = Params


@dataclass(frozen=True)
class Cohort:
    """Who took part in a round: ``clients`` (numbers), in the order of the uploads' rows, and
    ``num_examples`` float64 ``[c]``, the training examples of each. ``round`` counts from 1,
    ``key`` is for the random numbers that the server draws in the round, and ``num_clients`` is K,
    the number of clients of the whole federation. ``max_share`` is the largest part of a round's
    weight that one client may have; None: no limit."""

    clients: tuple[int, ...]
    num_examples: Tensor
    round: int
    key: Tensor
    num_clients: int = 0
    max_share: float | None = None

    def subset(self, rows: Tensor) -> Cohort:
        """The same round with those members whose uploads are at ``rows`` (int64 ``[m]``)."""
        clients = tuple(self.clients[row] for row in rows.tolist())
        return replace(self, clients=clients, num_examples=self.num_examples[rows.cpu()])

    def pooled(self) -> Cohort:
        """The same round as if one client had the examples of all."""
        return replace(self, clients=(), num_examples=self.num_examples.sum()[None])

    def with_max_share(self, max_share: float | None) -> Cohort:
        """The same round, in which no member's examples count as more than ``max_share`` of the sum
        of all that are counted."""
        counted = _lowered(self.num_examples, max_share)
        return replace(self, num_examples=counted, max_share=max_share)

    def limited(self, weights: Tensor) -> Tensor:
        """A method's own ``weights`` ``[c]``, 0 or more, with the same sum and none above
        ``max_share`` of it. What a few have too much, all others get."""
        lowered = _lowered(weights, self.max_share)
        return lowered if lowered is weights else lowered * (weights.sum() / lowered.sum())

    @property
    def shares(self) -> Tensor:
        """p_k = n_k / sum n over the cohort, float64 ``[c]``."""
        return self.num_examples / self.num_examples.sum()

    @property
    def uniform(self) -> Tensor:
        """1 / c for every member, float64 ``[c]``."""
        return torch.full_like(self.num_examples, 1 / len(self.num_examples))


def _lowered(weights: Tensor, max_share: float | None) -> Tensor:
    """``weights`` ``[c]``, the largest of them lowered to ``max_share`` of the sum; equal ones if
    they are too few for that."""
    largest = float(weights.max()) if len(weights) else 0.0
    if max_share is None or not 0 < largest < math.inf:  # or not a number: the round is taken again
        return weights
    if max_share * len(weights) <= 1:
        return torch.ones_like(weights)
    positive = weights.clamp(min=1e-30 * largest)  # so that others than the largest have a share
    ordered = positive.sort(descending=True).values.tolist()
    for above, each in enumerate(ordered):  # so many are lowered to the limit
        limit = max_share * sum(ordered[above:]) / (1 - max_share * above)
        if each <= limit * (1 + 1e-9):
            return positive.clamp(max=limit) if above else weights
    raise AssertionError("unreachable: with enough members one of them is below the limit")


@dataclass(frozen=True)
class Paper:
    """Where a method comes from. Where there is no paper, ``year`` is None and all else empty."""

    title: str = ""
    authors: str = ""
    venue: str = ""
    year: int | None = None

    @classmethod
    def cited_in(cls, docstring: str) -> Paper:
        """The paper that the second paragraph of a method's module docstring cites, in the form
        ``Title. Authors. Venue year.``

        >>> Paper.cited_in("FedX.\\n\\nOn X. A. Author, B. C. Other. ICML 2020.")
        Paper(title='On X', authors='A. Author, B. C. Other', venue='ICML 2020', year=2020)
        """
        _, _, rest = docstring.partition("\n\n")
        cited = " ".join(rest.partition("\n\n")[0].split()).removesuffix(".")
        title, _, rest = cited.partition(". ")
        authors, _, venue = rest.rpartition(". ")
        years = re.findall(r"\b(?:19|20)\d\d\b", venue.partition(" (")[0])
        return cls(title, authors, venue, int(years[-1])) if authors and years else cls()


@dataclass(frozen=True)
class Portable:
    """What predicts for a client, as plain data: all that a program without this library needs
    beside the base model.

    ``form`` names the forward pass, a file in ``export/templates``. ``tensors`` without a "/" in
    their name take the place of the base model's own (a smaller one stands for its first units);
    the form gives a meaning to all others. ``lora`` are factors as `Method.lora` returns them, and
    ``magnitudes`` DoRA's m ``[d_out]``, by projection. ``settings`` are plain values, as JSON has
    them.
    """

    form: str
    tensors: Params
    lora: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    magnitudes: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Method(ABC):
    """A federated method: a frozen dataclass whose fields are its hyper-parameters.

    States are flat dicts of tensors: a task's (``task.state``) and whatever else the method adds.
    The engine cuts what is private from what is shared: an ``upload`` never sees a private tensor.
    ``local``, ``upload`` and ``finetune`` are written for one client and run for many at once
    under ``torch.func.vmap``: no branches on values. By default a method is FedAvg.
    """

    name: ClassVar[str]
    # global, split, regularised, mixture, cluster, sparse, adapter or local
    family: ClassVar[str] = "own"
    needs_public: ClassVar[bool] = False  # whether `local` reads ``context.public``
    needs_only_mean: ClassVar[bool] = False  # `aggregate` needs only the uploads' weighted mean
    by_token: ClassVar[bool] = False  # a `predict` of its own reads nothing but the model's outputs
    sends_updates: ClassVar[bool] = False  # uploads are changes of what the client received
    # float tensors of an upload that are no part of the update: attacks and clipping leave them
    beside_update: ClassVar[tuple[str, ...]] = ()
    released: ClassVar[str] = ""  # what clients send that noise on the mean of updates leaves open
    # nothing is sent: every client trains equally often, whoever takes part with other methods
    trains_alone: ClassVar[bool] = False
    # patterns of received tensors whose sizes may change from round to round
    changing_sizes: ClassVar[tuple[str, ...]] = ()
    # a step's loss is a mean over predictions, so that parts of a batch can be computed in turn
    takes_parts: ClassVar[bool] = True
    # with checkpointing a model's blocks run twice, so that nothing may be remembered in them
    takes_checkpointing: ClassVar[bool] = True
    # `local` looks at no tensor's value, so that a GPU can record its kernels and play them again
    recordable: ClassVar[bool] = True
    min_batch_size: ClassVar[int] = 1  # examples; `local` doesn't train on smaller ones

    optimiser: Optimiser = field(default=Optimiser(), kw_only=True)
    robust: Robust = field(default=Robust(), kw_only=True)  # which uploads are let through

    @classmethod
    def paper(cls) -> Paper:
        """The paper that the docstring of the method's module cites."""
        return Paper.cited_in(sys.modules[cls.__module__].__doc__ or "")

    def adapt(self, backbone: Backbone) -> nn.Module:
        """``backbone.model`` with what the method adds (LoRA, gates) and ``requires_grad`` set on
        what it trains; the model may be changed in place."""
        return backbone.model

    @property
    def averages(self) -> bool:
        """Whether the server's next state depends on the mean of the uploads alone, as this method
        is configured: what noise on the mean, as of differential privacy, needs."""
        return self.needs_only_mean

    @property
    def weighs_by_mean(self) -> bool:
        """Whether the server's next state is its state plus the mean of the updates by weights that
        `own_weight` gives, as this method is configured. Then a second pass can stand for single
        uploads where the server is not to see these; `aggregate` gets that mean as one row."""
        return False

    def own_weight(self, task: Task, upload: Params, mean: Params) -> Tensor:
        """A client's weight from 0 to 1, a scalar, from its upload and the uploads' mean by
        `client_weights`; of a method that `weighs_by_mean`. Weights are divided by their sum."""
        raise NotImplementedError

    @property
    def needs_public_labels(self) -> bool:
        """Whether `local` trains on the labels of ``context.public``, too."""
        return False

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        """Raise InputError where the hyper-parameters don't fit each other or the federation;
        called before the model is loaded."""
        return

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        """Raise InputError where the hyper-parameters don't fit the model; called before the first
        round."""
        return

    def check_batch(self, task: Task, batch: Batch) -> None:
        """Raise InputError where a forward pass shows that the method can't work on the model;
        ``batch`` holds two examples. Called before anything is written."""
        return

    def is_private(self, task: Task, name: str) -> bool:
        """Whether a tensor of a state belongs to the client alone."""
        return False

    def num_trained(self, task: Task) -> int:
        """How many scalars a client trains in a round; those of all its models count."""
        return sum(task.state[name].numel() for name in task.trained)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        """A client's private tensors before its first round; the same shapes for all clients."""
        return {n: value for n, value in task.state.items() if self.is_private(task, n)}

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        """The server's state before the first round."""
        return {n: value for n, value in task.state.items() if not self.is_private(task, n)}

    def change_clients(self, task: Task, server: Server, num_clients: int) -> Server:
        """The server's state after clients have left or joined, as a run begins with that of
        another one. Rows by client are those of the new ``num_clients`` already; what else depends
        on the clients has to be worked out again."""
        return server

    def send(self, task: Task, server: Server, client: int) -> Params:
        """What a client receives: the shared part of its state."""
        return server

    def send_new(self, task: Task, server: Server, client: int) -> Params:
        """What a client receives that joins after the training, as number ``client`` >= K.

        By default the same as all others. A method whose server has a row for each client sends
        what the new client can find its own row from, in `fit_row`.
        """
        return self.send(task, server, client)

    def fit_row(
        self, task: Task, received: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        """What `send` would give a client that joins, from what `send_new` gave it: the row that
        the server lacks is found on the client's own ``batches``. Without batches the row is that
        of a client of which nothing is known. For one client at a time."""
        return received

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        """Train ``state`` (received and private together); the new state and the mean loss. By
        default one step of ``optimiser`` a batch."""
        return train(task, state, batches, context, self.optimiser)

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        """What a client sends back, from the state that it received and the shared tensors that it
        trained; the same shapes for all clients."""
        return trained

    def unchanged(self, task: Task, server: Server, upload: Params) -> Params:
        """What the float tensors of ``upload`` would be of a client that changes nothing: what
        norms, robust rules and attacks measure from. By default 0 of a method that
        ``sends_updates``, and of others the server's own tensors."""
        known = {} if self.sends_updates else server
        return {
            name: known[name] if name in known and known[name].shape == value.shape
            else torch.zeros_like(value)
            for name, value in upload.items()
            if value.is_floating_point()
        }  # fmt: skip

    def products(self, task: Task) -> Sequence[tuple[str, str]]:
        """The names of A ``[r, d_in]`` and B ``[d_out, r]`` of an upload whose product the server
        adds: attacks and clipping multiply it once, in B. By default none."""
        return ()

    def pack(self, task: Task, upload: Params) -> Params:
        """One client's upload as it travels, in any shape: without some rows, masks as bits."""
        return upload

    def unpack(self, task: Task, packed: Params) -> Params:
        """The upload again, at the server: the inverse of `pack`."""
        return packed

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        """Check an upload that comes over a network. Its tensors have the names, types and shapes
        of the method's uploads already, and finite values; by default nothing else is asked.

        Args:
            task: the method's task.
            client: the number of the client that sends it, from 0 to K - 1.
            received: what that client received in this round, as `send` gave it.
            upload: what it sends, unpacked, ``[...]`` by name: not stacked.
            steps: on how many batches it was asked to train.
            lr_scale: the round's factor on learning rates.

        Raises:
            InputError: this client sends no such values. The message names the tensor, what it
                holds and what is allowed.
        """
        return

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        """The next server state; ``uploads`` are unpacked and stacked ``[c, ...]``. A method that
        ``needs_only_mean`` gets their mean as one row, and the cohort as one member. By default
        the mean itself, with `client_weights`."""
        return weighted_sum(uploads, checked_weights(self, cohort))

    def client_weights(self, cohort: Cohort) -> Tensor:
        """The weights of the uploads' mean, float64 ``[c]``, of sum 1. By default they follow the
        numbers of examples, as in FedAvg; ``cohort.uniform`` is the plain mean."""
        return cohort.shares

    def steps_on_batch(self, passes: int) -> int:
        """How many steps `local` takes on a batch at most, where a round has so many ``passes``:
        what noise in each step, as of differential privacy of records, is counted by."""
        return 1

    @property
    def finetune_passes(self) -> int:
        """On how many passes over the client's data `finetune` trains. With 0 it isn't called."""
        return 0

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        """The state that a client uses and is evaluated with; it is not kept."""
        return state

    def global_state(self, task: Task, server: Server) -> Params | None:
        """The model for a client that never took part; None if the method has no global model. By
        default the task's tensors in the server's state, if it holds all of them."""
        if server.keys() == task.state.keys():
            return server
        if not task.state.keys() <= server.keys():
            return None
        return pick(server, task.state)

    def inference_params(self, task: Task, state: Params) -> Params:
        """The task's tensors that predict for a client, chosen or mixed from its state where that
        holds several models."""
        return state

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        """Logits ``[b, classes]`` or ``[b, L, vocabulary]``."""
        return task.logits(self.inference_params(task, state), batch)

    @property
    def keeps_keys(self) -> bool:
        """Whether a model that writes may keep keys and values of the tokens that it has read: not
        where `predict` looks at the inputs itself."""
        return self.by_token or type(self).predict is Method.predict

    def precompute(self, task: Task, batch: Batch) -> Params:
        """Tensors ``[b, ...]`` that depend on each example and on frozen tensors alone.

        They are computed once for each example and stand in later batches as ``cached.NAME``. By
        default they are the outputs of the frozen layers below the first trained one.
        """
        return task.features(batch)

    def server_diagnostics(self, task: Task, server: Server, clients: Sequence[int]) -> Params:
        """Tensors of the server's state for the report's figures; where the state has a row for
        each client, the rows of these ``clients``."""
        return {}

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        """Tensors of one client's state for the report's figures; ``batch`` holds validation
        examples."""
        return {}

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        """The LoRA factors by projection that a state predicts with: A ``[r, d_in]`` and B
        ``[d_out, r]``, any scaling inside B. Empty if no single adapter predicts as the state does.
        """
        return lora_factors(task, state)

    def portable(self, task: Task, state: Params) -> Portable:
        """What predicts as `predict` does, for use without this library. By default the base model
        with an adapter if `lora` gives one, or else with other values of its tensors. A method
        that has a forward pass of its own names the form of it.
        """
        params = self.inference_params(task, state)
        factors = self.lora(task, params)
        if factors:
            magnitudes = lora_magnitudes(task, params)
            return Portable("adapter", base_params(task, params), factors, magnitudes=magnitudes)
        return Portable("plain", without_lora(task, params))


def checked_weights(method: Method, cohort: Cohort) -> Tensor:
    """The weights that ``method`` gives the cohort's uploads, with the cohort's ``max_share``.

    Raises:
        InputError: there is not one for each upload, or their sum is not 1.
    """
    weights = method.client_weights(cohort)
    count = len(cohort.num_examples)
    if not isinstance(weights, Tensor) or weights.shape != (count,):
        got = f"the shape {list(weights.shape)}" if isinstance(weights, Tensor) else brief(weights)
        raise InputError(
            f"{method.name}: client_weights must return a tensor with one weight for each of the "
            f"{count} uploads; got {got}"
        )
    total = float(weights.sum())
    if count and not abs(total - 1) < 1e-3:
        raise InputError(
            f"{method.name}: client_weights of {count} of {cohort.num_clients} clients have the "
            f"sum {total:.4g}; it must be 1"
        )
    return cohort.limited(weights)


@dataclass(frozen=True)
class FineTuning(Method):
    """A method for any model: fields choose whether all of it, the head or LoRA is trained.

    ``rank`` and ``lora_alpha`` are LoRA's r and alpha; ``layers``, patterns of module paths,
    restricts ``full``. Without anything else this is FedAvg.
    """

    trainable: Trainable = field(default="full", kw_only=True)
    rank: Rank = field(default=8, kw_only=True)
    lora_alpha: Alpha = field(default=16.0, kw_only=True)
    layers: tuple[str, ...] = field(default=(), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(
            backbone, self.trainable, self.rank, self.lora_alpha, self.layers, dora=True
        )
