"""The lines of a round in the logs of a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..engine.costs import peak_memory_mb
from ..engine.results import Round, RoundFaults
from ..engine.scoring import Evaluation
from ..params import Params

_MAX_NAMED = 100  # clients of a line of clients.jsonl, which names them


def history_line(done: Round, bounds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of ``history.jsonl``. ``bounds``: the settings that bound the norms of
    uploads, where they are others than in the line before."""
    trained = {"trained": done.trained, "trained_steps": done.trained_steps}
    all_count = done.faults is None and done.trained == len(done.cohort.clients)
    return {
        "round": done.number,
        "cohort": list(done.cohort.clients),
        "train_loss": done.train_loss,
        "losses": list(done.losses),
        "steps": list(done.steps),
        "lr_scale": done.lr_scale,
        "bytes_down": done.bytes_down,
        "bytes_up": done.bytes_up,
        **({} if all_count else trained),
        **({} if done.privacy is None else asdict(done.privacy)),
        **({} if done.clip is None else {"clip": done.clip, "next_clip": done.next_clip}),
        **({"norms": list(done.norms)} if done.norms else {}),
        **({"bounds": dict(bounds)} if bounds else {}),
        **({"notes": list(done.notes)} if done.notes else {}),
        **({} if done.faults is None else _faults(done.faults)),
    }


def _faults(faults: RoundFaults) -> dict[str, Any]:
    line = asdict(faults)
    del line["versions"]
    optional = {"simulated_seconds": line.pop("seconds"), "staleness": line.pop("staleness")}
    return {**line, **{name: value for name, value in optional.items() if value is not None}}


def clients_line(
    done: Round, evaluation: Evaluation, names: Sequence[str] | None
) -> dict[str, Any]:
    """Return the line of ``clients.jsonl``; ``names`` are those of all clients."""
    line = {"round": done.number, **vars(evaluation)}
    del line["confusion"]
    if not line["metrics"]:  # none were asked for
        del line["metrics"]
    if names is not None and len(evaluation.clients) <= _MAX_NAMED:
        line["names"] = [names[client] for client in evaluation.clients]
    return line


def confusion_of(done: Round) -> Params:
    """``MODEL/SPLIT`` ``[n, classes, classes]`` and the clients ``MODEL/clients`` ``[n]``."""
    tensors: Params = {}
    for one in done.evaluations:
        if one.confusion is not None:
            tensors[f"{one.model}/{one.split}"] = torch.from_numpy(one.confusion).int()
            tensors[f"{one.model}/clients"] = torch.tensor(one.clients)
    return tensors


def timings_line(done: Round, files: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the line of ``timings.jsonl``; ``files`` are those that the round has written and no
    later round replaces, by name with the checksums of tensors."""
    return {
        "round": done.number,
        "seconds": {name: round(value, 4) for name, value in done.seconds.items()},
        "executor": done.executor,
        "cpu_seconds": None if done.cpu_seconds is None else round(done.cpu_seconds, 4),
        "peak_memory_mb": round(peak_memory_mb(), 1),
        "files": dict(files),
    }
