"""A page that follows a run, for browsers on this machine; the run directory is read when the page
asks.

It answers GET requests for its own few files and for the run's report.html, and nothing else. A
request must name this machine, so that no page from elsewhere can read it by a name that it lets
point here (DNS rebinding). Connections are bounded in number, and each request in time.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from .. import report
from ..errors import InputError, whole_number
from ..report import drawing
from ..report.charts import specs
from ..store.format import as_json
from ..store.metrics import scale_of
from .bounded import BoundedHandler, BoundedServer
from .follow import Follower
from .state import RunState

_PAUSE = 0.5  # seconds; requests within share a look
_HERE, _REPORT = Path(__file__).parent, Path(report.__file__).parent
_FILES = {
    "/": (_HERE / "page.html", "text/html"),
    "/page.js": (_HERE / "page.js", "text/javascript"),
    "/theme.js": (_REPORT / "theme.js", "text/javascript"),
    "/vega.js": (_REPORT / "vega" / "vega.js", "text/javascript"),
}
# Vega makes functions of its expressions
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class PageServer(BoundedServer):
    """Serves the page of the run of a ``follower``."""

    def __init__(self, follower: Follower, host: str, port: int) -> None:
        super().__init__(host, port, _Handler)
        self._follower = follower
        self._lock = threading.Lock()
        self._looked = 0.0
        self._version = time.time_ns() // 1_000_000  # a page may know those of an earlier server
        self._state: RunState | None = None

    def answer(self, known: int) -> dict[str, Any]:
        """What is new for a page that knows the version ``known``: all, or only the time left."""
        with self._lock:
            now, state = time.monotonic(), self._state
            if state is None or now - self._looked >= _PAUSE:
                new = self._follower.look()
                if state is None or replace(new, seconds_left=state.seconds_left) != state:
                    self._version += 1
                state, self._looked = new, now
                self._state = state
            found = {"version": self._version, "share": state.share}
        return found if found["version"] == known else found | _content(state)

    def report_page(self) -> bytes | None:
        """The run's report, if it is there."""
        path = self._follower.run / "report.html"
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def _content(state: RunState) -> dict[str, Any]:
    labels = list(dict.fromkeys(trial.method for trial in state.trials))
    factor, digits = scale_of(state.metric)
    return vars(state) | {
        "note": state.note,
        "measure": state.measure,
        "isOver": state.is_over,
        "factor": factor,
        "digits": digits,
        "labels": labels,
        "dashes": drawing.DASHES,
        "look": drawing.LOOK,
        "specs": {
            "curves": specs.curves(labels, state.metric, "validation"),
            "losses": specs.losses(labels),
        },
        "report": state.report is not None,
    }


def _style() -> str:
    light, dark = (
        " ".join(f"--m{k}: {colour};" for k, colour in enumerate(colours))
        for colours in (drawing.COLOURS, drawing.DARK)
    )
    colours = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    sheets = (_REPORT / "page.css", _HERE / "page.css")
    return colours + "".join(sheet.read_text("utf-8") for sheet in sheets)


class _Handler(BoundedHandler):
    server: PageServer

    def do_GET(self) -> None:  # noqa: N802
        path, _, query = self.path.partition("?")
        if not self.server.accepts(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this page has another address")
        elif path == "/state":
            self._send_state(parse_qs(query).get("known", ["0"])[0])
        elif path == "/page.css":
            self._send(_style().encode(), "text/css")
        elif path in _FILES:
            file, kind = _FILES[path]
            self._send(file.read_bytes(), kind)
        elif path == "/favicon.ico":  # browsers ask for it beside the report
            self._send(b"", "image/x-icon")
        elif path == "/report.html" and (content := self.server.report_page()) is not None:
            self._send(content, "text/html", policy=None)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_state(self, known: str) -> None:
        content: dict[str, Any]
        try:
            content = self.server.answer(whole_number(known) or 0)
        except InputError as error:
            content = {"version": 0, "error": str(error)}
        self._send(as_json(content).encode(), "application/json")

    def _send(self, content: bytes, kind: str, policy: str | None = _POLICY) -> None:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        if policy is not None:
            headers["Content-Security-Policy"] = policy
        self.send(HTTPStatus.OK, f"{kind}; charset=utf-8", content, headers)
