"""A method's picture without scripts: its clients after the last round, one panel for each seed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..drawing import COLOURS, Drawing, new_figure
from ..figures import client_ticks
from .content import Group, Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 2.4  # inches of a panel with dots


def still(pictures: Sequence[Json], groups: Sequence[Group], label: str) -> Drawing:
    """Draw a method's ``pictures``, as `pictures.pictures` returns them."""
    is_map = bool(pictures[0]["column"])
    columns = len(pictures[0]["columns"])
    height = 1.1 + 0.14 * min(max(columns, 6), 30) if is_map else _HEIGHT
    figure = new_figure(0.9 + len(pictures) * height)
    panels = figure.subplots(len(pictures), 1, squeeze=False)[:, 0]
    for axis, picture in zip(panels, pictures, strict=True):
        group, values = groups[picture["group"]], _last(picture)
        if is_map:
            image = _draw_map(axis, picture, values)
            figure.colorbar(image, ax=axis, label=picture["valueName"])
        else:
            axis.plot(values[:, 0], "o", color=COLOURS[0])
            axis.set(ylabel=picture["valueName"])
            axis.grid(axis="y")
            axis.yaxis.get_major_locator().set_params(integer=picture["isWhole"])
        client_ticks(axis, [group.clients[k] for k in picture["clients"]], group.partition)
        axis.set_title(f"{group.title}, after round {picture['rounds'][-1]}")
    panels[-1].set_xlabel("clients")
    return Drawing(f"{pictures[0]['title']}: {label}", figure, pictures[0]["caption"])


def _last(picture: Json) -> NDArray[np.float64]:
    """The values ``[clients, columns]`` after the last round; not a number where there is none."""
    shape = len(picture["rounds"]), len(picture["clients"]), len(picture["columns"])
    codes = np.frombuffer(base64.b64decode(picture["data"]), "<u2").reshape(shape)[-1]
    missing = np.iinfo(np.uint16).max
    return np.where(codes == missing, np.nan, picture["low"] + picture["step"] * codes)


def _draw_map(axis: Axes, picture: Json, values: NDArray[np.float64]) -> Any:
    """Draw a column for each client; what is left out or unknown stays empty."""
    from matplotlib.colors import Normalize, TwoSlopeNorm

    low, high = picture["domain"]
    neutral = picture["neutral"]
    shown = np.where(values == 0, np.nan, values) if picture["drops"] else values
    norm = Normalize(low, high) if neutral is None else TwoSlopeNorm(neutral, low, high)
    colours = "cividis" if neutral is None else "PuOr"
    image = axis.imshow(shown.T, aspect="auto", interpolation="none", norm=norm, cmap=colours)
    columns = picture["columns"]
    places = range(0, len(columns), 1 + (len(columns) - 1) // 12)
    axis.set_yticks(places, [columns[k] for k in places])
    axis.set_ylabel(picture["column"])
    return image
