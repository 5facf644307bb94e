"""A model of a finished run, ready to predict: a client's own, or the global one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Data
from ..data.table import Dataset, Images, Tokens
from ..engine.scoring import by_length
from ..errors import InputError, announce, listed
from ..method import Method
from ..objectives.objective import Words
from ..params import Batch, Params, to_device
from ..runs.build import check_ids
from ..runs.trained import Opened, TrainedMethod, Which, open_trained
from ..task.backbone import Backbone
from ..task.task import Task
from ..task.writing import Spoken, window_of, write
from .examples import inputs_of, picture_examples, text_examples

_MOST = 1_000_000  # tokens of a prompt, where the model says no number


class LogitsModule(nn.Module):
    """The logits of one client's model. Its parameters and buffers are the client's tensors, under
    their names in a state; changing them changes the predictions. The frozen rest of the model is
    no part of it. It runs where the task does."""

    def __init__(self, method: Method, task: Task, state: Params) -> None:
        super().__init__()
        self._method, self._task, self._names = method, task, tuple(state)
        for name, value in state.items():
            path, _, last = name.rpartition(".")
            owner: nn.Module = self
            for part in filter(None, path.split(".")):
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            # a state buffer, in any of a state's models, or what has no gradient
            is_state = any(f".{name}".endswith(f".{buffer}") for buffer in task.buffers)
            if is_state or not value.is_floating_point():
                owner.register_buffer(last, value.clone())
            else:
                owner.register_parameter(last, nn.Parameter(value.clone()))

    def forward(self, batch: Batch | None = None, /, **tensors: Tensor) -> Tensor:
        """A batch, as a dict or by keywords, to logits ``[b, classes]`` or ``[b, L, vocabulary]``:
        ``input_ids`` and ``attention_mask`` ``[b, L]``, or ``pixel_values`` ``[b, C, H, W]``."""
        state = {name: attrgetter(name)(self) for name in self._names}
        return self._method.predict(self._task, state, {**(batch or {}), **tensors})


@dataclass(frozen=True)
class PersonalModel:
    """The model that a client uses, or the global one (``client`` None). ``state`` has its tensors,
    beside the frozen ones of the model that the run began with."""

    trained: TrainedMethod
    client: str | int | None
    state: Params

    def __repr__(self) -> str:
        whose = "global" if self.client is None else f"client {self.client}"
        predicts = f"classes: {listed(self.classes)}" if self.classes else self.kind
        return f"PersonalModel({self.trained.label}, {whose}, {predicts})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits; none for language modelling."""
        return tuple(self.trained.data["classes"])

    @property
    def kind(self) -> str:
        """The kind of task, as ``data.task`` names it."""
        return self.trained.task.backbone.objective.name

    @cached_property
    def module(self) -> LogitsModule:
        """The model as an ``nn.Module`` that has the client's tensors and returns logits."""
        return LogitsModule(self.trained.method, self.trained.task, self.state)

    def logits(self, batch: Batch) -> Tensor:
        """Logits of a batch, float32 ``[b, classes]`` or ``[b, L, vocabulary]``.

        Args:
            batch: ``input_ids`` int64 and ``attention_mask`` ``[b, L]``, padded on the right; or
                ``pixel_values`` float ``[b, C, H, W]``, bytes divided by 255.
        """
        task = self.trained.task
        if "attention_mask" in batch:
            batch = {**batch, "attention_mask": batch["attention_mask"].float()}
        with torch.no_grad():
            return self.trained.method.predict(task, self.state, to_device(batch, task.device))

    def predict(
        self, inputs: Any, *, max_new_tokens: int = 32, say: Callable[[str], object] | None = None
    ) -> list[Any]:
        """Predict each of some inputs; the results are in the order of the inputs.

        The inputs go through the model in batches of ``evaluate.batch_size``, the shortest texts
        first, as in an evaluation. Only a method whose predictions depend on the batch (pFedGate)
        can tell.

        Args:
            inputs: texts, pairs of texts, lists of words or conversations (lists of messages); or
                pictures as paths, a folder, PIL's images or arrays ``[n, C, H, W]``.
            max_new_tokens: of a language model's text.
            say: gets the pieces of a text as they are written, if the model writes texts.

        Returns:
            A `Prediction` for each input; from a causal language model the text (str) that goes on
            from it, by the most probable tokens.

        Raises:
            InputError: the model reads inputs of another kind, or one of them can't be read.
        """
        inputs = inputs if isinstance(inputs, Tokens | Images | Dataset) else inputs_of(inputs)
        examples = self.examples(inputs)
        say_cut(self.trained, [examples])
        return self.predict_examples(examples, inputs, max_new_tokens, say)

    def predict_examples(
        self,
        examples: Tokens | Images,
        inputs: Sequence[Any],
        max_new_tokens: int,
        say: Callable[[str], object] | None = None,
    ) -> list[Any]:
        """The same of `examples`, which are these ``inputs``."""
        backbone = self.trained.task.backbone
        objective = self.trained.objective_of(self.client)
        if isinstance(examples, Tokens) and objective.writes:
            return self._texts(examples, max_new_tokens, say)
        size = self.trained.experiment.evaluate.batch_size
        max_length = self.trained.experiment.data.max_length
        words = Words(self.classes, backbone.tokenizer, max_length)
        answers: list[Any] = [None] * len(examples)
        for rows in by_length(examples.lengths(np.arange(len(examples))), size):
            batch = examples.batch(rows)
            found = objective.predictions(self.logits(batch), batch).cpu().numpy()
            some = [inputs[row] for row in rows] if isinstance(inputs, list) else ()
            for row, answer in zip(rows, objective.answers(found, some, words), strict=True):
                answers[row] = answer
        return answers

    def examples(self, inputs: Any) -> Tokens | Images:
        """Inputs as `predict` takes them, tokenised or decoded as in the run. Raises InputError
        where the model reads inputs of another kind, or one of them can't be read."""
        return examples_of(self.trained, inputs)

    def _texts(self, prompts: Tokens, most: int, say: Callable[[str], object] | None) -> list[str]:
        task, method = self.trained.task, self.trained.method
        tokenizer = task.backbone.tokenizer
        if tokenizer is None:
            raise InputError("this language model has no tokenizer, so it can't generate text")
        size = self.trained.experiment.evaluate.batch_size if say is None else 1
        logits, keeps = partial(method.predict, task, self.state), method.keeps_keys
        texts = [""] * len(prompts)
        for rows in by_length(prompts.lengths(np.arange(len(prompts))), size):
            ids = [prompts[row].tolist() for row in rows]
            said = None if say is None else Spoken(tokenizer, say)
            new = write(task, logits, ids, most, keeps=keeps, said=said)
            if said is not None:
                said.finish()
            for row, tokens in zip(rows, new, strict=True):
                texts[row] = tokenizer.decode(tokens, skip_special_tokens=True)
        return texts


def predict_by_client(
    trained: TrainedMethod,
    inputs: Sequence[Any],
    clients: Sequence[str],
    *,
    max_new_tokens: int = 32,
) -> list[Any]:
    """Predict each of the ``inputs``, as `PersonalModel.predict` takes them, with the model of its
    own client, by name or number; the results are in the order of the inputs."""
    for client in dict.fromkeys(clients):  # before anything is predicted
        if trained.onboarded(client) is None:
            trained.number(client)
    results: list[Any] = [None] * len(inputs)
    read = []
    for client in dict.fromkeys(clients):
        state = to_device(trained.client_state(client), trained.task.device)
        rows = [row for row, name in enumerate(clients) if name == client]
        model = PersonalModel(trained, client, state)
        own = [inputs[row] for row in rows]
        read.append(model.examples(own))
        found = model.predict_examples(read[-1], own, max_new_tokens)
        for row, result in zip(rows, found, strict=True):
            results[row] = result
    say_cut(trained, read)
    return results


def say_cut(trained: TrainedMethod, examples: Sequence[Tokens | Images]) -> None:
    """Say on stderr how many texts were cut, if any was."""
    tokens = [one for one in examples if isinstance(one, Tokens)]
    if count := sum(len(one.cut) for one in tokens if one.cut is not None):
        most = trained.experiment.data.max_length
        announce(
            f"{count} of {sum(map(len, tokens))} texts are longer than {most} tokens (the run's "
            f"data.max_length): only their first {most} are read"
        )


def examples_of(opened: Opened, inputs: Any) -> Tokens | Images:
    """Inputs as `PersonalModel.predict` takes them, tokenised or decoded as in the run."""
    if isinstance(inputs, Dataset):
        inputs = inputs.inputs
    data = opened.data
    if data["modality"] == "image":
        return picture_examples(inputs, data["picture"])
    max_length = opened.experiment.data.max_length
    backbone = opened.task.backbone
    are_pairs, goes_on = bool(data.get("pair")), backbone.objective.generates
    if goes_on:
        max_length = (window_of(opened.task.backbone) or _MOST) - 1
    examples = text_examples(
        inputs, backbone.tokenizer, max_length, backbone.objective, are_pairs=are_pairs
    )
    if goes_on and examples.cut is not None and len(examples.cut):
        raise InputError(
            f"input {examples.cut[0] + 1} has more than {max_length} tokens, and this model reads "
            f"{max_length + 1} with what it writes; give it a shorter one"
        )
    check_ids(examples, backbone)
    return examples


def count_trained_on(
    trained: TrainedMethod, inputs: Sequence[Any], class_numbers: Sequence[int]
) -> int | None:
    """How many of some rows, of these classes or -1, were training rows of a client; None where
    that is not known."""
    if trained.trained_rows is None:
        return None
    labels = np.asarray(class_numbers)
    dataset = Dataset(examples_of(trained, inputs), len(labels), trained.data["task"], "-", labels)
    return trained.num_trained_on(dataset, np.flatnonzero(labels >= 0))


def load_model(
    run: Path | str,
    method: str | None,
    client: str | int | None = None,
    seed: int | None = None,
    *,
    which: Which = "best",
    data: Data | Dataset | None = None,
    backbone: Backbone | None = None,
) -> PersonalModel:
    """Load a model of a finished run.

    Args:
        run: the run directory.
        method: the method's label in the experiment; None: the run has one.
        client: a client, also one that joined afterwards; None: the global model.
        seed: None: the experiment's first.
        which: the state of the reported round, or of the last one. A client that joined afterwards
            has one model, and ``last`` is refused.
        data: the data, if the run was given them from Python.
        backbone: the model, if the run was given it from Python.

    Raises:
        InputError: there is no such run, method, seed or client; the method has no global model.
    """
    trained = open_trained(run, method, seed, which=which, data=data, backbone=backbone)
    state = trained.global_state() if client is None else trained.client_state(client)
    return PersonalModel(trained, client, to_device(state, trained.task.device))
