"""The keys that the server accepts: `register` brings Flower's list of them up to date."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient

from ..errors import InputError
from ..runs.experiment import read_toml
from ..store.files import read_json, write_json
from ..store.format import damaged
from .folder import Deployment
from .subprocesses import CONNECTION, ask

REGISTERED = "registered.json"  # in the server's folder: the node of each site
_REMOVED = "unregistered"  # Flower's word for the status of such a key


def register(deployment: Deployment, env: dict[str, str]) -> None:
    """Register the keys of the sites in ``deploy.toml``, and remove all others, for good."""
    paths = {site.name: deployment.key(site.name).with_suffix(".pub") for site in deployment.sites}
    keys = {name: _public(path) for name, path in paths.items()}
    if len(set(keys.values())) < len(keys):
        raise InputError(
            f"two of the sites {', '.join(keys)} have the same key; delete one of them, and "
            "fedtailor deploy certs makes a new one"
        )
    nodes = {node.public_key: node for node in _nodes(deployment)}
    for name, key in keys.items():
        if key in nodes and nodes[key].status == _REMOVED:
            raise InputError(
                f"the key of site {name} was removed from the server, for good; delete "
                f"{paths[name]} and, if it exists, {deployment.key(name)}, and fedtailor deploy "
                "certs makes a new one"
            )
    for key, node in nodes.items():
        if key not in keys.values() and node.status != _REMOVED:
            ask(["supernode", "unregister", str(node.node_id), CONNECTION], env)
    node_ids = {name: str(nodes[key].node_id) for name, key in keys.items() if key in nodes}
    for name in keys.keys() - node_ids.keys():
        command = ["supernode", "register", str(paths[name]), CONNECTION, "--name", name]
        node_ids[name] = str(ask(command, env)["node-id"])
    content = {name: {"node": node} for name, node in node_ids.items()}
    write_json(deployment.server / REGISTERED, content)


def has_keys(deployment: Deployment) -> bool:
    """Return whether the server that was started last on this machine knows sites by their keys."""
    path = deployment.server / "flower" / "config.toml"
    return path.exists() and not read_toml(path)["superlink"][CONNECTION]["insecure"]


def clients_by_node(deployment: Deployment) -> dict[int, range] | None:
    """Return the clients that each node may serve, as its key says; None without keys. Raises
    InputError where the server has not registered the sites."""
    if not has_keys(deployment):
        return None
    registered = read_registered(deployment)
    return {
        registered[site.name]: deployment.clients(site.name)
        for site in deployment.sites
        if site.name in registered
    }


def read_registered(deployment: Deployment) -> dict[str, int]:
    """Return the number of each site's node, as `register` has written it."""
    path = deployment.server / REGISTERED
    try:
        return {name: int(about["node"]) for name, about in read_json(path).items()}
    except (TypeError, LookupError, ValueError):
        raise damaged(path, "it must hold the number of each site's node") from None


def _public(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{path} is not a public key in OpenSSH's format, as fedtailor deploy certs makes it: "
            f"{error}"
        ) from None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _nodes(deployment: Deployment) -> list[NodeInfo]:
    """All nodes that were ever registered, with their keys: ``flwr supernode list`` has none."""
    address = f"127.0.0.1:{deployment.port}"
    authority = deployment.certificate("ca.crt").read_bytes()
    client = ControlHttpClient.from_server_address(address, False, authority, [])
    with closing(client):
        try:
            return list(client.ListNodes(ListNodesRequest()).nodes_info)
        except httpx.HTTPError as error:
            raise InputError(f"the server doesn't list its nodes: {error}") from None
