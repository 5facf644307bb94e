"""The server, a site and a run of a deployment: Flower's programs with their flags."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import GO_ON, InputError, announce
from ..flower.client import Site
from ..store.files import write_atomically
from ..store.run_directory import locked
from ..temporary_folder import temporary_folder
from . import subprocesses
from .folder import Deployment, at_site
from .registration import has_keys, register
from .site_process import answers
from .subprocesses import CONNECTION, FOLDER, SITE, ProgramEndedError, ask, started

_OF_FLOWER = re.compile(  # lines that a user of fedtailor need not see
    rb"(\x1b\[\d+m)?(INFO|DEBUG) *(\x1b\[0m)? *:|Using SuperLink: |Successfully installed |"
    + "╭─|│|╰─".encode()  # its boxes around errors
)
_RAISED = "ServerApp failed with exception: "  # begins the details of an error of ours
_SOCKETS = "fedtailor-site-"  # begins the names of folders for sockets
_STARTS_APPS = "flower-superexec"  # without it a SuperLink or SuperNode goes on, and does nothing
_JOINED = "joined"  # a file that exists once a site has received a message
_MAX_REFUSAL = 90.0  # seconds; after 60 Flower's server notices that a SuperNode was killed
_FIRST_PAUSE, _LAST_PAUSE = 1.0, 16.0  # seconds before a SuperNode is started again


def server_environment(deployment: Deployment) -> dict[str, str]:
    """The environment of Flower's programs on the server; InputError if none was started here."""
    if not (deployment.server / "flower" / "config.toml").exists():
        where = shlex.quote(str(deployment.folder))
        raise InputError(f"no server was started here: fedtailor deploy server {where}")
    return subprocesses.environment(deployment.server, **{FOLDER: str(deployment.folder)})


def serve(deployment: Deployment, *, insecure: bool) -> None:
    """Start the SuperLink, register the sites' keys, and serve until interrupted; ``insecure``:
    without TLS and keys. Raises InputError where a file is missing, or the SuperLink ends."""
    local = deployment.host in ("localhost", "127.0.0.1")
    host = "127.0.0.1" if local else "0.0.0.0"
    command = [
        sys.executable, "-m", "fedtailor.deploy.superlink",
        "--host", host,
        "--port", str(deployment.port),
        "--database", str(deployment.server / "state.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    if insecure:
        _warn()
        command.append("--insecure")
    else:
        files = {
            "--ssl-ca-certfile": deployment.certificate("ca.crt"),
            "--ssl-certfile": deployment.certificate("server.crt"),
            "--ssl-keyfile": deployment.certificate("server.key"),
        }
        _check_files(deployment, [*files.values()])
        command += [text for option, path in files.items() for text in (option, str(path))]
        command.append("--enable-supernode-auth")
        public_keys = [deployment.key(site.name).with_suffix(".pub") for site in deployment.sites]
        _check_files(deployment, public_keys)
    with locked(deployment.server):
        subprocesses.check_port(host, deployment.port)
        _write_connection(deployment, insecure)
        make_private(deployment.server / "state.db")  # what sites have sent, until it is read
        most = subprocesses.PARTS + 4 * max(site.clients for site in deployment.sites)
        env = server_environment(deployment) | {subprocesses.MOST_PARTS: str(most)}
        with (
            # at SIGTERM it waits for `deploy run`, which waits for it
            started(command, env, "flower-superlink", if_killed=signal.SIGKILL) as process,
            subprocesses.watched(process, _STARTS_APPS),
        ):
            subprocesses.wait_for(deployment.port)
            if not insecure:
                register(deployment, env)
            print(f"ready at {deployment.address}", flush=True)


def join(
    deployment: Deployment,
    site: str,
    data: str,
    settings: Sequence[str],
    *,
    insecure: bool,
    tell_labels: bool = False,
) -> None:
    """Start the SuperNode of a ``site`` that has ``data``, with ``settings`` of ``[data]``, and
    answer its messages until interrupted; ``tell_labels``: how many examples of each class there
    are.

    A SuperNode that ends is started again, and data and model are loaded anew: Flower's SuperNode
    ends at many errors of the server that would not occur again, and the server refuses for a
    minute the key of a SuperNode that was killed. It is not started again if the site never
    received a message, since its key may be wrong, nor after a minute and a half of refusals.
    Before each start there is a pause: a second, and twice the last one while the server refuses.
    """
    folder, clients = deployment.site(site), deployment.clients(site)
    experiment = at_site(deployment.experiment, data, settings)
    command = ["flower-supernode", "--superlink", deployment.address]
    if insecure:
        _warn()
        command.append("--insecure")
    else:
        authority, key = deployment.certificate("ca.crt"), deployment.key(site)
        _check_files(deployment, [authority, key])
        command += ["--root-certificates", str(authority)]
        command += ["--auth-supernode-private-key", str(key)]
    with locked(folder):
        first_refusal: float | None = None  # the time
        pause = _FIRST_PAUSE
        while True:
            local_site = Site(
                experiment, folder / "states", clients=clients, tell_labels=tell_labels
            )
            local_site.load()
            if first_refusal is None and (whose := deployment.whose(site, local_site.names)):
                announce(whose)
            reason, accepted = _serve_site(local_site, folder, command)
            now = time.monotonic()
            first_refusal = None if accepted else first_refusal or now
            has_joined = (folder / _JOINED).exists()
            if first_refusal and (now > first_refusal + _MAX_REFUSAL or not has_joined):
                raise ProgramEndedError(reason)
            pause = _FIRST_PAUSE if accepted else min(2 * pause, _LAST_PAUSE)
            announce(f"{reason}; starting it again in {pause:g} s")
            time.sleep(pause)


def _serve_site(site: Site, folder: Path, command: Sequence[str]) -> tuple[str, bool]:
    """Start a SuperNode and answer its messages until it ends. Returns why it has ended, and
    whether the server accepted it: it has received a message, or has run for longer than a refused
    one does."""
    reason, accepted, start = "", False, time.monotonic()
    try:
        with (
            temporary_folder(_SOCKETS) as place,
            Listener(f"{place}/socket", "AF_UNIX") as listener,
            started(
                [*command, "--port", str(subprocesses.free_port())],
                subprocesses.environment(folder, **{SITE: f"{place}/socket"}),
            ) as process,
            subprocesses.watched(process, _STARTS_APPS),
        ):
            for _ in answers(site, listener):
                accepted = True
                (folder / _JOINED).touch()
    except ProgramEndedError as error:
        reason = error.reason
    return reason, accepted or time.monotonic() > start + _MAX_REFUSAL


def let_in(deployment: Deployment) -> bool:
    """Register the keys of all sites at the server, if it runs on this machine with TLS and keys;
    whether it does. Otherwise it does that when it starts."""
    if not has_keys(deployment) or not subprocesses.answers_at(deployment.port):
        return False
    register(deployment, server_environment(deployment))
    return True


def run(deployment: Deployment) -> Path:
    """Run the remaining rounds of the experiment, with the server's lines on stderr; the run
    directory. What Flower says of itself goes to a file, but for warnings and errors. Raises
    InputError where the server doesn't answer, or the run fails."""
    env = server_environment(deployment)
    number = ""
    try:
        with subprocesses.interrupts_later():
            number = str(ask(["run", str(deployment.folder), CONNECTION], env)["run-id"])
        log = deployment.server / "flower.log"
        print(f"Flower's own lines go to {log}", file=sys.stderr)
        status, seen = "", 0
        while not status.startswith("finished"):  # the lines may end before the run
            seen = _follow(number, env, log, seen)
            try:
                last = ask(["list", CONNECTION, "--run-id", number], env)["runs"][0]
            except InputError as error:
                raise InputError(
                    "the server no longer answers; start fedtailor deploy server again, and "
                    f"{GO_ON} ({error})"
                ) from None
            status = str(last["status"])
    except KeyboardInterrupt:
        if number:
            ask(["stop", number, CONNECTION], env)
        raise
    if status != "finished:completed":
        details = str(last["status-details"])
        if details.startswith(_RAISED):
            raise InputError(details.removeprefix(_RAISED))
        raise InputError(f"Flower's run {number} is {status}: {details}; {GO_ON}")
    return deployment.run


def _follow(number: str, env: dict[str, str], log: Path, seen: int) -> int:
    """Show the lines of a run but the first ones, that were ``seen``; how many there are now."""
    command = ["flwr", "log", number, CONNECTION, "--stream"]
    count = 0
    with started(command, env | {"PYTHONUNBUFFERED": "1"}, is_read=True) as process:
        assert process.stdout is not None
        with process.stdout as lines:
            for count, line in enumerate(lines, 1):
                if count > seen:
                    _show(line, log)
        process.wait()
    return max(seen, count)


def _show(line: bytes, log: Path) -> None:
    """Append what Flower says of itself to ``log``, and show other lines on stderr at once; also
    one that can't be written, as on a full disk."""
    is_kept = False
    if _OF_FLOWER.match(line):
        with suppress(OSError), log.open("ab", buffering=0) as file:
            is_kept = file.write(line) == len(line)
    if not is_kept:
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def make_private(path: Path) -> None:
    """Let the user alone read and write a database, made if need be, and what lies beside it."""
    path.touch(mode=0o600)
    for file in path.parent.glob(f"{path.name}*"):
        file.chmod(0o600)


def _warn() -> None:
    announce(
        "--insecure: nothing is encrypted, and anyone who reaches the port can take part; use it "
        "only to try a deployment on one machine"
    )


def _check_files(deployment: Deployment, paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            command = f"fedtailor deploy certs {shlex.quote(str(deployment.folder))}"
            raise InputError(f"{path} is missing; {command}, on the server, makes it")


def _write_connection(deployment: Deployment, insecure: bool) -> None:
    server: dict[str, Any] = {"address": f"127.0.0.1:{deployment.port}", "insecure": insecure}
    if not insecure:
        server["root-certificates"] = str(deployment.certificate("ca.crt"))
    path = deployment.server / "flower" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"superlink": {"default": CONNECTION, CONNECTION: server}}
    write_atomically(path, tomli_w.dumps(content).encode())
