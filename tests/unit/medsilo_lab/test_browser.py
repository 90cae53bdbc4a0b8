"""Check medsilo's HTML pages in a real browser.

Each page opens without errors, fits a phone's screen, prints correctly, and passes axe-core in light and in dark mode.
"""

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from medsilo.core.files import write_json
from medsilo_lab.comparison.compare import Study
from medsilo_lab.report import page
from medsilo_lab.report.differences import write_sheets
from medsilo_lab.report.study_page import render, write_demo, write_study
from medsilo_lab.study.verdict_file import HospitalVerdict, Needed, PairedDifference, read_verdict
from tests.browser import Browser, chromium
from tests.unit.medsilo_lab.test_report import SITES, round_line, save, summary_of
from tests.unit.medsilo_lab.test_verdict import statistics_of, verdict_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("panels")]  # all tests of this group share one study

PAGES = ["run", "study"]
ENTER = ("Enter", 13, "\r")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, panels_study: Study) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    names = list(SITES)
    scores = {"fedavg": (0.9, 0.8, 0.7), "fedbn": (0.85, 0.95, None), "local": (0.6, 0.9, 0.8)}
    runs = []
    for method, values in scores.items():
        summary = summary_of(method, method, dict(zip(names, values, strict=True)))
        refused = {"refused": {names[2]: "its plan differs"}, "answered": names[:2]} if method == "fedbn" else {}
        runs.append(save(folder, summary, [round_line(1, names), round_line(2, names, **refused)]))
    return {
        "run": page.write(runs, folder / "run.html", "Three runs"),
        "one": page.write(runs[:1], folder / "one.html", "One run"),
        "study": write_study(panels_study.folder, folder / "study.html"),
        **others(folder, panels_study),
    }


def others(folder: Path, study: Study) -> dict[str, Path]:
    shown = folder / "gains"
    shutil.copytree(study.folder, shown)
    gain = PairedDifference(mean=0.1, low=-0.05, high=0.2, p=0.1, seeds=3, patients=9, adjusted=0.3, sure=False)
    words, more = ["better", "inconclusive", "worse"], Needed(of="test patients", number=90, difference=0.1)
    gains = {
        f"hospital-{n}": HospitalVerdict(word=word, method="adafed", difference=gain, needed=more if n == 1 else None)
        for n, word in enumerate(words)
    }
    of_all = read_verdict(shown)
    rows = [row.changed(from_single_site=dict.fromkeys(of_all.sites, gain), baseline="adafed") for row in of_all.rows]
    one = {of_all.sites[0]: gains["hospital-1"]}
    told = of_all.changed(hospitals=gains, first=gain, declared="adafed", rows=rows)
    files = {}
    for name, verdict in {"gains": told, "sheet": told.changed(hospitals=one)}.items():
        write_json(shown / "verdict.json", verdict.as_json())
        files[name] = write_study(shown, folder / f"{name}.html")
    files["sheet"] = write_sheets(shown, lambda run: ["Numbers."])[0]
    files["demo"] = write_demo(shown, "harmofl")
    return files


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Browser) -> Browser:
    browser.size(1280, 800)
    browser.media()
    return browser


@pytest.mark.parametrize("kind", PAGES)
def test_it_opens_without_a_complaint(kind: str, pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages[kind])
    assert tab.ask("document.querySelectorAll('section').length") >= 5
    assert tab.ask("[...document.querySelectorAll('main > section > details[open]')].length") == (kind == "run")
    assert tab.complaints == []
    tab.ask("console.error('so the test would hear it')")
    assert len(tab.complaints) == 1


# The highest number of printed sheets for each page, without opening closed sections.
PRINTED = {"sheet": 1, "run": 2, "one": 2, "study": 3, "gains": 3, "demo": 3}


@pytest.mark.parametrize("paper", [(8.5, 11.0), (8.27, 11.69)])
def test_a_page_prints_on_few_sheets(
    paper: tuple[float, float], pages: dict[str, Path], tab: Browser, subtests: pytest.Subtests
) -> None:
    """The paper's size is Letter or A4, and the margins are the browser's defaults.

    In earlier versions, the printed demo needed ten sheets of paper, four of which listed runs.
    """
    for kind, most in PRINTED.items():
        with subtests.test(kind=kind):
            tab.open(pages[kind])
            tab.media("print", "dark")
            assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            assert tab.ask("!!document.querySelector('#limits').offsetHeight")
            tab.media()
            printed = tab.do("Page.printToPDF", paperWidth=paper[0], paperHeight=paper[1])["data"]
            assert 1 <= len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed))) <= most


def test_the_list_of_runs_is_never_printed(pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages["gains"])
    tab.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.ask("document.querySelector('#provenance').offsetHeight") > 100
    tab.media("print")
    assert tab.ask("document.querySelector('#provenance').offsetHeight") == 0


def test_each_hospital_s_three_scores_stand_on_one_scale(tmp_path: Path, tab: Browser) -> None:
    """The picture shows the single-site, the federated and the pooled score of each hospital."""
    levels = {"local": 0.6, "fedavg": 0.7, "central": 0.9}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return levels[title] + 0.02 * np.random.default_rng([seed, *site.encode()]).normal(size=30)

    verdict = verdict_of(statistics_of(tmp_path, [*levels], [0, 1, 2, 3], scores), tmp_path)
    page = tmp_path / "page.html"
    page.write_text(render(verdict, {row.title: [] for row in verdict.rows}), "utf-8")
    rows = {row.title: row for row in verdict.rows}
    for width in (1400, 400):
        tab.size(width, 900, phone=width == 400)
        tab.open(page)
        places = tab.ask(PLACES)
        assert len(places) == len(verdict.sites) + 1 == 4
        (first, least), *_, (last, most) = ((float(words), x) for words, x in tab.ask(AXIS))
        for site, own in zip([None, *verdict.sites], places, strict=True):
            for title, x in zip(levels, own, strict=True):
                level = rows[title].sites[site] if site else rows[title].score
                assert level
                assert first + (last - first) * (x - least) / (most - least) == pytest.approx(level.mean, abs=0.01)
        assert tab.ask("document.querySelector('table.differences').getBoundingClientRect().bottom") < 900
        assert tab.ask("document.documentElement.scrollWidth") <= width


MIDDLE = "(e => (r => r.x + r.width / 2)(e.getBoundingClientRect()))"
EACH = f"(s => ['.alone', '.mark', '.pooled'].map(c => {MIDDLE}(s.querySelector(c))))"
PLACES = f"[...document.querySelectorAll('tbody .drawn svg')].map({EACH})"
AXIS = f"[...document.querySelectorAll('thead .drawn text')].map(t => [t.textContent, {MIDDLE}(t)])"


def test_links_of_a_page_work_in_a_mail(pages: dict[str, Path]) -> None:
    """Each link leads to an anchor on the same page.

    Instead of a link to the documentation, the page names the command that prints the documentation.
    """
    for kind, path in pages.items():
        for address in re.findall(r'href="([^"]+)"', path.read_text("utf-8")):
            assert address.startswith("#") or address == "data:,", (kind, address)
    assert "medsilo docs " in pages["demo"].read_text("utf-8")


# A page's width and colour scheme have separate effects, so only the tests before a release use all pairs.
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (400, "dark"),
        pytest.param(1400, "light", marks=pytest.mark.long),
        pytest.param(400, "light", marks=pytest.mark.long),
        pytest.param(1400, "dark", marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_and_no_column_is_cut(
    width: int, scheme: str, pages: dict[str, Path], tab: Browser, subtests: pytest.Subtests
) -> None:
    tab.size(width, 900, phone=width == 400)
    tab.media(scheme=scheme)
    for kind, path in pages.items():
        with subtests.test(kind=kind):
            tab.open(path)
            assert tab.ask("document.documentElement.scrollWidth") <= width
            tab.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert tab.faults() == []
            assert tab.ask("document.documentElement.scrollWidth") <= width
            assert path.stat().st_size < 2_000_000


def test_axe_finds_what_is_wrong(tmp_path: Path, tab: Browser) -> None:
    (tmp_path / "bad.html").write_text(
        "<!doctype html><html><title>x</title><img src=''><p style='color:#eee'>pale</p>"
    )
    tab.open(tmp_path / "bad.html")
    assert {name for name, _ in tab.faults()} >= {"image-alt", "html-has-lang", "color-contrast"}


def test_the_study_s_panels_are_seen(pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages["study"])
    assert tab.ask("[...document.images].filter(i => !i.naturalWidth).length") == 0
    assert tab.ask("document.querySelectorAll('#overlays .fold[open] img').length") == 9
    assert tab.complaints == []


def test_a_folded_panel_opens_by_keyboard_and_is_printed_only_then(pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages["study"])
    tab.ask("document.querySelector('#overlays details').open = true")
    second = "document.querySelectorAll('#overlays .fold')[1]"
    seen = f"{second}.querySelector('img').checkVisibility({{contentVisibilityAuto: true}})"
    tab.media("print")
    assert tab.ask(f"{second}.offsetHeight") == 0 and not tab.ask(seen)
    tab.media()
    assert tab.ask(f"{second}.offsetHeight") > 0 and not tab.ask(seen)
    tab.ask(f"{second}.querySelector('summary').focus()")
    tab.press(*ENTER)
    assert tab.ask(seen)
    tab.media("print")
    assert tab.ask(f"{second}.offsetHeight") > 100 and tab.ask(seen)


def test_a_refused_site_is_on_the_first_screen(pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages["run"])
    place = "[...document.querySelectorAll('.notices li')].find(e => e.textContent.includes('its plan differs'))"
    assert "hospital-c" in tab.ask(f"{place}.textContent")
    assert 0 < tab.ask(f"{place}.getBoundingClientRect().bottom") <= 800
