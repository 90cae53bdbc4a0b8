"""The study's page shows what its methods found: every number is the mean of the runs' own, and no seed is hidden."""

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.runs.reading import read_summary
from medsilo.runs.record import Record
from medsilo.runs.schema import Details, Similarity, SiteResult
from medsilo_lab.report import page, panels
from medsilo_lab.report.read import read, read_all
from medsilo_lab.report.study_page import write_study
from medsilo_lab.study.cells import Cell
from medsilo_lab.study.compare import Study
from tests.conftest import SITES
from tests.unit.test_report import Page, save, summary_of

pytestmark = pytest.mark.xdist_group("panels")  # one study serves them all

FEDSM = "fedsm:pull=0.6"
A, B, C = SITES
SCORES = {A: 0.5, B: 0.75, C: 0.625}
W = [
    [[0.5, 0.25, 0.25], [0.1, 0.5, 0.4], [0.3, 0.2, 0.5]],
    [[0.5, 0.35, 0.15], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]],
]
CURVES = [[(0.0, 8, 0.5), (0.7, 8, 0.625), (1.0, 8, 0.25)], [(0.0, 8, 0.75), (0.7, 8, 0.125), (1.0, 8, 0.75)]]
TESTED = [{A: {A: 6, "global": 2}, B: {B: 8}, C: {B: 4}}, {A: {C: 4, A: 4}, B: {B: 8}, C: {B: 1, "global": 3}}]


@pytest.fixture
def copy(panels_study: Study, tmp_path: Path) -> Study:
    """The study in a folder that a test may change."""
    shutil.copytree(panels_study.folder, tmp_path / "study")
    cells = [Cell(cell.row, cell.seed, cell.plan, tmp_path / "study" / cell.folder.name) for cell in panels_study.cells]
    return Study(tmp_path / "study", panels_study.about, cells)


def folder_of(study: Study, title: str, seed: int) -> Path:
    return next(cell.folder for cell in study.cells if (cell.row.title, cell.seed) == (title, seed))


def details_of(study: Study, title: str) -> list[Details]:
    return [read_summary(folder_of(study, title, seed)).details for seed in (0, 1)]


def tell(study: Study, title: str, key: str, *changes: dict[str, Any]) -> None:
    """Let the two seeds of a row have found this."""
    for seed, change in enumerate(changes):
        folder = folder_of(study, title, seed)
        summary = read_summary(folder)
        found = getattr(summary.details, key).changed(**change)
        Record(folder).write_summary(summary.changed(details=summary.details.model_copy(update={key: found})))


def section(study: Study, name: str) -> tuple[str, Page]:
    """A section of the study's page, if it is there."""
    text = write_study(study.folder).read_text()
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return (found.group(), Page(found.group())) if found else ("", Page(""))


def picture(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def by_hand(values: list[float], form: str = "{:.3f}") -> str:
    """The mean and, where they differ, the lowest and the highest."""
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(np.mean(values)) + (f"{low}–{high}" if low != high else "")


# AdaFed's W


@pytest.mark.slow
@pytest.mark.parametrize("as_it_was", [True, False])
def test_weights_are_the_mean_over_seeds_with_its_spread(as_it_was: bool, copy: Study) -> None:
    if not as_it_was:
        tell(copy, "adafed", "similarity", {"weights": W[0]}, {"weights": W[1]})
    found = np.array([details.similarity.weights for details in details_of(copy, "adafed")])
    text, parsed = section(copy, "similarity")
    spread = np.ptp(found, axis=0).max()
    assert spread > 0 and "Mean over 2 seeds" in text
    shades = [float(shade) for shade in re.findall(r"--heat:([\d.]+)", text)]
    others = found.mean(0)[~np.eye(3, dtype=bool)]
    assert shades == pytest.approx(list(others / others.max()), abs=0.006)
    assert text.count("number kept") == 3  # what sites keep of their own would drown the rest
    for i, site in enumerate(SITES):
        assert parsed.row(site)[1:] == [by_hand(list(found[:, i, j])) for j in range(3)]


# FedSM's super model


def test_frequencies_and_thresholds_are_those_of_every_seed(copy: Study) -> None:
    changes = [
        {"tested": tested, "curve": curve, "threshold": curve[place][0]}
        for tested, curve, place in zip(TESTED, CURVES, (1, 2), strict=True)
    ]
    tell(copy, FEDSM, "super_model", *changes)
    parsed = section(copy, "super-models")[1]
    start = next(place for place, row in enumerate(parsed.rows) if row[0] == "Test cases")
    assert parsed.rows[start][1:] == ["global", *SITES]
    for line, site in zip(parsed.rows[start + 1 :], SITES, strict=False):
        counts = [tested[site] for tested in TESTED]
        shares = [[own.get(name, 0) / sum(own.values()) for own in counts] for name in ["global", *SITES]]
        assert line == [site, *(by_hand(share, "{:.0%}") for share in shares)]
    assert "Threshold γ, seed by seed: 0.7, 1." in section(copy, "super-models")[0]


def test_the_validation_cases_are_told_as_they_were_chosen(panels_study: Study) -> None:
    parsed = section(panels_study, "super-models")[1]
    told = [details.super_model.validated for details in details_of(panels_study, FEDSM)]
    for line, site in zip(parsed.rows[1:4], SITES, strict=True):
        shares = [[own[site].get(name, 0) / sum(own[site].values()) for own in told] for name in ["global", *SITES]]
        assert line == [site, *(by_hand(share, "{:.0%}") for share in shares)]


def test_a_site_that_shared_in_one_seed_only_has_its_column_and_is_named(copy: Study) -> None:
    tell(copy, FEDSM, "super_model", {"agreed": [A, B]}, {"agreed": SITES})
    text, parsed = section(copy, "super-models")
    assert parsed.row("Test cases")[1:] == ["global", *SITES]
    assert f"the global model answers for them: {C}." in text


# HarmoFL's images


def test_one_pair_of_images_a_site_of_the_first_seed(panels_study: Study) -> None:
    text, _ = section(panels_study, "harmonised")
    shown = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    first = folder_of(panels_study, "harmofl", 0)
    assert shown == [
        picture(first / f"sites/{site}/pictures/{kind}-1.png") for site in SITES for kind in ("before", "after")
    ]
    assert "<small>seed 0</small>" in text


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


def test_where_a_seed_is_missing_the_numbers_are_the_other_s(copy: Study) -> None:
    for title in ("adafed", FEDSM, "harmofl"):
        (folder_of(copy, title, 0) / "summary.json").unlink()
    copy.conclude([])
    weights = details_of_one(copy, "adafed").similarity.weights
    text, parsed = section(copy, "similarity")
    assert "Mean over" not in text
    assert parsed.row(A)[1:] == [f"{weight:.3f}" for weight in weights[0]]
    assert "Threshold γ: " in section(copy, "super-models")[0]
    assert "<h3>adafed, seed 1</h3>" in section(copy, "overlays")[0]


def details_of_one(study: Study, title: str) -> Details:
    return read_summary(folder_of(study, title, 1)).details


def test_all_seeds_missing_is_no_panel(copy: Study) -> None:
    for seed in (0, 1):
        (folder_of(copy, "adafed", seed) / "summary.json").unlink()
    copy.conclude(["adafed, seed 0: it went away"])
    assert section(copy, "similarity")[0] == "" and section(copy, "super-models")[0] != ""
    assert "2 seeds missing" in (copy.folder / "report.html").read_text()


def test_hospitals_that_did_not_train_have_their_scores(copy: Study) -> None:
    for seed, score in enumerate((0.5, 0.875)):
        folder = folder_of(copy, FEDSM, seed)
        unseen = {"elsewhere": SiteResult(test={"dice": score, "cases": 9}), "nowhere": SiteResult()}
        Record(folder).write_summary(read_summary(folder).changed(evaluation_sites=unseen))
    assert section(copy, "unseen")[1].rows == [["Method", "elsewhere", "nowhere"], [FEDSM, "0.6880.500–0.875", "–"]]


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
    for seed, weights in enumerate(W):
        details = Details(similarity=Similarity(sites=SITES, weights=weights))
        runs.append(save(tmp_path, summary_of("adafed", "AdaFed", SCORES, seed=seed, details=details)))
    text = page.render(read_all(runs), "Title")
    assert text.count('aria-label="Weights of AdaFed, seed 0"') == text.count('"Weights of AdaFed, seed 1"') == 1
    assert "Mean over 2 seeds" not in text and "missing" not in text.split('id="similarity"')[1].split("</section>")[0]
