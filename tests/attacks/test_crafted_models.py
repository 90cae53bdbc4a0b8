"""An attacker crafts a starting model whose disclosed score answers a question about one patient.

Rounding scores makes the attack more expensive, but does not prevent it. The tests measure the number of studies that
the attack needs; docs/trust/privacy.md states this number.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.core.errors import Refused
from medsilo.federation.protection import planned_answers
from medsilo.plan import parse_plan
from medsilo.runs.messages import Request
from medsilo.site.query_budget import QueryBudget, data_set
from medsilo.site.settings import SiteSettings, make_settings
from tests.hospital import write_table
from tests.sites import site_of
from tests.unit.federation.test_protection import STUDY

PAGE = Path(__file__).resolve().parents[2] / "docs/trust/privacy.md"
HALF = 60
CREATININE, HIGHEST, DIGIT = 134.0, 200.0, 0.1
TASK = {"name": "table", "labels": ["0", "1"], "standardise": "none", "columns": ["age", "creatinine"]}
PLAN = parse_plan({**STUDY, "task": TASK, "network": {"name": "mlp", "hidden": [4, 6], "norm": "none"}})
STEEP, FAR = 100.0, 1e5


def registry(folder: Path, known: int) -> None:
    """Write a table in which each patient has a unique age; the attacker knows all ages and outcomes."""
    drawn = np.random.default_rng(5).normal(90, 20, 2 * HALF).round(1)
    drawn[known] = CREATININE
    rows = [
        {"patient": f"p{age}", "age": age, "creatinine": value, "outcome": int(age >= HALF)}
        for age, value in enumerate(drawn.tolist())
    ]
    write_table(folder / "cases.csv", rows)


def craft(parameters: list[Any], below: float, known: int, above: float) -> None:
    """Make a network predict falsely for patients younger than `below`, and for the known patient if this patient's
    creatinine is greater than `above`.
    """
    one, one_bias, two, two_bias, last, last_bias = parameters
    with torch.no_grad():
        for own in parameters:
            own.zero_()
        one.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        # The first two units of the layer measure the distance from the known patient's age.
        one_bias.copy_(torch.tensor([-float(known), float(known), 0.0, 0.0]))
        for place, edge in ((0, below), (2, HALF - 0.5)):
            two[place : place + 2, 3] = STEEP
            two_bias[place : place + 2] = torch.tensor([-STEEP * edge, -STEEP * edge - 1])
        two[4:6] = torch.tensor([-FAR, -FAR, STEEP, 0.0])
        two_bias[4:6] = torch.tensor([-STEEP * above, -STEEP * above - 1])
        second = 200 * torch.tensor([-1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
        last.copy_(second[None])
        last_bias.fill_(100.0)


@dataclass
class Attacker:
    folder: Path
    settings: SiteSettings
    known: int
    studies: int = 0

    def loss(self, below: float, above: float) -> float:
        self.studies += 1
        site = site_of(PLAN, "a", ["a"], self.settings, self.folder / f"{self.studies}/sites/a")
        craft([*site.participant.state.model.parameters()], below, self.known, above)
        model = {name: value.clone() for name, value in site.participant.state.model.state_dict().items()}
        asked = Request(task="deliver", round=0, study="s", plan=PLAN.hash, sites=("a",))
        told = site.answer(asked.message({"model": model})).facts["validation_loss"]
        assert told is not None
        return float(told)

    def edge(self) -> int:
        low, high = 0, HALF
        at_low = self.loss(low - 0.5, HIGHEST)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.loss(middle - 0.5, HIGHEST) == at_low else (low, middle)
        return low

    def read(self) -> float | None:
        below = self.edge() - 0.5
        base, low, high = self.loss(below, HIGHEST), 0.0, HIGHEST
        if self.loss(below, -1.0) == base:
            return None
        while high - low > DIGIT:
            middle = (low + high) / 2
            low, high = (middle, high) if self.loss(below, middle) != base else (low, middle)
        return (low + high) / 2


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, int]]:
    folder, found = tmp_path_factory.mktemp("crafted"), dict[str, int]()

    def price() -> dict[str, int]:
        if found:
            return found
        for known in range(HALF, 2 * HALF):
            own = folder / str(known)
            registry(own / "data", known)
            data = {"folder": str(own / "data"), "outcome": ["outcome"]}
            values = {"device": "cpu", "data": data, "state_dir": str(folder / "state")}
            attacker = Attacker(own, make_settings({**values, "answers": 100_000}, "x"), known)
            (folder / "state/a/key").parent.mkdir(parents=True, exist_ok=True)
            (folder / "state/a/key").write_text("5e" * 32)
            if (value := attacker.read()) is not None:
                used = QueryBudget(folder / "state/a").used(data_set(attacker.settings.data, "table"))
                answers = sum(count["validation"] for count in used.values())
                planned = planned_answers(PLAN)["validation"] * attacker.studies
                found.update(studies=attacker.studies, answers=answers, planned=planned, cents=round(100 * value))
                return found
        raise AssertionError("nobody is in validation")

    return price


def test_a_crafted_model_reads_a_known_patients_value_for_a_price(priced: Callable[[], dict[str, int]]) -> None:
    """medsilo does not promise to prevent attacks by crafted models. The test measures the cost of the attack, because
    hospitals choose their settings by this cost.
    """
    found = priced()
    assert abs(found["cents"] / 100 - CREATININE) <= DIGIT
    assert found["answers"] == found["studies"] < SiteSettings().most_studies
    row = re.search(r"\| one number between 0 and 200, to 0\.1 \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text("utf-8"))
    assert row, f"the page has no such row: {found}"
    assert tuple(map(int, row.groups())) == (found["studies"], found["answers"], found["planned"])


def test_fewer_answers_end_it(tmp_path: Path) -> None:
    """If a hospital limits a study to eight scores, the attack ends before it finds the patient's value."""
    known = HALF + 3
    registry(tmp_path / "data", known)
    data = {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}
    values = {"device": "cpu", "data": data, "state_dir": str(tmp_path / "state"), "answers": 8}
    attacker = Attacker(tmp_path / "runs", make_settings(values, "x"), known)
    with pytest.raises(Refused, match="answers"):
        attacker.read()
    assert attacker.studies == 7
