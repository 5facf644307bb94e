"""What models have written, side by side: the base, the global model and some clients'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..store.read import read_samples
from ..store.records import Sample
from .select import Entry, reported


@dataclass(frozen=True)
class ShownSample:
    """A prompt of a client's validation examples, the right answer, and what each model answers:
    its name in words, and the text."""

    prompt: str
    of: str
    reference: str
    answers: tuple[tuple[str, str], ...]


def in_words(samples: Sequence[Sample], names: Sequence[str]) -> tuple[ShownSample, ...]:
    """Return samples with words for the models; ``names`` are those of clients, if any."""

    def name(client: int) -> str:
        return names[client] if client < len(names) else f"client {client}"

    def answers(one: Sample) -> Iterator[tuple[str, str]]:
        for key, text in one.answers.items():
            shared = key in ("base", "global")
            yield f"{key} model" if shared else f"{name(int(key))}'s model", text

    return tuple(
        ShownSample(one.prompt, name(one.client), one.reference, tuple(answers(one)))
        for one in samples
    )


def method_samples(entries: Sequence[Entry]) -> dict[str, Sequence[ShownSample]]:
    """Return by title what each method's models have written, with the first seed, after the round
    that is closest to the reported one; without methods that have written nothing."""
    found = dict[str, Sequence[ShownSample]]()
    for entry in entries:
        for trial, selected in reported(entry)[:1]:
            last = trial.commit.round
            number, samples = read_samples(trial.folder, selected.round, last)
            if samples:
                names = entry.run.partitions[trial.seed].names or ()
                title = f"{entry.label}, after round {number}"
                found[title] = in_words(samples, names)
    return found
