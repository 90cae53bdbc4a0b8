"""Test the sentences, colours and headings that pages show for learned and for untrained models."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import medsilo
from medsilo.cli import main
from medsilo.federation.raw_results import write_measures
from medsilo.plan import parse_plan
from medsilo.runs.progress import round_lines
from medsilo.runs.rounds import SiteRound
from medsilo_lab.report.page import render
from medsilo_lab.report.read import read_all
from medsilo_lab.report.run_warnings import is_still_rising, learning, of_run
from medsilo_lab.study.scores import SiteTest
from medsilo_lab.study.verdict_file import Notice, read_verdict
from medsilo_page import charts
from tests.conftest import SMALL, make_plan
from tests.unit.medsilo_lab.test_report import Page, round_line, save, summary_of

SITES = ("hospital-a", "hospital-b")


# ---------------------------------------------------------------------------------------------------- learned or not
def page_of(folder: Path, metric: str, score: float, curve: list[float]) -> str:
    one = {
        "validation": curve,
        "test": {metric: score, "loss": 0.3, "cases": 40},
        "classes": {"train": [6, 4], "validation": None, "test": [6, 4]},
    }
    summary = summary_of("fedavg", "FedAvg", dict.fromkeys(SITES, score), dict.fromkeys(SITES, one), metric=metric)
    parsed = Page(render(read_all([save(folder, summary)]), "T"))
    return parsed.header_text


def test_rounded_scores_are_said_to_be_so_and_nothing_is_concluded_from_them(tmp_path: Path) -> None:
    """The Dice of the five patients is 0.06, which is rounded to 0.

    The page shows the range 0 to 0.25, so it can name neither a lowest hospital nor a best round.
    """
    few = {"validation": [0.0] * 8, "steps": {"validation": 0.5, "test": 0.5}}
    one = few | {"test": {"dice": 0.0, "loss": 0.3, "cases": 20}}
    told = dict.fromkeys(SITES, one), dict.fromkeys(SITES, 0)
    summary = summary_of("fedavg", "FedAvg", dict.fromkeys(SITES, 0.0), told[0], metric="dice")
    run = read_all([save(tmp_path, summary.changed(selected=summary.selected.changed(rounds=told[1])))])
    page, said = Page(render(run, "T")), "\n".join(map(str, of_run(run[0])))
    assert "of 0 to 0.25" in page.header_text and "has not learned" not in page.header_text
    for text in (page.header_text, said):
        assert "steps of 0.5" in text and "hospital-a (20 cases)" in text
    assert "round 0" in page.header_text and "lowest" not in render(run, "T")
    line = round_line(1, ["a"]).changed(sites={"a": SiteRound(validation=0.0, step=0.5)})
    assert "dice before 0 to 0.25  loss" in round_lines(line, 3, "dice")[0]


@pytest.mark.parametrize(
    ("metric", "score", "said"),
    [
        ("accuracy", 0.9, ""),
        ("accuracy", 0.62, "has not learned"),  # the most frequent class has 60 % of the cases
        ("accuracy", 0.5, "is below guessing"),
        ("dice", 0.5, ""),
        ("dice", 0.11, "has not learned"),
        ("concordance", 0.7, ""),
        ("concordance", 0.52, "has not learned"),
        ("concordance", 0.4, "is below guessing"),
        ("closeness", 0.4, ""),  # the metric "closeness" has no known score of guessing
    ],
)
def test_the_headline_says_whether_a_model_is_better_than_guessing(
    metric: str, score: float, said: str, tmp_path: Path
) -> None:
    told = page_of(tmp_path, metric, score, [score, score])
    words = ("has not learned", "is below guessing", "has not converged")
    assert [one for one in words if f"the model {one}" in told] == ([said] if said else [])


@pytest.mark.parametrize(
    ("curve", "rises"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], True),
        ([0.1, 0.7, 0.8, 0.81, 0.81, 0.81, 0.81], False),
        ([0.1, 0.2, 0.3], False),
        ([0.3, 0.6, 0.65, 0.7, 0.68, 0.73, 0.78, 0.8, 0.79, 0.83, 0.86, 0.88, 0.9], True),
    ],
)
def test_the_headline_says_whether_training_ended_too_early(curve: list[float], rises: bool, tmp_path: Path) -> None:
    told = page_of(tmp_path, "accuracy", 0.9, curve)
    assert ("the model has not converged" in told) == ("RUN --more 20" in told) == rises


@pytest.mark.parametrize("rounds", [6, 12, 30])
def test_a_curve_that_scatters_is_seldom_called_rising(rounds: int, tmp_path: Path) -> None:
    """The test draws 300 converged curves and 300 rising curves, all with the same random noise."""
    save(tmp_path, summary_of("fedavg", "FedAvg", {"hospital-a": 0.9}))
    run, random = read_all([tmp_path / "fedavg-seed0"])[0], np.random.default_rng(rounds)

    def said(way: np.ndarray) -> float:
        curves = 0.3 + way + random.normal(0, 0.04, (300, rounds + 1))
        sites = [run.summary.sites["hospital-a"].changed(validation=curve.tolist()) for curve in curves]
        runs = [replace(run, summary=run.summary.changed(sites={"hospital-a": one})) for one in sites]
        return float(np.mean([is_still_rising(one) for one in runs]))

    turn = np.arange(rounds + 1) / rounds
    assert said(0.5 * (1 - np.exp(-20 * turn))) < 0.06 and said(0.5 * turn) > 0.35


def test_a_number_is_held_against_the_mean(tmp_path: Path) -> None:
    """The model's closeness is 0.9 (error 1), and predicting the mean would give a closeness of 0.5 (error 5)."""
    folder = tmp_path / "sites/hospital-a"
    values = torch.tensor([0.0, 10.0, 0.0, 10.0], dtype=torch.float64)
    measures = {"closeness": torch.full((4,), 0.9), "mae": torch.ones(4), "value": values}
    write_measures(folder, measures, list("abcd"))
    assert SiteTest.read(tmp_path, "hospital-a", "closeness").mean == pytest.approx(0.5)
    assert SiteTest.read(tmp_path, "hospital-a", "mae").mean is None


# ---------------------------------------------------------------------------------------------------- one list

# with this small learning rate, medsilo selects the model of round 0
UNTAUGHT = ["task.name=synthetic-activity", *SMALL, "training.rounds=1", "training.learning_rate=1e-5"]
AS_OPTIONS = [word for change in UNTAUGHT for word in ("--set", change)]


def lines_of(notices: list[Notice]) -> list[str]:
    return [str(one) for one in notices]


def test_a_run_says_everywhere_that_its_model_was_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In earlier versions, `run fedavg --set algorithm.name=fedbn ...` printed scores without a warning about
    training.
    """
    out = ["-o", str(tmp_path), "--name", "run", "--engine", "inprocess", "--json"]
    assert main(["run", "fedavg", *AS_OPTIONS, *out]) == 0
    said = capsys.readouterr()
    run = medsilo.Run(tmp_path / "run")
    lines = lines_of(run.warnings)
    assert any(line.startswith("Untrained: FedAvg: the model tested at hospital-a") for line in lines)
    told = json.loads(said.out.splitlines()[-1])["warnings"]
    assert [f"{one['word']}: {one['text']}" for one in told] == lines
    page = Page((tmp_path / "run/report.html").read_text("utf-8"))
    for one in run.warnings:
        assert f"warning: {one}" in said.err and one.text in page.header_text
    assert said.err.count(" untrained\n") == 5 and all("untrained" in one for one in page.row("FedAvg", "results")[1:])


@pytest.mark.slow
def test_a_comparison_says_everywhere_that_its_models_were_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In earlier versions, the headline did not mention that every seed had tested the untrained model of round 0."""
    command = ["compare", "--methods", "local,fedavg", "--seeds", "0,1", *AS_OPTIONS, "--at-once", "1"]
    assert main([*command, "-o", str(tmp_path / "c"), "--json"]) == 0
    said = capsys.readouterr()
    found = medsilo.Comparison(tmp_path / "c")
    lines = lines_of(found.warnings)
    assert sum(line.startswith("Untrained: ") and "in 2 of 2 runs" in line for line in lines) == 2
    told = json.loads(said.out)["warnings"]
    assert [f"{one['word']}: {one['text']}" for one in told] == lines
    assert lines_of(read_verdict(tmp_path / "c").warnings) == lines
    page = Page((tmp_path / "c/report.html").read_text("utf-8"))
    assert all("untrained" in one for one in page.row("fedavg", "results")[1:])
    for one in found.warnings:
        assert f"warning: {one}" in said.err and one.text in page.header_text and str(one) in found.headline


@pytest.mark.parametrize(("auroc", "says"), [(0.81, "its AUROC is 0.81"), (0.52, "the model has not learned")])
def test_an_accuracy_no_better_than_the_most_frequent_class_is_said_to_be_so(
    auroc: float, says: str, tmp_path: Path
) -> None:
    """If 7 % of a registry's patients die, a model without any skill has an accuracy of 0.93."""
    one = {"test": {"accuracy": 0.93, "loss": 0.3, "cases": 43}, "classes": {"train": None, "test": [40, 3]}}
    told = dict.fromkeys(SITES, 0.93), dict.fromkeys(SITES, one)
    run = read_all([save(tmp_path, summary_of("fedavg", "FedAvg", *told, pooled={"auroc": auroc}))])[0]
    [line] = [one.text for one in of_run(run) if one.word == "Not learned"]
    assert "no better than that of always saying the most frequent class (0.93)" in line and says in line
    assert line in Page(render([run], "T")).header_text


def test_a_class_of_few_patients_does_not_hide_that_a_model_says_the_other_class(tmp_path: Path) -> None:
    """Each hospital rounds its score and suppresses the count of the four of its 44 test patients who die."""
    one = {"test": {"accuracy": 0.9, "loss": 0.3, "cases": 40}, "classes": {"train": None, "test": [40, 0]}}
    rounded = one | {"steps": {"test": 0.02}}
    run = read_all(
        [save(tmp_path, summary_of("fedavg", "FedAvg", *(dict.fromkeys(SITES, own) for own in (0.9, rounded))))]
    )
    [line] = [one.text for one in of_run(run[0]) if one.word == "Not learned"]
    assert "hardly better than that of always saying the most frequent class (0.91)" in line


def test_a_sheet_names_no_other_hospital_in_its_warnings(tmp_path: Path) -> None:
    summary = summary_of("fedavg", "FedAvg", dict.fromkeys(SITES, 0.9))
    raw = summary.changed(selected=summary.selected.changed(rounds=dict.fromkeys(SITES, 0)))
    rows = {"fedavg": read_all([save(tmp_path, raw)])}
    for site, other in (SITES, SITES[::-1]):
        [line] = [one.text for one in learning(rows, site) if one.word == "Untrained"]
        assert site in line and other not in line


def test_slices_are_called_slices(tmp_path: Path) -> None:
    for sliced, word in ((True, "48 slices"), (False, "48 cases")):
        (tmp_path / word).mkdir()
        run = save(tmp_path / word, summary_of("fedavg", "FedAvg", {"hospital-a": 0.9}, sliced=sliced))
        assert word in render(read_all([run]), "T")
    assert make_plan("fedavg", sites=["a"]).task.sliced is False
    assert parse_plan(make_plan().resolved() | {"task": {"name": "synthetic-prostate"}, "network": None}).task.sliced


# ---------------------------------------------------------------------------------------------------- the page's form
def test_a_difference_lies_at_its_value_on_its_interval_and_zero_is_marked() -> None:
    one = charts.Whisker(2.0, (-1.0, 5.0), 0, "+2.0 points")
    svg = ElementTree.fromstring(charts.whisker_chart(one, [-5.0, 0.0, 5.0], "k", "T"))
    paths = {str(path.get("class")): path.get("d", "") for path in svg.iter("path")}
    mark, zero = (float(re.match(r"M([\d.]+)", paths[kind])[1]) for kind in ("mark", "chance"))  # type: ignore[index]
    low, high = map(float, re.match(r"M([\d.]+) [\d.]+H([\d.]+)", paths["whisker"]).groups())  # type: ignore[union-attr]
    point = charts.AXIS / 10
    assert [low - zero, mark - zero, high - zero] == pytest.approx([-point, 2 * point, 5 * point], abs=0.2)
    assert svg.findtext("desc") == "+2.0 points."
    top = ElementTree.fromstring(charts.axis_of([-5.0, 0.0, 5.0], signed=True))
    assert [(text.text, float(text.get("x", 0))) for text in top.iter("text")] == [
        ("−5", zero - 5 * point),
        ("0", zero),
        ("+5", zero + 5 * point),
    ]


def test_references_never_take_a_methods_colour() -> None:
    looks = charts.styles([True, *[False] * charts.COLOURS, True])
    assert len({charts.colour(look) for look in looks}) == charts.COLOURS + 2
    assert len({(charts.colour(n), n % len(charts.DASHES), n % len(charts.MARKERS)) for n in range(24)}) == 24


def test_every_section_but_the_limits_is_folded_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    runs = [save(tmp_path, summary_of(name, name, dict.fromkeys(SITES, 0.5))) for name in ("local", "fedavg")]
    text = render(read_all(runs), "T")
    parsed = Page(text)
    assert re.findall(r"<main[^>]*>\s*<section id=\"(\w+)\"", text) == ["limits"]
    sections = re.findall(r'<section id="([\w-]+)"[^>]*>\s*<(details|h2)', text)
    assert {name for name, tag in sections if tag == "h2"} == {"limits"} and len(sections) > 5
    inside = {address[1:] for address in parsed.addresses if address.startswith("#")}
    assert inside <= set(parsed.ids)
