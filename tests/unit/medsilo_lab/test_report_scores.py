"""Pages and outputs show a rounded score as a range, and show no score with more digits than the number of patients
allows.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import medsilo
from medsilo.cli.show import Console
from medsilo.core.rounding import Resolution
from medsilo.plan import parse_plan
from medsilo.runs.progress import round_lines
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.score import Score, interval_text, number_text
from medsilo.site.settings import make_settings
from medsilo_lab.cli.running import conclude
from medsilo_lab.deploy.model_card import card_facts, write_card
from medsilo_lab.deploy.source import Source
from medsilo_lab.engines import inprocess
from medsilo_lab.study.scores import SiteTest
from tests.unit.medsilo_lab.test_released import TABLE, marked
from tests.unit.medsilo_lab.test_report import Page

NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


def digits_in(text: str) -> list[int]:
    return [len(found[1] or "") for found in NUMBER.finditer(text)]


# ---------------------------------------------------------------------------------------------------- one score
@settings(max_examples=2000, deadline=None)
@given(truth=st.floats(0, 1), patients=st.integers(1, 400), rounds=st.booleans(), trained=st.booleans())
def test_no_score_has_more_digits_than_its_step_and_patients_allow(
    truth: float, patients: int, rounds: bool, trained: bool
) -> None:
    """medsilo shows a score of 100 patients with three digits, and a score of fewer patients with two digits.

    A rounded score has as many digits as half of its rounding step.
    """
    rounding = Resolution(1 / patients, 5 if rounds else 0, 5 if rounds else 1, size=patients)
    step = rounding.step(0, 1)
    if step > 1:  # medsilo suppresses a score whose rounding step is larger than the score's range
        return
    score = Score.told(rounding.mean(truth, 0, 1), patients, step, trained=trained)
    text = str(score)
    assert text.endswith("untrained") != trained
    ends = [float(found[0]) for found in NUMBER.finditer(text)]
    allowed = len(f"{step / 2:.6f}".rstrip("0").partition(".")[2]) if step else 3 if patients >= 100 else 2
    assert max(digits_in(text)) <= min(allowed, 3)
    if step:
        assert score.kind == "range" and score.value is None and " to " in text
        assert ends[0] - 1e-9 <= truth <= ends[1] + 1e-9 and 0 <= ends[0] < ends[1] <= 1
        assert ends[1] - ends[0] <= step + 2e-3
    else:
        assert score.kind == "value" and len(ends) == 1 and abs(ends[0] - truth) <= 0.005 + 1e-9


def test_a_range_or_what_is_suppressed_is_never_a_number() -> None:
    assert str(Score.told(1.0, 20, 0.5)) == "0.75 to 1"
    assert str(Score.told(0.0, 20, 0.5)) == "0 to 0.25"
    assert str(Score.told(0.5, 20, 0.5)) == "0.25 to 0.75"
    assert str(Score.told(0.9, 2000, 0.005)) == "0.897 to 0.903"
    assert str(Score.told(None, 3, absent="suppressed")) == "suppressed" and str(Score.told(None)) == "–"
    assert str(Score.told(0.92134, 40)) == "0.92" and str(Score.told(0.92134, 100)) == "0.921"
    assert number_text(0.5, 5) == "0.50" and interval_text((0.123456, 0.98765), 30) == "0.12–0.99"


# ---------------------------------------------------------------------------------------------------- everywhere
@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rounded")
    data = {
        "folder": marked(root / "data", 300),
        "table": "cases.csv",
        "columns": {"patient": "patient"},
        "outcome": ["outcome"],
    }
    plan = {**TABLE, "task": {**TABLE["task"], "standardise": "none"}, "model_selection": {"keep": "last"}}
    plan |= {"training": {"rounds": 3, "learning_rate": 0.3}}
    inprocess.run(
        parse_plan(plan), folder=root / "run", settings=make_settings({"data": data, "device": "cpu"}, "test")
    )
    return root / "run"


def concluded(run: Path) -> Console:
    screen = Console()
    conclude(screen, run)
    screen.end()
    return screen


def truth_of(run: Path, site: str) -> float:
    return float(SiteTest.read(run, site, "accuracy").scores.values.mean())


def test_a_rounded_score_is_a_range_in_every_place(rounded: Path, capsys: pytest.CaptureFixture) -> None:
    """In earlier versions, the output had a Dice of 1.000 for two hospitals whose scores were .921 and .902."""
    summary = read_summary(rounded)
    shown = {site: str(summary.score_at(site)) for site in "ab"}
    for site, text in shown.items():
        low, high = map(float, text.split(" to "))
        assert low <= truth_of(rounded, site) <= high and high - low < 1
    mean = str(summary.mean_score)
    low, high = map(float, mean.split(" to "))
    assert low <= sum(truth_of(rounded, site) for site in "ab") / 2 <= high

    capsys.readouterr()
    screen = concluded(rounded)
    lines = capsys.readouterr().out.splitlines()
    table = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if re.match(r"(a|b|mean|pooled)\s{2,}", line))
    assert table["a"] == shown["a"] and table["b"] == shown["b"] and table["mean"] == mean

    told = json.loads((rounded / "summary.json").read_text("utf-8"))["scores"]
    assert told == screen.document["summary"]["scores"]
    assert told["sites"]["a"] | {"kind": "range", "value": None, "trained": True} == told["sites"]["a"]
    assert told["sites"]["a"]["low"] < told["sites"]["a"]["high"] and told["sites"]["a"]["n"] > 0
    assert [told["mean"][end] for end in ("low", "high")] == pytest.approx([low, high], abs=0.0051)

    text = (rounded / "report.html").read_text("utf-8")
    row = Page(text).row("FedAvg", "results")
    assert row[1] == mean and row[3].startswith(shown["a"]) and row[4].startswith(shown["b"])
    assert Page(text).row("FedAvg a", "figures")[1] == shown["a"] and mean in text

    run = medsilo.Run(rounded)
    line = run.table.loc["a"]
    assert line["kind"] == "range" and f"{line['low']:g} to {line['high']:g}" == shown["a"] and line["n"] > 0
    assert line.isna()["accuracy"] and mean in repr(run)

    before = round_lines(read_rounds(rounded)[1], 3, "accuracy")
    assert len(before) == 2 and all(re.search(r"accuracy before [\d.]+ to [\d.]+  loss", one) for one in before)

    card: dict[str, Any] = card_facts(Source.open(rounded, ""))
    assert card["scores"]["a"]["shown"] == shown["a"] and card["scores"]["a"]["low"] < card["scores"]["a"]["high"]
    write_card(Source.open(rounded, ""), rounded / "card")
    assert f"| {shown['a']} (rounded" in (rounded / "card/MODEL_CARD.md").read_text("utf-8")


def test_what_follows_from_rounded_counts_is_called_about(rounded: Path) -> None:
    """medsilo computes areas under the ROC curve and class frequencies from rounded counts of patients."""
    concluded(rounded)
    page = Page((rounded / "report.html").read_text("utf-8"))
    names, own = page.row("Method", "figures"), page.row("FedAvg a", "figures")
    derived = [value for name, value in zip(names, own, strict=True) if name in ("auroc", "balanced accuracy")]
    assert derived and all(value == "suppressed" or value.startswith("≈") for value in derived)
