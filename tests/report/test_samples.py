"""What models have written: in the run directory, on the report's page, and in a watched run."""

from __future__ import annotations

import html
import io
import itertools
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.report.page import write
from fedtailor.runs.experiment import parse
from fedtailor.store.files import read_json, write_json
from fedtailor.store.format import as_json
from fedtailor.store.rollback import rollback
from fedtailor.watch.follow import Follower
from fedtailor.watch.server import _content
from fedtailor.watch.terminal import View
from tests import kinds

pytestmark = pytest.mark.slow

NAME = "methods/fedlora/seed-0/samples-000002.json"
MARKUP = "<script>alert('ward')</script> & <b>bold</b>"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = parse({
        "rounds": 3, "methods": {"fedlora": {"rank": 2, "optimiser": {"lr": 1e-6}}},
        "split": {"clients": 3, "scheme": "iid"}, "seeds": [0],
        "local": {"batch_size": 4, "steps": 1},
        "engine": {"executor": "sequential"},
        "evaluate": {
            "generate": {"examples": 2, "tokens": 5, "every": 2}, "metrics": ["worse"],
            "select": "worse",
        },
    })  # fmt: skip
    data, backbone = kinds.data("instruct"), kinds.backbone("instruct")
    calls = itertools.count()
    worse = {"worse": lambda prompt, answer, reference: -next(calls)}  # round 2 is the best
    out = tmp_path_factory.mktemp("run") / "run"
    return ft.run(chosen, out, data=data, backbone=backbone, metrics=worse).path


@pytest.fixture
def marked(done: Path, tmp_path: Path) -> Path:
    """The run, where one of its answers is markup."""
    run = Path(shutil.copytree(done, tmp_path / "run"))
    for path in run.glob("methods/*/*/samples-*.json"):
        content = read_json(path)
        content["samples"][0]["answers"]["1"] = MARKUP
        write_json(path, content)
    return run


def test_the_page_has_the_answers_side_by_side_as_plain_text(marked: Path, tmp_path: Path) -> None:
    page = write(marked, tmp_path / "page.html").read_text()
    section = page.partition('<section id="samples"')[2].partition("</section>")[0]
    first = read_json(marked / NAME)["samples"][0]
    assert section.count("<blockquote>") == 3
    assert f"<blockquote>{first['prompt']}</blockquote>" in section
    for words in ("base model", "global model", "client 0's model", "the right answer"):
        assert html.unescape(section).count(f'<p class="soft">{words}</p>') == 3
    assert "<summary>fedlora, after round 2</summary>" in section
    assert "&lt;script&gt;alert(&#39;ward&#39;)&lt;/script&gt; &amp; &lt;b&gt;" in section
    assert MARKUP not in page


def test_a_run_that_is_watched_shows_the_last_answers(marked: Path) -> None:
    state = Follower(marked).look()
    assert state.trials[0].written == 3
    sent = json.loads(as_json(_content(state)))
    assert sent["trials"][0]["samples"][0]["answers"][3] == ["client 1's model", MARKUP]
    console = Console(file=io.StringIO(), width=120, height=40)
    console.print(View(state))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fedlora, seed 0, after round 3: " in printed
    assert f"client 1's model: {MARKUP}" in printed


def test_samples_are_of_the_run_and_go_with_their_rounds(done: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(done, tmp_path / "run"))
    last = run / NAME.replace("2.json", "3.json")
    assert last.exists()
    broken = Path(shutil.copytree(done, tmp_path / "broken"))
    path = broken / NAME.replace("2.json", "3.json")
    path.write_text(path.read_text().replace("answers", "answerz"))
    with pytest.raises(InputError, match=r"samples-000003\.json is damaged"):
        Follower(broken)._look()
    rollback(run, "fedlora", 0)
    assert (run / NAME).exists()
    assert not last.exists()
