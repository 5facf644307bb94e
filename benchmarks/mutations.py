"""What the kinds of `benchmarks.fuzz` share: changes of bytes and of plain values, and a small
experiment."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedtailor.errors import InputError

if TYPE_CHECKING:
    import fedtailor as ft

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 10**9, 2**31, 2**63, 10**40, 1e308, -1e308,
    float("nan"), float("inf"), "", "x", "0", "../x", "a\0b", "\x1b[2J", "\ud800", "none",
    999 * "x", [], {}, [1], ["x"], [[]], {"x": 1}, {"": {}}, [None],
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What was changed: the ``place`` in the file, and the types before and after; else how."""

    place: str
    types: str = ""

    @property
    def is_of_another_type(self) -> bool:
        """Whether a value was replaced by one of another type."""
        before, _, after = self.types.partition(" -> ")
        return before != after and {before, after} != {"int", "float"}


class Hang(BaseException):
    """A mutation took more than its time; no handler of exceptions catches it."""


class RefusedError(Exception):
    """The input was refused in one line."""


def read(action: Callable[[], Any], allowed: tuple[type[Exception], ...] = (InputError,)) -> None:
    """Do something; an ``allowed`` error of one line becomes a `RefusedError`."""
    try:
        action()
    except allowed as error:
        if "\n" in str(error):
            raise AssertionError(f"a message of several lines: {error}") from error
        raise RefusedError from None


def flipped(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """Return the content with one to eight bits flipped."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed), Change("bits")


def cut(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """Return the content without its end."""
    return content[: rng.randrange(len(content) + 1)], Change("end")


def swapped(rng: random.Random, value: Any) -> tuple[Any, Change]:
    """Return a copy of plain values in which one is replaced, removed or added."""
    places = list(_places(value))
    if not places:
        return rng.choice(_VALUES), Change("all", f"{type(value).__name__} -> ?")
    path = rng.choice(places)
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    old, way = parent[path[-1]], rng.randrange(8)
    name = ".".join("*" if isinstance(key, int) else key for key in path)
    if way == 0:
        del parent[path[-1]]
        return changed, Change(f"{name} removed")
    if way == 1 and isinstance(parent, list):
        parent.insert(path[-1], old)
        return changed, Change(f"{name} twice")
    if way == 1:
        parent["unknown"] = rng.choice(_VALUES)
        return changed, Change("unknown key")
    if way == 2 and isinstance(old, int | float) and not isinstance(old, bool):
        new: Any = rng.choice([-old, old + 1, old * 1000, old / 3, str(old)])
    else:
        new = copy.deepcopy(rng.choice(_VALUES))
    parent[path[-1]] = new
    return changed, Change(name, f"{type(old).__name__} -> {type(new).__name__}")


def mutated(rng: random.Random, content: bytes, suffix: str) -> tuple[bytes, Change]:
    """Return the bytes of a file changed in one way; ``suffix`` says how values are written."""
    if suffix not in (".json", ".jsonl") or rng.random() < 0.3:
        return rng.choice([flipped, cut])(rng, content)
    if suffix == ".json":
        value = json.loads(content)
        if isinstance(value, dict):
            value.pop("checksum", None)  # whoever changes a value can work it out again
        value, change = swapped(rng, value)
        return json.dumps(value).encode(), change
    lines = content.splitlines()
    if not lines:
        return b"x", Change("line")
    at = rng.randrange(len(lines))
    value, change = swapped(rng, json.loads(lines[at]))
    lines[at] = json.dumps(value).encode()
    return b"".join(line + b"\n" for line in lines), change


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner if isinstance(value, dict | list) else ():
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from _places(one, (*path, key))


Attempt = Callable[[random.Random], Change]


def small_experiment(methods: Mapping[str, ft.Method]) -> ft.Experiment:
    """Return an experiment with small pictures of digits and a small network."""
    import fedtailor as ft

    return ft.Experiment(
        methods=methods,
        name="fuzz",
        rounds=2,
        data=ft.DataConfig(name="digits", limit=150),
        split=ft.SplitConfig(3, "dirichlet", alpha=1.0, min_examples=5),
        model=ft.ModelConfig("lenet", pretrained=False, image_size=16, width=0.2,
                             targets=("hidden1", "hidden2")),
        local=ft.LocalConfig(batch_size=8, steps=1),
        engine=ft.EngineConfig(executor="sequential"),
    )  # fmt: skip
