"""From a cohort's uploads to the server's next state.

Uploads are stacked, in memory or memory-mapped; where a method needs only their weighted mean, they
are added up as they come.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .. import random
from ..errors import DivergedError, InputError
from ..method import Cohort, Method, Server, checked_weights
from ..params import Params, aligned, clone, not_finite, pick, to_device, too_large
from ..robustness.before import changed
from ..robustness.combine import combined
from ..robustness.rules import Robust
from ..stacked import GROUP, accumulation_dtype, weighted_sum
from ..task.task import Task
from .config import Plan
from .forms import check_like

MOST = 1e18  # of a value of the server's state


class UploadStack:
    """A cohort's uploads, stacked ``[c, ...]``; memory-mapped in ``folder``, by default the
    one for temporary files, if they take more than ``limit`` bytes. The files there have no names,
    so nothing of them is left after a kill."""

    def __init__(self, cohort_size: int, limit: float, folder: Path | None = None) -> None:
        self._size = cohort_size
        self._limit = limit
        self._folder = folder
        self.params: Params = {}

    def put(self, position: int, upload: Params) -> None:
        """Set row ``position``."""
        if not self.params:
            nbytes = self._size * sum(v.numel() * v.element_size() for v in upload.values())
            on_disk = nbytes > self._limit
            for name, value in upload.items():
                self.params[name] = self._allocate(value, on_disk)
        for name, value in upload.items():
            self.params[name][position].copy_(value)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in ascending order. They move up in place: nothing is copied from
        the disk to memory."""
        for name, value in self.params.items():
            for at, row in enumerate(rows):
                if at != row:
                    value[at].copy_(value[row])
            self.params[name] = value[: len(rows)]

    def upload(self, index: int) -> Params:
        """The upload in row ``index``, as views."""
        return {name: value[index] for name, value in self.params.items()}

    def largest(self, rows: Sequence[int]) -> int:
        """Of these rows, the one that holds the value of the largest size."""
        return rows[_place_of_largest(self.upload(row).values() for row in rows)]

    def _allocate(self, like: Tensor, on_disk: bool) -> Tensor:
        shape = (self._size, *like.shape)
        if not on_disk:
            return like.new_empty(shape)
        size = self._size * like.numel()
        descriptor, path = tempfile.mkstemp(prefix="fedtailor-", dir=self._folder)
        try:
            _reserve(descriptor, path, size * like.element_size())
            return torch.from_file(path, shared=True, size=size, dtype=like.dtype).view(shape)
        finally:
            os.close(descriptor)
            Path(path).unlink()


def _reserve(descriptor: int, path: str, nbytes: int) -> None:
    """Let a file have room for ``nbytes``: on a full disk, writing to a memory map would end the
    process."""
    if nbytes == 0 or not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: uploads need {nbytes} bytes", path) from None


class UploadMean:
    """The weighted mean of a cohort's uploads as one row, ``[1, ...]``.

    Uploads are added in an ``order`` of positions that is the same under every executor, and then
    forgotten. An upload that comes early is kept until those before it have come. ``weights``
    ``[c]``, by position, have the sum 1. They are None as long as members may turn out to be
    missing: then every upload is kept, and added by `weigh`. Sums are those of
    `stacked.weighted_sum`.
    """

    def __init__(self, order: Sequence[int], weights: Tensor | None = None) -> None:
        self._order = list(order)
        self.keeps = weights is None
        self._weights: dict[int, float] = {}
        self._early: dict[int, Params] = {}  # by position
        self._added = 0
        self._group: Params = {}
        self._total: Params = {}
        self._dtypes: dict[str, torch.dtype] = {}
        if weights is not None:
            self.weigh(range(len(self._order)), weights)

    def put(self, position: int, upload: Params) -> None:
        """Add the upload of ``position``, or keep a copy of it until its turn."""
        if not self._weights or position != self._order[self._added]:
            self._early[position] = clone(upload)
            return
        self._add(position, upload)
        self._add_early()

    def weigh(self, present: Sequence[int], weights: Tensor) -> None:
        """Take the mean of the members at these positions, ascending, with their ``weights``. Where
        all uploads are kept, it can be taken again of fewer members."""
        self._weights = dict(zip(present, weights.tolist(), strict=True))
        self._order = [position for position in self._order if position in self._weights]
        self._added, self._group, self._total = 0, {}, {}
        self._add_early()

    def upload(self, index: int) -> Params:
        """The upload at ``index`` among those that are there, where all are kept."""
        return self._early[sorted(self._early)[index]]

    def largest(self) -> int:
        """The place, among those of `weigh`, of the upload with the value of the largest size."""
        return _place_of_largest(self._early[position].values() for position in self._weights)

    def _add_early(self) -> None:
        while self._added < len(self._order) and self._order[self._added] in self._early:
            position = self._order[self._added]
            self._add(position, self._early[position])
            if not self.keeps:
                del self._early[position]

    def _add(self, position: int, upload: Params) -> None:
        for name, value in upload.items():
            if self._added == 0:
                self._dtypes[name] = value.dtype
                self._group[name] = torch.zeros_like(value, dtype=accumulation_dtype(value.dtype))
            sum_ = self._group[name]
            sum_.add_(value.to(sum_.dtype), alpha=self._weights[position])
        self._added += 1
        if self._added % GROUP == 0:
            self._total = self._sums()
            self._group = {name: torch.zeros_like(part) for name, part in self._group.items()}

    def _sums(self) -> Params:
        """float64."""
        if not self._total:
            return {name: part.double() for name, part in self._group.items()}
        return {name: self._total[name] + part for name, part in self._group.items()}

    @property
    def params(self) -> Params:
        """The mean ``[1, ...]``, of the uploads' dtypes."""
        return {name: value.to(self._dtypes[name])[None] for name, value in self._sums().items()}


Uploads = UploadStack | UploadMean


def _place_of_largest(uploads: Iterable[Iterable[Tensor]]) -> int:
    sizes = [max(float(v.double().abs().max()) for v in one if v.numel()) for one in uploads]
    return sizes.index(max(sizes))


def training_order(num_batches: Sequence[int]) -> list[int]:
    """The positions of a cohort's members in the order in which they are trained and, for a mean,
    added up: by number of batches, so that clients of equal length run together with less padding.

    >>> training_order([5, 2, 5, 1])
    [3, 1, 0, 2]
    """
    return sorted(range(len(num_batches)), key=lambda at: (num_batches[at], at))


def empty_uploads(
    method: Method,
    cohort: Cohort,
    num_batches: Sequence[int],
    plan: Plan,
    *,
    complete: bool,
    attacked: bool,
) -> Uploads:
    """The place for a cohort's uploads until `next_state`. The cohort is ``complete`` if a round
    without one of its members comes to nothing, or is taken again: then uploads can be weighed as
    they come, unless they are ``attacked``."""
    if method.needs_only_mean and not method.robust.is_active and not attacked:
        weighed = cohort.with_max_share(plan.cohort.max_share)
        weights = checked_weights(method, weighed) if complete else None
        return UploadMean(training_order(num_batches), weights)
    return UploadStack(len(cohort.clients), plan.engine.upload_memory_mb * 1e6)


@dataclass(frozen=True)
class NextState:
    """The ``server``'s next state, the ``present`` positions of the cohort's members that the round
    counts, why it went on without the others, by position, and what else is to be told."""

    server: Server
    present: tuple[int, ...]
    left_out: dict[int, str]
    notes: tuple[str, ...]


def next_state(
    method: Method,
    task: Task,
    server: Server,
    uploads: Uploads,
    cohort: Cohort,
    present: Sequence[int],
    *,
    least: int,
    max_share: float | None = None,
    screen: Callable[[Uploads, Cohort], dict[int, str]] | None = None,
) -> NextState:
    """Aggregate the uploads of the members at these positions, ascending, none of which has more
    than ``max_share`` of the weight.

    First they go through the ``screen``, which may change them in place and says which rows are to
    be left out, and why. A result that is not finite, or above `MOST`, is taken again without the
    upload that makes such a result alone, or else without the one that has the largest value, until
    it can be used, as long as ``least`` members are left.

    Raises:
        TooFewUploadsError: they are too few for the method's robust rule.
        DivergedError: the result can't be used, and too few would be left without the worst ones.
    """
    if len(present) < len(cohort.clients) and isinstance(uploads, UploadStack):
        uploads.keep(present)
    refused = screen(uploads, cohort.subset(torch.tensor(present))) if screen is not None else {}
    left_out = {present[index]: reason for index, reason in refused.items()}
    if refused and isinstance(uploads, UploadStack):
        uploads.keep([index for index in range(len(present)) if index not in refused])
    counted = [position for position in present if position not in left_out]

    def leave_out(used: list[int], members: Cohort, problem: str) -> None:
        if len(counted) <= max(1, least) or len(used) == 1:
            raise DivergedError(problem)
        if isinstance(uploads, UploadStack):
            worst = _worst(method, task, server, uploads, members)
        else:
            worst = uploads.largest()
        left_out[used[worst]] = f"with its upload, {problem}"
        counted.remove(used.pop(worst))
        if isinstance(uploads, UploadStack):
            uploads.keep([row for row in range(len(used) + 1) if row != worst])

    full = method.robust
    while True:  # until each upload is used as it is, or a rule makes one of all
        rule, used = full.among(len(counted)), list(counted)
        method, notes = replace(method, robust=rule), _weakened(rule, full, counted, cohort)
        if not (isinstance(uploads, UploadStack) and rule.is_active):
            break
        members = cohort.subset(torch.tensor(counted))
        one, rows = _robust(method, task, server, uploads, members)
        if one is None:
            used = [counted[row] for row in rows]
            break
        state, problem = _aggregate(method, task, server, one, members.pooled())
        if problem is None:
            return NextState(state, tuple(counted), left_out, notes)
        leave_out(used, members, problem)
    while True:
        members = cohort.subset(torch.tensor(used)).with_max_share(max_share)
        if isinstance(uploads, UploadMean) and uploads.keeps:
            uploads.weigh(used, checked_weights(method, members))
        each = members if isinstance(uploads, UploadStack) else members.pooled()
        state, problem = _aggregate(method, task, server, uploads.params, each)
        if problem is None:
            return NextState(state, tuple(counted), left_out, notes)
        leave_out(used, members, problem)


def _weakened(
    rule: Robust, full: Robust, counted: Sequence[int], cohort: Cohort
) -> tuple[str, ...]:
    """In words that the ``rule`` of a round withstands fewer attackers than the ``full`` one."""
    if rule.attackers == full.attackers:
        return ()
    return (
        f"{len(counted)} of {len(cohort.clients)} uploads are there: the rule withstands "
        f"{rule.attackers} false ones, not {full.attackers}",
    )


def _worst(method: Method, task: Task, server: Server, uploads: UploadStack, cohort: Cohort) -> int:
    """The row to be left out of uploads that make a state that can't be used: of those that do so
    alone, or else of all, the one that has the largest value."""
    rows = range(len(cohort.clients))
    alone = []
    for row in rows:
        params = {name: value[row : row + 1] for name, value in uploads.params.items()}
        member = cohort.subset(torch.tensor([row]))
        if _aggregate(method, task, server, params, member)[1] is not None:
            alone.append(row)
    return uploads.largest(alone or rows)


def _robust(
    method: Method, task: Task, server: Server, uploads: UploadStack, cohort: Cohort
) -> tuple[Params | None, list[int]]:
    """What a robust rule leaves of the uploads: one in the place of all, ``[1, ...]``; or None, and
    the rows that are left in ``uploads``."""
    robust, params = method.robust, uploads.params
    floats = {name: value for name, value in params.items() if value.is_floating_point()}
    if "nnm" in robust.before and len(floats) < len(params):
        raise InputError(
            f"robust.before has 'nnm', which takes means, and {method.name} also sends "
            f"{min(params.keys() - floats.keys())}, which has none; allowed: 'clip'"
        )
    # running statistics would drown what clients ask for: they are far larger than updates
    scored = [name for name in floats if name not in task.buffers]
    state = {}
    if robust.needs_state:
        own = method.unchanged(task, server, {name: value[0] for name, value in floats.items()})
        state = {name: value.to(floats[name].device) for name, value in own.items()}
    for name in floats.keys() - set(scored):
        floats[name] = robust.bound(floats[name])
    order = random.uniform(cohort.key, (len(cohort.clients),)).argsort()
    floats = changed(robust, floats, state, scored, order)
    if robust.combines:
        return _row(combined(robust, floats, state, scored)), []
    rows = robust.select(pick(floats, scored))
    if "bucketing" in robust.before:
        kept = floats if rows is None else {name: value[rows] for name, value in floats.items()}
        count = len(next(iter(kept.values())))
        return _row(weighted_sum(kept, torch.full((count,), 1 / count))), []
    params |= floats
    if rows is None:
        return None, list(range(len(cohort.clients)))
    selected: list[int] = rows.tolist()
    uploads.keep(selected)
    return None, selected


def _row(upload: Params) -> Params:
    """One upload, as stacked ones ``[1, ...]``."""
    return {name: value[None] for name, value in upload.items()}


def _aggregate(
    method: Method, task: Task, server: Server, uploads: Params, cohort: Cohort
) -> tuple[Server, str | None]:
    """The server's next state, on the task's device, and in words why it can't be used, if so.

    It is computed where the uploads are: on the task's device, or on the CPU if they are on disk.
    """
    device = next((value.device for value in uploads.values()), task.device)
    try:
        state = method.aggregate(task, to_device(server, device), uploads, cohort)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of values so large that a system of equations is singular
        return server, "the server's next state can't be computed"
    if cohort.round == 1:
        check_like(method, "aggregate", state, server)
    return aligned(to_device(state, task.device)), _problem(state)


def _problem(state: Server) -> str | None:
    """In words what of a state can't be used: it is not finite, or so large that squares overflow
    in float32, and the next round's numbers with them."""
    if (large := too_large(state, MOST)) is None:
        return None
    if (name := not_finite(state)) is not None:
        return f"{name} of the server's next state is not finite"
    return f"{large} of the server's next state has values above {MOST:g}"
