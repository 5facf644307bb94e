"""``fedtailor watch``: follow a run in the terminal, or as a page in the browser."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, announce, say, whole_number
from ..store.format import as_json
from .options import add_flag, add_json

if TYPE_CHECKING:
    from ..watch.follow import Follower
    from ..watch.state import RunState

_PAUSE, _LONG_PAUSE = 1.0, 5.0  # seconds between two looks; the long one for very large grids
_SHARE = 0.01  # of a core
_WIDTH = 120  # of a table without a terminal


def add(parser: argparse.ArgumentParser) -> None:
    what = "a run directory, or a deployment's folder"
    parser.add_argument("run", type=Path, metavar="RUN", help=what)
    add_flag(parser, "--once", "show how the run stands, and end")
    add_json(parser, "how the run stands, once,")
    parser.add_argument(
        "--serve",
        nargs="?",
        const="8080",
        metavar="[HOST:]PORT",
        help="serve a page that follows the run, port: 8080; host: 127.0.0.1, which only this "
        "machine reaches",
    )


def command(options: argparse.Namespace) -> None:
    from ..watch.follow import Follower

    if options.serve is not None and (options.once or options.json):
        raise InputError("--serve follows the run; leave out --once and --json")
    if options.json:
        print(as_json(Follower(options.run).look(), 2))
        return
    if options.once:
        _print(Follower(options.run).look())
        return
    try:
        place = None if options.serve is None else _place(options.serve)
        _wait_for(options.run)
        follower = Follower(options.run)
        if place is not None:
            _serve(follower, *place)
        elif sys.stdout.isatty():
            _follow_in_terminal(follower)
        else:
            _follow_in_lines(follower)
    except KeyboardInterrupt:  # the usual way to leave
        return


def _wait_for(run: Path) -> None:
    """Return when a run has begun in its directory, or the folder of a deployment is there."""
    from ..watch.files import is_written

    if run.exists():
        return
    other = Path("runs") / run
    hint = f"; did you mean {other}?" if other.is_dir() else ""
    said = f"no directory {str(run)!r} yet; waiting for a run to begin there"
    announce(f"{said} (Ctrl-C ends){hint}")
    signs = run / "experiment.json", run / "deploy.toml"
    while not (is_written(run) or any(path.exists() for path in signs)):
        time.sleep(_PAUSE)


def _print(state: RunState) -> None:
    from rich.console import Console

    from ..watch.terminal import View

    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(View(state))


def _looks(follower: Follower) -> Iterator[RunState]:
    while True:
        begun = time.process_time()
        state = follower.look()
        yield state
        if follower.is_last(state):
            return
        spent = time.process_time() - begun
        time.sleep(min(max(_PAUSE, spent / _SHARE), _LONG_PAUSE))


def _follow_in_terminal(follower: Follower) -> None:
    from rich.console import Console
    from rich.live import Live

    from ..watch.terminal import View

    with Live(console=Console(), auto_refresh=False) as live:
        for state in _looks(follower):  # each in place of the one before; the last one stays
            live.update(View(state, is_last=state.is_over), refresh=True)


def _follow_in_lines(follower: Follower) -> None:
    from ..watch.lines import changes

    old = None
    for state in _looks(follower):
        for line in changes(old, state):
            print(line, flush=True)
        old = state


def _place(address: str) -> tuple[str, int]:
    """The host, empty for the default, and the port of ``[HOST:]PORT``."""
    host, _, port_text = address.rpartition(":")
    port = whole_number(port_text)
    if port is None or port > 65535:
        raise InputError(f"--serve {address}: must be [HOST:]PORT with a port from 0 to 65535")
    return host, port


def _serve(follower: Follower, host: str, port: int) -> None:
    from ..watch.bounded import LOCAL
    from ..watch.server import PageServer

    with PageServer(follower, host or LOCAL, port) as server:
        print(f"{server.url} follows {follower.run}; Ctrl-C ends it", flush=True)
        if not server.is_local:
            say("whoever reaches this machine can read this page")
        server.serve_forever()
