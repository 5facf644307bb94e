"""Private states in files beside the client: of the last round that counted, of the best one, and
of now.

What a client has trained in a round is written before it answers. Whether the round counted is the
server's to say, and it says so in the next request, which names the round to start from. Until then
the state before is kept, too: a round that is repeated, or that came to nothing, starts from it.
In the same way the server names the round that the client must not lose: the one that holds its
state as of the best round of the run so far. Its model of that round is stored in the end.

A run that was rolled back goes on under another name, and so in another folder. The states of the
rounds that still count are read from the folders before, in which nothing changes any more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import InputError
from ..params import Params, clone
from ..store.files import load_tensors, read_json, save_tensors, write_json

UPDATE = "update.safetensors"  # until the second pass of a round with masks
MODEL = "model.safetensors"  # what a client was judged by after the reported round
SPENT = "spent.json"  # the last round that was answered with noise
_NAME = re.compile(r"round-(\d+)\.safetensors")


class States:
    """The private states of clients in one run of one method with one seed. ``before``: the folders
    of the run before it was rolled back, the last first, each with the round it went back to."""

    def __init__(self, folder: Path, before: Sequence[tuple[Path, int]] = ()) -> None:
        self._folder, self._before = folder, before

    def read(self, client: int, base: int, like: Params) -> Params:
        """What ``client`` kept of round ``base``; ``like``, its first state, for 0."""
        if base == 0 or not like:
            return like
        path = self._found(client, base)
        if path is None:
            raise InputError(
                f"client {client}'s private state of round {base} is missing at this node"
            )
        try:
            state = load_tensors(path)
        except InputError:
            raise InputError(f"the private state of round {base} is damaged: {path}") from None
        if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in like.items()}:
            raise InputError(f"the private state of round {base} is of another model")
        return {name: state[name].clone() for name in like}

    def check(self, client: int, base: int, best: int, number: int) -> None:
        """Check that a client's round ``number`` may start from ``base``, with ``best`` as the best
        round.

        The server has said that the last but one state here counted, when it was the base of the
        last one. So it can't go back beyond it: a request for it would cost a state that counts.
        Nor can the best round be an earlier one than before."""
        kept = sorted(self._kept(client))
        if kept and kept[-1] > number:
            raise InputError(f"a request for round {number} came after one for round {kept[-1]}")
        if len(kept) > 1 and base < kept[-2]:
            raise InputError(
                f"a request to start from round {base} came after one to start from round "
                f"{kept[-2]}"
            )
        if len(kept) > 2 and best < kept[0]:  # those of the best round, the base, and the last one
            raise InputError(
                f"a request with round {best} as the best one came after one with round {kept[0]}"
            )
        if kept and best not in (0, base, *kept) and self._found(client, best) is None:
            raise InputError(
                f"the request names round {best} as the best one, and its state is not at this node"
            )

    def write(self, client: int, base: int, best: int, number: int, private: Params) -> None:
        """Keep the state after round ``number``, beside those of ``base`` and ``best``, and no
        other. Raises InputError where as `check` does; nothing is changed."""
        if not private:
            return
        self.check(client, base, best, number)
        kept = self._kept(client)
        save_tensors(self._file(client, _round_file(number)), private)
        for other, old in kept.items():
            if other not in (base, best, number):
                old.unlink()

    def spend(self, client: int, number: int, base: int, received: Params, how: str) -> None:
        """Note that a client answers round ``number`` with noise. A round that is repeated has the
        same noise, so it must start from the same ``base`` and ``received`` tensors, and train in
        the same way on the same data, which ``how`` says: from the difference of two answers one
        could tell what the client trains on. Raises InputError for others, and for a round before
        the last one."""
        path = self._file(client, SPENT)
        names = sorted(received)  # a server that was stopped has them in another order
        digest = hashlib.sha256(repr((base, how, *names)).encode())
        for value in (received[name] for name in names):
            digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        asked = {"round": number, "asked": digest.hexdigest()}
        last = read_json(path) if path.exists() else {"round": 0}
        if last["round"] > number or (last["round"] == number and last["asked"] != asked["asked"]):
            raise InputError(
                f"a request for round {number} came after one for round {last['round']} with "
                "other tensors, data or settings: a round is answered once, with its noise"
            )
        write_json(path, asked)

    def write_update(self, client: int, update: Params) -> None:
        """Keep what a client has sent masked, for a second pass."""
        save_tensors(self._file(client, UPDATE), update)

    def take_update(self, client: int) -> Params:
        """That again, once. Raises InputError where there is none."""
        path = self._file(client, UPDATE)
        update = clone(load_tensors(path))
        path.unlink()
        return update

    def keep(self, client: int, state: Params) -> Path:
        """Keep the model of the reported round, private tensors included; the folder it is in. No
        second pass follows any more."""
        path = self._file(client, MODEL)
        save_tensors(path, state)
        self._file(client, UPDATE).unlink(missing_ok=True)
        return path.parent

    def _kept(self, client: int) -> dict[int, Path]:
        paths = (self._folder / f"client-{client}").glob("round-*")
        return {int(m[1]): path for path in paths if (m := _NAME.fullmatch(path.name))}

    def _found(self, client: int, number: int) -> Path | None:
        """Where a client's state after a round is: here, or in the first folder before that has
        it, among those in which the round still counts."""
        name = f"client-{client}/{_round_file(number)}"
        folders = [self._folder, *(folder for folder, up_to in self._before if number <= up_to)]
        return next((path for folder in folders if (path := folder / name).is_file()), None)

    def _file(self, client: int, name: str) -> Path:
        """A file's place in a client's folder, which is made."""
        folder = self._folder / f"client-{client}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def _round_file(number: int) -> str:
    return f"round-{number:06d}.safetensors"
