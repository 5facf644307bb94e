"""What is done with Flower's programs, here shell scripts in their place."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedtailor.deploy import launch
from fedtailor.deploy.folder import Deployment, init, open_folder
from fedtailor.deploy.launch import join, make_private, run
from fedtailor.deploy.subprocesses import free_port
from fedtailor.errors import InputError
from tests.deploy.live import is_running, until
from tests.deploy.test_folder import made

FLOWER = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = run ] && kill -{signal} $PPID
echo '{{"run-id": 7}}'
"""


DIGITS = """
data.classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
model = {name = "cnn", pretrained = false, width = 0.1, image_size = 16}
methods.fedavg = {}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_start_is_interrupted_is_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = open_folder(made(tmp_path))
    config = deployment.server / "flower/config.toml"
    config.parent.mkdir(parents=True)
    config.touch()
    program, log = tmp_path / "bin/flwr", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(FLOWER.format(log=log, signal=number.name.removeprefix("SIG")))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(deployment)
    started, stopped = log.read_text().splitlines()
    assert started.startswith(f"run {deployment.folder} ")
    assert stopped.startswith("stop 7 ")
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


LOGGING = r"""#!/bin/sh
case $1 in
run) echo '{"run-id": 7}' ;;
log)
    printf 'Using SuperLink: deployment\n\033[92mINFO \033[0m:      Start a process\n'
    printf '╭─ Error ─╮\n│ no way │\n╰─────────╯\n'
    printf 'round 1 of 2\nINFO comes first\n\033[93mWARNING \033[0m:   slow\n' >&2
    ;;
list) echo '{"runs": [{"status": "finished:completed", "status-details": ""}]}' ;;
esac
"""


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Deployment]:
    """A deployment for which a script stands in the place of ``flwr``."""

    def make(script: str) -> Deployment:
        deployment = open_folder(made(tmp_path))
        (deployment.server / "flower").mkdir(parents=True)
        (deployment.server / "flower/config.toml").touch()
        program = tmp_path / "bin/flwr"
        program.parent.mkdir()
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return deployment

    return make


def test_what_flower_says_of_itself_goes_to_a_file(
    flower: Callable[[str], Deployment], capfd: pytest.CaptureFixture[str]
) -> None:
    deployment = flower(LOGGING)
    assert run(deployment) == deployment.run
    log = deployment.server / "flower.log"
    first, *shown = capfd.readouterr().err.splitlines()
    assert first == f"Flower's own lines go to {log}"
    assert shown == ["round 1 of 2", "INFO comes first", "\033[93mWARNING \033[0m:   slow"]
    kept = log.read_text().splitlines()
    assert kept[:2] == ["Using SuperLink: deployment", "\033[92mINFO \033[0m:      Start a process"]
    assert [line[0] for line in kept[2:]] == ["╭", "│", "╰"]


def test_what_a_full_disk_does_not_take_is_shown(
    flower: Callable[[str], Deployment], capfd: pytest.CaptureFixture[str]
) -> None:
    deployment = flower(LOGGING)
    (deployment.server / "flower.log").symlink_to("/dev/full")
    assert run(deployment) == deployment.run
    assert len(capfd.readouterr().err.splitlines()) == 9


def test_a_server_that_is_gone_ends_a_run_in_one_line(
    flower: Callable[[str], Deployment],
) -> None:
    deployment = flower(LOGGING.replace("list)", "list) exit 1 ;;\nother)"))
    with pytest.raises(InputError, match=r"no longer answers; .* the same command goes on after"):
        run(deployment)


ENDING = r"""#!/bin/sh
case $1 in
run) echo '{{"run-id": 7}}' ;;
log) echo round 1; [ -e {again} ] && echo round 2 ;;
list)
    status=running
    [ -e {again} ] && status=finished:failed
    touch {again}
    echo '{{"runs": [{{"status": "'$status'", "status-details": "{details}"}}]}}' ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("ServerApp failed with exception: 4 of 5 sent", "4 of 5 sent"),
        ("No heartbeat", "Flower's run 7 is finished:failed: No heartbeat; the same command goes"),
    ],
)
def test_a_run_is_followed_to_its_end_and_its_failure_is_one_line(
    details: str,
    said: str,
    tmp_path: Path,
    flower: Callable[[str], Deployment],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also where the stream of its lines ends before, and then begins anew."""
    deployment = flower(ENDING.format(again=tmp_path / "again", details=details))
    with pytest.raises(InputError, match=f"^{said}"):
        run(deployment)
    assert capfd.readouterr().err.splitlines()[1:] == ["round 1", "round 2"]


@pytest.mark.parametrize("joined", [False, True])
def test_a_site_that_got_messages_before_tries_again_for_a_while(
    joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e.toml").write_text(DIGITS)
    init(tmp_path / "dir", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    deployment = open_folder(tmp_path / "dir")
    program, log = tmp_path / "bin/flower-supernode", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho >> {log}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(launch, "_MAX_REFUSAL", 2.0 if joined else 60.0)
    if joined:
        deployment.site("a").mkdir(parents=True)
        (deployment.site("a") / "joined").touch()
    start = time.monotonic()
    with pytest.raises(InputError, match="flower-supernode ended with code 3, see above; the same"):
        join(deployment, "a", "digits", ["limit=30"], insecure=True)
    tries = len(log.read_text().splitlines())
    assert tries > 1 if joined else tries == 1
    assert (time.monotonic() > start + 2) >= joined


@pytest.mark.slow
def test_the_pause_between_tries_grows_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.toml").write_text(DIGITS)
    init(tmp_path / "dir", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    deployment = open_folder(tmp_path / "dir")
    deployment.site("a").mkdir(parents=True)
    (deployment.site("a") / "joined").touch()
    program = tmp_path / "bin/flower-supernode"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    pauses = {"_FIRST_PAUSE": 0.0625, "_LAST_PAUSE": 0.25, "_MAX_REFUSAL": 4.0}
    for name, seconds in pauses.items():
        monkeypatch.setattr(launch, name, seconds)
    with pytest.raises(InputError, match="flower-supernode ended with code 3"):
        join(deployment, "a", "digits", ["limit=30"], insecure=True)
    said = re.findall(r"starting it again in (\S+) s", capfd.readouterr().err)
    assert said[:3] == ["0.125", "0.25", "0.25"]


SERVING = """
import sys
from pathlib import Path
from fedtailor.deploy.folder import open_folder
from fedtailor.deploy.launch import serve
sys.executable = sys.argv[2]
serve(open_folder(Path(sys.argv[1])), insecure=True)
"""


@pytest.mark.slow
def test_a_superlink_ends_with_its_command_that_was_killed(tmp_path: Path) -> None:
    """At SIGTERM it would wait for the programs that wait for it."""
    (tmp_path / "e.toml").write_text(DIGITS)
    init(tmp_path / "dir", tmp_path / "e.toml", ["a"], f"127.0.0.1:{free_port()}")
    program, number = tmp_path / "superlink", tmp_path / "number"
    lines = "#!/bin/sh", "trap '' TERM", f"echo $$ > {number}.new", f"mv {number}.new {number}"
    program.write_text("\n".join([*lines, "exec sleep 60"]))
    program.chmod(0o700)
    server = subprocess.Popen([sys.executable, "-c", SERVING, tmp_path / "dir", program])
    until("it serves", number.exists)
    server.kill()
    server.wait()
    until("it ends", lambda: not is_running(int(number.read_text())), 20)


def test_what_the_server_stores_is_its_users_alone(tmp_path: Path) -> None:
    """Also the files that SQLite puts beside it."""
    path = tmp_path / "state.db"
    path.write_bytes(b"")
    path.chmod(0o644)  # as an earlier version left it
    make_private(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE messages (content BLOB)")
        database.commit()
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("state.db", "state.db-wal", "state.db-shm"), 0o600)
