"""What a run is going to do: its clients, data, model and methods, and what that will cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from ..store.format import as_json
from ..units import in_words, si


@dataclass(frozen=True)
class MethodSummary:
    """What a method costs. Scalars and bytes are those of one client in a round; seconds and
    ``bytes_total`` are estimates."""

    label: str
    trained: int
    communicated: int
    private: int
    bytes_down: int
    bytes_up: int
    step_seconds: float
    round_seconds: float
    rounds: int  # that are left, over all seeds
    cache_seconds: float  # of what is worked out once an example, with all seeds
    bytes_total: float
    upload_bytes: float  # that the server holds in a round
    private_bytes: float  # on disk, for all clients and seeds
    short_batches: int = 0  # clients with a batch that is too small to train on


@dataclass(frozen=True)
class TrialSummary:
    """A method with a seed; ``left`` are its rounds that will be trained, 0 if it has ended."""

    label: str
    seed: int
    left: int


@dataclass(frozen=True)
class Sizes:
    """The examples of a client."""

    least: int
    median: float
    most: int


@dataclass(frozen=True)
class StartSummary:
    """What is known before the first round; ``methods`` is empty where the data lie elsewhere."""

    name: str
    data: str
    rows: int
    test_rows: int  # of the official test split
    client_rows: int  # that some client has, of both
    pair: Sequence[str]  # the columns of an input that is two texts
    targets: str  # what the kind of task says of them
    tokens: Sizes | None  # of a sequence; None: pictures, or data that lie elsewhere
    max_length: int  # of a sequence; 0: unknown
    clients: int
    client_names: Sequence[str]  # a few of them, at most; empty: they have none
    train: Sizes
    test: Sizes
    cohort: int
    evaluated: int
    omissions: Sequence[str]
    model: str
    parameters: int
    device: str
    executor: str
    rounds: int
    seeds: Sequence[int]
    trials: Sequence[TrialSummary]
    methods: Sequence[MethodSummary]
    hints: Sequence[str]
    memory_mb: float
    processes: int  # that may train at the same time, each with memory of its own
    texts: str = ""  # what models write in evaluations
    privacy: str = ""  # what the run spends of a client's privacy; empty: there is no noise
    masks: str = ""  # what secure aggregation hides; empty: there is none

    @property
    def seconds(self) -> float:
        """The estimated time of all rounds that are left, on cores that do nothing else."""
        return sum(one.rounds * one.round_seconds + one.cache_seconds for one in self.methods)

    @property
    def seconds_if_busy(self) -> float:
        """The same where other programs take half of the cores: half as many clients train at a
        time. One process finds a core that is free."""
        return self.seconds * (2 if self.processes > 1 else 1)

    def lines(self) -> list[str]:
        """Return the summary as text."""
        left = sum(one.rounds for one in self.methods)
        labels = ", ".join(one.label for one in self.methods)
        more = f"; {left} rounds in all: {labels}" if labels else ""
        scope = f"rounds {self.rounds}, seeds {', '.join(map(str, self.seeds))}{more}"
        return [f"{self.name}: {scope}", *(f"  {line}" for line in self._details())]

    def as_json(self) -> str:
        """Return the summary as JSON."""
        times = {"seconds": self.seconds, "seconds_if_busy": self.seconds_if_busy}
        return as_json({**asdict(self), **times}, 2)

    def _details(self) -> Iterator[str]:
        yield from self._progress()
        targets = f"; {self.targets}" if self.targets else ""
        test = f" and {self.test_rows:,} test rows" if self.test_rows else ""
        rows = f", {self.rows:,} rows{test}" if self.rows else ""
        if 0 < self.client_rows < self.rows + self.test_rows:
            rows += f", of which the clients have {self.client_rows:,}"
        yield f"data      {self.data}{rows}{targets}"
        if self.pair:
            yield f"          an input is a pair: {' and '.join(map(repr, self.pair))}"
        if self.tokens is not None:
            cut = f"; at most {self.max_length:,} are read" if self.max_length else ""
            yield f"          tokens of a text (least, median, most): {_sizes(self.tokens)}{cut}"
        for text in self.omissions:
            yield f"          {text}"
        names = f": {', '.join(self.client_names)}" if self.client_names else ""
        yield f"clients   {self.clients:,}{names}"
        yield (
            f"          examples of a client (least, median, most): train {_sizes(self.train)}; "
            f"test {_sizes(self.test)}"
        )
        yield f"          {self.cohort:,} train in a round; {self.evaluated:,} are evaluated"
        for what in ("texts", "privacy", "masks"):
            if text := getattr(self, what):
                yield f"{what:<10}{text}"
        yield f"model     {self.model}, {self.parameters:,} parameters"
        yield f"executor  {self.executor}, on {self.device}"
        if self.methods:
            yield from self._costs().splitlines()
            yield from (f"hint      {text}" for text in self.hints)
            total = sum(one.bytes_total for one in self.methods)
            more = "; writing the texts comes on top" if self.texts else ""
            yield f"time      about {self._time()} (from one client's step{more})"
            yield f"bytes     about {si(total, 'B')} between the server and the clients"
            yield f"memory    {self._memory()}"

    def _progress(self) -> Iterator[str]:
        """What is there already, and what will be trained; nothing for a new run."""
        if all(trial.left == self.rounds for trial in self.trials):
            return
        done, todo = dict[int, list[str]](), dict[int, list[str]]()
        for trial in self.trials:
            first = self.rounds - trial.left + 1
            which = f" (from round {first})" if 1 < first <= self.rounds else ""
            (todo if trial.left else done).setdefault(trial.seed, []).append(trial.label + which)
        for name, by_seed in (("done", done), ("to train", todo)):
            texts = [f"seed {seed}: {', '.join(labels)}" for seed, labels in by_seed.items()]
            if texts or name == "to train":
                yield f"{name:<10}{'; '.join(texts) or 'nothing'}"

    def _time(self) -> str:
        if self.processes == 1:
            return in_words(self.seconds)
        idle, busy = in_words(self.seconds), in_words(self.seconds_if_busy)
        return f"{idle} on {self.processes} idle cores, {busy} if half of them are busy"

    def _memory(self) -> str:
        uploads = max(one.upload_bytes for one in self.methods)
        private = sum(one.private_bytes for one in self.methods)
        disk = f"; private states take up to {si(private, 'B')} on disk" if private else ""
        one = f"{si(1e6 * self.memory_mb, 'B')} with data, model and one step"
        each = f", and up to as much in each of {self.processes} processes"
        more = f"a round's uploads take {si(uploads, 'B')} more{disk}"
        return f"{one}{each if self.processes > 1 else ''}; {more}"

    def _costs(self) -> str:
        header = [
            "method", "trained", "communicated", "private", "down", "up", "a step", "a round",
        ]  # fmt: skip
        cells = []
        for one in self.methods:
            sizes = map(si, (one.trained, one.communicated, one.private))
            traffic = si(one.bytes_down, "B"), si(one.bytes_up, "B")
            times = map(_short, (one.step_seconds, one.round_seconds))
            cells.append([one.label, *sizes, *traffic, *times])
        align = ["left"] + ["right"] * (len(header) - 1)
        return tabulate(cells, headers=header, colalign=align, disable_numparse=True)


def _sizes(sizes: Sizes) -> str:
    return f"{sizes.least:,}, {sizes.median:,.0f}, {sizes.most:,}"


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
