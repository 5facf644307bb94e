"""Environments of other libraries, made by shell scripts in place of Python and pip."""

import sys

import pytest
from benchmarks.peers import __main__ as peers

PYTHON = """#!/bin/sh
mkdir -p "$4/bin"
echo '#!/bin/sh\necho "$@" >> {log}' > "$4/bin/pip"
chmod 755 "$4/bin/pip"
"""


def test_only_blazefl_ignores_the_python_that_it_asks_for(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path / "envs")
    for library in peers.LIBRARIES:
        peers.install(library)
    commands = log.read_text().splitlines()
    assert len(commands) == len(peers.LIBRARIES)
    for library, command in zip(peers.LIBRARIES, commands, strict=True):
        assert command.startswith("install -q -r ")
        assert ("--ignore-requires-python" in command) == (library == "blazefl")
