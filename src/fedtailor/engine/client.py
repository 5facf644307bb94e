"""One client's round, the place where private is cut from shared; and what else a client does."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import random
from ..data.config import LocalConfig
from ..data.federation import Federation
from ..data.table import Indices
from ..method import Method
from ..objectives.objective import REFERENCE
from ..optim import ClientContext
from ..params import (
    CACHED,
    PACKED,
    Batch,
    Params,
    aligned,
    moved,
    not_finite,
    row,
    split,
    to_device,
    within,
)
from ..profiling import phase
from ..task.packing import places
from ..task.records import RecordNoise, SampledBatch
from ..task.task import Task
from ..uploads.attacks import AttackConfig, flipped
from ..uploads.chain import Chain
from ..uploads.private import Private
from ..uploads.secure.fixed_point import OutOfRangeError
from .backdoor import Trigger
from .costs import Costs, measure
from .executors.work import ClientInputs, ClientRequest, ClientWork, Refusal, looks_at_values
from .forms import check_predicts, check_state, check_trained
from .metrics import MetricValues
from .scoring import SPLITS, Scoring, stamped
from .writing import Writing

_DIAGNOSED = 64  # validation examples of a client, for the method's diagnostics


def client_round(
    method: Method,
    task: Task,
    received: Params,
    private: Params,
    batches: Sequence[Batch],
    context: ClientContext,
) -> tuple[Params, Params, Tensor]:
    """Train for one round: (what is sent up, the new private state, the mean loss). Raises
    InputError where, in round 1, what the method returns has not the form that it must have."""
    outcome = method.local(task, {**received, **private}, batches, context)
    if context.is_first:
        check_trained(method, task, received, private, outcome)
    trained, loss = outcome
    kept, shared = split(trained, partial(method.is_private, task))
    upload = method.upload(task, received, shared)
    if context.is_first:
        check_state(method, "upload", upload)
    return upload, kept, loss


@dataclass(frozen=True)
class _Clients(ClientWork, ABC):
    """Work on the clients of a federation. ``public``: examples that everybody has."""

    method: Method
    task: Task
    federation: Federation
    local: LocalConfig
    public: Batch | None

    @property
    def device(self) -> torch.device:
        return self.task.device

    @property
    def recordable(self) -> bool:
        return self.method.recordable

    @property
    def draws_ahead(self) -> bool:
        return self.task.on_gpu and self.federation.example_cache is None

    @property
    def most_tokens(self) -> int | None:
        return self.federation.dataset.max_length if self.task.on_gpu else None

    def draw(self, request: ClientRequest) -> list[Batch]:
        with phase("data"):
            return [self._packed(batch) for batch in islice(self._drawn(request), request.steps)]

    def _drawn(self, request: ClientRequest) -> Iterator[Batch]:
        who, draw = (request.client, request.round), self.federation.batches
        return draw(*who, self.local, purpose=request.purpose, passes=request.passes)

    def prepare(
        self, server: Params, request: ClientRequest, drawn: list[Batch] | None = None
    ) -> ClientInputs:
        received = self.method.send(self.task, server, request.client)
        return self._in_memory(received, request, drawn)

    def inputs(
        self, received: Params, request: ClientRequest, drawn: Iterable[Batch] | None = None
    ) -> ClientInputs:
        """What the client works with, once it has ``received`` its share; by default the batches
        are those of the round."""
        inputs = self._in_memory(received, request, drawn)
        private, batches = moved((inputs.private, inputs.batches), self.device)
        return replace(inputs, private=private, batches=batches)

    def _in_memory(
        self, received: Params, request: ClientRequest, drawn: Iterable[Batch] | None
    ) -> ClientInputs:
        """The same, with batches and a private state that are not at the device yet."""
        start, cpu_start, task = time.perf_counter(), time.process_time(), self.task
        assert request.private is not None
        if drawn is None:
            batches = self.draw(request)
        else:
            batches = [self._packed(batch) for batch in islice(drawn, request.steps)]
        if task.backbone.objective.compares_with_received:
            state = {**received, **request.private}
            batches = [self._with_received(state, batch) for batch in batches]
        key = random.key(self.federation.seed, request.round, request.client, request.purpose)
        return ClientInputs(
            aligned(received),
            request.private,
            batches,
            ClientContext(
                key.to(task.device),
                request.lr_scale,
                request.round,
                self.public,
                request.passes,
                self.local.micro_batch,
                request.lr_slope,
            ),
            time.perf_counter() - start,
            time.process_time() - cpu_start,
        )

    def _packed(self, batch: Batch) -> Batch:
        """A batch that says which of its examples share a row, if they are to."""
        if not self.local.pack or PACKED in batch:
            return batch
        lengths = batch["attention_mask"].sum(1).long().numpy()
        return {**batch, PACKED: places(lengths, self.local.micro_batch)}

    def _with_received(self, state: Params, batch: Batch) -> Batch:
        """The batch, with the losses of the model that the client begins with as its reference."""
        with torch.no_grad():
            there, state = moved((batch, state), self.device)
            logits = self.method.predict(self.task, state, there)
            return {**batch, REFERENCE: self.task.sequence_losses(logits, there)}


@dataclass(frozen=True)
class ClientUpdate:
    """The result of a client's training.

    ``packed`` is what it sends, ``private`` its new private state (None where that stays at the
    client's site), ``loss`` the mean over its batches. ``refusal`` says why the update can't be
    used, if it can't. ``cpu_seconds`` is the processor time of the training, over all
    cores; 0 where it is not known.
    """

    packed: Params
    private: Params | None
    loss: float
    refusal: Refusal | None
    costs: Costs
    data_seconds: float
    cpu_seconds: float
    kept: Params | None = None  # its upload, where a second pass needs it
    unchanged: str = ""  # why it sends that it changes nothing, if so; no server elsewhere hears it


TrainingOutcome = tuple[Params, Params, Tensor, Tensor]
"""What is sent up, the new private state, the mean loss, and whether all these are finite: where
that is False, they may be (a norm is not), or not."""


@dataclass(frozen=True)
class StepNoise:
    """Differential privacy of records (`noised_gradient`). A method takes up to ``uses`` steps on a
    batch. ``secret`` begins the keys of all draws."""

    clip: float
    std: float
    uses: int
    secret: tuple[int | str, ...]


@dataclass(frozen=True)
class Training(_Clients):
    """`client_round`; the result is a `ClientUpdate`. Its steps may have ``noise``. ``attackers``
    may train on wrong data, with a ``trigger`` for a backdoor."""

    chain: Chain
    noise: StepNoise | None = None
    attack: AttackConfig = AttackConfig()
    attackers: frozenset[int] = frozenset()
    trigger: Trigger | None = None

    def _drawn(self, request: ClientRequest) -> Iterator[Batch]:
        if self.noise is None:
            return super()._drawn(request)
        who = request.client, request.round
        return self.federation.sampled(*who, self.local, self.noise.secret)

    def _in_memory(
        self, received: Params, request: ClientRequest, drawn: Iterable[Batch] | None
    ) -> ClientInputs:
        noise, attack, client, number = self.noise, self.attack, request.client, request.round
        inputs = super()._in_memory(received, request, drawn)
        if noise is not None:
            inputs = replace(inputs, context=self._noised(inputs.context, noise, client, number))
        if client in self.attackers and attack.is_on(number) and attack.on_data:
            return replace(inputs, batches=[self._poisoned(batch) for batch in inputs.batches])
        return inputs

    def _noised(
        self, context: ClientContext, noise: StepNoise, client: int, number: int
    ) -> ClientContext:
        """The context of a client's steps with noise, in round ``number``."""
        # dropout goes by an example's place: who knew its key would see the places shift where a
        # record is missing
        key, own = (
            random.key(*noise.secret, purpose, number, client).to(self.task.device)
            for purpose in ("record noise", "record step")
        )
        size = min(self.local.batch_size, self.federation.num_examples(client))
        of_batch = key.new_tensor(size, dtype=torch.float64)
        return context._replace(key=own, noise=RecordNoise(key, of_batch, noise.clip, noise.std))

    def _poisoned(self, batch: Batch) -> Batch:
        """What an attacker trains on instead."""
        if self.trigger is None:
            return flipped(batch, self.federation.dataset.num_classes)
        count = self.attack.marked(len(batch["labels"]))
        there = stamped(self.method, self.task, self.trigger, moved(batch, self.device), count)
        inputs, cached = split(there, lambda name: not name.startswith(CACHED))
        return {**moved(inputs, torch.device("cpu")), **cached}

    def run(
        self, received: Params, private: Params, batches: Sequence[Batch], context: ClientContext
    ) -> TrainingOutcome:
        if self.noise is not None:
            batches = [SampledBatch(b, at, self.noise.uses) for at, b in enumerate(batches)]
        trained = client_round(self.method, self.task, received, private, batches, context)
        upload, kept, loss = trained
        return *trained, within({**kept, **upload, "the loss": loss})

    def to_host(self, outcome: TrainingOutcome) -> TrainingOutcome:
        upload, *rest = outcome
        return upload, *moved(tuple(rest), torch.device("cpu"))

    def finish(
        self,
        request: ClientRequest,
        inputs: ClientInputs,
        outcome: TrainingOutcome,
        cpu_seconds: float,
    ) -> ClientUpdate:
        upload, private, loss, is_usual = outcome
        at, why = self.chain.at(inputs.received, request.round, [request.client]), ""
        refusal = None
        if not is_usual:
            refusal = _refusal(self.federation.name(request.client), loss, {**private, **upload})
        if refusal is not None and any(isinstance(link, Private) for link in self.chain.links):
            # whether a round goes on without a client must not depend on its data
            why = refusal.reason
            upload, private = {**upload, **at.unchanged(upload)}, inputs.private
            loss, refusal = torch.zeros_like(loss), None
        try:
            packed = self.chain.send(upload, replace(at, masks=request.masks, clip=request.clip))
        except OutOfRangeError as error:
            reason = f"its update has values up to {error.most:g}: {error}"
            packed, refusal = {}, refusal or Refusal(reason, told=str(error), lasts=True)
        return ClientUpdate(
            packed,
            private,
            loss.item(),
            refusal,
            measure(
                self.method, self.task, inputs.received, private, packed, masked=self.chain.hidden
            ),
            inputs.seconds,
            cpu_seconds,
            upload if request.masks is not None and self.method.weighs_by_mean else None,
            why,
        )


def _refusal(client: str, loss: Tensor, trained: Params) -> Refusal | None:
    """Why a client's numbers can't be used: they are not finite."""
    if not loss.isfinite():
        return Refusal(f"the loss of client {client} is {loss.item()}", diverged=True)
    if (name := not_finite(trained)) is None:
        return None
    reason = f"client {client} has trained {name} to values that are not finite"
    return Refusal(reason, diverged=True)


@dataclass(frozen=True)
class ClientEvaluationResult:
    """How good a model is on one client's examples: ``sums`` ``[split, 3]`` of loss, hits and
    predictions (`Scoring.num_sums` of them); the method's ``diagnostics`` of it, None without
    examples for them; and the ``metrics`` of each split, if any are asked for."""

    sums: NDArray[np.float64]
    diagnostics: Params | None
    metrics: tuple[MetricValues, ...] = ()
    samples: tuple[str, ...] = ()  # answers to `Writing.samples`, of a client that shows them


@dataclass(frozen=True)
class ClientEvaluation(_Clients):
    """The state that a client uses, fine-tuned where the method does that, on its own examples; the
    result is a `ClientEvaluationResult`."""

    batch_size: int
    scoring: Scoring
    writing: Writing

    @property
    def together(self) -> bool:
        return self.method.finetune_passes > 0 or self.scoring.together

    @property
    def recordable(self) -> bool:
        return self.method.finetune_passes > 0 and super().recordable

    def run(
        self, received: Params, private: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        state = used = {**received, **private}
        if self.method.finetune_passes:
            used = self.method.finetune(self.task, state, batches, context)
        check_predicts(self.method, self.task, "finetune", used, state)
        return used

    def used(self, received: Params, request: ClientRequest) -> Params:
        """The state that a client uses, once it has ``received`` its share."""
        inputs = self.inputs(received, request)
        return self.run(inputs.received, inputs.private, inputs.batches, inputs.context)

    def finish(
        self, request: ClientRequest, inputs: ClientInputs, outcome: Params, cpu_seconds: float
    ) -> ClientEvaluationResult:
        scored = self.scored(request.client, outcome, request.round)
        return self._shown(request, outcome, scored)

    def finish_all(
        self, chunk: Sequence[tuple[ClientRequest, ClientInputs]], outcomes: Params, seconds: float
    ) -> Iterator[tuple[ClientRequest, ClientEvaluationResult]]:
        if not self.scoring.together:
            yield from super().finish_all(chunk, outcomes, seconds)
            return
        rows = [[self.federation.rows(r.client, split) for split in SPLITS] for r, _ in chunk]
        try:
            scores = self.scoring.scores_of_all(outcomes, rows, self.batch_size)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not looks_at_values(error):
                raise
            scores = None
        if scores is None:  # too many, or a model that vmap can't follow: one after the other
            yield from super().finish_all(chunk, outcomes, seconds)
            return
        for index, (request, _) in enumerate(chunk):
            result = self._result(
                request.client, row(outcomes, index), request.round, rows[index], scores[index]
            )
            yield request, self._shown(request, row(outcomes, index), result)

    def _shown(
        self, request: ClientRequest, state: Params, result: ClientEvaluationResult
    ) -> ClientEvaluationResult:
        """The same, with diagnostics and written texts."""
        client = request.client
        shown = client_diagnostics(self.method, self.task, self.federation, client, state)
        samples = self.writing.samples_of(client, state, request.round)
        return replace(result, diagnostics=shown, samples=samples)

    def scored(
        self, client: int, state: Params, number: int | None = None
    ) -> ClientEvaluationResult:
        """The results of a model on a client's examples, without diagnostics, in the evaluation of
        round ``number``; None: outside of rounds, where nothing is written."""
        rows = [self.federation.rows(client, split) for split in SPLITS]
        scores = [self.scoring.scores(state, of_split, self.batch_size) for of_split in rows]
        return self._result(client, state, number, rows, scores)

    def _result(
        self,
        client: int,
        state: Params,
        number: int | None,
        rows: Sequence[Indices],
        scores: Sequence[NDArray[np.float64]],
    ) -> ClientEvaluationResult:
        scoring = self.scoring
        sums = np.stack([of_split[:, : scoring.num_sums].sum(0) for of_split in scores])
        if scoring.predicts:
            return ClientEvaluationResult(sums, None, scoring.metric_values(rows, scores))
        return ClientEvaluationResult(sums, None, self.writing.metrics_of(client, state, number))


def client_diagnostics(
    method: Method, task: Task, federation: Federation, client: int, state: Params
) -> Params | None:
    """The method's diagnostics of a client's state; None without validation examples."""
    rows = federation.rows(client, "validation")[:_DIAGNOSED]
    if type(method).client_diagnostics is Method.client_diagnostics or not len(rows):
        return None
    with torch.no_grad():
        batch = to_device(federation.batch(rows), task.device)
        shown = method.client_diagnostics(task, state, batch)
    found: Params = moved(shown, torch.device("cpu"))
    return found
