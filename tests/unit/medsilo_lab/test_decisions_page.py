"""Test the decisions and the calibration on a run's page, and the decision sheets."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.runs import paths
from medsilo.runs.schema import Decisions, Summary
from medsilo_lab.comparison.compare import Study
from medsilo_lab.report.differences import write_sheets
from medsilo_lab.study.verdict_file import HospitalVerdict, PairedDifference, read_verdict
from tests.unit.medsilo_lab.test_report import rendered, save, summary_of

A, B, C = "hospital-a", "hospital-b", "hospital-c"


def decisions(yes: int, no: int, threshold: float | None = 0.35, certain: bool = True) -> Decisions:
    places = [(0, 0, 0.0)] * 10
    places[1], places[8] = (20, 2, 3.0), (20, 17, 17.0)
    return Decisions(
        confusion=[[18, 2], [5, 15]],
        threshold=threshold,
        decided=None if threshold is None else [no, 20 - no, 20 - yes, yes],
        reliability=[places] if certain else None,
    )


def told(yes: int, no: int, **changes: Any) -> dict[str, Any]:
    figures = {"accuracy": 0.8, "sensitivity": yes / 20, "specificity": no / 20, "calibration_error": 0.05}
    return {"figures": figures, "decisions": decisions(yes, no, **changes)}


def summary(sites: Sequence[str] = (A, B, C), **changes: Any) -> Summary:
    by_site = {A: told(18, 15), B: told(16, 20), C: told(17, 16, threshold=None, certain=False)}
    by_site[C] = {"figures": {"accuracy": 0.8}, "decisions": by_site[C]["decisions"]}
    pooled = {"accuracy": 0.81, "sensitivity": 0.85, "specificity": 0.875, "calibration_error": 0.0625}
    scores = {site: 0.7 + number / 100 for number, site in enumerate(sites)}
    return summary_of("fedavg", "FedAvg", scores, by_site, pooled=pooled, **changes)


def test_a_runs_page_shows_decisions_confusion_and_reliability(tmp_path: Path) -> None:
    text, parsed = rendered([save(tmp_path, summary())])
    assert parsed.row(A, "decisions")[1:] == [
        *("0.350", "0.9018 of 20, 0.70–0.97", "0.7515 of 20, 0.53–0.89"),
        *("0.7818 of 23, 0.58–0.90", "0.840.69–0.92", "0.05"),
    ]
    assert parsed.row(C, "decisions")[1:] == ["–"] * 6
    everyone = parsed.row("all sites' cases", "decisions")
    assert everyone[1:4] == ["each its own", "0.8534 of 40, 0.71–0.93", "0.8835 of 40, 0.74–0.95"]
    assert "(Youden" in text
    rates = ["0.7515 of 20, 0.53–0.89", "0.9018 of 20, 0.70–0.97", "0.8815 of 17, 0.66–0.97", "0.810.64–0.91"]
    assert parsed.row("hospital-a class 1", "decisions")[1:] == [*rates, *["–"] * 4]
    counts = {row[0].strip(): row[1:] for row in parsed.rows if row}
    assert (counts["all sites' cases class 1"], counts["hospital-a class 1"]) == (["15", "45"], ["5", "15"])
    (curve,) = re.findall(r'<svg[^>]*aria-labelledby="reliability-title".*?</svg>', text, re.DOTALL)
    assert "hospital-a: 0.100 after 0.15 of mean probability, 0.850 after 0.85." in curve and "hospital-c" not in curve
    assert parsed.row("Method", "figures") == ["Method and whose test cases", "accuracy"]


def test_roc_and_net_benefit_follow_from_the_told_places(tmp_path: Path) -> None:
    """Of 40 cases, 19 are ill; the threshold 0.8 gives 17 true and 3 false alarms, and the threshold 0.1 gives 40
    alarms.
    """
    text = rendered([save(tmp_path, summary())])[0]
    for title in (
        "hospital-a, after 0.1429 of 1 − specificity: 0.895",
        "all sites' cases, after 0.5 of threshold: 0.350",
    ):
        assert title in text
    (benefit,) = re.findall(r'aria-labelledby="benefit-title".*?</svg>', text, re.DOTALL)
    (everybody,) = re.findall(r'class="line chance" d="M([^"]*)"', benefit)
    assert everybody.count("L") == 5
    styles = re.findall(
        r'<g class="(s\d)">', text[text.index('id="decisions"') : text.index('aria-labelledby="benefit')]
    )
    assert {"s0", "s1", "s3"} <= set(styles)


def several_classes() -> Summary:
    places = [[(10, 5, 5.0)] * 2 + [(0, 0, 0.0)] * 8] * 3
    table = Decisions(confusion=[[8, 2, 0], [1, 9, 0], [0, 5, 5]], reliability=places)
    areas = {"auroc": 0.8, "auroc_0": 0.9, "auroc_1": 0.8, "auroc_2": 0.7, "pr_auc_1": 0.6}
    areas |= {"sensitivity_at_90_specificity_1": 0.5, "specificity_at_90_sensitivity_1": 0.7}
    few = Decisions(confusion=[[10, 0, 0], [0, 10, 0], [0, 1, 1]])
    none = Decisions(confusion=[[10, 0, 0], [0, 10, 0], [0, 0, 0]])
    told = {
        A: {"decisions": table, "figures": areas},
        B: {"decisions": few, "figures": {**areas, "auroc": 0.6, "auroc_2": 0.1}},
        C: {"decisions": none, "figures": {**areas, "auroc": 0.85, "auroc_2": None}},
    }
    return summary_of("fedavg", "FedAvg", {A: 0.7, B: 0.8, C: 0.9}, told, pooled={**areas, "auroc_2": 0.6})


def test_the_page_says_how_thresholds_were_chosen_and_names_the_classes(tmp_path: Path) -> None:
    text = rendered([save(tmp_path, summary(labels=["well", "<ill>"]))])[0]
    assert "largest sum of sensitivity and specificity" in text
    assert "&lt;ill&gt;" in text and "class 0" not in text


def test_several_classes_have_no_threshold(tmp_path: Path) -> None:
    text, parsed = rendered([save(tmp_path, several_classes())])
    rows = [parsed.row(f"{A} class {label}", "decisions")[1:] for label in range(3)]
    assert rows[1] == [
        *("0.909 of 10, 0.60–0.98", "0.6513 of 20, 0.43–0.82", "0.569 of 16, 0.33–0.77", "0.690.47–0.85"),
        *("0.800.58–0.91", "0.600.30–0.84", "0.500.24–0.76", "0.700.48–0.85"),
    ]
    assert rows[2][:2] == ["0.505 of 10, 0.24–0.76", "1.0020 of 20, 0.84–1.00"]
    assert "medsilo chooses no threshold" in text and "Youden" not in text
    assert 'aria-labelledby="roc-title"' in text and 'aria-labelledby="benefit-title"' not in text


def test_each_hospital_has_its_classes_with_their_cases_beside_the_mean_of_their_areas(tmp_path: Path) -> None:
    """The mean area under the ROC curve would rank a hospital without class 2 first, and a hospital with two cases of
    class 2 last.
    """
    folder = save(tmp_path, several_classes())
    text, parsed = rendered([folder])
    assert parsed.row(f"{B} class 2", "decisions")[1:3] == ["0.501 of 2, 0.09–0.91", "1.0020 of 20, 0.84–1.00"]
    assert parsed.row(f"{C} class 2", "decisions")[1:4] == ["–0 of 0", "1.0020 of 20, 0.84–1.00", "–0 of 0"]
    assert parsed.row("all sites' cases class 2", "decisions")[1] == "0.506 of 12, 0.25–0.75"
    (note,) = re.findall(r"Few test cases: ([^<]*)", text)
    assert note.startswith(f"{B} 2 of class 2, {C} 0 of class 2. AUROC") and "do not rank hospitals" in note
    assert parsed.row("Method", "figures") == ["Method and whose test cases", "auroc"]
    several = rendered([folder, save(tmp_path, several_classes().changed(seed=7))])[0]
    assert several.count("Few test cases") == 1 and several.count(f"{B} 2 of class 2") == 1


def test_a_page_without_classes_has_no_such_section(tmp_path: Path) -> None:
    assert 'id="decisions"' not in rendered([save(tmp_path, summary_of("fedavg", "FedAvg", {A: 0.7}))])[0]


# ---------------------------------------------------------------------------------------------------- decision sheets
@pytest.mark.slow
def test_a_decision_sheet_names_no_other_hospital(panels_study: Study, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(panels_study.folder, folder)
    with pytest.raises(MedsiloError, match="compare with the method local, too"):
        write_sheets(folder, lambda run: [])
    verdict = read_verdict(folder)
    gain = PairedDifference(mean=0.1, low=0.05, high=0.2, p=0.01, seeds=3, adjusted=0.03, sure=True)
    own = HospitalVerdict(word="better", method=verdict.rows[0].title, difference=gain)
    write_json(folder / paths.VERDICT, verdict.changed(hospitals=dict.fromkeys(verdict.sites, own)).as_json())
    pages = write_sheets(folder, lambda run: ["model: 5.0 kB in round 1 to 2."])
    assert [page.stem for page in pages] == verdict.sites
    for page in pages:
        text = page.read_text("utf-8")
        assert "model: 5.0 kB in round 1 to 2." in text and not re.findall(r"https?://", text)
        assert [site for site in verdict.sites if site in text] == [page.stem]
    write_json(folder / paths.VERDICT, verdict.changed(hospitals={"../../x": own}).as_json())
    with pytest.raises(MedsiloError, match="can't be a file name"):
        write_sheets(folder, lambda run: [])
