"""A client's personal model from the files of its site: used there, or exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.names import client_number
from ..errors import InputError, unknown
from ..export.folder import ClientModel, kept_by_joined
from ..flower.states import MODEL
from ..runs.build import task_again
from ..runs.manifest import read_data_manifest
from ..store.files import load_tensors
from .folder import Deployment


def open_model(
    deployment: Deployment,
    site: str,
    label: str | None = None,
    seed: int | None = None,
    client: str | int | None = None,
) -> ClientModel:
    """Return a client's personal model of the reported round, from its site's files. The client's
    name may be that at the site or at the server. Raises InputError where there is no such model,
    or not yet; it is damaged."""
    experiment = deployment.experiment
    if label is None and len(experiment.methods) > 1:
        raise InputError(f"there are several methods; name one: {', '.join(experiment.methods)}")
    label = label or next(iter(experiment.methods))
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    seed = experiment.seeds[0] if seed is None else seed
    folders = list((deployment.site(site) / "states").glob(f"*/{label}/seed-{seed}"))
    number, name = _client(deployment, site, client, folders)
    paths = [folder / f"client-{number}" / MODEL for folder in folders]
    models = [path for path in paths if path.is_file()]
    if not models:
        raise InputError(
            f"site {site} has no model of {label}, seed {seed}, client {number}; a site stores its "
            "models when the run ends; if the site was offline then, run fedtailor deploy run again"
        )
    newest = max(models, key=lambda path: path.stat().st_mtime)
    try:
        state = load_tensors(newest)
    except InputError:
        raise InputError(
            f"the model is damaged: {newest}; remove the file, and run fedtailor deploy run again"
        ) from None
    method = experiment.methods[label]
    data = read_data_manifest(newest.parent.parent / "data.json")
    task = task_again(experiment, method, data, seed)
    joined = kept_by_joined(newest.parent)
    return ClientModel(experiment, label, seed, data, task, state, name, joined=joined)


def _client(
    deployment: Deployment, site: str, client: str | int | None, folders: Sequence[Path]
) -> tuple[int, str]:
    """Return the number and the name of a site's client; the name stands in one of ``folders``."""
    clients, names = deployment.clients(site), list(deployment.names)
    data = [path for folder in folders if (path := folder / "data.json").is_file()]
    if data:
        newest = max(data, key=lambda path: path.stat().st_mtime)
        # fewer if written before a site was added
        own = read_data_manifest(newest).get("names") or []
        names = [own[k] if own[k:] and own[k] else name for k, name in enumerate(names)]
    allowed = ", ".join(f"{k} ({names[k]})" for k in clients)
    if client is None and len(clients) > 1:
        raise InputError(f"site {site} has several clients; name one: {allowed}")
    if client is None:
        return clients.start, names[clients.start]
    if client in deployment.names and client not in names:
        number = deployment.names.index(client)
    else:
        number = client_number(client, len(names), names)
    if number not in clients:
        raise InputError(f"no client {client} at site {site}; allowed: {allowed}")
    return number, names[number]
