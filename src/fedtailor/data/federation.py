"""Clients, their examples, and the rounds that they take part in; every draw has a key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import torch

from .. import random
from ..errors import InputError
from ..objectives.objective import IGNORED
from ..params import DRAWN, EXAMPLE_WEIGHT, Batch
from .config import LocalConfig
from .example_cache import ExampleCache, LastResults, padded_stack
from .omissions import Omission
from .table import Dataset, Fingerprints, Indices, Partition

Split = Literal["train", "validation", "test"]

_BUCKET = 16  # batches; their examples are sorted by length together


@dataclass(frozen=True)
class Federation:
    """K clients with a data set divided among them, and the run's seed.

    ``example_cache`` adds a method's cached results to every batch, and ``last_results`` are those
    of the run's last one. ``public`` are examples that the server and all clients have. With
    ``remote`` the clients' examples lie at their sites, and only their numbers are known here.
    ``trained_before`` are the rows that the models were trained on before this run, ascending;
    None: they were not, or it is not known. ``told_labels`` ``[K, classes]`` are what all sites
    have told of theirs. Training leaves out batches of fewer than ``least_batch`` examples. Cohorts
    and noise follow from a ``secret`` instead of the seed, where there is one.
    """

    dataset: Dataset
    partition: Partition
    seed: int = 0
    example_cache: ExampleCache | None = None
    public: Dataset | None = None
    remote: bool = False
    trained_before: Fingerprints | None = None
    told_labels: Indices | None = None
    least_batch: int = 1
    secret: str | None = None
    last_results: LastResults = field(default_factory=LastResults)

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.partition.train)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The clients' names, by number; None if they have none."""
        return self.partition.names

    @property
    def omissions(self) -> tuple[Omission, ...]:
        """What the data set and its division leave out."""
        return (*self.dataset.omissions, *self.partition.omissions)

    def name(self, client: int) -> str:
        """Return a client's name, or its number in digits if it has none."""
        return (self.names[client] if self.names else "") or str(client)

    def batch(self, rows: Indices) -> Batch:
        """Return the batch of some rows, with the cached results of the method."""
        batch = self.dataset.batch(rows)
        return batch if self.example_cache is None else self.example_cache.add_to(batch, rows)

    def num_examples(self, client: int) -> int:
        """Return n_k, the number of the client's training examples."""
        return self.partition.train.size(client)

    def novel(self, count: int) -> frozenset[int]:
        """Draw the ``count`` novel clients, which never take part; the same in every round."""
        return frozenset(self._novel(count).tolist())

    def _novel(self, count: int) -> Indices:
        if count == 0:
            return np.empty(0, np.int64)
        rng = random.generator(self.seed, "novel clients")
        return np.sort(rng.choice(self.num_clients, count, replace=False, shuffle=False))

    def _draw(self, rng: np.random.Generator, count: int, novel: int) -> tuple[int, ...]:
        """Draw ``count`` clients, ascending, none of the ``novel`` ones, without a list of all."""
        clients = np.sort(rng.choice(self.num_clients - novel, count, replace=False, shuffle=False))
        return self._of_places(clients, novel)

    def _of_places(self, places: Indices, novel: int) -> tuple[int, ...]:
        """The clients at ``places`` among those that are not ``novel``."""
        before = self._novel(novel) - np.arange(novel)  # how many others have smaller numbers
        return tuple((places + np.searchsorted(before, places, side="right")).tolist())

    @property
    def server_seed(self) -> int | str:
        """What the server's own draws follow from."""
        return self.seed if self.secret is None else self.secret

    def cohort(
        self, round_: int, size: int, novel: int = 0, *, poisson: bool = False
    ) -> tuple[int, ...]:
        """Draw the ``size`` clients of a round, without replacement, in ascending order; none of
        the ``novel`` ones. With ``poisson`` each is drawn by itself, and ``size`` on average."""
        count = self.num_clients - novel
        if size >= count:
            return self._of_places(np.arange(count), novel)
        rng = random.generator(self.server_seed, "cohort", round_)
        return self._draw(rng, int(rng.binomial(count, size / count)) if poisson else size, novel)

    def turns(self, round_: int, rounds: int, size: int, novel: int = 0) -> dict[int, range]:
        """Return the clients whose turn it is in a round, from 1, where every client trains equally
        often: ascending, each with the rounds that its turn stands for. Of all ``rounds``, a
        client's first turn has the first part, and so on.

        Each of the K clients that are not ``novel`` has ``max(1, round(rounds * size / K))`` turns
        (``size``: of a cohort under other methods); all have had one before any has the next."""
        count = self.num_clients - novel
        first, end = (num_turns(number, rounds, size, count) for number in (round_ - 1, round_))
        each = num_turns(rounds, rounds, size, count) // count
        numbers, places = np.divmod(np.arange(first, end), count)
        turns = zip(self._of_places(places, novel), numbers.tolist(), strict=True)
        parts = (rounds * np.arange(each + 1) // each + 1).tolist()
        return {client: range(parts[turn], parts[turn + 1]) for client, turn in sorted(turns)}

    def num_steps(self, client: int, local: LocalConfig, passes: int | None = None) -> int:
        """Return how many batches `batches` yields."""
        passes = local.passes if passes is None else passes
        if local.steps is not None:
            return passes * local.steps
        whole, rest = divmod(self.num_examples(client), local.batch_size)
        return passes * max(1, whole + (rest >= self.least_batch))

    def batches(
        self,
        client: int,
        round_: int,
        local: LocalConfig,
        *,
        purpose: str = "train",
        passes: int | None = None,
    ) -> Iterator[Batch]:
        """Yield the client's training batches of a round.

        Every epoch is a new shuffle; examples of similar length share a batch. The last batch of an
        epoch may be smaller; with fewer than ``least_batch`` examples it is left out, or, if it is
        the only one, is padding (``weight`` 0), on which nothing is trained. ``purpose`` is a part
        of the random key, and ``passes`` are those over the client's data; None: a round's."""
        steps_left = self.num_steps(client, local, passes)
        weights = self.class_weights(client) if local.class_weights else None
        epoch = 0
        while steps_left > 0:
            batches = self._epoch(client, round_, epoch, local.batch_size, purpose)
            for rows in batches[:steps_left]:
                batch = self.batch(rows)
                if weights is not None:
                    batch[EXAMPLE_WEIGHT] = weights[batch["labels"]]
                if len(rows) < self.least_batch:
                    batch["weight"] = torch.zeros(len(rows))
                yield batch
            steps_left -= len(batches)
            epoch += 1

    def sampling(self, local: LocalConfig, novel: int = 0) -> tuple[tuple[int, float, int], ...]:
        """Return the kinds of clients that take part, and have examples here: their number of
        examples, the probability with which `sampled` draws each, and their steps in a round."""
        sizes = np.delete(self.partition.train.sizes(), self._novel(novel))
        _, first = np.unique(sizes, return_index=True)
        clients = np.delete(np.arange(self.num_clients), self._novel(novel))[first].tolist()
        kinds = ((self.num_examples(k), self.num_steps(k, local)) for k in clients)
        return tuple((n, min(1.0, local.batch_size / n), steps) for n, steps in kinds if n)

    def sampled(
        self, client: int, round_: int, local: LocalConfig, secret: Sequence[int | str]
    ) -> Iterator[Batch]:
        """Yield as many batches as `batches` does, each of which has every training example of the
        client with the probability min(1, batch_size / n), independent of all other draws (Poisson
        sampling). `DRAWN` says of a batch that would be empty that an example stands in.
        ``secret`` begins the random key."""
        rows = self.partition.train[client]
        rate = min(1.0, local.batch_size / len(rows))
        for step in range(self.num_steps(client, local)):
            rng = random.generator(*secret, "records", round_, client, step)
            chosen = rows[rng.random(len(rows)) < rate]
            count = len(chosen)
            batch = self.batch(chosen if count else rows[:1])
            yield {**batch, DRAWN: torch.full((max(1, count),), float(count > 0))}

    def class_weights(self, client: int) -> torch.Tensor:
        """Return the weight of each class in the client's training loss, float32 ``[classes]``: n /
        (c * n_j) for the n_j of its n training examples that have class j, and the c classes that
        any of them has. The others have 0."""
        labels = self.dataset.class_numbers
        assert labels is not None
        labels = labels[self.partition.train[client]]
        counts = np.bincount(labels, minlength=self.dataset.num_classes)
        shares = (counts > 0) * counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return torch.from_numpy(shares.astype(np.float32))

    def _epoch(
        self, client: int, round_: int, epoch: int, size: int, purpose: str
    ) -> list[Indices]:
        rng = random.generator(self.seed, purpose, round_, client, epoch)
        rows = rng.permutation(self.partition.train[client])
        batches: list[Indices] = []
        for start in range(0, len(rows), size * _BUCKET):
            bucket = rows[start : start + size * _BUCKET]
            bucket = bucket[np.argsort(self.dataset.inputs.lengths(bucket), kind="stable")]
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        drawn = [batches[i] for i in rng.permutation(len(batches))]
        return [one for one in drawn if len(one) >= self.least_batch] or drawn

    def rows(self, client: int, split: Split) -> Indices:
        """Return the rows of one of the client's splits."""
        return self.partition.split(split)[client]

    def num_rows(self, client: int, split: Split) -> int:
        """Return how many rows one of the client's splits has; without looking at them, since a
        site may claim any number of rows."""
        return self.partition.split(split).size(client)

    def evaluation_clients(
        self, count: int | None, novel: int = 0, without: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return all clients but the ``novel`` ones and those ``without`` which the results are;
        with ``count``, of a sample, the same in every round."""
        most = self.num_clients - novel
        if count is None or count >= most:
            clients = self._of_places(np.arange(most), novel)
        else:
            clients = self._draw(random.generator(self.seed, "evaluation clients"), count, novel)
        return tuple(client for client in clients if client not in without) if without else clients

    def check(self, local_clients: range | None = None) -> None:
        """Raise InputError if a client, or one of ``local_clients``, has no training examples."""
        empty = np.flatnonzero(self.partition.train.sizes() == 0)
        if local_clients is not None:
            empty = empty[np.isin(empty, local_clients)]
        if len(empty):
            raise InputError(
                f"client {self.name(int(empty[0]))} has no training examples (so have "
                f"{len(empty)} of {self.num_clients} clients); use fewer clients or raise "
                "split.min_examples"
            )


def num_turns(round_: int, rounds: int, size: int, clients: int) -> int:
    """Return how many turns have ended after a round, where ``clients`` train equally often (see
    `Federation.turns`). The first round has one at least; others may have none."""
    each = max(1, round(rounds * size / clients))
    return -(-clients * each * round_ // rounds)


def pad_and_stack(
    clients: Sequence[Sequence[Batch]], most_tokens: int | None = None
) -> list[Batch]:
    """Stack the batches of c clients, each with those of its steps, along a leading client axis.

    Returns one batch a step. Tensors are padded with zeros to the largest in every dimension,
    targets by tokens with ``IGNORED``; where a client has no more steps, they are all of these. If
    the number of examples differs, ``weight`` ``[c, b]`` is 1 for real examples and 0 for padding.

    With ``most_tokens`` (0: unknown) all steps have the shapes of the largest, always with
    ``weight``, and examples have one of a few lengths, so that few shapes occur.
    """
    longest, stacked = max(clients, key=len), []
    least = None if most_tokens is None else _largest([*chain(*clients)], most_tokens)
    for number, like in enumerate(longest):
        none = {name: value[:0] for name, value in like.items()}
        own = [one[number] if number < len(one) else none for one in clients]
        stacked.append(_stack(own, least))
    return stacked


def graded(length: int) -> int:
    """Return the least length of at least ``length`` among a few: at most a quarter is added.

    >>> [graded(length) for length in (3, 24, 100, 130)]
    [8, 24, 112, 160]
    """
    step = max(8, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _largest(batches: Sequence[Batch], most_tokens: int) -> tuple[int, int]:
    """The most examples of a batch; and the tokens to pad all texts to."""
    size = max((len(next(iter(batch.values()))) for batch in batches), default=0)
    if any(DRAWN in batch for batch in batches):  # it differs from batch to batch
        size = graded(size)
    lengths = [batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch]
    longest = max(lengths, default=0)
    return size, max(longest, min(graded(longest), most_tokens))


def _stack(batches: Sequence[Batch], least: tuple[int, int] | None) -> Batch:
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    most, tokens = least or (0, 0)
    stacked: Batch = {}
    for name, first in batches[0].items():
        if name != "weight":
            by_tokens = name == "labels" and first.dim() > 1 and not first.is_floating_point()
            goes_by_tokens = by_tokens or name != "labels"
            shape = [most, *_padded_sizes(batches[0], first, tokens if goes_by_tokens else 0)]
            filler = IGNORED if by_tokens else 0
            stacked[name] = padded_stack([batch[name] for batch in batches], filler, shape)
    device = next(iter(batches[0].values())).device
    weights = [
        batch["weight"] if "weight" in batch else torch.ones(size, device=device)
        for size, batch in zip(sizes, batches, strict=True)
    ]
    if least or min(sizes) < max(sizes) or not all(weight.all() for weight in weights):
        stacked["weight"] = padded_stack(weights, 0, [most])
    return stacked


def _padded_sizes(batch: Batch, value: torch.Tensor, tokens: int) -> list[int]:
    """The least sizes of a tensor of a ``batch`` behind its examples: where it goes by the tokens
    of the inputs, as many as these get."""
    ids = batch.get("input_ids")
    if not tokens or ids is None or value.shape[: ids.dim()] != ids.shape:
        return [0] * (value.dim() - 1)
    return [*ids.shape[1:-1], tokens, *value.shape[ids.dim() :]]
