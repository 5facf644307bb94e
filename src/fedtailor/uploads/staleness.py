"""Stale uploads, of asynchronous rounds, as the aggregate takes them.

A client's update is its upload minus an upload that changes nothing of the state that it was sent.
After s more rounds it counts as

    the upload that changes nothing of the server's state of now + update / sqrt(1 + s)
"""

from __future__ import annotations

import math

from ..params import Params
from .chain import Link, UploadContext


class Staleness(Link):
    """Brings stale uploads up to date, but for running statistics and what is not of floats."""

    def receive(self, upload: Params, at: UploadContext) -> Params:
        if at.staleness == 0:
            return upload
        floats = at.updates(upload)
        then, now = at.unchanged_from(at.sent, floats), at.unchanged(floats)
        factor = 1 / math.sqrt(1 + at.staleness)
        moved = {
            name: now[name].double() + factor * (value.double() - then[name].double())
            for name, value in floats.items()
        }
        return upload | {name: value.to(upload[name].dtype) for name, value in moved.items()}
