"""A run's page shows its method's results, and a study's page shows pictures from its runs."""

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Details, Similarity, SiteResult
from medsilo_lab.comparison.compare import Study
from medsilo_lab.report import page, panels
from medsilo_lab.report.read import read, read_all
from medsilo_lab.report.study_page import write_study
from medsilo_lab.study.cells import Cell
from medsilo_server.record import Record
from tests.conftest import SITES
from tests.unit.medsilo_lab.test_report import Page, save, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("panels")]  # all tests of this group share one study

FEDSM = "fedsm:pull=0.6"
A, B, C = SITES
SCORES = {A: 0.5, B: 0.75, C: 0.625}
W = [[0.5, 0.25, 0.25], [0.1, 0.5, 0.4], [0.3, 0.2, 0.5]]
CURVE = [(0.0, 8, 0.5), (0.7, 8, 0.625), (1.0, 8, 0.25)]
TESTED = {A: {A: 6, "global": 2}, B: {B: 8}, C: {B: 4}}


@pytest.fixture
def copy(panels_study: Study, tmp_path: Path) -> Study:
    shutil.copytree(panels_study.folder, tmp_path / "study")
    cells = [Cell(cell.row, cell.seed, cell.plan, tmp_path / "study" / cell.folder.name) for cell in panels_study.cells]
    return Study(tmp_path / "study", panels_study.about, cells)


def folder_of(study: Study, title: str, seed: int) -> Path:
    return next(cell.folder for cell in study.cells if (cell.row.title, cell.seed) == (title, seed))


def tell(study: Study, title: str, **change: Any) -> None:
    folder = folder_of(study, title, 0)
    summary = read_summary(folder)
    found = summary.details.super_model.changed(**change)
    Record(folder).write_summary(summary.changed(details=summary.details.model_copy(update={"super_model": found})))


def section(study: Study, name: str) -> tuple[str, Page]:
    text = write_study(study.folder).read_text()
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return (found.group(), Page(found.group())) if found else ("", Page(""))


def picture(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def run_section(folder: Path, name: str) -> tuple[str, Page]:
    found = re.search(rf'<section id="{name}".*?</section>', page.render([read(folder)], "T"), re.DOTALL)
    assert found
    return found.group(), Page(found.group())


def test_frequencies_and_the_threshold_are_the_run_s(copy: Study) -> None:
    tell(copy, FEDSM, tested=TESTED, curve=CURVE, threshold=CURVE[1][0], agreed=[A, B])
    text, parsed = run_section(folder_of(copy, FEDSM, 0), "super-models")
    start = next(place for place, row in enumerate(parsed.rows) if row[0] == "Test cases")
    assert parsed.rows[start][1:] == (names := ["global", A, B])
    for line, site in zip(parsed.rows[start + 1 :], SITES, strict=False):
        counts = TESTED[site]
        assert line == [site, *(f"{counts.get(name, 0) / sum(counts.values()):.0%}" for name in names)]
    assert "Threshold γ: 0.7." in text and f"use the global model: {C}." in text


def test_the_validation_cases_are_told_as_they_were_chosen(panels_study: Study) -> None:
    folder = folder_of(panels_study, FEDSM, 0)
    parsed, told = run_section(folder, "super-models")[1], read_summary(folder).details.super_model.validated
    for line, site in zip(parsed.rows[1:4], SITES, strict=True):
        shares = [told[site].get(name, 0) / sum(told[site].values()) for name in ["global", *SITES]]
        assert line == [site, *map("{:.0%}".format, shares)]


# Overlays


def test_overlays_are_those_of_each_row_s_first_seed(panels_study: Study) -> None:
    text, parsed = section(panels_study, "overlays")
    titles = ["harmofl", "adafed", FEDSM]
    shown = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert shown == [
        picture(folder_of(panels_study, title, 0) / f"sites/{site}/pictures/test-{which}.png")
        for title in titles
        for site in SITES
        for which in ("best", "median", "worst")
    ]
    runs = {title: read(folder_of(panels_study, title, 0)) for title in titles}
    lines = iter(row for row in parsed.rows if row[0] != "Site")
    for run in runs.values():
        for site in SITES:
            assert next(lines) == [site, *(f"{one.score:.3f}" for one in run.overlays[site])]
    assert re.findall(r'<details class="fold"( open)?>\s*<summary><h3>(.*?)</h3>', text) == [
        (" open", "harmofl, seed 0"),
        ("", "adafed, seed 0"),
        ("", f"{FEDSM}, seed 0"),
    ]


def test_overlays_that_would_make_the_page_too_large_are_left_out_and_it_says_so(
    panels_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [one for title in ("harmofl", "adafed", FEDSM) for one in _drawn(panels_study, title)]
    sizes = {kinds: sum(len(one.image) for one in drawn if one.which in kinds) for kinds in KINDS}
    for room, left in zip([*sizes.values(), 1], [*KINDS, ()], strict=True):
        monkeypatch.setattr(panels, "MOST_OVERLAYS", room)
        text, parsed = section(panels_study, "overlays")
        assert text.count("<img ") == 9 * len(left)
        assert ("left out to keep" in text) == (len(left) < 3)
        assert not left or parsed.row("Site")[1:] == [kind.capitalize() for kind in left]


KINDS = [("best", "median", "worst"), ("median", "worst"), ("median",)]


def _drawn(study: Study, title: str) -> list[Any]:
    return [one for own in read(folder_of(study, title, 0)).overlays.values() for one in own]


# Seeds


def test_where_a_seed_is_missing_the_overlays_are_the_other_s(copy: Study) -> None:
    (folder_of(copy, "adafed", 0) / "summary.json").unlink()
    copy.conclude([])
    assert "<h3>adafed, seed 1</h3>" in section(copy, "overlays")[0]
    (folder_of(copy, "adafed", 1) / "summary.json").unlink()
    copy.conclude(["adafed, seed 0: it went away"])
    assert "adafed" not in section(copy, "overlays")[0]
    assert "2 seeds missing" in (copy.folder / "report.html").read_text()


def test_hospitals_that_did_not_train_have_their_scores(copy: Study) -> None:
    for seed, score in enumerate((0.5, 0.875)):
        folder = folder_of(copy, FEDSM, seed)
        unseen = {"elsewhere": SiteResult(test={"dice": score, "cases": 9}), "nowhere": SiteResult()}
        Record(folder).write_summary(read_summary(folder).changed(evaluation_sites=unseen))
    assert section(copy, "unseen")[1].rows == [["Method", "elsewhere", "nowhere"], [FEDSM, "0.690.50–0.88", "–"]]


# The page


def test_the_page_stays_one_file_and_its_ids_are_unique(panels_study: Study) -> None:
    text = write_study(panels_study.folder).read_text()
    parsed = Page(text)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(address.startswith(("#", "data:")) for address in parsed.addresses)
    pictures = sum(map(len, re.findall(r'src="(data:image/png[^"]+)"', text)))
    assert len(text) - pictures < 200_000


def test_several_runs_on_one_page_keep_a_panel_each(tmp_path: Path) -> None:
    runs = []
    details = Details(similarity=Similarity(sites=SITES, weights=W))
    for seed in (0, 1):
        runs.append(save(tmp_path, summary_of("adafed", "AdaFed", SCORES, seed=seed, details=details)))
    text = page.render(read_all(runs), "Title")
    assert text.count('aria-label="Weights of AdaFed, seed 0"') == text.count('"Weights of AdaFed, seed 1"') == 1
