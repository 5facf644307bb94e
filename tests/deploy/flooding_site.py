"""A site that floods: each time it has trained, its answer has 50,000 records more.

``python -m tests.deploy.flooding_site deploy client FOLDER ...``, as ``fedtailor``.
"""

from __future__ import annotations

import sys

from flwr.app import MessageType, RecordDict

from fedtailor.cli import main
from fedtailor.deploy import site_process
from fedtailor.deploy.site_process import Answer, reply
from fedtailor.flower.client import Site
from tests.flower.hostile import flood


def flooding_reply(site: Site, kind: str, content: RecordDict) -> Answer:
    """The answer to a message, with the flood if it is an upload."""
    answer, error = reply(site, kind, content)
    if kind != MessageType.TRAIN or answer is None:
        return answer, error
    return flood(answer), None


if __name__ == "__main__":
    site_process.reply = flooding_reply
    sys.exit(main())
