"""``fedtailor deploy``: run over Flower, at sites that keep their data."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .export import say_how_to_try
from .options import add_flag, add_json, add_settings, whole
from .serve import add_endpoint, serve_until_stopped

if TYPE_CHECKING:
    from ..deploy.folder import Deployment

_INSECURE = "without TLS and keys; for one machine, to try it"


def add(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="STEP")

    init = _step(commands, "init", None, "write a deployment's folder from an experiment file")
    init.add_argument("--experiment", type=Path, required=True, metavar="EXPERIMENT.toml")
    init.add_argument("--sites", default="a,b,c", metavar="NAME[:CLIENTS],...")
    init.add_argument("--address", help="HOST:PORT of the server, as the sites reach it")
    add_settings(init, "change a value of the experiment, as in fedtailor run; repeatable")

    certs = _step(commands, "certs", _certs, "make the certificates and keys that are missing")
    add_flag(certs, "--force", "make all anew; the old ones are lost")

    new = _step(commands, "add-site", _add_site, "add a site that joins when the training is over")
    new.add_argument("--name", required=True)
    new.add_argument("--clients", type=whole(1), default=1, metavar="N", help="default: 1")

    server = _step(commands, "server", _server, "start Flower's SuperLink, and let the sites in")
    add_flag(server, "--insecure", _INSECURE)

    client = _step(commands, "client", _client, "start Flower's SuperNode at a site")
    client.add_argument("--site", required=True, metavar="NAME")
    client.add_argument("--data", required=True, help="the site's file, or a data set's name")
    add_settings(client, "another column or limit here, e.g. label=diagnosis; repeatable")
    what = "tell the server how many examples of each class there are, for fedtailor advise"
    add_flag(client, "--tell-labels", what)
    add_flag(client, "--insecure", _INSECURE)

    _step(commands, "run", _run, "run the experiment, or go on with it")

    status = _step(
        commands, "status", _status, "show the sites, Flower's runs and the rounds so far"
    )
    add_json(status)

    export = _step(
        commands, "export", _export, "write a client's own model, at its site, for use elsewhere"
    )
    _add_model(export)
    export.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    add_flag(export, "--merge", "one full model, no adapter")

    serving = _step(commands, "serve", _serve, "serve a client's own language model, at its site")
    _add_model(serving)
    add_endpoint(serving)


def command(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("flwr") is None:
        raise InputError("fedtailor deploy needs Flower: pip install 'fedtailor[flower]'")
    from ..deploy.folder import open_folder

    if options.step is None:
        _init(options)
    else:
        options.step(open_folder(options.folder), options)


def _step(
    commands: Any,
    name: str,
    step: Callable[[Deployment, argparse.Namespace], None] | None,
    what: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the deployment's folder")
    parser.set_defaults(step=step)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--site", required=True, metavar="NAME")
    parser.add_argument("--method", metavar="LABEL", help="default: the only one")
    parser.add_argument("--seed", type=int, help="default: the experiment's first")
    parser.add_argument("--client", help="a client's name or number; default: the only one")


def _init(options: argparse.Namespace) -> None:
    from ..deploy.folder import ADDRESS, init

    sites = [name.strip() for name in options.sites.split(",")]
    address = options.address or ADDRESS
    made = init(options.folder, options.experiment, sites, address, options.settings)
    counts = f"{len(made.sites)} sites, {made.total} clients"
    print(f"{options.folder}: {counts}, server at {made.address}")


def _certs(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.certificates import make

    made = make(deployment, force=options.force)
    for path in made:
        print(f"made {path.relative_to(deployment.folder)}")
    if not made:
        print("nothing is missing; --force makes all anew")
    files = " ".join(["deploy.toml experiment.toml certs/ca.crt", *deployment.own_files])
    for site in deployment.sites:
        print(f"site {site.name} needs: {files} keys/{site.name}")


def _add_site(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.certificates import make
    from ..deploy.folder import add_site
    from ..deploy.launch import let_in

    deployment = add_site(deployment, options.name, options.clients)
    folder, clients = deployment.folder, deployment.clients(options.name)
    print(f"site {options.name}: clients {', '.join(map(str, clients))}")
    keys = ""
    if deployment.certificate("ca.crt").exists():
        for path in make(deployment):
            print(f"made {path.relative_to(folder)}")
        when = "is let in" if let_in(deployment) else "is let in when the server starts"
        print(f"site {options.name} {when}")
        keys = f" certs/ca.crt keys/{options.name}"
    own_files = "".join(f" {file}" for file in deployment.own_files)
    print(f"site {options.name} needs: deploy.toml experiment.toml{own_files}{keys}")
    print(f"there: fedtailor deploy client DIR --site {options.name} --data FILE")
    print(f"then here: fedtailor deploy run {shlex.quote(str(options.folder))}")


def _server(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.launch import serve

    serve(deployment, insecure=options.insecure)


def _client(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.launch import join

    join(
        deployment, options.site, options.data, options.settings,
        insecure=options.insecure, tell_labels=options.tell_labels,
    )  # fmt: skip


def _run(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.launch import run

    print(run(deployment))


def _status(deployment: Deployment, options: argparse.Namespace) -> None:
    from tabulate import tabulate

    from ..deploy.launch import server_environment
    from ..deploy.status import status

    state = status(deployment, server_environment(deployment))
    if options.json:
        print(json.dumps(state, indent=2))
        return
    print(tabulate(state["sites"], "keys", disable_numparse=[0]))
    print(f"\n{tabulate(state['progress'], 'keys', disable_numparse=[0])}")
    if state["run"] is not None:
        print(f"\nFlower's run {state['run']}: {state['state']}")


def _export(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.export import open_model
    from ..export.folder import new_folder, write_model

    model = open_model(deployment, options.site, options.method, options.seed, options.client)
    with new_folder(options.out) as stage:
        write_model(model, stage, options.merge)
    print(options.out)
    say_how_to_try(options.out)


def _serve(deployment: Deployment, options: argparse.Namespace) -> None:
    from ..deploy.export import open_model
    from ..serving.models import Models

    model = open_model(deployment, options.site, options.method, options.seed, options.client)
    name = model.client or options.site
    serve_until_stopped(Models(model, [name], lambda _: model.state), options.folder, options)
