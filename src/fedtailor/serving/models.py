"""Which models are served, by the names that requests have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..params import Params, to_device
from ..runs.trained import Opened, TrainedMethod

BASE = "base"
_MOST_KEPT = 64  # states of clients in memory


@dataclass
class Models:
    """The models of one method with one seed: each client's under its name, the global one, if
    there is one, under that of the run's folder, and ``base``, the model before any training.
    Clients whose names are those of others come first."""

    opened: Opened
    clients: Sequence[str]
    read: Callable[[str], Params]  # a client's state
    run: str = ""
    shared: Params | None = None

    def __post_init__(self) -> None:
        """Keep the states that were asked for last."""
        self._client_state = lru_cache(_MOST_KEPT)(
            lambda name: to_device(self.read(name), self.opened.task.device)
        )

    @classmethod
    def of_run(cls, trained: TrainedMethod) -> Models:
        """Find those of a run: its clients by name or number, those that joined, the global one."""
        names = trained.data.get("names") or map(str, range(trained.data["clients"]))
        shared = None
        if trained.has_global_model:
            shared = to_device(trained.global_state(), trained.task.device)
        clients, run = [*names, *trained.joined], trained.run.resolve().name
        return cls(trained, clients, trained.client_state, run, shared)

    @cached_property
    def names(self) -> list[str]:
        """All names, the run's first."""
        own = [self.run] if self.shared is not None else []
        return list(dict.fromkeys([*own, BASE, *self.clients]))

    def state(self, name: str) -> Params | None:
        """Return the state of a model; None: the base model's."""
        if name not in self.clients:
            if name == BASE:
                return None
            if name == self.run and self.shared is not None:
                return self.shared
        return self._client_state(name)
