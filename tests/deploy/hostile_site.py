"""A site that lies: each time it has trained, it sends the next one of the hostile answers.

``python -m tests.deploy.hostile_site deploy client FOLDER ...``, as ``fedtailor``.
"""

from __future__ import annotations

import sys
from itertools import count

from flwr.app import MessageType, RecordDict

from fedtailor.cli import main
from fedtailor.deploy import site_process
from fedtailor.deploy.site_process import Answer, reply
from fedtailor.flower.client import Site
from tests.flower.hostile import HOSTILE

_turn = count()


def hostile_reply(site: Site, kind: str, content: RecordDict) -> Answer:
    """The answer to a message, spoilt if it is an upload."""
    answer, error = reply(site, kind, content)
    if kind != MessageType.TRAIN or answer is None:
        return answer, error
    spoil, _ = HOSTILE[next(_turn) % len(HOSTILE)]
    return spoil(answer), None


if __name__ == "__main__":
    site_process.reply = hostile_reply
    sys.exit(main())
