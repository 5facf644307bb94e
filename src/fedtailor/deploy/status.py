"""The status of a deployment: its sites, Flower's last run, the committed rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..store.committed import read_commit, read_refused
from ..store.format import REFUSED_FILE, has_commit, trial_folder, whole_lines
from .folder import Deployment
from .registration import REGISTERED, read_registered
from .subprocesses import CONNECTION, ask


@dataclass(frozen=True)
class SiteStatus:
    """A site, and the status of its node."""

    site: str
    clients: str
    node: str
    status: str
    since: str


@dataclass(frozen=True)
class Progress:
    """The progress of a method with one seed; ``refused`` counts results that rounds left out."""

    method: str
    seed: int
    round: int
    rounds: int
    refused: int


@dataclass(frozen=True)
class Status:
    """The status of a deployment, with the number and the status of Flower's last run."""

    address: str
    sites: tuple[SiteStatus, ...]
    run: str | None
    state: str | None
    progress: tuple[Progress, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the status as a dict, for JSON."""
        return asdict(self)


def status(deployment: Deployment, env: dict[str, str]) -> Status:
    """Ask the server for the status; it must run on this machine.

    Args:
        deployment: the deployment.
        env: the environment of Flower's programs.

    Raises:
        InputError: the server doesn't answer.
    """
    nodes = ask(["supernode", "list", CONNECTION], env)["nodes"]
    runs = ask(["list", CONNECTION], env)["runs"]
    last = max(runs, key=lambda run: str(run["pending-at"]), default=None)
    return Status(
        deployment.address,
        tuple(_sites(deployment, {str(node["node-id"]): node for node in nodes})),
        None if last is None else str(last["run-id"]),
        None if last is None else str(last["status"]),
        tuple(_progress(deployment)),
    )


def _sites(deployment: Deployment, nodes: dict[str, dict[str, Any]]) -> list[SiteStatus]:
    is_registered = (deployment.server / REGISTERED).exists()
    registered = read_registered(deployment) if is_registered else {}
    sites = []
    for site in deployment.sites:
        number = str(registered.get(site.name, "-"))
        node = nodes.pop(number, {})
        clients = deployment.clients(site.name)
        numbers = f"{clients[0]}" if len(clients) == 1 else f"{clients[0]} to {clients[-1]}"
        sites.append(SiteStatus(site.name, numbers, number, *_state(node)))
    return sites + [SiteStatus("?", "?", number, *_state(node)) for number, node in nodes.items()]


def _state(node: dict[str, Any]) -> tuple[str, str]:
    status = str(node.get("status", "unknown"))
    since = {"online": "online-at", "offline": "offline-at"}.get(status, "created-at")
    return status, str(node.get(since, "-"))


def _progress(deployment: Deployment) -> list[Progress]:
    experiment, progress = deployment.experiment, []
    for label in experiment.methods:
        for seed in experiment.seeds:
            folder = trial_folder(deployment.run, label, seed)
            refused = folder / REFUSED_FILE
            round_ = read_commit(folder).round if has_commit(folder) else 0
            lines = whole_lines(refused) if refused.exists() else []
            found = [read_refused(line, refused) for line in lines]
            clients = {(one.round, one.client) for one in found}
            progress.append(Progress(label, seed, round_, experiment.rounds, len(clients)))
    return progress
