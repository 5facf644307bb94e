"""What the files of a run directory say, as frozen dataclasses; `checked` holds files to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, Len, MaxLen, MinLen
from numpy.typing import NDArray

from .checked import Amount, Count, Results, Seed

KNOWN_NOISE = "for experiments alone: the seed tells the noise"  # privacy.secret = false

Counts = NDArray[np.integer]


@dataclass(frozen=True)
class Environment:
    """What made a run."""

    date: str
    python: str
    machine: str
    threads: Count
    gpu: str | None
    versions: Mapping[str, str]
    id: str | None = None  # tells it from another run that began in the same second


@dataclass(frozen=True)
class DataManifest:
    """What the data of a run with a seed are, in words. ``names`` are those of the clients, None if
    they have none; ``omissions`` say what is left out."""

    digest: str
    clients: Annotated[int, Ge(1), Le(10**9)]
    task: str
    modality: Literal["text", "image"]
    classes: Sequence[str]
    data: str = ""
    public: str | None = None
    scale: Annotated[Sequence[Annotated[float, Ge(-1e30), Le(1e30)]], MaxLen(3)] = ()
    picture: Annotated[Sequence[Annotated[int, Ge(1), Le(10**5)]], Len(3, 3)] | None = None
    names: Sequence[str] | None = None
    omissions: Sequence[Mapping[str, Any]] = ()
    holdings: str | None = None  # the checksum of the file of the clients' sizes ...
    trained: str | None = None  # ... and of that of the rows that models were trained on
    seed: Seed | None = None


@dataclass(frozen=True, kw_only=True)
class Partition(DataManifest):
    """The data of a run with a seed, with the sizes of the clients' splits, each ``[K]``, and their
    examples by class.

    Of clients that are evaluated, ``majority`` is the most frequent class of their training
    examples, and ``majority_correct`` counts their test examples of that class.
    """

    train: Counts
    validation: Counts
    test: Counts
    labels: Counts | None = None  # [K, classes], over all splits; None: unknown to the server
    clusters: Counts | None = None  # [K]: the ground truth
    majority: Counts | None = None  # [K], -1 for clients that are not evaluated
    majority_correct: Counts | None = None

    def name(self, client: int) -> str:
        """Return a client's name, or its number in digits if it has none."""
        return (self.names[client] if self.names else "") or str(client)

    def majority_accuracy(self, clients: Sequence[int]) -> list[float | None] | None:
        """Return the accuracy of each client's most frequent training class on its own test
        examples, None for a client without some; None instead of a list where it is unknown."""
        if self.majority_correct is None or not len(clients):
            return None
        correct, sizes = (of[list(clients)] for of in (self.majority_correct, self.test))
        if (correct < 0).any():
            return None
        return [int(c) / int(n) if n else None for c, n in zip(correct, sizes, strict=True)]


@dataclass(frozen=True)
class BestRound:
    """A round, and the mean of its ``validation`` results; None where no client has examples."""

    round: Count
    validation: float | None


@dataclass(frozen=True)
class Commit:
    """What ``commit.json`` says: the last complete round of ``rounds``, and the logs' lengths in
    bytes. ``best``: the best round so far by model, personal or global; ``global_then`` is the
    global model's as of the best round of the personal models, where it is another one."""

    round: Count
    rounds: Count
    finished: bool
    bytes: Mapping[str, Count]
    diverged: str | None = None  # why it stopped after that round; the next run goes on there
    best: Mapping[str, BestRound] = field(default_factory=dict)
    stopped: bool = False  # a callback stopped it after that round; it can go on
    # the earlier rounds whose states clients in flight have been sent; not in the file if there are
    # none
    in_flight: Sequence[Count] = ()
    # of the logs' committed bytes, of the rows of the files of private states, and of the files of
    # the server's states
    checksums: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None  # of the method that it belongs to ...
    seed: Seed | None = None  # ... and the seed
    # the last rounds that it was rolled back from; not in the file if there are none
    rolled_back: Sequence[Count] = ()

    @property
    def ended(self) -> bool:
        """Whether a run would not go on with it by itself."""
        return self.finished or self.diverged is not None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or a callback stopped it."""
        return self.ended or self.stopped

    def has_ended(self, rounds: int) -> bool:
        """Whether it has diverged, or finished with so many ``rounds``: some may be added."""
        return (self.finished and self.round >= rounds) or self.diverged is not None

    @property
    def is_going_back(self) -> bool:
        """Whether a roll-back may have something to do: no round is committed since."""
        return bool(self.rolled_back) and self.stopped and self.round == self.best_round

    @property
    def has_model(self) -> bool:
        """Whether a round is committed. Without one, training diverged in the first round."""
        return self.bytes["timings"] > 0

    @property
    def best_round(self) -> int:
        """The reported round of the personal models; the last one if they were never evaluated."""
        return self.best["personal"].round if "personal" in self.best else self.round

    @property
    def best_global_round(self) -> int:
        """The reported round of the global model; `best_round` if it was never evaluated."""
        return self.best["global"].round if "global" in self.best else self.best_round


@dataclass(frozen=True)
class RoundLine:
    """One line of history.jsonl. ``trained`` and ``trained_steps`` count all clients that have
    trained, where that is not the cohort alone; the bytes are those of all of them. ``norms`` are
    those of the cohort's uploads. ``bounds`` has the settings that bound them, in the first line,
    and where they are others than before. ``epsilon`` at ``delta`` is what the rounds so far have
    spent of the privacy of a client or record (``level``), as the ``accountant`` works it out;
    None: there is no ``noise``. A ``clip`` that moves is ``next_clip`` in the next round."""

    round: Count
    cohort: Sequence[Count]
    train_loss: float | None
    losses: Results
    steps: Sequence[Count]
    lr_scale: Amount
    bytes_down: Count
    bytes_up: Count
    norms: Sequence[Annotated[float, Ge(0)]] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped_before: Sequence[Count] = ()
    dropped_after: Sequence[Count] = ()
    late: Sequence[Count] = ()
    staleness: Sequence[Count] = ()
    trained: Count | None = None
    trained_steps: Count | None = None
    simulated_seconds: Amount | None = None
    epsilon: Amount | None = None
    delta: Amount = 0.0
    noise: Amount = 0.0
    accountant: str = ""
    level: str = "client"
    clip: Amount | None = None
    next_clip: Amount | None = None

    @property
    def norm_by_client(self) -> dict[int, float]:
        """The norm of each client's upload; empty where they were not measured."""
        return dict(zip(self.cohort, self.norms, strict=False))

    @property
    def num_trained(self) -> int:
        """How many clients have trained."""
        return len(self.cohort) if self.trained is None else self.trained

    @property
    def num_steps(self) -> int:
        """How many local steps they have done together."""
        return sum(self.steps) if self.trained_steps is None else self.trained_steps


@dataclass(frozen=True)
class EvaluationLine:
    """One line of clients.jsonl: the results of every client after a round. ``metrics`` are the
    experiment's own by name, None where one is undefined."""

    round: Count
    model: str
    split: str
    clients: Sequence[Count]
    num_examples: Sequence[Count]
    loss: Results
    accuracy: Results
    metrics: Mapping[str, Results] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """One line of timings.jsonl: seconds by phase, peak memory in megabytes, and the processor time
    of the clients' training in seconds, None where it is not known. ``files`` are the files that
    the round has written for good, with checksums of tensors."""

    round: Count
    seconds: Mapping[str, Amount]
    peak_memory_mb: Amount | None
    executor: str | None = None
    cpu_seconds: Amount | None = None
    files: Mapping[str, str | None] = field(default_factory=dict)

    def files_in(self, folder: Path) -> dict[Path, str | None]:
        """The files by their paths, with their checksums."""
        return {folder / name: checksum for name, checksum in self.files.items()}


@dataclass(frozen=True)
class Sample:
    """What models have answered to a prompt of ``client``, by model (``base``, ``global`` or a
    client's number), and the right answer."""

    client: Count
    prompt: str
    reference: str
    answers: Mapping[str, str]


@dataclass(frozen=True)
class RefusedResult:
    """One line of refused.jsonl: a client's result that a round over Flower went on without."""

    round: Count
    client: Count
    reason: str


@dataclass(frozen=True)
class Costs:
    """Scalars that a client trains, communicates and keeps; bytes per client and round by dtype;
    the floating-point operations of training on one batch, None where they were not counted;
    ``has_row``, whether the server learns a row for each client."""

    trained: Count
    communicated: Count
    private: Count
    down: Mapping[str, Count]
    up: Mapping[str, Count]
    model: Count
    flops: Annotated[int, Ge(0), Le(10**30)] | None = None
    has_row: bool = False


@dataclass(frozen=True)
class ExperimentRecord:
    """What a reader of an experiment.json relies on, beside its `SECTIONS`."""

    name: str
    rounds: Count
    seeds: Annotated[Sequence[Seed], MinLen(1)]
    methods: Sequence[dict[str, Any]]
    sources: dict[str, str] = field(default_factory=dict)


SECTIONS: Mapping[str, Mapping[str, Any]] = {  # and what is relied on in them, if it is there
    **{key: {} for key in ("data", "split", "local", "engine", "public", "faults", "attack")},
    "model": {"factory": str | None},
    "cohort": {"novel": Count},
    "schedule": {"name": str},
    "privacy": {},
    "secure_aggregation": {},
    "evaluate": {"select": str | None, "metrics": Sequence[str]},
    "start_from": {"run": str | None},
}


@dataclass(frozen=True)
class MethodRecord:
    """One of its methods."""

    label: str
    name: str
    sha256: str | None = None
    optimiser: dict[str, Any] = field(default_factory=dict)
    robust: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Attack:
    """The simulated attack of an experiment."""

    kind: str = "none"
    fraction: Amount = 0.2
    clients: Sequence[Count] = ()
    strength: float | None = None
    first_round: Count = 1
    last_round: Count | None = None
    target: Count = 0
    poisoned: Amount = 0.5


@dataclass(frozen=True)
class OmissionRecord:
    """What is left out of the data."""

    text: str
    count: Count = 0
    short: str = ""
