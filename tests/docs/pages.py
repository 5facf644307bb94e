"""Runs a page of the documentation as a reader does: from the top, in one terminal.

- A ``bash`` block runs.
- A block whose first line is a comment with a file's name (``# net.py``) becomes that file.
- A ``text`` block shows what the commands above it have printed, or some lines of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.\w+)\n")
_END = "--- the end of block {} ---"
_VARIES = re.compile(
    r"'[^']*'|\"[^\"]*\"|[-+*.,:\s]+|\d[\d.,:]*( ?(ms|s|min|h|B|kB|MB|GB|k|M)\b)?|\b(nan|inf)\b"
)
"""What another machine prints otherwise: numbers with their units, stars, the width of columns, and
what a model writes, in quotation marks."""


class Block(NamedTuple):
    """A block of code, and the line of the page on which it begins."""

    language: str
    content: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that it is."""
        found = _FILE.match(self.content)
        return found and found[1]


def blocks(page: str) -> list[Block]:
    """All blocks of code."""
    return [
        Block(found[1].strip(), found[2], page.count("\n", 0, found.start()) + 1)
        for found in _BLOCK.finditer(page)
    ]


def script(page: str) -> str:
    """What a reader types."""
    lines = ["set -e"]
    for block in blocks(page):
        if block.file:
            lines += [f"cat > {block.file} <<'END_OF_FILE'", block.content + "END_OF_FILE"]
        elif block.language == "bash":
            lines += [block.content, f"echo '{_END.format(block.line)}'"]
        else:
            assert block.language == "text", f"line {block.line}: is it a file, bash, or text?"
    return "\n".join(lines)


def run(page: str, folder: Path, seconds: float = 900, patience: float = 30) -> dict[int, str]:
    """Run it in an empty folder: what the commands before each ``text`` block have printed, by the
    line of that block. No process is left in the end, or ``patience`` seconds later."""
    said = folder.with_suffix(".log")
    home = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{home}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    with said.open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script(page)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            left = _is_left(process.pid, patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rest = said.read_text()
    assert code == 0, rest[-3000:]
    assert not left, "the page leaves processes behind"
    printed, now = {}, ""
    for block in blocks(page):
        if block.language == "text":
            printed[block.line], now = now, ""
        elif block.language == "bash":
            before, _, rest = rest.partition(_END.format(block.line) + "\n")
            now += before
    return printed


def _is_left(group: int, seconds: float) -> bool:
    """Whether processes of the group are there after so many seconds, in which a server may end."""
    for _ in range(1 + int(10 * seconds)):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def essence(line: str) -> str:
    """The line without what varies."""
    return _VARIES.sub(" ", line).strip()


def missing(block: Block, printed: str) -> list[str]:
    """The lines of a ``text`` block that were not printed. ``...`` stands for lines that are left
    out. What the verdict and its table say depends on the last digit of a result, so they are not
    compared."""
    verdict = re.compile(r"^(Verdict: |Test \w+: how far).*?(\n\n|\Z)", re.MULTILINE | re.DOTALL)
    content = verdict.sub("", block.content)
    there = {essence(line) for line in printed.splitlines()} | {""}
    return [line for line in content.splitlines() if essence(line) not in there]
