"""If a score or count covers too few cases, the number does not leave the site, is reported as suppressed, and enters
no mean.

Suppressing scores and counts does not affect other results of the study.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.report import page
from medsilo_lab.report.formats import text_table
from medsilo_lab.report.read import read_all
from medsilo_lab.study.cells import Row, cells_of, run_cell
from medsilo_lab.study.scores import read_measures
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, SMALL, make_plan
from tests.sites import site_of

A, B, C = SITES
STRICT = SiteSettings(device="cpu", min_patients_per_metric=5)


def cut(data: Cases, cases: int) -> Cases:
    return Cases(data.inputs[:cases], data.targets[:cases], data.patients[:cases])


def data_of(plan: Plan, site: str, sizes: dict[str, int]) -> SiteData:
    whole = plan.task.load(site, SITES, plan.seed, None)
    parts = {part: getattr(whole, part) for part in ("train", "validation", "test")}
    return SiteData(**{part: cut(cases, sizes.get(part, len(cases))) for part, cases in parts.items()})


def run(root: Path, plan: Plan, sizes: dict[str, dict[str, int]], settings: SiteSettings = STRICT) -> dict[str, Any]:
    sites = {
        site: site_of(plan, site, SITES, settings, root / "sites" / site, data_of(plan, site, sizes.get(site, {})))
        for site in SITES
    }
    return Coordinator(plan, SITES, Loop(sites), Record(root), "in-process").run()


def test_a_score_over_too_few_test_cases_is_withheld_and_never_zero(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    sizes = {A: {"test": 4}, B: {"test": 5}}  # numbers of test cases: one fewer than the minimum, and the minimum
    summary = run(tmp_path / "run", plan, sizes)
    site = summary.sites[A]
    assert site.test == {"accuracy": None, "loss": None, "cases": 4}
    assert site.figures == {} and site.suppressed == sorted(plan.task.goal.layout)
    others = [summary.sites[site].test for site in (B, C)]
    assert summary.mean_test == pytest.approx(sum(other["accuracy"] for other in others) / 2)
    cases = sum(other["cases"] for other in others)
    hits = sum(other["accuracy"] * other["cases"] for other in others)
    assert summary.pooled_test == pytest.approx(hits / cases)
    assert summary.pooled["accuracy"] == pytest.approx(hits / cases)
    measures, patients = read_measures(tmp_path / "run/sites" / A)  # the hospital itself gets all scores
    assert len(measures["accuracy"]) == 4 and len(patients) == 4
    shown = read_all([tmp_path / "run"])
    assert shown[0].score(A) is None and shown[0].withholds(A) and not shown[0].withholds(B)
    text = text_table(shown[0])
    assert f"{A}     suppressed\n" in text and "suppressed: too few test patients" in text
    assert ">suppressed</td>" in page.render(shown, "T")


def test_a_synthetic_hospital_tells_of_single_cases_unless_it_says_otherwise(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    summary = run(tmp_path / "run", plan, {A: {"test": 1, "validation": 1}}, SiteSettings(device="cpu"))
    assert all(site.suppressed == [] for site in summary.sites.values())
    assert summary.sites[A].test["accuracy"] in (0.0, 1.0)


def test_pooled_figures_are_of_those_that_tell(tmp_path: Path) -> None:
    """Site A discloses no scores, site B discloses no scores by class (one class has only a single case), and site C
    discloses all scores.
    """
    plan = make_plan("fedavg", *SMALL, "task.windows=12")
    assert [int(data_of(plan, site, {}).test.targets.bincount().sub(1).eq(0).sum()) for site in (B, C)] == [1, 0]
    summary = run(tmp_path / "run", plan, {A: {"test": 1}}, SiteSettings(device="cpu", min_patients_per_metric=2))
    suppressed = {site: summary.sites[site].suppressed for site in SITES}
    assert suppressed == {A: sorted(plan.task.goal.layout), B: ["chances", "confusion", "reliability"], C: []}
    assert summary.sites[B].figures.keys() == {"accuracy", "accuracy_by_patient"}
    assert summary.sites[B].decisions is None
    of_b, of_c = (read_measures(tmp_path / "run/sites" / site)[0] for site in (B, C))
    hits = torch.cat([of_b["accuracy"], of_c["accuracy"]])
    assert summary.pooled["accuracy"] == pytest.approx(float(hits.mean()))
    label, found = of_c["label"], of_c["found"]
    shares = [float((found[label == one] == one).double().mean()) for one in label.unique()]
    assert summary.pooled["balanced_accuracy"] == pytest.approx(sum(shares) / len(shares))


def test_the_best_round_is_chosen_by_the_others(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=3")
    few = {A: {"validation": 3}}
    summary = run(tmp_path / "run", plan, few)
    a, b, c = (summary.sites[site].validation for site in SITES)
    assert a == [None] * 4 and None not in b and None not in c
    means = [(one + other) / 2 for one, other in zip(b, c, strict=True)]
    assert summary.selected.rounds == dict.fromkeys(SITES, means.index(max(means)))
    assert summary.sites[A].suppressed == []
    rows = (tmp_path / "run/sites" / A / "metrics.csv").read_text().splitlines()
    assert all(row.split(",")[5] for row in rows[1:])


def test_a_site_alone_with_too_few_still_chooses_its_own_model(tmp_path: Path) -> None:
    plan = make_plan("local", *SMALL, "training.rounds=3")
    summary = run(tmp_path / "run", plan, {A: {"validation": 3}})
    rows = [row.split(",") for row in (tmp_path / "run/sites" / A / "metrics.csv").read_text().splitlines()[1:]]
    scores = [float(row[5]) for row in rows]
    assert summary.sites[A].validation == [None] * 4
    assert summary.selected.rounds[A] == scores.index(max(scores))


def test_when_nobody_tells_the_last_round_is_taken_and_nothing_is_averaged(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    summary = run(tmp_path / "run", plan, {site: {"validation": 2, "test": 2} for site in SITES})
    assert summary.status == "finished"
    assert summary.selected.rounds == dict.fromkeys(SITES, 2)
    assert summary.mean_test is None and summary.pooled_test is None and summary.pooled == {}


def test_central_training_withholds_alike() -> None:
    plan = make_plan("central", *SMALL, "task.windows=2")
    settings = SiteSettings(device="cpu", min_patients_per_metric=100_000)
    summary = inprocess.run(plan, settings=settings).summary
    assert summary.mean_test is None and summary.pooled_test is None
    assert all(site.test["accuracy"] is None for site in summary.sites.values())


def test_a_comparison_says_when_no_site_tells_a_score(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=1")
    cells = cells_of(plan, [Row("fedavg", ())], [0], [], tmp_path)
    failure = run_cell(cells[0], SiteSettings(device="cpu", min_patients_per_metric=10_000))
    assert "no site has a test score" in failure and "min_patients_per_metric" in failure
    assert not cells[0].summary()
