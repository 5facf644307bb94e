"""Messages between server and sites, mutated, as `benchmarks.fuzz` tries them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .mutations import Attempt, Change, cut, flipped, read, swapped


def wire(folder: Path) -> Attempt:
    """Unpack mutated messages; the checksum of most of them is right."""
    import torch
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedtailor.flower import codec, messages
    from fedtailor.params import encode

    tensors = {"w": torch.randn(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    metrics = (messages.MetricValues((0.5, None)),) * 2
    sums = ((1.5, 3, 4), (2.5, 1, 4))
    results = (
        messages.ClientReply(0, payload=0, loss=0.5),
        messages.ClientReply(1, sums=sums, metrics=metrics),
        messages.ClientReply(2, error="no data", diverged=True),
    )
    head, example = messages.RoundReply, asdict(messages.RoundReply("r", 3, "train", results))
    limits = codec.Limits(1 << 16, 4, 1 << 16)
    text, data = json.dumps(example), encode(tensors)

    def attempt(rng: random.Random) -> Change:
        kind, names, one, changed = head.__name__, json.dumps([list(tensors)]), text, data
        way = rng.randrange(4)
        if way == 0:
            value, change = swapped(rng, example)
            one = json.dumps(value)
        elif way == 1:
            changed, change = rng.choice([flipped, cut])(rng, data)
        elif way == 2:
            value, change = swapped(rng, [list(tensors)])
            names = json.dumps(value)
        else:
            raw, change = rng.choice([flipped, cut])(rng, one.encode())
            one = raw.decode("utf-8", "surrogateescape" if rng.random() < 0.1 else "replace")
        texts = [kind, one, names]
        try:
            texts.append(codec._checksum(texts, [changed]) if rng.random() < 0.9 else "0")
        except UnicodeEncodeError:
            texts.append("0")
        about: Any = {"schema": codec.SCHEMA, **dict(zip(codec._TEXTS, texts, strict=True))}
        arrays = {"0": Array("uint8", (len(changed),), "safetensors", changed)}
        content = RecordDict({"about": ConfigRecord(about), "payloads": ArrayRecord(arrays)})
        read(lambda: codec.unpack(content, head, limits))
        return replace(change, place=f"{('head', 'tensors', 'names', 'head')[way]} {change.place}")

    return attempt


def answers(folder: Path) -> Attempt:
    raise NotImplementedError


def requests(folder: Path) -> Attempt:
    raise NotImplementedError
