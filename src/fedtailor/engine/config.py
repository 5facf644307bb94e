"""What a run does, beside its data, model and method: rounds, cohorts, rates, evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from ..data.config import Clients, Few, LocalConfig
from ..data.federation import Federation
from ..errors import InputError, brief
from ..task.task import Precision
from ..uploads.accounting import Account, PrivacyConfig, account, rounds_within
from ..uploads.attacks import AttackConfig
from ..uploads.norms import USUAL_FACTOR, USUAL_QUANTILE
from ..uploads.record_accounting import RecordAccount, record_account
from ..uploads.secure.config import SecureAggregationConfig
from .faults import ClientFaults, FaultConfig

LEAST = 0.5  # of a cohort, where clients whose uploads can't be used are left out

_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True)
class GenerateConfig:
    """What models that write texts write in an evaluation, by the most probable tokens."""

    # answers to so many validation examples of a client, and so many test examples; 0: none
    examples: Annotated[int, Ge(0), Le(1_000_000)] = 0
    tokens: Few = 64  # of an answer, at most
    every: Few | None = None  # rounds, and the last one; None: each fifth evaluation

    def __post_init__(self) -> None:
        if not self.examples and (self.tokens, self.every) != (64, None):
            raise InputError(
                "evaluate.generate.examples = 0: nothing is written, so tokens and every have no "
                "effect; set examples, such as 8"
            )


@dataclass(frozen=True)
class ClientMetric:
    """The metric of some clients, by name."""

    clients: tuple[str, ...] = ()
    metric: str = ""


@dataclass(frozen=True)
class EvaluateConfig:
    """When and on whom models are evaluated."""

    every: Few = 1  # rounds; the last round always is
    clients: Clients | None = None  # a fixed sample of so many clients; None: all
    batch_size: Few = 64
    global_model: bool = True  # beside the personal models
    # rounds of fitting of a client that never took part
    novel_passes: Annotated[int, Ge(0), Le(10_000)] = 1
    # beside loss and accuracy: "macro_f1", "auc", ..., or an own function, "FILE.py:FUNCTION"
    metrics: tuple[str, ...] = ()
    confusion: bool = False  # keep each client's confusion matrix
    select: str | None = None  # the metric that chooses the reported round; None: the usual one
    generate: GenerateConfig = GenerateConfig()
    # of texts: each client's own metric, together the metric "own_metric"
    by_client: tuple[ClientMetric, ...] = ()

    def __post_init__(self) -> None:
        named = [name for one in self.by_client for name in one.clients]
        if twice := [name for name in named if named.count(name) > 1]:
            raise InputError(f"evaluate.by_client has client {twice[0]!r} twice")
        if self._writes_every % self.every:
            raise InputError(
                f"evaluate.generate.every = {self.generate.every}: texts are written in "
                f"evaluations; it must be a multiple of evaluate.every = {self.every}"
            )

    @property
    def metric_of(self) -> dict[str, str]:
        """The metric of each client in ``by_client``."""
        return {name: one.metric for one in self.by_client for name in one.clients}

    @property
    def _writes_every(self) -> int:
        return self.generate.every or 5 * self.every

    def due(self, round_: int, rounds: int) -> bool:
        """Whether round ``round_`` of ``rounds`` is evaluated."""
        return round_ % self.every == 0 or round_ == rounds

    def writes(self, round_: int, rounds: int) -> bool:
        """Whether models write texts in the evaluation of round ``round_``."""
        is_due = round_ % self._writes_every == 0 or round_ == rounds
        return self.generate.examples > 0 and is_due


@dataclass(frozen=True)
class EngineConfig:
    """How clients are run. Executors give the same numbers, up to rounding."""

    executor: Literal["auto", "sequential", "vectorised", "processes"] = "auto"
    # vectorised: clients trained at once; None: 5 on a CPU or a rank, as many as pays on a GPU
    clients_per_step: Few | None = None
    processes: Annotated[int, Gt(0), Le(4096)] | None = None  # at most; None: one a core
    # on a GPU: the kernels of a training are recorded, and played for others of the same shapes
    capture: bool = True
    precision: Precision = "fp32"  # bf16: autocast; parameters stay float32
    # a training step keeps the inputs of transformer blocks alone, and runs these twice
    checkpointing: bool = False
    device: str = "auto"
    upload_memory_mb: Annotated[float, Gt(0), Le(1e9)] = 2000.0  # more of a cohort's go to disk
    # for what a method works out once an example, if all examples' results fit; 0: never
    cache_mb: Annotated[float, Ge(0), Le(1e9)] = 2000.0
    # a client whose numbers are not finite stops the method with that seed, or is left out
    on_divergence: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise InputError(
                f"engine.device = {brief(self.device)}: allowed are 'auto', 'cpu', 'cuda' and "
                "'cuda:1' (a GPU's number)"
            )


@dataclass(frozen=True)
class CohortConfig:
    """Who takes part in a round: a ``fraction`` of the clients, or ``size`` of them."""

    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    size: Clients | None = None  # instead of fraction
    # so many clients, drawn by key, never take part
    novel: Annotated[int, Ge(0), Le(1_000_000_000)] = 0
    # the largest part of a round's weight that a client may have; None: no limit
    max_share: Annotated[float, Gt(0), Le(1)] | None = None
    # asynchronous: the server aggregates once it has so many uploads; None: synchronous rounds
    buffer: Clients | None = None
    # an upload that changes far more than others do is left out, cut down to the bound, or kept
    above_norm: Literal["refuse", "clip", "keep"] = "refuse"
    # the bound; None: by the norms of others
    max_norm: Annotated[float, Gt(0), Le(1e12)] | None = None
    # times the quantile of recent norms
    norm_factor: Annotated[float, Ge(1), Le(1e12)] = USUAL_FACTOR
    norm_quantile: Annotated[float, Gt(0), Lt(1)] = USUAL_QUANTILE

    def count(self, num_clients: int) -> int:
        """The cohort's size, at least 1, of ``num_clients`` that take part."""
        size = self.size if self.size is not None else round(self.fraction * num_clients)
        return max(1, min(size, num_clients))


@dataclass(frozen=True)
class ScheduleConfig:
    """The factor on every learning rate, by round: from 1 towards ``final``, after a warm-up.

    The round after the last would have ``final``, so that the last one still trains. With
    ``within_rounds`` the factor moves in equal steps from each round's to the next one's.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    warmup_rounds: Annotated[int, Ge(0), Le(1_000_000)] = 0
    within_rounds: bool = False

    def factor(self, round_: int, rounds: int) -> float:
        """For round ``round_`` of ``rounds`` (the first is 1).

        >>> [ScheduleConfig("linear").factor(t, 4) for t in (1, 2, 3, 4)]
        [1.0, 0.75, 0.5, 0.25]
        """
        if round_ <= self.warmup_rounds:
            return round_ / (self.warmup_rounds + 1)
        if self.name == "constant":
            return 1.0
        passed = (round_ - self.warmup_rounds - 1) / (rounds - self.warmup_rounds)
        down = passed if self.name == "linear" else (1 - math.cos(math.pi * passed)) / 2
        return 1.0 - (1.0 - self.final) * down


@dataclass(frozen=True)
class Plan:
    """Everything of a run but its data, model and method."""

    rounds: int
    local: LocalConfig = LocalConfig()
    cohort: CohortConfig = CohortConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    attack: AttackConfig = AttackConfig()
    faults: FaultConfig = FaultConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    secure_aggregation: SecureAggregationConfig = SecureAggregationConfig()

    def cohort_size(self, federation: Federation) -> int:
        """How many clients are asked to take part in a round."""
        return self.cohort.count(federation.num_clients - self.cohort.novel)

    @property
    def max_share(self) -> float | None:
        """The largest part of a round's weight that a client may have; None: no limit. Where there
        is noise all have the same weight, so that none changes the mean by more than others."""
        if self.privacy.of_clients:
            return 0.0  # too little for any: all have the same
        return self.cohort.max_share

    def account(self, federation: Federation) -> Account | RecordAccount | None:
        """What the run spends of its clients' privacy; None where there is no noise."""
        if not self.privacy.is_active:
            return None
        if self.privacy.of_records:
            sampling = federation.sampling(self.local, self.cohort.novel)
            return record_account(self.privacy, sampling, self.rounds)
        clients = federation.num_clients - self.cohort.novel
        masked = self.secure_aggregation.is_active
        return account(self.privacy, clients, self.cohort_size(federation), self.rounds, masked)

    def within_budget(self, federation: Federation) -> int:
        """How many rounds ``privacy.stop`` allows; all where it is not set. Raises InputError where
        the first one spends too much."""
        target = self.privacy.epsilon
        if self.privacy.stop is None or target is None:
            return self.rounds
        if self.cohort.novel >= federation.num_clients:
            return self.rounds  # nobody is left, which is said elsewhere
        endless = replace(self, privacy=self.privacy.endless, rounds=1)
        endless.account(federation)  # what is wrong with any number of rounds

        def spent(rounds: int) -> float:
            try:
                account = replace(endless, rounds=rounds).account(federation)
            except InputError:  # so many have too many cohorts of nobody
                return math.inf
            assert account is not None
            return account.spent(rounds).epsilon

        fit = rounds_within(target, spent, self.rounds)
        if fit == 0:
            replace(self, rounds=1).account(federation)  # says why
        return fit

    def privacy_words(self, federation: Federation) -> str:
        """What the run spends of its clients' privacy; empty where there is no noise."""
        account, quantile = self.account(federation), self.privacy.clip_quantile
        if account is None:
            return ""
        words = account.words(self.privacy.bound)
        if quantile is None or isinstance(account, RecordAccount):
            return words
        return (
            f"{words}; the norm moves to the quantile {quantile:g} of all, for "
            f"{100 * (account.update_noise / account.noise - 1):.2g} % more noise"
        )

    @property
    def alone(self) -> Plan:
        """The plan where nothing is sent: nothing is lost, late, waited for, noised or masked."""
        by_client = tuple(
            ClientFaults(one.clients, machine=one.machine) for one in self.faults.by_client
        )
        faults = FaultConfig(machines=self.faults.machines, by_client=by_client)
        cohort = replace(self.cohort, buffer=None)
        return replace(self.in_clear, cohort=cohort, faults=faults)

    @property
    def in_clear(self) -> Plan:
        """The plan without noise and masks."""
        return replace(self, privacy=PrivacyConfig(), secure_aggregation=SecureAggregationConfig())

    def lr_scale(self, rounds: Sequence[int]) -> float:
        """The mean factor on learning rates over ``rounds``."""
        factors = [self.schedule.factor(one, self.rounds) for one in rounds]
        if self.schedule.within_rounds:
            after = self.schedule.factor(rounds[-1] + 1, self.rounds)
            factors = [(a + b) / 2 for a, b in pairwise([*factors, after])]
        return sum(factors) / len(rounds)

    def lr_slope(self, rounds: Sequence[int]) -> float:
        """By how much the factor rises from the beginning of ``rounds`` to their end, as a share of
        its mean; 0 where it is the same for all steps of a round."""
        if not self.schedule.within_rounds:
            return 0.0
        first, last = (
            self.schedule.factor(one, self.rounds) for one in (rounds[0], rounds[-1] + 1)
        )
        return (last - first) / self.lr_scale(rounds)

    def attackers(self, federation: Federation) -> frozenset[int]:
        """The clients that attack."""
        return self.attack.attackers(federation.seed, federation.num_clients)

    def evaluated(self, federation: Federation) -> tuple[int, ...]:
        """The clients that take part and whose models are evaluated: none that attacks."""
        return federation.evaluation_clients(
            self.evaluate.clients, self.cohort.novel, self.attackers(federation)
        )

    def evaluated_and_novel(self, federation: Federation) -> tuple[int, ...]:
        """The clients whose models are evaluated, ascending; novel ones among them."""
        return tuple(sorted({*self.evaluated(federation), *federation.novel(self.cohort.novel)}))
