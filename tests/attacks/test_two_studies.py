"""A lead with an honest server, who subtracts two sealed studies: with one hospital and without it."""

from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError, ParticipationError
from medsilo.federation.asking import Missing
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Parcel
from medsilo.site.settings import SiteSettings, make_settings
from tests.attacks.test_secure_aggregation import HOSPITALS, Hospitals, Liar, furthest, lead
from tests.unit.test_coordinator import LOST
from tests.unit.test_protection import STUDY, write_photos

SEALED = ["transport.sealing=pairwise", "training.rounds=1", "training.learning_rate=0.01"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SiteSettings]:
    """Four hospitals with 16 patients each."""
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
        for site in HOSPITALS
    }


def plan_of(sites: list[str], *changes: str) -> Plan:
    return parse_plan(STUDY, [*SEALED, f"participation.sites=[{','.join(sites)}]", *changes])


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
        assert all("in one hospital alone, whose model the two would tell" in said for said in second.said.values())
    if len(liar.opened) > 1:
        (_, whole, cases), (_, rest, fewer) = liar.opened
        model = {name: (whole[name] * cases - rest[name] * fewer) / (cases - fewer) for name in whole}
        pytest.fail(f"it knows d's model to {furthest(model, first.trained['d', 1]):.1e}")
    assert sorted(second.said) == HOSPITALS[:3]
    assert not second.trained, "they refuse before they train"
    lead(
        again := plan_of(HOSPITALS[:3], "seed=1"),
        tmp_path / "other",
        Hospitals(again, tmp_path / "other", settings=patients),
    )


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
    with pytest.raises(ParticipationError, match="in one hospital alone, whose model the two would tell"):
        lead(other, tmp_path / "second", second)
    assert len(liar.opened) == 1
    lead(plan, tmp_path / "third", Hospitals(plan, tmp_path / "third", settings=patients))  # the same set is no news
    assert len(liar.opened) == 2
