"""Lists of names in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from .majority import AtMajority

MAX_NAMES = 5


def listed(names: Sequence[str], count: int | None = None) -> str:
    """Return the first names, and how many more there are; ``count`` is the number of all of them.

    >>> listed(["a", "b"]), listed([*"abcdefgh"])
    ('a and b', 'a, b, c, d, e and 3 more')
    """
    more = (len(names) if count is None else count) - len(names[:MAX_NAMES])
    *first, last = [*names[:MAX_NAMES], *([f"{more} more"] if more else [])]
    return f"{', '.join(first)} and {last}" if first else last


def at_majority_names(clients: Sequence[AtMajority]) -> str:
    """Name clients with the accuracy of a method and of the best one there.

    >>> bern, seven = (AtMajority(name, None, 0.5, 0.5, "local", 0.75) for name in ("Bern", "7"))
    >>> at_majority_names([bern, seven])
    'Bern (50.0 %; local 75.0 %) and client 7 (50.0 %; local 75.0 %)'
    """
    return listed([
        f"{client_name(one.client, one.seed)} ({100 * one.accuracy:.1f} %; {one.better} "
        f"{100 * one.better_accuracy:.1f} %)"
        for one in clients
    ])  # fmt: skip


def client_name(client: str, seed: int | None) -> str:
    """Name a client, so that a number is not taken for a count.

    >>> client_name("7", 2)
    'client 7 of seed 2'
    """
    name = f"client {client}" if client.isdigit() else client
    return name if seed is None else f"{name} of seed {seed}"
