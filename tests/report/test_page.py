import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor import report
from fedtailor.errors import InputError
from fedtailor.report import page as pages
from fedtailor.report.charts import content as charts
from fedtailor.report.page import every_client, write
from tests.report import conftest
from tests.report.charts.test_content import content_of
from tests.report.conftest import hold, write_run

MakeRun = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    return write_run(folder, methods=("fedavg", "fedsdg", "local"))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write([run], run.with_suffix(".html")).read_text(encoding="utf-8")


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    shown = without_scripts(page)
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)|url\(([^)]*)\)""", shown)
    targets = [first or second for first, second in links]
    assert targets
    allowed = ("#", "data:image/png", "data:text/csv", "data:text/plain")
    assert all(target.startswith(allowed) for target in targets)
    assert "@import" not in shown
    assert "<script src" not in page
    assert set(re.findall(r"https?://[^\s\"'<]*", shown)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_ids_are_unique_and_found(page: str) -> None:
    page = without_scripts(page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)) <= {
        pair for name in ids for pair in ((name, ""), ("", name))
    }


def test_the_page_has_its_sections_in_order(page: str) -> None:
    page = without_scripts(page)
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Verdict",
        "Results",
        "Clients",
        "Results by round",
        "Cost against result",
        "How much of its own each client uses: fedsdg",
        "Labels of the clients",
        "Worst clients",
        "Time in detail",
        "Run: letters",
    ]
    assert page.count("<figcaption>") == 6
    assert len(page.encode()) < 2_000_000


def test_the_scripts_that_draw_have_at_most_a_megabyte() -> None:
    folder = Path(report.__file__).parent / "vega"
    assert sum(path.stat().st_size for path in folder.glob("*.js")) <= 1_000_000


@pytest.mark.slow
def test_a_page_of_many_clients_has_at_most_three_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, seeds = 100, (0, 1, 2)
    for values, value in (("K", n), ("TEST", [20] * n), ("VALIDATION", [5] * n)):
        monkeypatch.setattr(conftest, values, value)
    others = ("fedprox", "ditto", "apfl", "fedrep", "fedper", "ifca", "pfedme", "scaffold", "fedbn")
    methods = ("local", "fedavg", "fedsdg", *others)
    run = write_run(tmp_path / "large", methods=methods, seeds=seeds, rounds=50)
    for seed in seeds:
        hold(run, seed, train=[40] * n, labels=[[30, 20, 15]] * n)
    page = write([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<tr data-key=") == n * len(seeds)
    assert len(page.encode()) <= 3_000_000


def test_one_point_is_no_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "short", rounds=1, seeds=(0,))  # of round 0
    page = write([run], tmp_path / "short.html").read_text(encoding="utf-8")
    assert "<h2>Clients</h2>" in page
    assert "<h2>Results by round</h2>" not in page


def test_the_page_says_how_the_run_was_made(page: str) -> None:
    for text in ("d1-0" + "0" * 40, "versions.torch", "8 cores", "&#34;epochs&#34;: 1", "108 MB"):
        assert text in page


def test_the_same_runs_give_the_same_bytes(run: Path, page: str, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    assert write([run], again) == again
    assert again.read_text(encoding="utf-8") == page
    assert list(tmp_path.iterdir()) == [again]


def test_two_runs_of_language_models_whose_names_are_escaped(
    make_run: MakeRun, tmp_path: Path
) -> None:
    paths = [
        make_run("a", is_lm=True),
        make_run("b", is_lm=True, done=0, digest="d2", name="<b>&'x", methods=("fedavg",)),
    ]
    write(paths, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("Clients&#39; data</h2>") == 1
    assert '<th scope="col">ppl</th>' in text
    assert "fedavg (&lt;b&gt;&amp;&#39;x)" in text
    assert "<b>" not in text


def test_a_target_in_no_directory_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run(seeds=(0,))
    with pytest.raises(InputError, match="give a file in a directory that exists"):
        write([path], tmp_path / "nowhere" / "page.html")


def test_a_run_that_has_just_begun_is_shown(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run(done=1, seeds=(0,))
    for commit in path.glob("methods/*/*/commit.json"):
        state = json.loads(commit.read_text())
        state["bytes"]["clients"] = 0
        commit.write_text(json.dumps(state))
    write([path], tmp_path / "page.html")
    assert "fedsdg (round 1 of 8)" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_rows_are_named_for_the_script(make_run: MakeRun) -> None:
    found = every_client(content_of(make_run(methods=("fedavg", "local"))))
    assert found.keys[:2] == ["0:0", "0:1"]
    assert found.header == ["client", "clients of", "train", "test", "fedavg", "local"]
    assert found.cells[0][:4] == ["0", "seed 0", "60", "20"]
    assert len(found.cells) == 10
    assert found.note == ""


def test_the_page_says_which_rows_are_left_out(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MAX_ROWS", 4)
    monkeypatch.setattr(charts, "MAX_CLIENTS", 4)
    run = make_run()
    text = write([run], tmp_path / "page.html").read_text()
    assert "The table shows the first 4 of 6 rows. Of up to 6 clients the page has 4" in text
    assert "methods/METHOD/seed-SEED/clients.jsonl has all" in text
    assert (run / "methods/fedavg/seed-0/clients.jsonl").exists()
