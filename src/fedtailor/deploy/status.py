"""The status of a deployment: its sites, Flower's last run, the committed rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..store.committed import commit_of, read_refused
from ..store.format import REFUSED_FILE, trial_folder, whole_lines
from .folder import Deployment
from .registration import REGISTERED, read_registered
from .subprocesses import CONNECTION, ask


def status(deployment: Deployment, env: dict[str, str]) -> dict[str, Any]:
    """Ask the server, which must run on this machine, for its address, the sites with their nodes,
    Flower's last run, and the progress of each trial, where ``refused`` counts results left out."""
    nodes = ask(["supernode", "list", CONNECTION], env)["nodes"]
    runs = ask(["list", CONNECTION], env)["runs"]
    last = max(runs, key=lambda run: str(run["pending-at"]), default=None)
    return {
        "address": deployment.address,
        "sites": [*_sites(deployment, {str(node["node-id"]): node for node in nodes})],
        "run": None if last is None else str(last["run-id"]),
        "state": None if last is None else str(last["status"]),
        "progress": [*_progress(deployment)],
    }


def _sites(deployment: Deployment, nodes: dict[str, dict[str, Any]]) -> Iterator[dict[str, str]]:
    is_registered = (deployment.server / REGISTERED).exists()
    registered = read_registered(deployment) if is_registered else {}
    for site in deployment.sites:
        number = str(registered.get(site.name, "-"))
        clients = deployment.clients(site.name)
        numbers = f"{clients[0]}" if len(clients) == 1 else f"{clients[0]} to {clients[-1]}"
        yield _site(site.name, numbers, number, nodes.pop(number, {}))
    for number, node in nodes.items():
        yield _site("?", "?", number, node)


def _site(name: str, clients: str, number: str, node: dict[str, Any]) -> dict[str, str]:
    status = str(node.get("status", "unknown"))
    when = {"online": "online-at", "offline": "offline-at"}.get(status, "created-at")
    since = str(node.get(when, "-"))
    return {"site": name, "clients": clients, "node": number, "status": status, "since": since}


def _progress(deployment: Deployment) -> Iterator[dict[str, Any]]:
    experiment = deployment.experiment
    for label in experiment.methods:
        for seed in experiment.seeds:
            folder = trial_folder(deployment.run, label, seed)
            refused = folder / REFUSED_FILE
            lines = whole_lines(refused) if refused.exists() else []
            found = [read_refused(line, refused) for line in lines]
            commit = commit_of(folder)
            yield {
                "method": label,
                "seed": seed,
                "round": commit.round if commit else 0,
                "rounds": experiment.rounds,
                "refused": len({(one.round, one.client) for one in found}),
            }
