"""A model and its loss as pure functions of a state.

A `Task` holds a model that never changes again. Its functions take a state, the batch and, for a
training step, a key, and return logits, losses and the new values of state buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import random
from ..objectives.objective import IGNORED, LEAST, REFERENCE, Scores
from ..objectives.writing import Writing, token_losses
from ..params import CACHED, EXAMPLE_WEIGHT, PACKED, Batch, Params, add_prefix, strip_prefix
from .backbone import Backbone, sequences
from .batch_norm import FunctionalBatchNorm, use_functional_batch_norm
from .checkpointing import checkpoint_blocks
from .fast_pooling import use_fast_max_pool
from .frozen_prefix import Prefix, find_prefix
from .packing import Packing
from .pieces import score_in_pieces
from .quantised import check_frozen
from .step import StepContext, bind, key_dropout

Precision = Literal["fp32", "bf16"]

Reparametrise = Callable[[Params, Batch], Params]

_FEATURES = f"{CACHED}features"
_MOST_LOGITS = 2**26  # numbers: 256 MB


def _unchanged(state: Params, batch: Batch) -> Params:
    return state


class Task:
    """A backbone as adapted by a method, its initial state, and its loss.

    ``state`` holds every trained parameter (their names: ``trained``) and every module's state
    buffers (``buffers``), such as the running statistics of trained batch normalisations. All other
    tensors are frozen inside the model, which never changes again. The initial state is the model's
    own tensors, no copy of them: no code may write to a state's tensors.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapt: Callable[[Backbone], nn.Module] = lambda backbone: backbone.model,
        *,
        seed: int = 0,
        precision: Precision = "fp32",
        device: str | torch.device = "cpu",
        checkpointing: bool = False,
    ) -> None:
        """Adapt a copy of ``backbone``'s model, which shares the tensors of the original.

        Args:
            backbone: the model, and what is known of its structure.
            adapt: changes the model in place, or wraps it; returns the result.
            seed: of the initial values of adapters.
            precision: of the forward pass; ``bf16`` if the model has such weights, of which those
                that are trained become float32.
            device: where the model and its state are.
            checkpointing: keep less of a training step's forward pass, and compute it again.
        """
        self.device = torch.device(device)
        self.original = backbone  # as it was before any method adapted it
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(random.key(seed, "adapters")))
            self.backbone = copy.copy(backbone)
            object.__setattr__(self.backbone, "model", _copy_modules(backbone.model))
            self.model = adapt(self.backbone).to(self.device)
        check_frozen(backbone.model, self.model)
        for parameter in self.model.parameters():
            if parameter.dtype == torch.bfloat16:
                precision = "bf16"
                if parameter.requires_grad:  # small steps are lost in few bits
                    parameter.data = parameter.data.float()
        self.precision = precision
        self.model.eval()  # for good: dropout and batch normalisation read the step's context
        self._step = StepContext()
        key_dropout(self.model)
        self._head = score_in_pieces(self.model)
        self.most_tokens = None  # whose logits a batch without gradients may have
        if self._head is not None:
            self.most_tokens = _MOST_LOGITS // self._head.out_features
        use_functional_batch_norm(self.model, backbone.batch_norm)
        use_fast_max_pool(self.model)
        self.buffers = frozenset(bind(self.model, self._step))
        self.trained = frozenset(n for n, p in self.model.named_parameters() if p.requires_grad)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._names = frozenset(  # of all tensors of a forward pass, with buffers that are None
            f"{path}.{name}".lstrip(".")
            for path, module in self.model.named_modules()
            for name in (*module._parameters, *module._buffers)
        )
        with_duplicates = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        self._tied = len(with_duplicates) > len(tensors)  # a search at every call would take time
        self.state: Params = {
            name: value.detach()
            for name, value in tensors.items()
            if name in self.trained or name in self.buffers
        }
        self.model.requires_grad_(False)
        self._checkpointing = checkpointing
        if checkpointing:
            checkpoint_blocks(self.backbone, self.model, self._step)
        self.prefix: Prefix | None = None  # `features` finds it
        self._memory: Any = None  # in `remembering`

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU, which does better with few large steps of few shapes."""
        return self.device.type == "cuda"

    def in_head(self, name: str) -> bool:
        """Say whether the tensor ``name`` of the state belongs to the task head."""
        return any(name.startswith(path + ".") for path in self.backbone.head)

    def least_examples(self, batch: Batch) -> int:
        """How many examples a batch, such as this one, needs in training. It is two where a batch
        normalisation gets one value of a channel from an example: its variance is 0."""
        norms = self._batch_norms
        if not norms:
            return 1
        with torch.no_grad():
            self.logits(self.state, batch)
        return 2 if any(norm.per_example == 1 for norm in norms) else 1

    @property
    def mixes_examples(self) -> bool:
        """Whether the loss of an example depends on the others of its batch."""
        return bool(self._batch_norms)

    @property
    def _batch_norms(self) -> list[FunctionalBatchNorm]:
        norms = [one for one in self.model.modules() if isinstance(one, FunctionalBatchNorm)]
        return [norm for norm in norms if norm.trained]

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward: masks, positions, pictures. Where
        examples are several sequences, the model reads each as one."""
        inputs = {n: v for n, v in batch.items() if not n.startswith(CACHED)}
        return self.backbone.prepare(sequences(inputs))

    def logits(
        self, state: Params, batch: Batch, reparametrise: Reparametrise = _unchanged
    ) -> Tensor:
        """Compute the logits at ``state`` in evaluation mode.

        Args:
            state: tensors by name; the model's own tensors take the place of absent ones.
            batch: the inputs ``[b, ...]``.
            reparametrise: turns (state, batch) into the tensors that the forward pass uses.

        Returns:
            float32 ``[b, classes]`` or ``[b, L, outputs]``; ``[b, S, L, outputs]`` where examples
            are S sequences.
        """
        with self._step.passing(training=False):
            return self._call(reparametrise(state, batch), batch)

    def pretrained_logits(self, batch: Batch) -> Tensor:
        """Compute the logits of the model as it was before any training, as `logits` does.

        They have no gradient. A ``reparametrise`` may call this function.
        """
        with torch.no_grad(), self._step.passing(training=False):
            return self._call({}, batch)

    def reference(self, batch: Batch) -> Params:
        """Return what the objective ``compares`` a model with, if it does: the pretrained model's
        loss of each sequence, ``reference`` ``[b, S]``."""
        if not self.backbone.objective.compares:
            return {}
        return {"reference": self.sequence_losses(self.pretrained_logits(batch), batch)}

    def with_reference(self, batch: Batch) -> Batch:
        """Return the batch with its `reference`, unless it has that."""
        if REFERENCE in batch:
            return batch
        return {**batch, **add_prefix(self.reference(batch), CACHED)}

    def sequence_losses(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of the target tokens of each sequence, ``[b, S]``."""
        objective = self.backbone.objective
        assert isinstance(objective, Writing)
        return token_losses(logits, objective.token_targets(batch))[0].sum(-1)

    def module(self, path: str, state: Params, *inputs: Any) -> Any:
        """Run the submodule at ``path`` on ``inputs`` with the tensors of ``state``."""
        module, tensors = self.model.get_submodule(path), strip_prefix(state, f"{path}.")
        return functional_call(module, tensors, inputs, tie_weights=self._tied)

    def module_step(
        self, path: str, state: Params, batch: Batch, *inputs: Any
    ) -> tuple[Any, Params]:
        """Run `module`, which may have no dropout, in a training step on ``batch``. Returns its
        output and the new values of state buffers."""
        with self._step.passing(training=True, weight=batch.get("weight")) as buffers:
            return self.module(path, state, *inputs), buffers

    def features(self, batch: Batch) -> Params:
        """Compute the features of the frozen prefix (`frozen_prefix`), for `Method.precompute`.

        A batch that has them as ``cached.features`` doesn't go through the frozen layers again.

        Returns:
            ``features`` ``[b, ...]``; empty if no frozen layer runs first, or none can be left out,
            and with checkpointing, which could not run a block from its middle again.
        """
        if self._checkpointing:
            return {}
        with torch.no_grad(), self._step.passing(training=False):
            if self.prefix is None:
                noisy = {name: _add_noise(name, self.state[name]) for name in sorted(self.trained)}
                # far away, so that it shows even in few bits, or behind a threshold
                others = {n: -2 * v - 1 for n, v in self.state.items() if v.is_floating_point()}
                changing = self.trained | self.buffers
                self.prefix = find_prefix(
                    self.model,
                    changing,
                    lambda: self._call(noisy, batch),
                    lambda: self._call(others, batch),
                )
            if self.prefix.boundary is None:
                return {}
            return {"features": self.prefix.features(lambda: self._call({}, batch))}

    def _call(self, state: Params, batch: Batch) -> Tensor:
        packing = Packing(batch) if PACKED in batch else None
        logits = self._output(state, batch, packing).float()
        if packing is not None:
            logits = packing.unpack(logits)
        ids = batch.get("input_ids")
        if ids is None or ids.dim() < 3:
            return logits
        return logits.reshape(*ids.shape[:2], *logits.shape[1:])

    def _output(self, state: Params, batch: Batch, packing: Packing | None) -> Tensor:
        state = {name: value for name, value in state.items() if name in self._names}
        start: AbstractContextManager[None] = nullcontext()
        if self.prefix is not None and not self.prefix.contains_any(state):
            features = batch.get(_FEATURES)
            if packing is not None and features is not None:
                features = packing.pack(features)
            start = self.prefix.starting_from(features)
        with start, torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16"):
            inputs = self.inputs(batch if packing is None else packing.inputs(batch))
            if self._memory is not None:
                inputs = self._memory.inputs(inputs, batch)
            output = functional_call(self.model, state, (), inputs, tie_weights=self._tied)
        if self._memory is not None:
            self._memory.keep(output)
        return self.backbone.logits(output)

    def parts(self, batch: Batch, rows: int | None) -> Iterator[tuple[Batch, Tensor | float]]:
        """Yield ``batch`` in parts of so many ``rows`` (None: whole), each with its share of the
        batch's predictions: the batch's loss is the sum of the parts' losses times these. What is
        dropped of a part is what is dropped of it in the batch."""
        size = len(next(iter(batch.values())))
        if rows is None or rows >= size:
            yield batch, 1.0
            return
        counts = self.backbone.objective.counts(batch)
        for name in {EXAMPLE_WEIGHT, "weight"} & batch.keys():
            counts = counts * batch[name]
        shares = counts / counts.sum().clamp(min=LEAST)
        try:
            for first in range(0, size, rows):
                some = slice(first, first + rows)
                self._step.part = first, len(shares[some])
                yield {name: value[some] for name, value in batch.items()}, shares[some].sum()
        finally:
            self._step.part = 0, 1

    @contextmanager
    def remembering(self, memory: Any) -> Iterator[None]:
        """Let the forward passes of a prediction go on from what they have read before, which a
        `writing.Memory` has. The mask of their batch has all tokens, its ids only the new ones."""
        memory.begin()
        self._memory = memory
        try:
            yield
        finally:
            self._memory = None

    def loss(
        self, state: Params, batch: Batch, key: Tensor, reparametrise: Reparametrise = _unchanged
    ) -> tuple[Tensor, Params]:
        """Compute the loss of a training step.

        Args:
            state: tensors by name.
            batch: inputs and labels; ``weight`` ``[b]`` is 0 for padding examples.
            key: int64 scalar that seeds dropout.
            reparametrise: as in `logits`.

        Returns:
            The mean over the real examples (real target tokens for language modelling), in nats,
            and the new values of state buffers.
        """
        scores, buffers = self.scores(state, batch, key, reparametrise)
        return scores.mean(batch.get("weight")), buffers

    def scores(
        self,
        state: Params,
        batch: Batch,
        key: Tensor | None = None,
        reparametrise: Reparametrise = _unchanged,
    ) -> tuple[Scores, Params]:
        """Compute the scores of a training step with this ``key``, as `loss` does, and the new
        values of state buffers; without a key in evaluation mode. A language model's logits, which
        `logits` and `score` need, are never whole in memory."""
        objective, weight = self.backbone.objective, batch.get("weight")
        batch = self.with_reference(batch)
        if self._head is not None and isinstance(objective, Writing):  # in pieces
            targets = objective.token_targets(batch)
            packing = Packing(batch) if PACKED in batch else None
            scored = targets if packing is None else packing.pack(targets, IGNORED)
            is_step = key is not None
            step = self._step.passing(training=is_step, key=key, weight=weight, targets=scored)
            with step as buffers:
                found = self._output(reparametrise(state, batch), batch, packing)
            if self._head.returned(found):
                found = found if packing is None else packing.unpack(found)
                losses, hits = found.unbind(-1)
                scores = objective.token_scores(losses, hits, targets, batch)
                return _weighted(scores, batch), buffers
            self._head = None  # the model changes its layer's outputs: they must be logits
        if key is None:
            return self.score(self.logits(state, batch, reparametrise), batch), {}
        logits, buffers = self.step_logits(state, batch, key, reparametrise)
        return self.score(logits, batch), buffers

    def step_logits(
        self, state: Params, batch: Batch, key: Tensor, reparametrise: Reparametrise = _unchanged
    ) -> tuple[Tensor, Params]:
        """Compute the logits of a training step, with dropout and the batch's own statistics, and
        the new values of state buffers; as `loss`, but the batch needs no labels."""
        with self._step.passing(training=True, key=key, weight=batch.get("weight")) as buffers:
            return self._call(reparametrise(state, batch), batch), buffers

    def score(self, logits: Tensor, batch: Batch) -> Scores:
        """Compute the loss and the hits of each example, as the backbone's objective does; times
        its weight in a batch that has weights."""
        return _weighted(self.backbone.objective.score(logits, self.with_reference(batch)), batch)


def _weighted(scores: Scores, batch: Batch) -> Scores:
    weight = batch.get(EXAMPLE_WEIGHT)
    return scores if weight is None else scores.weighted(weight)


def _copy_modules(model: nn.Module) -> nn.Module:
    """Copy modules and parameters, but share the values, to which nothing here writes."""
    shared: dict[int, Tensor] = {id(buffer): buffer.detach() for buffer in model.buffers()}
    shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, shared)


def _add_noise(name: str, value: Tensor) -> Tensor:
    noise = random.normal(random.key(name), tuple(value.shape), std=0.01)
    return value + noise.to(value.device)
