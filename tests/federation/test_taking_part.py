from pathlib import Path

import pytest

from medsilo.runs.score import Score
from medsilo.site.settings import EachSites, SiteSettings
from medsilo_lab.engines import simulator
from tests.conftest import SITES, SMALL, make_plan

A, B, C = SITES


def hospitals(takes_part: str) -> SiteSettings:
    return EachSites(device="cpu", sites={C: SiteSettings(device="cpu", takes_part=takes_part)})


@pytest.mark.slow
@pytest.mark.parametrize(("takes_part", "why"), [("observe", "only observes"), ("test", "trains none")])
def test_a_study_counts_the_refusal_and_goes_on_without_who_does_not_train(
    takes_part: str, why: str, tmp_path: Path
) -> None:
    going_on = ["participation.when_missing=continue", "participation.minimum=2"]
    plan = make_plan("fedavg", *SMALL, *going_on)
    record = simulator.run(plan, tmp_path / "run", hospitals(takes_part))
    summary = record.summary()
    assert summary and summary.finished
    for line in record.rounds():
        assert sorted(line.sites) == [A, B] and why in line.refused[C]
    assert summary.sites[A].contributed == plan.rounds and summary.sites[C].contributed == 0
    assert summary.score_at(C) == Score(kind="missing")
    own = tmp_path / "run/sites" / C
    assert not list(own.glob("*.safetensors")) and not (own / "data.json").exists()


@pytest.mark.slow
def test_who_tests_is_tested_where_the_plan_asks_for_no_more(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, f"participation.evaluation_sites=[{C}]", sites=[A, B])
    record = simulator.run(plan, tmp_path / "run", hospitals("test"))
    summary = record.summary()
    assert summary and summary.finished and summary.evaluation_sites[C].test
    assert not any(line.refused for line in record.rounds())
