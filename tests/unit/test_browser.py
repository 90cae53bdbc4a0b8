"""The pages in a real browser: they open without a complaint, fit a phone, print, can be read in the dark, and
axe-core finds nothing on them."""

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.core.files import write_json
from medsilo_lab.report import page
from medsilo_lab.report.gains import write_sheets
from medsilo_lab.report.study_page import write_demo, write_study
from medsilo_lab.study.compare import Study
from medsilo_lab.study.verdict_file import HospitalGain, Needed, PairedDifference, read_verdict
from tests.browser import Browser, chromium
from tests.unit.test_report import SITES, round_line, save, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("panels")]  # one study serves them all

PAGES = ["run", "study"]
ENTER = ("Enter", 13, "\r")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, panels_study: Study) -> dict[str, Path]:
    """A run with a refused site beside others, and a study with panels."""
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
        "study": write_study(panels_study.folder, folder / "study.html"),
        **others(folder, panels_study),
    }


def others(folder: Path, study: Study) -> dict[str, Path]:
    """Pages of other kinds: a comparison with every verdict, its sheet, the demo, a check."""
    shown = folder / "gains"
    shutil.copytree(study.folder, shown)
    gain = PairedDifference(mean=0.1, low=-0.05, high=0.2, p=0.1, seeds=3, patients=9, adjusted=0.3, sure=False)
    words, more = ["better", "inconclusive", "worse"], Needed(of="test patients", number=90, difference=0.1)
    gains = {
        f"hospital-{n}": HospitalGain(word=word, method="adafed", gain=gain, needed=more if n == 1 else None)
        for n, word in enumerate(words)
    }
    of_all = read_verdict(shown)
    rows = [row.changed(joining=dict.fromkeys(of_all.sites, gain), against="adafed") for row in of_all.rows]
    one = {of_all.sites[0]: gains["hospital-1"]}
    told = of_all.changed(gains=gains, first=gain, declared="adafed", rows=rows)
    files = {}
    for name, verdict in {"gains": told, "sheet": told.changed(gains=one)}.items():
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
    assert tab.complaints == []
    tab.ask("console.error('so the test would hear it')")
    assert len(tab.complaints) == 1


@pytest.mark.parametrize("paper", [(8.5, 11.0), (8.27, 11.69)])
def test_a_hospital_s_sheet_is_one_printed_page(
    paper: tuple[float, float], pages: dict[str, Path], tab: Browser
) -> None:
    """On Letter and on A4, with the browser's own margins asked for."""
    tab.open(pages["sheet"])
    printed = tab.do("Page.printToPDF", paperWidth=paper[0], paperHeight=paper[1])["data"]
    assert len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed))) == 1


@pytest.mark.parametrize("kind", PAGES)
def test_it_prints_every_section(kind: str, pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages[kind])
    tab.media("print", "dark")
    assert tab.ask("[...document.querySelectorAll('section')].filter(s => !s.offsetHeight).length") == 0
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    printed = tab.pdf()
    assert printed.startswith(b"%PDF-") and len(re.findall(rb"/Type\s*/Page\b", printed)) >= 2


# No rule of the pages' style asks for both: each value once, all pairs before a release.
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
    assert tab.ask("document.querySelectorAll('#overlays details[open] img').length") == 9
    assert tab.complaints == []


def test_a_folded_panel_opens_by_keyboard_and_is_printed_only_then(pages: dict[str, Path], tab: Browser) -> None:
    tab.open(pages["study"])
    second = "document.querySelectorAll('#overlays details')[1]"
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
