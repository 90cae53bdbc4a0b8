"""The AUROC and the balanced accuracy are undefined for cases of one class.

No record, page, mean, choice of a round or comparison replaces an undefined score by a number. At a hospital whose
patients need protection, an undefined score looks like any score that stays at the hospital.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import medsilo
from medsilo.cli import main
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import ROUNDS, SUMMARY
from medsilo.runs.schema import Summary
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.shares import PARTS
from medsilo_lab.report.formats import text_table
from medsilo_lab.report.page import render
from medsilo_lab.report.read import RunResult, read, read_all
from medsilo_lab.report.run_warnings import of_run
from medsilo_lab.study.verdict_file import read_verdict
from tests import inprocess
from tests.hospital import write_table

SITES = ["a", "b", "c"]
ALIKE = "c"  # the hospital whose patients all have the outcome 0
ROUND_COUNT = 5
OF_TASK = {
    "auroc": {"labels": ["0", "1"], "score": "auroc"},
    "balanced_accuracy": {"labels": ["0", "1"], "score": "balanced_accuracy"},
}
NAMES = {"auroc": "AUROC", "balanced_accuracy": "balanced accuracy"}
OF_MACHINE = {"seconds", "memory", "started", "ended", "study", "packages"}


def write_hospitals(folder: Path, ill: int | None = None, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Write a table for each hospital.

    Args:
        ill: the number of a patient at the hospital ALIKE who has the outcome 1, although the others have the outcome 0
        parts: the parts of the data in which the patients of the hospital ALIKE all have the outcome 0
    """
    for site in SITES:
        drawn, rows = np.random.default_rng(ord(site)), []
        for number in range(120):
            outcome, part = int(drawn.random() < 0.5), PARTS[number % 3]
            row = {"patient": f"{site}{number}", "x": outcome + drawn.normal(), "y": 2 * drawn.normal() - outcome}
            if site == ALIKE and part in parts:
                outcome = int(number == ill)
            rows.append(row | {"outcome": outcome, "part": part})
        write_table(folder / site / "cases.csv", rows)
    return {"folder": str(folder), "outcome": ["outcome"]}


def plan_of(metric: str, method: str = "fedavg", **more: Any) -> Plan:
    task = {"name": "table", "columns": [{"name": "x"}, {"name": "y"}], **OF_TASK[metric]}
    training = {"rounds": ROUND_COUNT, "batch_size": 8, "learning_rate": 0.3}
    values = {"algorithm": {"name": method}, "task": task, "network": None, "training": training, "seed": 0}
    return parse_plan({**values, "participation": {"sites": SITES}, **more})


def settings_of(folder: Path, public: bool, **how: Any) -> SiteSettings:
    data = write_hospitals(folder / "data", **how)
    own = {"device": "cpu", "public_data": public, "state_dir": str(folder / "state"), "data": data}
    return make_settings(own, "a test")


def run(folder: Path, plan: Plan, public: bool = True, **how: Any) -> Summary:
    return inprocess.run(plan, folder=folder / "run", settings=settings_of(folder, public, **how)).summary


@pytest.fixture(scope="module", params=[*OF_TASK])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunResult]:
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, plan_of(request.param))
    return request.param, read(folder / "run")


def test_a_record_has_no_number_for_an_undefined_score(found: tuple[str, RunResult]) -> None:
    metric, result = found
    summary = result.summary
    own, others = summary.sites[ALIKE], [summary.score(site) for site in SITES if site != ALIKE]
    assert own.test is not None and own.test[metric] is None and own.test["loss"] is not None
    assert own.validation == [None] * (ROUND_COUNT + 1) and own.figures[metric] is None
    assert all(line.sites[ALIKE].validation is None and line.sites[ALIKE].validation_loss for line in result.rounds)
    assert None not in others and summary.mean_test == pytest.approx(statistics.fmean(others))  # type: ignore[type-var]
    assert summary.pooled_test == pytest.approx(summary.pooled[metric], abs=1e-6)
    assert summary.as_json()["scores"]["sites"][ALIKE] | {"n": 0} == {
        **{"kind": "undefined", "value": None, "low": None, "high": None},
        **{"n": 0, "step": 0.0, "trained": True, "seen": False},
    }
    assert ALIKE not in summary.telling and ALIKE not in result.intervals


def test_pages_call_an_undefined_score_undefined_and_say_why(found: tuple[str, RunResult], tmp_path: Path) -> None:
    metric, result = found
    assert [ALIKE, "undefined"] in [line.split() for line in text_table(result).splitlines()]
    (told,) = [one.text for one in of_run(result) if "undefined" in one.text]
    assert (
        told == f"{result.label}: {NAMES[metric]} undefined at {ALIKE}: one class; means and comparisons leave it out."
    )
    page = render([result], "T")
    assert ">undefined<" in page and told in page
    # the other hospitals still have a mean curve
    assert None not in result.mean_curve and len(result.mean_curve) == ROUND_COUNT + 1


def test_an_undefined_score_neither_chooses_a_round_nor_prevents_a_choice(found: tuple[str, RunResult]) -> None:
    _, result = found
    curve = result.mean_curve
    best = max(range(len(curve)), key=lambda rounds: curve[rounds] or 0)
    assert {*result.summary.selected.rounds.values()} == {best}


def test_a_hospital_without_a_defined_score_keeps_the_model_of_the_last_round(tmp_path: Path) -> None:
    """In an earlier version, each model had the score 0.5, so the hospital kept the untrained model of round 0."""
    assert run(tmp_path, plan_of("auroc", "ditto")).selected.rounds[ALIKE] == ROUND_COUNT


def test_a_score_that_only_validation_lacks_is_still_tested(tmp_path: Path) -> None:
    summary = run(tmp_path, plan_of("auroc"), parts=("validation",))
    assert {*summary.sites[ALIKE].validation} == {None} and summary.score_at(ALIKE).kind == "value"
    assert summary.telling == SITES


def test_a_mean_of_undefined_scores_is_undefined(tmp_path: Path) -> None:
    values = {"participation": {"sites": [ALIKE]}}
    data = write_hospitals(tmp_path / "data")
    own = make_settings({"device": "cpu", "public_data": True, "data": data}, "a test")
    summary = inprocess.run(plan_of("auroc", "local", **values), folder=tmp_path / "run", settings=own).summary
    assert summary.finished and summary.mean_test is None and str(summary.mean_score) == "undefined"
    assert "mean" in (told := text_table(read_all([tmp_path / "run"])[0])) and "0.5" not in told


def test_centralised_training_leaves_undefined_scores_out(tmp_path: Path) -> None:
    summary = run(tmp_path, plan_of("auroc", "central"))
    others = [summary.score(site) for site in SITES if site != ALIKE]
    assert summary.mean_test == pytest.approx(statistics.fmean(others)) and str(summary.score_at(ALIKE)) == "undefined"  # type: ignore[type-var]
    curves = [summary.sites[site].validation for site in SITES if site != ALIKE]
    means = [statistics.fmean(own) for own in zip(*curves, strict=True)]  # type: ignore[type-var]
    assert summary.selected.rounds[ALIKE] == means.index(max(means))
    assert {*summary.sites[ALIKE].validation} == {None}


def test_a_comparison_leaves_undefined_scores_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "plan.yaml").write_text(plan_of("auroc").to_yaml())
    settings = settings_of(tmp_path, public=True)
    own = settings.model_dump(mode="json", include={"device", "public_data", "data"}, exclude_defaults=True)
    (tmp_path / "medsilo.yaml").write_text(json.dumps(own))
    line = f"compare --plan {tmp_path}/plan.yaml --methods fedavg,local --seeds 0,1,2 --settings {tmp_path} --at-once 1"
    assert main([*line.split(), "-o", str(tmp_path / "out")]) == 0
    verdict = read_verdict(tmp_path / "out")
    told = [one.text for one in verdict.warnings if "undefined" in one.text]
    assert told == [f"fedavg, local: AUROC undefined at {ALIKE}: one class; means and comparisons leave it out."]
    for row in verdict.rows:
        assert {site for site, own in row.sites.items() if own} == {"a", "b"}
        assert row.score and row.score.mean == pytest.approx(statistics.fmean(row.sites[site].mean for site in "ab"))
    assert (
        verdict.sites == ["a", "b"]
        and verdict.patients == {"a": 40, "b": 40}
        and verdict.hospitals.keys() == {"a", "b"}
    )
    assert verdict.first and verdict.first.patients == 80
    page = (tmp_path / "out/report.html").read_text("utf-8")
    assert told[0] in page and told[0] in capsys.readouterr().out


def test_a_concordance_over_cases_that_cannot_be_compared_is_undefined(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    sites = {}
    for site in SITES:
        inputs, times = drawn.normal(size=(90, 2)), drawn.integers(1, 50, 90)
        parts = {part: slice(30 * place, 30 * place + 30) for place, part in enumerate(PARTS)}
        events = np.full(90, site != ALIKE)
        events[:30] = True  # for training
        targets = np.stack([times, events], 1)
        sites[site] = {part: (inputs[own], targets[own], np.arange(90)[own]) for part, own in parts.items()}
    told = medsilo.run(task="survival", sites=sites, model="linear", rounds=2, device="cpu", folder=tmp_path / "run")
    result = read(told.folder)
    others = [result.summary.score(site) for site in SITES if site != ALIKE]
    assert result.summary.mean_test == pytest.approx(statistics.fmean(others))  # type: ignore[type-var]
    assert str(result.score_at(ALIKE)) == "undefined" and {*result.site(ALIKE).validation} == {None}
    (caution,) = [one.text for one in of_run(result) if "undefined" in one.text]
    assert caution.endswith(f"concordance undefined at {ALIKE}; means and comparisons leave it out.")


# ---------------------------------------------------------------------------------------------- protected patients
def record_of(folder: Path) -> str:
    """Return all numbers that the server has of a run, without times and sizes of processes."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(own) for name, own in value.items() if name not in OF_MACHINE}
        return [kept(own) for own in value] if isinstance(value, list) else value

    lines = [(folder / SUMMARY).read_text(), *(folder / ROUNDS).read_text().splitlines()]
    return json.dumps([kept(json.loads(line)) for line in lines], indent=1, sort_keys=True)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize("metric", [*OF_TASK])
def test_no_record_tells_whether_a_protected_hospital_has_one_patient_of_the_other_class(
    metric: str, method: str, tmp_path: Path
) -> None:
    """With ditto, the records must also agree on the round that each hospital selects."""
    records = {}
    for ill in (None, 1, 4, 2):  # patients of the other class: none, validation patients only, and one test patient
        folder = tmp_path / str(ill)
        summary = run(folder, plan_of(metric, method), public=False, ill=ill)
        assert str(summary.score_at(ALIKE)) == "suppressed"
        records[ill] = record_of(folder / "run")
    assert len({*records.values()}) == 1
    result = read(tmp_path / "None/run")
    said = [one.text for one in of_run(result)]
    assert not [text for text in said if "one class" in text or "undefined" in text]
    assert "undefined" not in text_table(result)
