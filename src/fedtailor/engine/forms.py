"""Whether a method's hooks return what the engine goes on with; looked at in the first round."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor

from ..errors import InputError, brief
from ..method import Method
from ..params import Params, split
from ..task.task import Task


def check_state(method: Method, hook: str, state: object) -> None:
    """Raise InputError unless a hook has returned tensors by name."""
    if not isinstance(state, dict):
        raise InputError(f"{method.name}.{hook} returns {brief(state)}; it must return a state")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{method.name}.{hook} returns a state with {brief(name)}: {brief(value)}; a state "
                "has tensors by name"
            )


def check_like(method: Method, hook: str, state: Params, like: Params) -> None:
    """Raise InputError unless ``state`` has the names, shapes and types of ``like``; sizes may
    differ where the method says ``changing_sizes``."""
    check_state(method, hook, state)
    lacking, new = like.keys() - state.keys(), state.keys() - like.keys()
    if lacking or new:
        what = "lacks" if lacking else "has more:"
        names = ", ".join(sorted(lacking or new)[:3])
        raise InputError(
            f"{method.name}.{hook} returns a state that {what} {names}; it must have the names of "
            "the state before it"
        )
    for name, before in like.items():
        now = state[name]
        may_change = any(fnmatchcase(name, pattern) for pattern in method.changing_sizes)
        if (now.dtype, now.dim()) != (before.dtype, before.dim()) or not (
            may_change or now.shape == before.shape
        ):
            raise InputError(
                f"{method.name}.{hook} returns {name} as {now.dtype} {list(now.shape)}; it must be "
                f"{before.dtype} {list(before.shape)}, as before"
            )


def check_trained(
    method: Method, task: Task, received: Params, private: Params, outcome: object
) -> None:
    """Raise InputError unless ``local`` has returned a state and a loss: the private part whole,
    and of the shared part each tensor of the model that the client received."""
    if not received and not private:
        raise InputError(
            f"a client of {method.name} receives no tensor and has none of its own; init_server or "
            "init_client must return some"
        )
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Tensor)):
        raise InputError(
            f"{method.name}.local returns {brief(outcome)}; it must return a state and a loss"
        )
    state, loss = outcome
    check_state(method, "local", state)
    if loss.dim():
        raise InputError(
            f"{method.name}.local returns a loss of shape {list(loss.shape)}; it must be one number"
        )
    kept, shared = split(state, partial(method.is_private, task))
    check_like(method, "local", kept, private)
    model = {name: value for name, value in received.items() if name in task.state}
    check_like(method, "local", {name: shared[name] for name in model if name in shared}, model)
