"""A client's model as one ``nn.Module``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..method import Method
from ..params import Batch, Params
from ..task.task import Task


class LogitsModule(nn.Module):
    """The logits of one client's model.

    Its parameters and buffers are the client's tensors, under their names in a state; changing them
    changes the predictions. The frozen rest of the model is no part of it. It runs where the task
    does.
    """

    def __init__(self, method: Method, task: Task, state: Params) -> None:
        super().__init__()
        self._method, self._task = method, task
        self._names = tuple(state)
        for name, value in state.items():
            _register(self, name, value.clone(), is_buffer=_is_buffer(task, name, value))

    def forward(self, batch: Batch | None = None, /, **tensors: Tensor) -> Tensor:
        """A batch, as a dict or by keywords, to logits ``[b, classes]`` or ``[b, L, vocabulary]``:
        ``input_ids`` and ``attention_mask`` ``[b, L]``, or ``pixel_values`` ``[b, C, H, W]``."""
        return self._method.predict(self._task, dict(self._state()), {**(batch or {}), **tensors})

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            path, _, last = name.rpartition(".")
            yield name, getattr(self.get_submodule(path), last)


def _is_buffer(task: Task, name: str, value: Tensor) -> bool:
    """Whether a tensor is a state buffer, in any of a state's models, or has no gradient."""
    is_state = any(f".{name}".endswith(f".{buffer}") for buffer in task.buffers)
    return is_state or not value.is_floating_point()


def _register(root: nn.Module, name: str, value: Tensor, *, is_buffer: bool) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if is_buffer:
        root.register_buffer(last, value)
    else:
        root.register_parameter(last, nn.Parameter(value))
