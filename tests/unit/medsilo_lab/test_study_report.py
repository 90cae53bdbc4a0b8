"""A study's page and table repeat the scores of the study's runs, and no method wins by chance."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Summary
from medsilo_lab.comparison.compare import Study
from medsilo_lab.report import study_page
from medsilo_lab.report.differences import write_sheets
from medsilo_lab.report.read import read
from medsilo_lab.report.study_page import write_study
from medsilo_lab.study.cells import Cell
from medsilo_lab.study.verdict import Statistics
from medsilo_lab.study.verdict_file import PairedDifference, Verdict, read_verdict
from tests.conftest import make_plan, make_study
from tests.unit.medsilo_lab.test_report import Page, captions

PURPOSE = "to recognise a fall"
SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1", f"study.purpose={PURPOSE}"]
SEEDS = [0, 1]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    plan = make_plan("fedavg", *SMALL)
    return make_study(tmp_path_factory.mktemp("study"), plan, "local", "fedavg", "fedbn", "central")


def verdict_of(study: Study) -> Verdict:
    return read_verdict(study.folder)


def summaries(study: Study, title: str) -> list[Summary]:
    return [read_summary(study.folder / f"{title}-{seed}") for seed in SEEDS]


@pytest.mark.slow
def test_scores_are_those_of_the_summaries(study: Study) -> None:
    for row in verdict_of(study).rows:
        runs = summaries(study, row.title)
        assert row.score.by_seed == pytest.approx([run.mean_test for run in runs])
        assert row.pooled.by_seed == pytest.approx([run.pooled_test for run in runs])
        assert row.score.sd == pytest.approx(np.std([run.mean_test for run in runs], ddof=1))
        for site, found in row.sites.items():
            assert found.mean == pytest.approx(np.mean([run.score(site) for run in runs]))
            assert 0 <= found.low <= found.mean <= found.high <= 1


@pytest.mark.slow
def test_differences_are_those_of_the_summaries(study: Study) -> None:
    found = {row.title: row for row in verdict_of(study).rows}
    assert found["fedavg"].baseline is None
    for title in ("local", "fedbn", "central"):
        pairs = list(zip(summaries(study, title), summaries(study, "fedavg"), strict=True))
        expected = np.mean([mine.mean_test - theirs.mean_test for mine, theirs in pairs])
        assert found[title].difference.mean.mean == pytest.approx(expected)
        expected = np.mean([mine.pooled_test - theirs.pooled_test for mine, theirs in pairs])
        assert found[title].difference.pooled.mean == pytest.approx(expected)
    pairs = list(zip(summaries(study, "fedbn"), summaries(study, "local"), strict=True))
    for site, own in found["fedbn"].from_single_site.items():
        scores = [[run.score(site) for run in pair] for pair in pairs]
        assert own.mean == pytest.approx(np.mean([mine - theirs for mine, theirs in scores]))
    assert not any(found["local"].from_single_site.values()) and not any(found["central"].from_single_site.values())


def test_the_page_shows_the_verdict(study: Study) -> None:
    verdict = verdict_of(study)
    parsed = Page(write_study(study.folder).read_text())
    assert verdict.headline in parsed.header_text and "Does federated training" not in parsed.header_text
    for row in verdict.rows:
        cells = [row.score, row.pooled, *row.sites.values()]
        shown = [f"{one.mean:.2f} ± {one.sd:.2f}{one.low:.2f}–{one.high:.2f}" for one in cells]
        assert parsed.row(row.title, "results")[1:] == shown
    runs = summaries(study, "fedbn")
    assert all(run.plan_hash[:12] in (study.folder / "report.html").read_text() for run in runs)


def test_the_page_says_about_which_method_joining_was_asked(study: Study) -> None:
    """The page names the declared method, if any, whose gain over single-site training was tested."""
    verdict = verdict_of(study)
    of_any = verdict.model_copy(update={"declared": None, "against": None})
    notes = [study_page.render(one, {row.title: [] for row in verdict.rows}) for one in (verdict, of_any)]
    assert verdict.declared == "fedavg" and ["together: fedavg" in note for note in notes] == [True, False]
    assert ["together: with the method that the row names" in note for note in notes] == [False, True]
    assert ["This question was asked before the runs" in note for note in notes] == [True, False]


def test_a_run_without_its_cases_scores_is_named(study: Study, tmp_path: Path) -> None:
    shutil.copytree(study.folder / "fedbn-0", tmp_path / "fedbn-0")
    (tmp_path / "fedbn-0/sites/hospital-b/test.csv").unlink()
    cells = [
        Cell(cell.row, cell.seed, cell.plan, tmp_path / "fedbn-0")
        for cell in study.cells
        if cell.folder.name == "fedbn-0"
    ]
    with pytest.raises(MedsiloError, match="hospital-b in run 'fedbn-0' .*: repeat"):
        Study(tmp_path, study.about, cells).conclude([])


def test_scores_that_are_no_numbers_are_left_out_and_named(study: Study, tmp_path: Path) -> None:
    shutil.copytree(study.folder, tmp_path / "study")
    path = tmp_path / "study" / "fedbn-0/sites/hospital-b/test.csv"
    head, first, *rest = path.read_text().splitlines()
    column = head.split(",").index(verdict_of(study).metric)
    cells = first.split(",")
    cells[column] = "nan"
    path.write_text("\n".join([head, ",".join(cells), *rest]) + "\n")
    cells_there = [Cell(cell.row, cell.seed, cell.plan, tmp_path / "study" / cell.folder.name) for cell in study.cells]
    verdict = Study(tmp_path / "study", study.about, cells_there).conclude([])
    rows = {row.title: row for row in verdict.rows}
    assert rows["fedbn"].sites["hospital-b"] is None and rows["fedavg"].sites["hospital-b"]
    assert str(verdict.warnings[0]).startswith("No number: fedbn, seed 0: hospital-b")


def test_every_comparison_names_its_test_patients(study: Study) -> None:
    """In earlier versions, a page demanded 14 test patients without naming the present number of test patients."""
    verdict = verdict_of(study)
    page = write_study(study.folder).read_text()
    parsed = Page(page)
    assert set(verdict.patients) == set(verdict.sites) and min(verdict.patients.values()) > 0
    assert f"{sum(verdict.patients.values())} test patients" in parsed.header_text
    for site, one in verdict.hospitals.items():
        [line] = [" ".join(row) for row in parsed.rows if row[:2] == [site, one.word]]
        assert one.difference.patients == verdict.patients[site]
        assert re.search(rf"{one.word}.* points ?.* n = {one.difference.patients}$", line)
        assert f"{one.difference.seeds} repetitions of the training." in captions(page)[0]


def test_a_sheet_names_no_more_test_patients_than_every_seed_has(study: Study, tmp_path: Path) -> None:
    """In earlier versions, a decision sheet counted the test patients of the first run, although the run of another
    seed had fewer test patients.
    """
    folder = tmp_path / "study"
    shutil.copytree(study.folder, folder)
    verdict = verdict_of(study)
    write_json(folder / "verdict.json", verdict.changed(patients=dict.fromkeys(verdict.sites, 1)).as_json())
    pages = [page.read_text("utf-8") for page in write_sheets(folder, lambda run: [])]
    many = [run.patients[site] for site in verdict.hospitals for run in [read(folder / "fedavg-0")]]
    assert ["at least 1 test patient" in page for page in pages] == [number != 1 for number in many] and any(
        number > 1 for number in many
    )


def test_a_comparison_says_how_many_in_each_caption_and_what_it_is_for(study: Study) -> None:
    text = write_study(study.folder).read_text("utf-8")
    assert not [words for words in captions(text) if not re.search(r"n = \d", words)]
    assert PURPOSE in Page(text).header_text and "Holm" not in Page(text).header_text


def test_one_seed_names_nobody(study: Study) -> None:
    alone = Statistics([cell for cell in study.cells if cell.seed == 0], None).verdict(study.about, [])
    assert "4 repetitions" in alone.between and "4 repetitions" in alone.headline and "Inconclusive" in alone.headline
    assert not any(row.difference.mean.sure for row in alone.rows if row.baseline)


def test_what_is_surely_worse_does_not_look_like_a_gain() -> None:
    looks = [
        study_page._difference(
            PairedDifference(mean=mean, low=mean - 0.1, high=mean + 0.1, p=0.01, adjusted=0.01, seeds=2, sure=sure)
        )["look"]
        for mean, sure in ((0.3, True), (-0.3, True), (0.3, False))
    ]
    assert looks == ["higher", "lower", ""]


def test_an_unknown_baseline_is_an_error_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", "--methods", "local,fedavg", "--baseline", "fedsum", "--out", str(tmp_path / "s")]) == 1
    assert "--baseline 'fedsum'" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_folder_without_a_verdict_is_named(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match=r"no verdict\.json"):
        write_study(tmp_path)
