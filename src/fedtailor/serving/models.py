"""Which models of a run are served, by the names that requests have for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import InputError
from ..params import Params, to_device
from ..runs.trained import TrainedMethod

BASE = "base"
_MOST_KEPT = 64  # states of clients in memory


@dataclass
class Models:
    """The models of one method with one seed: each client's under the client's name or number, the
    global one, if there is one, under the name of the run's folder, and ``base``, the model before
    any training. Clients whose names are those of others come first."""

    trained: TrainedMethod
    _states: OrderedDict[str, Params] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        names = self.trained.data.get("names") or map(str, range(self.trained.data["clients"]))
        self.clients = [*names, *self.trained.joined]
        self.run = self.trained.run.resolve().name
        self.shared: Params | None = None
        try:
            shared = self.trained.global_state()
            self.shared = to_device(shared, self.trained.task.device)
        except InputError:  # the method has none
            pass

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
        if name not in self._states:
            state = self.trained.client_state(name)
            self._states[name] = to_device(state, self.trained.task.device)
        self._states.move_to_end(name)
        while len(self._states) > _MOST_KEPT:
            self._states.popitem(last=False)
        return self._states[name]
