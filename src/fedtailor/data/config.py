"""The fields of an experiment's ``[data]`` and ``[split]`` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from ..errors import InputError, brief
from ..objectives import OBJECTIVES, objective_of
from .templates import Template

Fraction = Annotated[float, Ge(0), Lt(1)]
MOST_ROWS = 2**31 - 1  # of a table or of a client: rows are counted in 32 bits
Rows = Annotated[int, Gt(0), Le(MOST_ROWS)]
Clients = Annotated[int, Gt(0), Le(1_000_000_000)]
Few = Annotated[int, Gt(0), Le(1_000_000)]  # what a machine has room for, by a wide margin


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from: a built-in or Hugging Face ``name``, or a local ``path``."""

    name: str | None = None
    path: str | None = None  # file or folder that holds a table
    test_path: str | None = None  # the official test split of a local file
    subset: str | None = None  # the configuration of a Hugging Face data set
    revision: str | None = None  # of a Hugging Face data set: a commit, a branch or a tag
    train_split: str = "train"
    test_split: str | None = "test"  # None, or absent in the data: no official test split
    task: str | None = None  # a kind of task; None: the built-in's
    text: str | None = None  # columns; None: the built-in's, or the usual names
    text_pair: str | None = None  # a second text of each example, such as a hypothesis
    image: str | None = None
    label: str | tuple[str, ...] | None = None  # several: of 0 and 1 each
    # of tasks that join columns: prompts by client
    templates: tuple[Template, ...] = ()
    client: str | None = None  # the natural client: a user, a hospital, a role
    classes: tuple[str, ...] = ()  # their names, in order; (): those of the training rows
    # of numbers to predict: their mean and deviation; (): those of the training rows
    scale: tuple[Annotated[float, Ge(-1e30), Le(1e30)], ...] = ()
    # of numbers to predict: Huber's loss, squared up to so many deviations; None: squared
    huber_delta: Annotated[float, Gt(0), Le(1e6)] | None = None
    # of preferences: how much a model may differ from the reference, the less the more; None: 0.1
    beta: Annotated[float, Gt(0), Le(1e6)] | None = None
    # of preferences: the model before any training, or as it came in a round; None: "base"
    reference: Literal["base", "received"] | None = None
    # the side in pixels of the squares that pictures are resized to; None: all have one size
    picture_size: Annotated[int, Ge(1), Le(8192)] | None = None
    max_length: Annotated[int, Gt(1), Le(1_000_000)] = 128  # tokens; longer texts are truncated
    limit: Rows | None = None  # at most so many training rows, drawn by key
    skip: Annotated[int, Ge(0), Le(MOST_ROWS)] = 0  # so many drawn training rows are left out first
    limit_test: Rows | None = None

    def __post_init__(self) -> None:
        """Refuse a kind of task that does not exist."""
        objective = objective_of(self.task)
        reads_one = objective.joins_columns or objective.reads_targets
        if isinstance(self.label, tuple) and reads_one and not objective.takes_flags:
            others = [repr(name) for name, one in OBJECTIVES.items() if one.takes_flags]
            raise InputError(
                f"data.label = {list(self.label)}: the task {objective.name!r} reads one column; "
                f"for several set data.task = {' or '.join(others)}"
            )
        for one in self.templates:
            one.check()
        if self.templates and not (objective.joins_columns and self.client):
            raise InputError(
                f"data.templates are prompts by client: they need data.client, which is "
                f"{brief(self.client)}, and a task with prompts, and not {objective.name!r}"
            )
        if self.scale and (len(self.scale) != 2 or self.scale[1] <= 0):
            raise InputError(
                f"data.scale = {list(self.scale)}: must be two numbers, the mean and the deviation "
                "of the targets, above 0"
            )


@dataclass(frozen=True)
class SplitConfig:
    """How the rows are divided among clients."""

    # None, only for scheme "natural": all clients
    clients: Clients | None = None
    scheme: Literal["iid", "dirichlet", "pathological", "shards", "natural", "clusters"] = "iid"
    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.5  # dirichlet: concentration
    classes_per_client: Few = 2  # pathological
    shards_per_client: Few = 2  # shards
    clusters: Few = 5  # clusters: groups of labels
    cluster_sizes: tuple[Rows, ...] | None = None  # clients in each cluster; None: near-equal
    # fewer: drawn again (dirichlet), left out (natural)
    min_examples: Annotated[int, Ge(1), Le(MOST_ROWS)] = 10
    max_examples: Rows | None = None  # of a client; these are drawn by key
    rotations: Literal[1, 2, 4] = 1  # angles at which clients see their pictures, in turn
    shuffled: Fraction = 0.0  # of the clients: the labels of their training rows are shuffled
    validation: Fraction = 0.1  # of a client's training rows
    test: Fraction = 0.2  # of a client's rows, where there is no official test split
    seed: Annotated[int, Ge(0), Lt(2**63)] | None = None  # None: the run's seed


@dataclass(frozen=True)
class LocalConfig:
    """How much a client trains in a round: ``epochs`` over its data, or ``steps`` batches.

    A pass goes over the client's data once; where ``steps`` is set, it is that many batches.
    """

    batch_size: Few = 16
    epochs: Annotated[int, Gt(0), Le(10_000)] = 1
    steps: Few | None = None  # instead of epochs
    # a step computes so many examples at a time; None: all of its batch
    micro_batch: Few | None = None
    pack: bool = False  # of language models: several examples of a batch share a row of tokens
    # "balanced": in the training loss each of a client's classes counts as much as another
    class_weights: Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        """Refuse parts of a batch that are no smaller than it, and to pack single examples."""
        if self.pack and 1 in (self.batch_size, self.micro_batch):
            raise InputError(
                "local.pack = true has no effect on one example at a time; give a larger "
                "local.batch_size and local.micro_batch, or leave it out"
            )
        if self.micro_batch is not None and self.micro_batch >= self.batch_size:
            raise InputError(
                f"local.micro_batch = {self.micro_batch} has no effect on batches of "
                f"local.batch_size = {self.batch_size}; give less, or leave it out"
            )

    @property
    def passes(self) -> int:
        """How many passes a round's local training has."""
        return self.epochs if self.steps is None else 1
