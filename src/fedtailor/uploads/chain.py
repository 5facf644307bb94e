"""The chain of links that uploads pass through, from a client's training to the aggregate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..params import Params
from .collected import Uploads
from .secure.messages import Masks

Needs = Literal["sums", "uploads", "stack"]
_NEEDS: tuple[Needs, ...] = ("sums", "uploads", "stack")


@dataclass(frozen=True)
class UploadContext:
    """What links know of a round. ``state`` is what the client has received, or at the server its
    own state; ``clients`` are the client, or those whose uploads are there, in the order of rows.
    ``unchanged_from`` gives the upload that changes nothing of a state (`Method.unchanged`),
    ``statistics`` are the names of running statistics, ``beside`` those of `Method.beside_update`,
    and ``products`` those of `Method.products`. A stale upload is ``staleness`` rounds old and
    changes ``sent``. At the server ``drawn`` uploads were expected, and ``least`` must be left.
    ``masks`` are a client's, where the server is to see sums alone, and ``kept`` is its upload
    where a second pass needs it; ``clip`` is the norm that its update may have, where that differs
    from round to round."""

    seed: int | str
    statistics: Collection[str]
    unchanged_from: Callable[[Params, Params], Params]
    state: Params = field(default_factory=dict)
    round: int = 0
    clients: tuple[int, ...] = ()
    sent: Params = field(default_factory=dict)
    staleness: int = 0
    drawn: int = 0
    least: int = 1
    masks: Masks | None = None
    clip: float | None = None
    kept: Params | None = None
    beside: Collection[str] = ()
    products: Sequence[tuple[str, str]] = ()

    def unchanged(self, upload: Params) -> Params:
        """The float tensors of an upload like this one that changes nothing of ``state``."""
        return self.unchanged_from(self.state, upload)

    def updates(self, upload: Params) -> Params:
        """The tensors that tell what clients change: of floats, and no running statistics."""
        return _floats(upload, {*self.statistics, *self.beside})

    def scaled(self, upload: Params) -> Params:
        """The tensors to multiply so that a share reaches each change once: of a product B A, B."""
        return _floats(upload, {*self.beside, *(A for A, _ in self.products)})


def _floats(upload: Params, without: Collection[str]) -> Params:
    return {n: v for n, v in upload.items() if v.is_floating_point() and n not in without}


class Link:
    """One transform of uploads. By default each end changes nothing."""

    note: str | None = None  # what is to be told of the round
    hides: bool = False  # what the server gets of it is a sum that tells of no single upload

    @property
    def needs(self) -> Needs:
        """What it works with at the server: "sums" of uploads that are forgotten at once, single
        "uploads" that are kept until all are there, or a "stack" of these."""
        return "sums"

    @property
    def clip_now(self) -> float | None:
        """The norm that updates may have in this round, if it differs from round to round."""
        return None

    def send(self, upload: Params, at: UploadContext) -> Params:
        """At the client: its upload as this link sends it."""
        return upload

    def open(self, at: UploadContext, present: Sequence[int]) -> Mapping[int, Masks]:
        """Begin a round at the server, for which ``at.clients`` were drawn: what the `send` of each
        client needs that may train, of those ``present``."""
        return {}

    def receive(self, upload: Params, at: UploadContext) -> Params:
        """At the server: one client's upload again, as far as the server may know it."""
        return upload

    def watch(self, upload: Params, at: UploadContext) -> None:
        """See one client's upload that is then added up and forgotten."""

    def check(self, present: int) -> None:
        """Raise TooFewUploadsError if so many uploads are too few."""

    def gather(self, uploads: Uploads, at: UploadContext) -> Mapping[int, str | None]:
        """Change the uploads that are there, in place; the rows that are not used, and why: a
        member with a reason doesn't count, and one with None has only not been selected. Raises
        TooFewLeftError where too few would be left."""
        return {}

    def total(self, uploads: Params, at: UploadContext) -> Params:
        """What the method aggregates, from stacked uploads ``[c, ...]`` or their mean
        ``[1, ...]``: as many rows, or one. Called again if the aggregate can't be used."""
        return uploads

    def close(self, clients: Sequence[int]) -> tuple[float, ...]:
        """End a round that counts these clients; the norms of their uploads, where known."""
        return ()


@dataclass(frozen=True)
class Packing(Link):
    """Uploads travel in the form that the method gives them: `Method.pack` at the client,
    `Method.unpack` at the server."""

    pack: Callable[[Params], Params]
    unpack: Callable[[Params], Params]

    def send(self, upload: Params, at: UploadContext) -> Params:
        return self.pack(upload)

    def receive(self, upload: Params, at: UploadContext) -> Params:
        return self.unpack(upload)


@dataclass(frozen=True)
class Chain(Link):
    """Links in the order in which a client applies them; the server goes from the last one to the
    first. ``context`` is what they know before the first round."""

    links: tuple[Link, ...]
    context: UploadContext

    def at(self, state: Params, round_: int, clients: Sequence[int]) -> UploadContext:
        """What links know at a client that has received ``state``, or at the server."""
        return replace(self.context, state=state, round=round_, clients=tuple(clients))

    @property
    def needs(self) -> Needs:
        return max((link.needs for link in self.links), key=_NEEDS.index)

    @property
    def clip_now(self) -> float | None:
        return next((link.clip_now for link in self.links if link.clip_now is not None), None)

    @property
    def hidden(self) -> bool:
        """Whether the server gets a sum alone."""
        return any(link.hides for link in self.links)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be told of the round."""
        return tuple(link.note for link in self.links if link.note is not None)

    def send(self, upload: Params, at: UploadContext) -> Params:
        for link in self.links:
            upload = link.send(upload, at)
        return upload

    def open(self, at: UploadContext, present: Sequence[int]) -> Mapping[int, Masks]:
        opened = (link.open(at, present).items() for link in self.links)
        return {client: masks for of_link in opened for client, masks in of_link}

    def receive(self, upload: Params, at: UploadContext) -> Params:
        for link in reversed(self.links):
            upload = link.receive(upload, at)
            if link.hides:  # the links before it see the sum
                break
        return upload

    def watch(self, upload: Params, at: UploadContext) -> None:
        for link in self.links:
            link.watch(upload, at)

    def check(self, present: int) -> None:
        for link in self.links:
            link.check(present)

    def gather(self, uploads: Uploads, at: UploadContext) -> dict[int, str | None]:
        """As `Link.gather`, by client."""
        unused: dict[int, str | None] = {}
        for link in reversed(self.links):
            if rows := link.gather(uploads, at):
                unused |= {at.clients[row]: reason for row, reason in rows.items()}
                left = [row for row in range(len(at.clients)) if row not in rows]
                uploads.keep(left)
                at = replace(at, clients=tuple(at.clients[row] for row in left))
        return unused

    def total(self, uploads: Params, at: UploadContext) -> Params:
        for link in reversed(self.links):
            uploads = link.total(uploads, at)
        return uploads

    def close(self, clients: Sequence[int]) -> tuple[float, ...]:
        return tuple(norm for link in self.links for norm in link.close(clients))
