"""What uploads go through before they are aggregated: attacks in simulation, the bound on norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .. import random
from ..data.federation import Federation
from ..errors import TooFewLeftError
from ..method import Cohort, Method, Server
from ..params import Params
from ..robustness.attacks import attack_uploads
from ..robustness.norms import RECENT, NormBound, clip, total_norm, update_norm
from ..task.task import Task
from .aggregation import Uploads, UploadStack
from .config import Plan

_FAR = 1_000_000  # times the norm of the server's state


@dataclass
class Screen:
    """The norms of a round's uploads, by client, and what becomes of those above the bound.
    ``recent_norms`` are those of the uploads that the last rounds counted, too."""

    method: Method
    task: Task
    federation: Federation
    plan: Plan
    recent_norms: Sequence[Mapping[int, float]] = ()
    norms: dict[int, float] = field(default_factory=dict)

    @property
    def bound(self) -> NormBound:
        """The bound of the round. As long as too few norms are known to set it, it is a million
        times the norm of the server's state, or a million where that is less than 1."""
        bound = self.plan.cohort.norm_bound(self.recent_norms)
        if bound.largest is not None or bound.is_known:
            return bound
        return replace(bound, first=_FAR * max(1.0, total_norm(self._server)))

    def begin(self, server: Server) -> None:
        """Begin a round from ``server``."""
        self._server, self.norms = server, {}

    def measure(self, client: int, upload: Params) -> None:
        """Take the norm of a client's upload, if there is a bound on it."""
        if self.plan.cohort.above_norm == "keep":
            return
        self.norms[client] = update_norm(upload, self._unchanged(upload))

    def above(self) -> list[int]:
        """The clients whose uploads are above the bound, ascending."""
        clients = sorted(self.norms)
        return [clients[at] for at in self.bound.above_limit([self.norms[k] for k in clients])]

    def __call__(self, uploads: Uploads, cohort: Cohort, least: int) -> dict[int, str]:
        """Change what attackers send and clip what is above the bound, in place; returns the rows
        to be left out, and why. The ``cohort`` has the members whose uploads are there.

        Raises:
            TooFewLeftError: fewer than ``least`` would be left.
        """
        if isinstance(uploads, UploadStack):
            self._attack(uploads, cohort)
        if not (above := self.above()):
            return {}
        rows = {client: cohort.clients.index(client) for client in above}
        limit = self.bound.limit(list(self.norms.values()))
        if self.plan.cohort.above_norm == "clip":
            for client, row in rows.items():
                upload = uploads.upload(row)
                clip(upload, self._unchanged(upload), limit / self.norms[client])
            return {}
        size = len(cohort.clients)
        if size - len(above) < max(1, least):
            raise TooFewLeftError(
                f"the norms of {len(above)} of {size} uploads are above {limit:.3g} "
                f"(cohort.max_norm, norm_factor), {size - len(above)} are left and {least} needed"
            )
        reason = "the norm of its upload, {:.3g}, is above the bound of {:.3g}"
        return {row: reason.format(self.norms[client], limit) for client, row in rows.items()}

    def close(self, cohort: Cohort) -> tuple[float, ...]:
        """End a round that counts these members; their norms."""
        counted = {client: self.norms[client] for client in cohort.clients if self.norms}
        self.recent_norms = [*self.recent_norms, counted][-RECENT:]
        return tuple(counted.values())

    def _unchanged(self, upload: Params) -> Params:
        return self.method.unchanged(self.task, self._server, upload)

    def _attack(self, uploads: UploadStack, cohort: Cohort) -> None:
        """Put what attackers send into ``uploads``, and measure that."""
        attack, attackers = self.plan.attack, self.plan.attackers(self.federation)
        rows = [row for row, client in enumerate(cohort.clients) if client in attackers]
        if not attack.on_uploads or not rows or not attack.is_on(cohort.round):
            return
        attacked = {
            name: value
            for name, value in uploads.params.items()
            if value.is_floating_point() and name not in self.task.buffers
        }
        like = {name: value[0] for name, value in attacked.items()}
        key = random.key(self.federation.seed, cohort.round, "attack")
        attack_uploads(
            attack, attacked, self.method.unchanged(self.task, self._server, like), rows, key
        )
        for row in rows:
            self.measure(cohort.clients[row], uploads.upload(row))
