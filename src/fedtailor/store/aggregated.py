"""A round that is aggregated, and not committed, as its evaluation is still to come.

Under noise or masks a round that is run again, with other clients, would tell more than one: the
noise is the same, and the difference of two sums is that of the clients. So the server keeps what
it has aggregated before it sends anything of it, and goes on from there.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch

from ..data.federation import Federation
from ..engine.costs import Costs
from ..engine.prepare import cohort_of
from ..engine.results import Round
from ..params import add_prefix, aligned, strip_prefix
from .files import load_tensors, record, save_tensors
from .format import damaged
from .lines import history_line
from .records import RoundLine

_ABOUT = "about"  # uint8: the line of the round in history.jsonl, and its costs


def write_aggregated(folder: Path, done: Round) -> None:
    """Keep a round that is not evaluated; the file goes with the next commit."""
    costs = None if done.costs is None else asdict(done.costs)
    about = json.dumps({**history_line(done, {}), "costs": costs}).encode()
    tensors = {name: value.cpu() for name, value in add_prefix(done.server, "server/").items()}
    tensors[_ABOUT] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    save_tensors(_path(folder, done.number), tensors)


def read_aggregated(folder: Path, number: int, federation: Federation) -> Round | None:
    """Return what was kept of a round; None if nothing was."""
    path = _path(folder, number)
    if not path.exists():
        return None
    tensors = load_tensors(path)
    try:
        about = json.loads(bytes(tensors[_ABOUT].tolist()))
        costs = about.pop("costs")
    except (LookupError, ValueError):
        raise damaged(path, "it must say what the round has cost") from None
    line = record(RoundLine, about, str(path))
    return Round(
        number=number,
        server=aligned(strip_prefix(tensors, "server/")),
        cohort=cohort_of(federation, number, tuple(line.cohort)),
        evaluations=(),
        diagnostics={},
        seconds={},
        executor=None,
        losses=tuple(math.nan if loss is None else loss for loss in line.losses),
        steps=tuple(line.steps),
        lr_scale=line.lr_scale,
        trained=line.num_trained,
        trained_steps=line.num_steps,
        bytes_down=line.bytes_down,
        bytes_up=line.bytes_up,
        costs=None if costs is None else record(Costs, costs, f"{path}: costs"),
        notes=tuple(line.notes),
        norms=tuple(line.norms),
        clip=line.clip,
        next_clip=line.next_clip,
    )


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}-aggregated.safetensors"
