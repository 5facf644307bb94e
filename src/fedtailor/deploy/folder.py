"""A deployment's folder: its files, and ``deploy.toml``, which names server and sites.

The server has the whole folder. A site needs ``deploy.toml``, ``experiment.toml``, the authority's
certificate and the site's own key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from ..data import DataConfig
from ..data.config import Clients
from ..data.sources import BUILTIN, objective_of_data
from ..data.tables import FORMATS
from ..errors import InputError, brief, listed, missing_file, unknown, whole_number
from ..flower.nodes import Timeouts
from ..flower.server import check_remote
from ..runs.experiment import Experiment, load, own_code, parse, read, read_toml
from ..runs.fields import build
from ..runs.manifest import copies
from ..runs.settings import Settings
from ..store.files import write_atomically
from ..user_code import origin_of

ADDRESS = "127.0.0.1:8000"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SITE_DATA = (
    *("name", "path", "test_path", "subset", "revision", "train_split", "test_split"),
    *("limit", "skip", "limit_test"),
)
_CLIENT_SPLIT = ("validation", "test", "max_examples", "seed")
_APP = {
    "pyproject.toml": """\
# Flower reads this file. `fedtailor deploy` starts Flower's programs.
[project]
name = "federation"
version = "1.0.0"
description = "Written by fedtailor deploy init"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedtailor"
fab-include = ["app/*.py"]

[tool.flwr.app.components]
serverapp = "app.server:app"
clientapp = "app.client:app"
""",
    "app/__init__.py": "",
    "app/server.py": '''\
"""The app that Flower runs at the server."""

from fedtailor.deploy.apps import server

app = server()
''',
    "app/client.py": '''\
"""The app that Flower runs at a site: it forwards each message to the process with the data."""

import os
from multiprocessing.connection import Client

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedtailor.deploy.subprocesses import end_after_parent

end_after_parent()
app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def forward(message: Message, context: Context) -> Message:
    with Client(os.environ["FEDTAILOR_SITE"]) as site:
        site.send((message.metadata.message_type, message.content))
        content, error = site.recv()
    return Message(Error(100, error) if error else content, reply_to=message)
''',
}


@dataclass(frozen=True)
class SiteConfig:
    """A site, which has the data of some clients."""

    name: str
    clients: Clients = 1
    new: bool = False  # joins when the training is over


@dataclass(frozen=True)
class Deployment:
    """The content of ``deploy.toml``. Clients are numbered in the order of the sites, those of new
    sites after all others."""

    folder: Path
    address: str = ADDRESS  # of the server, as the sites reach it
    timeouts: Timeouts = Timeouts()
    sites: tuple[SiteConfig, ...] = ()

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not 0 < (whole_number(port) or 0) < 65536 or "/" in host:
            raise InputError(
                f"address = {brief(self.address)}: must be HOST:PORT with a port from 1 to 65535"
            )
        if ":" in host:
            raise InputError(
                f"address = {self.address!r}: the server listens by IPv4 alone; give a name or an "
                "IPv4 address"
            )
        names = [site.name for site in self.sites]
        for name in names:
            if not _NAME.fullmatch(name):
                raise InputError(
                    f"site name {name!r}: allowed are letters, digits, '-' and '_', beginning with "
                    "a letter or a digit"
                )
        if not names or len(set(names)) < len(names):
            raise InputError(f"sites = {names}: there must be at least one, and each name once")

    @property
    def host(self) -> str:
        """The server's name or IP address."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def experiment(self) -> Experiment:
        """The experiment: the same at the server and at all sites, except for ``[data]``."""
        return load(self.folder / "experiment.toml")

    @property
    def own_files(self) -> list[str]:
        """The user's own files, which all sites need, as paths in the folder."""
        return [*copies(self.experiment)]

    @property
    def run(self) -> Path:
        """The run directory, on the server."""
        return self.folder / "run"

    @property
    def server(self) -> Path:
        """The folder of Flower's files on the server."""
        return self.folder / "server"

    def site(self, name: str) -> Path:
        """Return the folder of a site: private states, its models, Flower's files."""
        return self.folder / "sites" / name

    def key(self, name: str) -> Path:
        """Return the path of a site's private key; the public one is that with ``.pub``."""
        return self.folder / "keys" / name

    def certificate(self, name: str) -> Path:
        """Return the path of a file in the folder of certificates."""
        return self.folder / "certs" / name

    @property
    def total(self) -> int:
        """The number of clients of all sites but the new ones."""
        return sum(site.clients for site in self.sites if not site.new)

    @property
    def new_clients(self) -> range:
        """The numbers of the clients of new sites."""
        return range(self.total, sum(site.clients for site in self.sites))

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names at the server: ``berlin``, or ``berlin.0``, ``berlin.1`` and so on
        where a site has several."""
        return tuple(
            site.name if site.clients == 1 else f"{site.name}.{number}"
            for site in sorted(self.sites, key=lambda site: site.new)
            for number in range(site.clients)
        )

    def clients(self, name: str) -> range:
        """Return the numbers of the clients at a site."""
        first = 0
        for site in sorted(self.sites, key=lambda site: site.new):
            if site.name == name:
                return range(first, first + site.clients)
            first += site.clients
        raise unknown("site", name, [site.name for site in self.sites])

    def whose(self, name: str, in_data: Sequence[str]) -> str:
        """Say which of a site's clients has which of the names ``in_data``, where they differ from
        the server's; InputError where one is called like another site."""
        names = [self.names[client] for client in self.clients(name)]
        others = {*self.names, *(site.name for site in self.sites)} - {name, *names}
        for client in in_data:
            if client in others:
                raise InputError(
                    f"the data have rows of {client!r}, which is another site in deploy.toml; this "
                    f"is site {name!r}: give --data its own file, or --site the name of theirs"
                )
        pairs = [f"{a} is {b!r}" for a, b in zip(names, in_data, strict=False) if a != b]
        return f"in these data {listed(pairs)}; names in the data stay here" if pairs else ""


def open_folder(folder: Path) -> Deployment:
    """Read the deployment of a folder; InputError where its files don't fit together."""
    path = folder / "deploy.toml"
    if not path.is_file():
        raise InputError(f"{folder} has no deploy.toml; fedtailor deploy init writes one")
    content = read_toml(path)
    sites = content.pop("sites", [])
    if not isinstance(sites, list) or not all(isinstance(s, dict) and "name" in s for s in sites):
        raise InputError(f"{path}: sites must be tables [[sites]] that have a name")
    configs = tuple(build(SiteConfig(""), table, "sites") for table in sites)
    if "folder" in content:
        raise unknown("key", "folder", ["address", "timeouts", "sites"], where=str(path))
    deployment = build(Deployment(folder.resolve(), sites=configs), content, "")
    clients = deployment.experiment.split.clients
    if deployment.total != clients:
        raise InputError(
            f"{path} has sites with {deployment.total} clients, experiment.toml has split.clients "
            f"= {clients}: make them equal, and give both files to all sites"
        )
    return deployment


def init(
    folder: Path, experiment: Path, sites: Sequence[str], address: str, settings: Settings = ()
) -> Deployment:
    """Write a deployment's folder from an experiment file, changed by ``settings``, for ``sites``,
    each ``NAME`` or ``NAME:CLIENTS``, that reach the server at ``address``.

    The experiment in the folder has only those fields of ``[split]`` that apply to the data of one
    client, and those of ``[data]`` that all sites have in common: names of columns, the classes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty; choose another folder")
    deployment = Deployment(folder, address, sites=tuple(map(_site, sites)))
    content = read(experiment, settings)
    content.pop("tune", None)
    content["data"] = _common_data(parse(content).data, content.get("data", {}))
    split = {k: v for k, v in content.get("split", {}).items() if k in _CLIENT_SPLIT}
    content["split"] = {"scheme": "natural", "clients": deployment.total, **split}
    deployed = parse(content)
    check_remote(deployed)
    _name_copies(content)
    texts = {
        **_APP,
        "experiment.toml": tomli_w.dumps(content),
        "deploy.toml": _deploy_toml(deployment),
    }
    files = {**copies(deployed), **{name: text.encode() for name, text in texts.items()}}
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source)
    return open_folder(folder)


def _name_copies(content: dict[str, Any]) -> None:
    """Let the ``content`` of ``experiment.toml`` name the copies of the user's own files."""
    for code in own_code(content):
        try:
            own = origin_of(code.reference)
        except InputError as error:
            raise InputError(f"{code.key}: {error}") from error
        in_folder = own.reference if own.path is None else f"{code.folder}/{own.reference}"
        code.section[code.name] = in_folder


def add_site(deployment: Deployment, name: str, clients: int = 1) -> Deployment:
    """Add a new site, which joins when the training is over, to ``deploy.toml``."""
    site = build(SiteConfig(""), {"name": name, "clients": clients, "new": True}, "sites")
    sites = (*deployment.sites, site)
    if name in (site.name for site in deployment.sites):
        raise InputError(f"site {name} is there already; choose another name")
    replace(deployment, sites=sites)  # refuses a name that can't be one
    path = deployment.folder / "deploy.toml"
    table = (
        f'\n[[sites]]\nname = "{name}"\nclients = {clients}\n'
        "new = true  # joins when the training is over\n"
    )
    write_atomically(path, (path.read_text() + table).encode())
    return open_folder(deployment.folder)


def _site(text: str) -> SiteConfig:
    name, colon, clients = text.partition(":")
    number = whole_number(clients) if colon else 1
    if not number:
        raise InputError(f"site {brief(text)}: write NAME, or NAME:CLIENTS with a number above 0")
    return SiteConfig(name, number)


def _common_data(config: DataConfig, fields: dict[str, Any]) -> dict[str, Any]:
    objective = objective_of_data(config)
    if objective.names_classes and not config.classes:
        raise InputError(
            "data.classes is missing: a site may lack some of the classes, but all sites must "
            'number them alike; write for example classes = ["no", "yes"]'
        )
    if "scale" in objective.settings and not config.scale:
        raise InputError(
            "data.scale is missing: all sites must scale their numbers alike; write their mean and "
            "their deviation, as far as they are known, for example scale = [37.5, 1.2]"
        )
    common = {key: value for key, value in fields.items() if key not in _SITE_DATA}
    return {**common, "task": objective.name}


def _deploy_toml(deployment: Deployment) -> str:
    sites = "\n".join(
        f'\n[[sites]]\nname = "{site.name}"\nclients = {site.clients}' for site in deployment.sites
    )
    return (
        "# The address by which the sites reach the server, and the sites. Clients are numbered\n"
        "# in this order; `clients` is the number of clients at a site.\n"
        f'address = "{deployment.address}"\n\n'
        "[timeouts]  # seconds; `least` is a fraction of the cohort\n"
        "start = 600\nreply = 3600\nleast = 0.5\n"
        f"{sites}\n"
    )


def at_site(experiment: Experiment, data: str, settings: Sequence[str]) -> Experiment:
    """Return the experiment with the ``data`` of one site, a file, a folder or a data set's name,
    and its ``settings`` of ``[data]``, such as ``label=diagnosis``."""
    is_local = Path(data).suffix in FORMATS or (Path(data).is_dir() and data not in BUILTIN)
    if is_local and not Path(data).exists():
        raise missing_file(data)
    fields: dict[str, Any] = {"path": str(Path(data).resolve())} if is_local else {"name": data}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set takes key=value, got {text!r}")
        if key in ("path", "name", "task", "classes", *objective_of_data(experiment.data).settings):
            raise InputError(
                f"data.{key} can't be set at a site: --data names the file or data set, and "
                "experiment.toml has the task, the classes and the loss of all sites"
            )
        fields[key] = str(Path(value).resolve()) if key == "test_path" else value
    return replace(experiment, data=build(experiment.data, fields, "data"))
