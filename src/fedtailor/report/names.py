"""Names, and lists of them in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from ..store.records import Attack, RoundLine

MAX_NAMES = 5
NO_ATTACK = "no attack"


def in_prose(names: Sequence[str], count: int | None = None) -> str:
    """Return the first names, and how many more there are; ``count`` is the number of all of them.

    >>> in_prose(["a", "b"]), in_prose([*"abcdefgh"])
    ('a and b', 'a, b, c, d, e and 3 more')
    """
    more = (len(names) if count is None else count) - len(names[:MAX_NAMES])
    *first, last = [*names[:MAX_NAMES], *([f"{more} more"] if more else [])]
    return f"{', '.join(first)} and {last}" if first else last


def client_name(client: str, seed: int | None) -> str:
    """Name a client, so that a number is not taken for a count.

    >>> client_name("7", 2)
    'client 7 of seed 2'
    """
    name = f"client {client}" if client.isdigit() else client
    return name if seed is None else f"{name} of seed {seed}"


def privacy_name(line: RoundLine, neighbours: str) -> str:
    """Say what the rounds so far have spent of privacy; empty if there is no noise."""
    if line.epsilon is None:
        return ""
    done = "replaced" if neighbours == "replace" else "left out"
    of_clients = line.level == "client"
    whose = f"client whose data are {done}" if of_clients else "record that is there or not"
    return (
        f"epsilon {line.epsilon:.4g} at delta {line.delta:.3g} after round {line.round}, of a "
        f"{whose} ({line.accountant})"
    )


def attack_name(attack: Attack) -> str:
    """Name a simulated attack, with the attackers' share and what is not usual, in two lines.

    >>> attack_name(Attack("sign-flip", 0.2, strength=5.0)).split("\\n")
    ['sign-flip,', '20\\xa0%, strength 5']
    >>> attack_name(Attack("backdoor", clients=[3, 8], target=1)).split("\\n")
    ['backdoor,', 'clients 3 and 8, target 1']
    """
    if attack.kind == "none":
        return NO_ATTACK
    share = f"{100 * attack.fraction:.3g}\u00a0%"
    who = f"clients {in_prose(list(map(str, attack.clients)))}" if attack.clients else share
    usual = Attack()
    if attack.target != usual.target:
        who += f", target {attack.target}"
    if attack.poisoned != usual.poisoned:
        who += f", {100 * attack.poisoned:.3g}\u00a0% poisoned"
    rounds = [f"from round {attack.first_round}"] if attack.first_round > 1 else []
    if attack.last_round is not None:
        rounds.append(f"to round {attack.last_round}")
    strength = [] if attack.strength is None else [f"strength {attack.strength:.3g}"]
    return f"{attack.kind},\n{', '.join([who, *strength, *rounds])}"
