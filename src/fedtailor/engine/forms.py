"""Whether a method's hooks return what the engine goes on with; looked at in the first round, and
the server's state in each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor

from ..errors import InputError, brief
from ..method import Method
from ..params import Params, count, pick, split
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
        is_alike = (now.dtype, now.dim()) == (before.dtype, before.dim())
        if not is_alike or not (may_change or now.shape == before.shape):
            raise InputError(
                f"{method.name}.{hook} returns {name} as {now.dtype} {list(now.shape)}; it must be "
                f"{before.dtype} {list(before.shape)}, as before"
                + (", or changing_sizes must name it" if is_alike else "")
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
    lacking, scalars = task.trained - (received | private).keys(), count(received | private)
    makes_own = type(method).local is not Method.local  # it may begin with values of its own
    if lacking and not makes_own and scalars < (trained := method.num_trained(task)):
        raise InputError(
            f"a client of {method.name} lacks {min(lacking)}: it has {scalars:,} of {trained:,} "
            "scalars that num_trained counts; init_server, init_client and send must return them"
        )
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Tensor)):
        raise InputError(
            f"{method.name}.local returns {brief(outcome)}; it must return a state and a loss"
        )
    state, loss = outcome
    check_state(method, "local", state)
    if loss.dim() or not loss.is_floating_point():
        raise InputError(
            f"{method.name}.local returns a loss of {loss.dtype} {list(loss.shape)}; it must be "
            "one float"
        )
    kept, shared = split(state, partial(method.is_private, task))
    check_like(method, "local", kept, private)
    like = {name: value for name, value in received.items() if name in task.state}
    check_like(method, "local", {name: shared[name] for name in like if name in shared}, like)


def check_predicts(method: Method, task: Task, hook: str, state: Params, before: Params) -> None:
    """Raise InputError unless what ``hook`` has made of the state ``before``, and what predicts
    from that, have each trained tensor that was there, or more in its place: else the untrained
    model's own would stand for it. Names that the model has not stand for none."""
    trained = pick(before, task.trained & before.keys())
    used = method.inference_params(task, state)
    for name, params in ((hook, state), ("inference_params", used)):
        check_state(method, name, params)
        lacking = trained.keys() - params.keys()
        predicts = params is used and type(method).predict is Method.predict
        is_other = predicts and task.state.keys().isdisjoint(params)
        if lacking and (is_other or count(params) < count(trained)):
            raise InputError(
                f"{method.name}.{name} returns a state that lacks {min(lacking)}; it must have "
                "each trained tensor of the state before it"
            )


def check_plain_hooks(method: Method, task: Task) -> None:
    """Raise InputError unless ``finetune_passes`` and ``num_trained`` are numbers, and
    ``is_private`` says of each tensor True or False: a forgotten return would let the server have
    it."""
    numbers: dict[str, tuple[object, int]] = {
        "finetune_passes": (method.finetune_passes, 10_000),
        "num_trained": (method.num_trained(task), 10**15),
    }
    for name, (number, most) in numbers.items():
        if not isinstance(number, int) or not 0 <= number <= most:
            raise InputError(f"{method.name}.{name} is {brief(number)}; it must be 0 to {most}")
    for name in task.state:
        answer: object = method.is_private(task, name)
        if not isinstance(answer, bool):
            raise InputError(
                f"{method.name}.is_private of {name} returns {brief(answer)}; it must return True "
                "or False"
            )
