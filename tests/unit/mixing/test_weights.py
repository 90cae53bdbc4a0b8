"""The weight of each hospital in the mean is correct, even if patients have different numbers of cases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.plan import Plan, parse_plan
from medsilo.schedule.weighting import update_weight
from medsilo.site.settings import make_settings
from medsilo.tasks.regression import Regression
from tests import inprocess
from tests.hospital import write_table
from tests.sites import sites_of
from tests.unit.federation.test_protection import STUDY

CASES = {"one": [1], "forty": [40], "fourteen": [14], "fifteen": [15], "mixed": [1, 2, 5, 10, 30]}
# Disclosed counts are rounded to multiples of five times the largest number of cases of a patient. Rounding changes a
# count by at most 1.6 % of the cases at each hospital.
PATIENTS = {"one": 903, "forty": 251, "fourteen": 402, "fifteen": 307, "mixed": 703}
SLOPES = {"one": 0.2, "forty": 1.4, "fourteen": 0.5, "fifteen": 0.9, "mixed": -0.3}
FURTHEST, SLOPE = 0.03, 0.02


def plan_of(weighting: str) -> Plan:
    task = {"name": "table", "kind": "regression", "target": "y", "columns": ["x"], "standardise": "none"}
    task |= {"range": [-20.0, 20.0]}
    training = {"rounds": 12, "batch_size": 16384, "learning_rate": 0.4, "optimizer": "sgd"}
    values = {**STUDY, "task": task, "network": {"name": "linear"}, "training": training}
    algorithm = {"name": "fedavg", "weighting": weighting}
    return parse_plan({**values, "algorithm": algorithm, "participation": {"sites": [*CASES]}})


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, drawn = tmp_path_factory.mktemp("weights"), np.random.default_rng(0)
    for site, cases in CASES.items():
        rows: list[dict[str, Any]] = [
            {"patient": f"p{who}", "x": (x := round(drawn.normal(), 4)), "y": round(SLOPES[site] * x, 4)}
            for who in range(PATIENTS[site])
            for _ in range(cases[who % len(cases)])
        ]
        write_table(folder / "data" / site / "cases.csv", rows)
    return folder


def settings_of(folder: Path) -> Any:
    data = {"folder": str(folder / "data"), "outcome": ["y"]}
    return make_settings({"device": "cpu", "data": data, "state_dir": str(folder / "state")}, "x")


@pytest.mark.parametrize("weighting", ["patients", "cases"])
def test_shares_are_what_the_declared_rule_says(weighting: str, hospitals: Path, tmp_path: Path) -> None:
    """Weights from disclosed counts are close to weights from exact counts.

    An earlier rule gave a hospital between 0.05 and 1.8 times the exact weight.
    """
    plan = plan_of(weighting)
    told, true = {}, {}
    for name, site in sites_of(plan, tmp_path, [*CASES], settings_of(hospitals)).items():
        own = site.participant.disclosure
        cases, patients = own.cases["train"], len({*own.patients["train"]})
        told[name] = own.weight(cases)
        true[name] = update_weight(plan.weighting, cases, cases, patients)
    shares = {name: told[name] / sum(told.values()) / (true[name] / sum(true.values())) for name in CASES}
    assert max(abs(share - 1) for share in shares.values()) <= FURTHEST, shares


def test_a_pooled_slope_is_that_of_the_pool(hospitals: Path, tmp_path: Path) -> None:
    """Federated gradient descent over all cases finds the slope of the pooled data.

    With the weights of earlier versions, the slope was 1.088 instead of 0.634.
    """
    plan = plan_of("cases")
    sites = sites_of(plan, tmp_path / "look", [*CASES], settings_of(hospitals))
    pairs = [site.participant.data.train for site in sites.values()]
    x, y = (torch.cat([getattr(own, name).flatten() for own in pairs]).double() for name in ("inputs", "targets"))
    pooled = float((x * y).sum() / (x * x).sum())
    result = inprocess.run(plan, folder=tmp_path / "run", settings=settings_of(hospitals))
    model, goal = result.models["one"].eval(), plan.task.goal
    assert isinstance(goal, Regression)
    with torch.no_grad():
        at_zero, at_one = (float(goal.values_of(model(torch.tensor([[own]])))) for own in (0.0, 1.0))
    assert abs(at_one - at_zero - pooled) <= SLOPE, (at_one - at_zero, pooled)
