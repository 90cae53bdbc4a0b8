"""Rows of weights by which AdaFed's hospitals get each other's models: made up, concentrated, or never compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import ParticipationError, Refused
from medsilo.federation.asking import Missing
from medsilo.runs.messages import Parcel
from medsilo.sealing.terms import check_hidden
from tests import sealed
from tests.attacks.test_secure_aggregation import GO_ON, HOSPITALS, RULES, Hospitals, lead
from tests.conftest import make_plan
from tests.unit.test_coordinator import LOST

ADAFED = ("adafed", *RULES, "transport.sealing=pairwise")
CLEAR = "transport.sealing_clear=[statistics]"
NEARLY = 2.0**-21


def rows_told(change: Callable[[dict[str, list[float]]], None], first: int = 2) -> Callable[[str, Parcel], Parcel]:
    """A server that tells all hospitals rows of its own making, from a round on."""

    def lie(site: str, asked: Parcel) -> Parcel:
        rows = asked.facts.get("sealing", {}).get("rows", {})
        if asked.facts["round"] >= first and "model" in rows:
            change(rows["model"])
        return asked

    return lie


def test_a_row_that_is_nearly_one_hospitals_model(tmp_path: Path) -> None:
    """The plan lets the server make W, so nobody can compare it; d would open a's model to 2^-21."""
    plan = make_plan(*ADAFED, CLEAR, sites=HOSPITALS)

    def concentrate(rows: dict[str, list[float]]) -> None:
        rows["d"] = [1 - NEARLY, NEARLY / 3, NEARLY / 3, NEARLY / 3]

    hospitals = Hospitals(plan, tmp_path / "run", rows_told(concentrate))
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "run", hospitals)
    assert sorted(hospitals.said) == HOSPITALS and not any(number == 2 for _, number in hospitals.trained)
    assert all(
        "the sum of model for d would tell a hospital the model of one other" in s for s in hospitals.said.values()
    )


@pytest.mark.parametrize("row, passes", [((100, 170, 20, 10), True), ((100, 178, 12, 10), False)])
def test_the_floor_holds_for_those_whose_numbers_are_added(row: tuple[int, ...], passes: bool) -> None:
    """Also when it is a dropout that leaves one other hospital with nearly all: 178 of 190 without the reader."""
    block = sealed.block(sealed.numbers(4), total=300, reader="site-0", weights=row)
    check_hidden(sealed.terms(4), block, range(4))
    if passes:
        check_hidden(sealed.terms(4), block, [0, 1, 2])
    else:
        with pytest.raises(Refused, match="the model of one other, whose weight is more than 90%"):
            check_hidden(sealed.terms(4), block, [0, 1, 2])


def without_compare(site: str, asked: Parcel) -> Parcel | Missing:
    return LOST if site == "d" and asked.facts["task"] == "compare" else asked


def test_a_hospital_that_the_server_does_not_let_compare(tmp_path: Path) -> None:
    """It could not tell a W of the server's making: it sends nothing under it, and the others go on."""
    plan = make_plan(*ADAFED, *GO_ON, sites=HOSPITALS)
    hospitals = Hospitals(plan, tmp_path / "run", without_compare)
    server = lead(plan, tmp_path / "run", hospitals)
    assert "made no weights of model of its own in round 1" in hospitals.said["d"]
    assert [line.answered for line in server.rounds[1:]] == [["a", "b", "c"]] * (plan.rounds - 1)
    assert not any(site == "d" and number > 1 for site, number in hospitals.trained)


def test_a_hospital_that_was_not_measured_counts_for_nobody_and_goes_on(tmp_path: Path) -> None:
    plan = make_plan(*ADAFED, *GO_ON, sites=HOSPITALS)

    def away(site: str, asked: Parcel) -> Parcel | Missing:
        return LOST if site == "d" and asked.facts["round"] == 1 else asked

    hospitals = Hospitals(plan, tmp_path / "run", away)
    server = lead(plan, tmp_path / "run", hospitals)
    assert all("d" in line.answered for line in server.rounds[1:]) and not hospitals.said


@pytest.mark.parametrize("told", [{}, None], ids=["none", "of the server's making"])
def test_rows_of_a_plan_whose_hospitals_compare_nothing(told: Any, tmp_path: Path) -> None:
    """They follow from the plan alone."""
    plan = make_plan(*ADAFED, "algorithm.weights=uniform", sites=HOSPITALS)

    def lie(site: str, asked: Parcel) -> Parcel:
        letters = asked.facts.get("sealing", {})
        if "rows" in letters and told is None:
            letters["rows"]["model"]["a"] = [0.5, 0.3, 0.1, 0.1]
        elif "rows" in letters:
            letters["rows"] = {}
        return asked

    hospitals = Hospitals(plan, tmp_path / "run", lie)
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "run", hospitals)
    said = "not those that this site made of the plan" if told is None else "not those of the groups that are mixed"
    assert sorted(hospitals.said) == HOSPITALS and all(said in each for each in hospitals.said.values())
    lead(plan, tmp_path / "honest", Hospitals(plan, tmp_path / "honest"))
