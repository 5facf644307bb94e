"""From a cohort's uploads to the server's next state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import DivergedError
from ..method import Cohort, Method, Server, checked_weights
from ..params import Params, aligned, not_finite, to_device, too_large
from ..task.task import Task
from ..uploads.chain import Chain, UploadContext
from ..uploads.collected import UploadMean, Uploads
from .forms import check_like

MOST = 1e18  # of a value of the server's state


def training_order(num_batches: Sequence[int]) -> list[int]:
    """The positions of a cohort's members in the order in which they are trained and, for a mean,
    added up: by number of batches, so that clients of equal length run together with less padding.

    >>> training_order([5, 2, 5, 1])
    [3, 1, 0, 2]
    """
    return sorted(range(len(num_batches)), key=lambda at: (num_batches[at], at))


@dataclass(frozen=True)
class NextState:
    """The ``server``'s next state, the ``present`` positions of the cohort's members that the round
    counts, why it went on without others, by client, and what else is to be told."""

    server: Server
    present: tuple[int, ...]
    left_out: dict[int, str]
    notes: tuple[str, ...]


def next_state(
    method: Method,
    task: Task,
    chain: Chain,
    uploads: Uploads,
    cohort: Cohort,
    at: UploadContext,
    least: int,
    max_share: float | None = None,
) -> NextState:
    """Let the uploads, those of ``at.clients`` in the order of the ``cohort``, pass the ``chain``
    and aggregate them.

    A result that can't be used is taken again without the upload that makes such a result alone, or
    else without the one that has the largest value, as long as ``least`` members are left; then
    DivergedError, or TooFewUploadsError if a link of the chain needs more."""
    chain.check(len(at.clients))
    positions = {client: position for position, client in enumerate(cohort.clients)}
    unused = chain.gather(uploads, at)
    left_out = {client: reason for client, reason in unused.items() if reason is not None}
    used = [client for client in at.clients if client not in unused]
    while True:
        members = cohort.subset(torch.tensor([positions[client] for client in used]))
        members = members.with_max_share(max_share)
        if isinstance(uploads, UploadMean) and uploads.keeps:
            uploads.weigh(checked_weights(method, members))
        params = chain.total(uploads.params, replace(at, clients=members.clients))
        each = all(len(value) == len(used) for value in params.values())
        aggregated = members if each else members.pooled()
        state, problem = _aggregate(method, task, at.state, params, aggregated)
        counted = [client for client in at.clients if client not in left_out]
        if problem is None:
            present = tuple(positions[client] for client in counted)
            return NextState(state, present, left_out, chain.notes)
        if len(counted) <= max(1, least) or len(used) == 1:
            raise DivergedError(problem)
        worst = _worst(method, task, at.state, uploads, members)
        left_out[used.pop(worst)] = f"with its upload, {problem}"
        uploads.keep([row for row in range(len(members.clients)) if row != worst])


def _worst(method: Method, task: Task, server: Server, uploads: Uploads, cohort: Cohort) -> int:
    """The row to be left out of uploads that make a state that can't be used: of those that do so
    alone, or else of all, the one that has the largest value."""
    alone, sizes = [], []
    for row in range(len(cohort.clients)):
        upload = uploads.upload(row)
        sizes.append(max(float(v.double().abs().max()) for v in upload.values() if v.numel()))
        params = {name: value[None] for name, value in upload.items()}
        member = cohort.subset(torch.tensor([row]))
        alone.append(_aggregate(method, task, server, params, member)[1] is not None)
    rows = [row for row in range(len(sizes)) if alone[row]] or range(len(sizes))
    return max(rows, key=lambda row: sizes[row])


def _aggregate(
    method: Method, task: Task, server: Server, uploads: Params, cohort: Cohort
) -> tuple[Server, str | None]:
    """The server's next state, computed where the uploads are, and why it can't be used, if so."""
    device = next((value.device for value in uploads.values()), task.device)
    try:
        state = method.aggregate(task, to_device(server, device), uploads, cohort)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of values so large that a system of equations is singular
        return server, "the server's next state can't be computed"
    check_like(method, "aggregate", state, server)
    return aligned(to_device(state, task.device)), _problem(state)


def _problem(state: Server) -> str | None:
    """What of a state can't be used: not finite, or so large that squares overflow in float32."""
    if (large := too_large(state, MOST)) is None:
        return None
    if (name := not_finite(state)) is not None:
        return f"{name} of the server's next state is not finite"
    return f"{large} of the server's next state has values above {MOST:g}"
