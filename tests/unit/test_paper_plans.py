"""The plans of HarmoFL's paper load as they are, and run when they are made small."""

from pathlib import Path

import pytest

from medsilo.plan import load_plan
from medsilo.site.settings import SiteSettings
from medsilo.study import inprocess
from tests.unit.test_nuclei import draw

PLANS = Path(__file__).resolve().parents[2] / "jobs" / "harmofl" / "plans"
SMALLER = ["training.rounds=2", "training.batch_size=8"]
SMALL = {
    "camelyon17": ["task.size=32", "task.patients=6", "task.patches=4", "participation.sites=[a, b]"],
    "nuclei": ["task.size=32", "network.features=[2, 2, 4, 4, 4]"],
    "prostate": ["task.size=32", "task.patients=6", "network.features=[2, 2, 4, 4, 4]"],
}
SMALL["prostate"].append("participation.sites=[a, b]")


def test_the_papers_numbers() -> None:
    plans = {name: load_plan(PLANS / f"{name}.yaml") for name in SMALL}
    assert all(plan.protocol == "paper" and plan.algorithm.perturbation.alpha == 0.05 for plan in plans.values())
    assert [plan.task.shape[-1] for plan in plans.values()] == [96, 256, 384]
    assert [plan.rounds for plan in plans.values()] == [100, 500, 500]
    assert [plan.training.batch_size for plan in plans.values()] == [128, 8, 16]
    assert [plan.training.learning_rate for plan in plans.values()] == [1e-3, 1e-4, 1e-4]
    assert [plan.training.optimizer for plan in plans.values()] == ["sgd", "sgd", "adam"]
    assert [plan.training.truncate for plan in plans.values()] == [True, False, True]
    assert plans["prostate"].training.betas == (0.9, 0.99)


@pytest.mark.parametrize("name", SMALL)
def test_they_run(name: str, tmp_path: Path) -> None:
    plan = load_plan(PLANS / f"{name}.yaml", [*SMALLER, *SMALL[name]])
    folder = draw(tmp_path / "data") if name == "nuclei" else None
    settings = SiteSettings(device="cpu", data=folder, smallest_average=1)
    assert inprocess.run(plan, settings=settings).summary["status"] == "finished"
