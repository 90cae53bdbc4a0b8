"""The pages' words on learning, differences with whiskers, colours and headings."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from medsilo.federation.raw_results import write_measures
from medsilo.plan import parse_plan
from medsilo.runs.progress import round_lines
from medsilo.runs.rounds import SiteRound
from medsilo_lab.report import charts
from medsilo_lab.report.findings import is_still_rising
from medsilo_lab.report.formats import text_table
from medsilo_lab.report.page import render
from medsilo_lab.report.read import read_all
from medsilo_lab.study.scores import SiteTest
from tests.conftest import make_plan
from tests.unit.test_report import Page, round_line, save, summary_of

SITES = ("hospital-a", "hospital-b")


# ---------------------------------------------------------------------------------------------------- learned or not
def page_of(folder: Path, metric: str, score: float, curve: list[float]) -> str:
    """Return the headline of the page of a run with this score and validation curve at each of its sites."""
    one = {
        "validation": curve,
        "test": {metric: score, "loss": 0.3, "cases": 40},
        "classes": {"train": [6, 4], "validation": None, "test": [6, 4]},
    }
    summary = summary_of("fedavg", "FedAvg", dict.fromkeys(SITES, score), dict.fromkeys(SITES, one), metric=metric)
    parsed = Page(render(read_all([save(folder, summary)]), "T"))
    return parsed.header_text


def test_rounded_scores_are_said_to_be_so_and_nothing_is_concluded_from_them(tmp_path: Path) -> None:
    """Five patients tell a dice of 0.06 as 0: the page says below 0.25, names no lowest hospital and no round 0."""
    few = {"validation": [0.0] * 8, "steps": {"validation": 0.5, "test": 0.5}}
    one = few | {"test": {"dice": 0.0, "loss": 0.3, "cases": 20}}
    told = dict.fromkeys(SITES, one), dict.fromkeys(SITES, 0)
    summary = summary_of("fedavg", "FedAvg", dict.fromkeys(SITES, 0.0), told[0], metric="dice")
    run = read_all([save(tmp_path, summary.changed(selected=summary.selected.changed(rounds=told[1])))])
    page, table = Page(render(run, "T")), text_table(run[0])
    assert "between 0.000 and 0.250" in page.header_text and "has not learned" not in page.header_text
    for text in (page.header_text, table):
        assert "steps of 0.5" in text and "below 0.25" in text and "hospital-a (20 cases)" in text
    assert "round 0" in page.header_text and "lowest" not in render(run, "T")
    line = round_line(1, ["a"]).changed(sites={"a": SiteRound(validation=0.0)})
    assert "0.000 ± 0.25" in round_lines(line, 3, "dice", {"a": 0.5})[0]


@pytest.mark.parametrize(
    ("metric", "score", "said"),
    [
        ("accuracy", 0.9, ""),
        ("accuracy", 0.62, "has not learned"),  # the most frequent class has 0.6
        ("accuracy", 0.5, "is below guessing"),
        ("dice", 0.5, ""),
        ("dice", 0.11, "has not learned"),
        ("concordance", 0.7, ""),
        ("concordance", 0.52, "has not learned"),
        ("concordance", 0.4, "is below guessing"),
        ("closeness", 0.4, ""),  # what guessing has is not known here
    ],
)
def test_the_headline_says_whether_a_model_is_better_than_guessing(
    metric: str, score: float, said: str, tmp_path: Path
) -> None:
    told = page_of(tmp_path, metric, score, [score, score])
    words = ("has not learned", "is below guessing", "has not converged")
    assert [one for one in words if f"The model {one}." in told] == ([said] if said else [])


@pytest.mark.parametrize(
    ("curve", "rises"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], True),
        ([0.1, 0.7, 0.8, 0.81, 0.81, 0.81, 0.81], False),  # it has arrived
        ([0.1, 0.2, 0.3], False),  # too few to tell
        ([0.3, 0.6, 0.65, 0.7, 0.68, 0.73, 0.78, 0.8, 0.79, 0.83, 0.86, 0.88, 0.9], True),
    ],
)
def test_the_headline_says_whether_training_ended_too_early(curve: list[float], rises: bool, tmp_path: Path) -> None:
    told = page_of(tmp_path, "accuracy", 0.9, curve)
    assert ("The model has not converged." in told) == ("RUN --more 20" in told) == rises


@pytest.mark.parametrize("rounds", [6, 12, 30])
def test_a_curve_that_scatters_is_seldom_called_rising(rounds: int, tmp_path: Path) -> None:
    """Of 300 curves that have arrived, and of 300 that rise by half over the rounds, with the same scatter."""
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
    """Errors of a fifth of the mean's own: a closeness of 0.9, where the mean has 0.5."""
    folder = tmp_path / "sites/hospital-a"
    values = torch.tensor([0.0, 10.0, 0.0, 10.0], dtype=torch.float64)
    measures = {"closeness": torch.full((4,), 0.9), "mae": torch.ones(4), "value": values}
    write_measures(folder, measures, list("abcd"))
    assert SiteTest.read(tmp_path, "hospital-a", "closeness").mean == pytest.approx(0.5)
    assert SiteTest.read(tmp_path, "hospital-a", "mae").mean is None


# ---------------------------------------------------------------------------------------------------- what a page says
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
    svg = ElementTree.fromstring(charts.whisker_chart(one, [-5.0, 0.0, 5.0], "k", "T", True))
    paths = {str(path.get("class")): path.get("d", "") for path in svg.iter("path")}
    mark, zero = (float(re.match(r"M([\d.]+)", paths[kind])[1]) for kind in ("mark", "chance"))  # type: ignore[index]
    low, high = map(float, re.match(r"M([\d.]+) [\d.]+H([\d.]+)", paths["whisker"]).groups())  # type: ignore[union-attr]
    point = charts.AXIS / 10
    assert [low - zero, mark - zero, high - zero] == pytest.approx([-point, 2 * point, 5 * point], abs=0.2)
    assert [text.text for text in svg.iter("text")] == ["−5", "0", "+5"] and svg.findtext("desc") == "+2.0 points."


def test_references_never_take_a_methods_colour() -> None:
    looks = charts.styles([True, *[False] * charts.COLOURS, True])
    assert len({charts.colour(look) for look in looks}) == charts.COLOURS + 2
    assert len({(charts.colour(n), n % len(charts.DASHES), n % len(charts.MARKERS)) for n in range(24)}) == 24


def test_every_section_is_in_the_contents_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    runs = [save(tmp_path, summary_of(name, name, dict.fromkeys(SITES, 0.5))) for name in ("local", "fedavg")]
    text = render(read_all(runs), "T")
    parsed = Page(text)
    assert parsed.ids.index("terms-title") > parsed.ids.index("limits-title")
    inside = {address[1:] for address in parsed.addresses if address.startswith("#")}
    assert inside <= set(parsed.ids)
    assert {one for one in parsed.ids if one.endswith("-title")} - inside == {
        one for one in parsed.ids if re.fullmatch(r"(curve|terms).*-title", one)
    }
