"""The Flower app of a deployment's server. The environment names the deployment's folder."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.serverapp import ServerApp

from ..flower import server_app
from ..flower.server import expected_errors_in_one_line
from .folder import open_folder
from .registration import clients_by_node
from .subprocesses import FOLDER, end_after_parent


def server() -> ServerApp:
    """Return the app that Flower runs at the server, in a process of its own."""
    end_after_parent()
    expected_errors_in_one_line()
    deployment = open_folder(Path(os.environ[FOLDER]))
    return server_app(
        deployment.experiment,
        deployment.run,
        timeouts=deployment.timeouts,
        names=deployment.names[: deployment.total],
        new_clients=deployment.new_clients,
        sites=clients_by_node(deployment),
    )
