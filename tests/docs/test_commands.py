"""The commands of the documentation's pages run, from the top of the page, with small experiments.

The tutorials have a test of their own, which compares what they print, too. What does not run here
stands in ``NOT_RUN``, with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedtailor.disk_cache import cache_dir
from tests.docs import pages
from tests.docs.test_blocks import NET, PAGES, PROGRAM

MINE = """
cat > mine.toml <<'END'
rounds = 2
[data]
name = "digits"
limit = 300
[split]
clients = 3
validation = 0.2
[model]
factory = "net.py:make"
targets = ["blocks.*.proj"]
[methods.local]
[methods.fedsdg]
[tune]
candidates = 2
space.all.optimiser.lr = [0.03, 0.1]
END
"""
RUN = MINE + "fedtailor run mine.toml\n"
METRIC = RUN.replace("[data]", '[evaluate]\nmetrics = ["macro_f1"]\n[data]')
TABLES = """
python - <<'END'
import random
draw = random.Random(0)
said = {"no": ["a broken arm", "a cut", "a scar"], "yes": ["fever", "a cough", "a sore throat"]}
def write(name, hospitals):
    print("note,diagnosis,hospital", file=(table := open(name, "w")))
    for number in range(40 * len(hospitals)):
        answer = draw.choice(list(said))
        hospital = hospitals[number % len(hospitals)]
        print(draw.choice(said[answer]), answer, hospital, sep=",", file=table)
write("visits.csv", [f"site-{number}" for number in range(8)])
write("new-rows.csv", ["site-3"])
write("notes.csv", ["berlin", "oslo", "rome"])
write("lagos.csv", ["lagos"])
write("rows.csv", ["berlin"])
END
"""
HOSPITALS = """
cat > hospitals.toml <<'END'
rounds = 2
[data]
path = "notes.csv"
text = "note"
label = "diagnosis"
client = "hospital"
[split]
scheme = "natural"
validation = 0.2
[model]
name = "minilm"
[methods.fedsdg]
END
fedtailor run hospitals.toml
"""
QUICKSTART = "fedtailor run quickstart --set preset=small --set 'methods=[\"fedsdg\"]'\n"
BEFORE = {
    "README": TABLES, "continue": MINE, "experiments": RUN.replace("mine", "other") + MINE,
    "export": QUICKSTART, "faq": MINE, "metrics": METRIC, "predict": TABLES + HOSPITALS,
    "start": TABLES, "track": MINE, "tune": MINE, "watch": RUN,
}  # fmt: skip
"""The files and runs that a page speaks of."""
STAND_FOR = {
    "README": {"METHOD": "local", "CLIENT": "site-3"},
    "continue": {"rounds=40": "rounds=4"},
}
INSTALLS = "installs, as .ci/run and the tests of versions do"
NOT_RUN = {
    "README": {"make quickstart": "the home page runs it", "make test": "runs the tests",
               "source": "the test has an environment"},
    "continue": {"fedtailor rollback runs/mine *#": "for a method that has diverged, which "
                 "tests/runs/test_rollback.py has"},
    "CONTRIBUTING": {"make": "each is a check of its own",
                     "python docs/": "tests/test_docs.py checks what they write",
                     "python -m (pytest|tests)": "runs the tests",
                     "fedtailor (describe|check-method) NAME": "tests do"},
    "deployment": {"": "the tutorial on three sites runs them"},
    "evidence": {"": "hours; tests/evidence runs the scripts on the kept results"},
    "flower": {"": "tests/flower runs the app"},
    "experiments": {"fedtailor run (quickstart|fedhft)": "the home page runs the quickstart"},
    "index": {"python3|pip": INSTALLS},
    "results": {"": "its data are made, and a run takes a quarter of an hour"},
    "serve": {"": "serves until Ctrl-C; tests/serving asks OpenAI's client"},
    "start": {"python3|pip": INSTALLS},
    "torchrun": {"torchrun --nnodes": "asks for two hosts"},
    "track": {"pip": INSTALLS, "fedtailor track .* --to wandb": "make test-track runs it",
              "tensorboard": "serves until Ctrl-C"},
    "tune": {"pip": INSTALLS},
    "watch": {".* --serve": "serves until Ctrl-C; tests/watch opens it in a browser",
              "fedtailor watch news": "the tutorial on three sites runs it"},
}  # fmt: skip
SHORT = ("predict",)
"""It runs in ``make test-slow``, the others in ``make test-long``."""


def commands(path: Path) -> list[str]:
    """The commands of a page, one an entry."""
    lines = [
        line
        for block in pages.blocks(path.read_text())
        if (block.language or ("bash" if PROGRAM.match(block.content) else "")) == "bash"
        for line in block.content.replace("\\\n", " ").splitlines()
    ]
    return [line.removeprefix(".venv/bin/") for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.stem in SHORT else pytest.mark.long,
        )
        for path in PAGES
        if commands(path) and "" not in NOT_RUN.get(path.stem, {})
    ],
)
def test_the_commands_of_a_page_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(cache_dir()))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    left_out = [re.compile(pattern) for pattern in NOT_RUN.get(path.stem, {})]
    lines = [line for line in commands(path) if not any(p.match(line) for p in left_out)]
    typed = "\n".join([BEFORE.get(path.stem, ""), *lines])
    for name, value in STAND_FOR.get(path.stem, {}).items():
        typed = re.sub(rf"\b{name}\b", value, typed)
    pages.run(f"```bash\n{typed}\n```\n", folder, seconds=3600)


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_does_not_run_stands_on_its_page(name: str) -> None:
    path = next(path for path in PAGES if path.stem == name)
    for pattern in NOT_RUN[name]:
        assert any(re.match(pattern, line) for line in commands(path)), pattern
