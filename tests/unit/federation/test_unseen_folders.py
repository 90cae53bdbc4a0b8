"""A hospital that does not train may have only one patient, or only test patients."""

import shutil
from pathlib import Path

import pytest

from medsilo.check.site_check import Visit, check
from medsilo.core.errors import DataError, Refused
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.runs.schema import Summary
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.sources import DataSource
from tests import inprocess
from tests.hospital import photograph, write_pixels, write_table
from tests.sites import site_of

A, B, SMALL = "hospital-a", "hospital-b", "village"


def plan_of(method: str, kind: str) -> Plan:
    task = {"name": "image-folder", "kind": kind, "labels": ["no", "yes"] if kind == "classification" else ["square"]}
    networks = {
        "classification": {"name": "small-cnn", "width": 2},
        "segmentation": {"name": "unet", "features": [4, 8]},
    }
    values = {
        "algorithm": {"name": method},
        "task": {**task, "size": [32, 32]},
        "network": networks[kind],
        "training": {"rounds": 2, "batch_size": 4},
        "participation": {"sites": [A, B], "evaluation_sites": [SMALL]},
    }
    return parse_plan(values)


def write_hospital(folder: Path, patients: int, kind: str, part: str = "") -> Path:
    rows = []
    for number in range(patients):
        pixels, mask = photograph(number)
        write_pixels(folder / f"images/{number}.png", pixels)
        write_pixels(folder / f"labels/{number}.png", mask)
        label = number % 2 if kind == "classification" else f"labels/{number}.png"
        row = {"image": f"images/{number}.png", "label": label, "patient": f"p{number}"}
        rows.append({**row, "part": part} if part else row)
    write_table(folder / "cases.csv", rows)
    return folder


def study(tmp_path: Path, method: str, kind: str, patients: int, part: str = "") -> tuple[Summary, TrainingSite]:
    root = tmp_path / "data"
    for site in (A, B):
        write_hospital(root / site, 9, kind)
    write_hospital(root / SMALL, patients, kind, part)
    own = {"min_patients_per_metric": 1, "public_data": True, "pictures": True}
    settings = make_settings({"device": "cpu", "data": str(root), **own}, "x")
    plan = plan_of(method, kind)
    summary = inprocess.run(plan, folder=tmp_path / "run", settings=settings).summary
    site = site_of(plan, SMALL, [A, B, SMALL], settings, tmp_path / "again/study/sites" / SMALL)
    return summary, site


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "patients", "part"),
    [
        ("fedavg", "segmentation", 1, ""),
        ("fedavg", "classification", 2, ""),
        ("fedavg", "classification", 4, "test"),
        ("fedsm", "classification", 1, ""),
        ("harmofl", "segmentation", 2, "test"),
    ],
)
def test_a_small_or_test_only_hospital_is_tested(
    method: str, kind: str, patients: int, part: str, tmp_path: Path
) -> None:
    summary, site = study(tmp_path, method, kind, patients, part)
    assert summary.status == "finished"
    result = summary.evaluation_sites[SMALL]
    assert result.cases == {"train": 0, "validation": 0, "test": patients} and result.test["cases"] == patients
    assert 0 <= result.test[summary.metric] <= 1 and result.validation[-1] is None
    assert site.participant.disclosure.cases == {"train": 0, "validation": 0, "test": patients}


def test_who_was_tested_is_not_trained_on_when_more_patients_come(tmp_path: Path) -> None:
    """If a hospital that only tested models later trains with more patients, its earlier test patients remain test
    patients.
    """
    root = write_hospital(tmp_path / "data", 2, "classification")
    described = {"folder": str(root), "label_map": {"0": "no", "1": "yes"}}
    settings = make_settings({"device": "cpu", "data": described}, "x")
    unseen = plan_of("fedavg", "classification")
    site = site_of(unseen, SMALL, [A, B, SMALL], settings, tmp_path / "one/sites" / SMALL)
    assert set(site.participant.disclosure.patients["test"]) == {"p0", "p1"}
    write_hospital(root, 20, "classification")
    trains = unseen.with_changes([f"participation.sites=[{SMALL}]", "participation.evaluation_sites=[]"])
    site = site_of(trains, SMALL, [SMALL], settings, tmp_path / "two/sites" / SMALL)
    assert {"p0", "p1"} < set(site.participant.disclosure.patients["test"])
    assert site.participant.disclosure.cases == {"train": 12, "validation": 4, "test": 4}


def test_who_trains_needs_all_parts_still(tmp_path: Path) -> None:
    settings = make_settings({"device": "cpu", "data": str(write_hospital(tmp_path / "d", 2, "classification"))}, "x")
    with pytest.raises(DataError) as caught:
        site_of(plan_of("fedavg", "classification"), A, [A, B], settings, tmp_path / "run/sites/a")
    assert "part has no cases" in caught.value.private and "part" not in str(caught.value)


def test_a_hospital_that_does_not_train_refuses_to(tmp_path: Path) -> None:
    """A hospital that does not train rejects all requests to train, because medsilo checked the hospital's data for
    tests only.
    """
    settings = SiteSettings(device="cpu", data=DataSource(folder=write_hospital(tmp_path / "d", 9, "classification")))
    plan = plan_of("fedavg", "classification")
    site = site_of(plan, SMALL, [A, B, SMALL], settings, tmp_path / "run/sites" / SMALL)
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=(A, B, SMALL))
    with pytest.raises(Refused, match="does not train in this study"):
        site.answer(StudyMessage(asked.message({}).groups, asked.message({}).facts))


def test_check_lets_it_go(tmp_path: Path) -> None:
    folder = write_hospital(tmp_path / "data", 1, "classification")
    (tmp_path / "local").mkdir()
    (tmp_path / "local/medsilo.yaml").write_text("device: cpu\n")
    source, plan = DataSource(folder=folder), plan_of("fedavg", "classification")
    report = check(Visit(SMALL, plan, source=source, local=tmp_path / "local"))
    assert report.go, report.findings
    assert any("does not train" in finding.what for finding in report.findings)
    shutil.rmtree(folder / "images")
    assert not check(Visit(SMALL, plan, source=source, local=tmp_path / "local")).go
