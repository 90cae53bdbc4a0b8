"""A lead with an honest server, who subtracts two sealed studies: with one hospital and without it."""

from pathlib import Path

import pytest
import torch

from medsilo.core.errors import MedsiloError, ParticipationError, Refused
from medsilo.federation.asking import Missing
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Parcel
from medsilo.site.book import Book
from medsilo.site.settings import SiteSettings, make_settings
from tests import sealed
from tests.attacks.test_secure_aggregation import HOSPITALS, Hospitals, Liar, Model, furthest, lead
from tests.unit.test_coordinator import LOST
from tests.unit.test_protection import STUDY, write_photos

SEALED = ["transport.sealing=pairwise", "training.rounds=1", "training.learning_rate=0.01"]
FIVE = [*HOSPITALS, "e"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SiteSettings]:
    """Five hospitals with 16 patients each."""
    folder = tmp_path_factory.mktemp("patients")
    return {
        site: make_settings(
            {
                "device": "cpu",
                "data": write_photos(folder / site, [f"{site}{n}" for n in range(16)]),
                "smallest_average": 1,
            },
            site,
        )
        for site in FIVE
    }


def plan_of(sites: list[str], *changes: str) -> Plan:
    return parse_plan(STUDY, [*SEALED, f"participation.sites=[{','.join(sites)}]", *changes])


def left_over(liar: type[Liar]) -> Model:
    """Return what is left of the first sum without the second, divided by its cases."""
    (_, whole, cases), (_, rest, fewer) = liar.opened
    return {name: (whole[name] * cases - rest[name] * fewer) / (cases - fewer) for name in whole}


def test_two_studies_that_differ_in_one_hospital(
    patients: dict[str, SiteSettings],
    liar: type[Liar],
    tmp_path: Path,
) -> None:
    """It would know d's model of the first round."""
    plans = {"with": plan_of(HOSPITALS), "without": plan_of(HOSPITALS[:3])}
    first = Hospitals(plans["with"], tmp_path / "with", settings=patients)
    lead(plans["with"], tmp_path / "with", first)
    second = Hospitals(plans["without"], tmp_path / "without", settings=patients)
    try:
        lead(plans["without"], tmp_path / "without", second)
    except MedsiloError:
        assert all("in one hospital alone, whose model they would tell" in said for said in second.said.values())
    if len(liar.opened) > 1:
        pytest.fail(f"it knows d's model to {furthest(left_over(liar), first.trained['d', 1]):.1e}")
    assert sorted(second.said) == HOSPITALS[:3]
    assert not second.trained, "they refuse before they train"
    again = plan_of(HOSPITALS[:3], "seed=1")
    lead(again, tmp_path / "other", Hospitals(again, tmp_path / "other", settings=patients))
    model, given = left_over(liar), plans["with"].build_networks()["model"].state_dict()
    found, true = (
        torch.cat([(own[name].double() - given[name]).flatten() for name in given if given[name].is_floating_point()])
        for own in (model, first.trained["d", 1])
    )  # how d's model moved
    assert found.norm() > 10 * true.norm() and sealed.correlation(found, true) < 0.2


def test_two_hospitals_that_make_the_difference_are_known_together(
    patients: dict[str, SiteSettings], liar: type[Liar], tmp_path: Path
) -> None:
    """Their mean, and neither of them: the same as in a sum of two. A sum that parts them is refused."""
    for name, sites in (("five", FIVE), ("three", FIVE[:3])):
        plan = plan_of(sites, "seed=2")
        lead(plan, tmp_path / name, hospitals := Hospitals(plan, tmp_path / name, settings=patients))
        if name == "five":
            d, e = (hospitals.trained[site, 1] for site in ("d", "e"))
    mean = {name: (d[name].double() + e[name].double()) / 2 for name in d}
    assert furthest(left_over(liar), mean) < 1e-6 and furthest(left_over(liar), d) > 1e-4
    plan = plan_of(FIVE[:4], "seed=2")
    with pytest.raises(ParticipationError):
        lead(plan, tmp_path / "four", Hospitals(plan, tmp_path / "four", settings=patients))


def test_sums_that_tell_one_hospital_by_four(tmp_path: Path) -> None:
    """d and e, d and f, e and f: half of the first two without the third is d."""
    book = Book(tmp_path)
    for study, sites in enumerate(("abc", "abcde", "abcdf")):
        book.join_sum("data", sites, str(study), 1)
    for number in (None, 1):
        with pytest.raises(Refused, match="in one hospital alone"):
            book.join_sum("data", "abcef", "last", number)
    book.join_sum("data", "abcef", "last", 2)
    book.join_sum("data", "abc", "again", 1)


def test_a_second_study_whose_sum_misses_a_hospital_that_dropped_out(
    patients: dict[str, SiteSettings],
    liar: type[Liar],
    tmp_path: Path,
) -> None:
    """The second names the same hospitals, and d's line is cut in its round. Another learning rate makes no other."""
    plan = plan_of(HOSPITALS, *GO_ON)
    lead(plan, tmp_path / "first", Hospitals(plan, tmp_path / "first", settings=patients))

    def cut(site: str, asked: Parcel) -> Parcel | Missing:
        return LOST if site == "d" and asked.facts["task"] == "round" else asked

    other = plan_of(HOSPITALS, *GO_ON, "training.learning_rate=0.0100001")
    second = Hospitals(other, tmp_path / "second", cut, patients)
    with pytest.raises(ParticipationError, match="in one hospital alone, whose model they would tell"):
        lead(other, tmp_path / "second", second)
    assert len(liar.opened) == 1
    lead(plan, tmp_path / "third", Hospitals(plan, tmp_path / "third", settings=patients))  # the same set is no news
    assert len(liar.opened) == 2
