"""Any table of scores gives a verdict, or a line with the reason for the missing verdict. Too few patients never give a
verdict.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medsilo.core.errors import MedsiloError
from medsilo_lab.report.differences import finding, first_screen
from medsilo_lab.study.cells import Row, cells_of
from medsilo_lab.study.evidence import LEAST_PATIENTS, LEAST_SEEDS, Scores
from medsilo_lab.study.verdict import Statistics, usable
from medsilo_lab.study.verdict_file import About, Verdict
from medsilo_lab.study.words import verdict_in_words
from tests.conftest import make_plan
from tests.property.test_hostile_inputs import hostile

KINDS = ("any", "alike", "right or wrong", "perfect", "nothing", "a few fail", "no numbers", "infinite")
PLAN = make_plan("fedavg", "task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1")


def drawn(random: np.random.Generator, kind: str, patients: int) -> np.ndarray:
    values = random.uniform(0, 1, patients)
    if kind in ("no numbers", "infinite"):
        values[random.integers(patients)] = np.nan if kind == "no numbers" else np.inf
    if kind == "a few fail":
        values = np.where(random.random(patients) < 0.1, 0.0, 0.9)
    if kind == "right or wrong":
        values = (values < 0.7).astype(float)
    return {"alike": np.full(patients, 0.5), "perfect": np.ones(patients), "nothing": np.zeros(patients)}.get(
        kind, values
    )


@pytest.mark.slow
@hostile(0.1)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    people=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    seeds=st.integers(1, 6),
    rows=st.integers(1, 4),
    gain=st.sampled_from((0.0, 0.3, -0.5)),
    suppressed=st.booleans(),
    changed=st.integers(0, 9),
)
def test_a_table_gives_a_verdict_or_a_line(
    seed: int, kinds: list[str], people: list[int], seeds: int, rows: int, gain: float, suppressed: bool, changed: int
) -> None:
    random = np.random.default_rng(seed)
    titles = ["local", "fedavg", "fedbn", "ditto"][:rows]
    found = Statistics(cells_of(PLAN, [Row.parse(title) for title in titles], range(seeds), [], Path("none")), None)
    cases = [int(random.integers(1, 3)) for _ in people]
    for row in found.rows:
        for number in range(seeds):
            table = {}
            for place, size in enumerate(people):
                values = drawn(random, kinds[(place + number) % len(kinds)], size)
                if row.title == "fedavg" and np.isfinite(values).all():
                    values = np.clip(values + gain, 0, 1)
                if not (suppressed and place == 0 and random.random() < 0.2):
                    table[f"site-{place}"] = Scores(values, np.arange(size) // cases[place])
            if table:
                found.scores[row][number] = usable(table)
    if not changed:
        for own in found.scores[found.rows[-1]].values():
            own.update(
                {site: Scores(np.append(one.values, 0.5), np.append(one.patients, 0)) for site, one in own.items()}
            )
    try:
        verdict = found.verdict(About(title="x"), [])
    except MedsiloError as error:
        assert not changed and "same cases" in str(error) and "\n" not in str(error)
        return
    assert Verdict.model_validate(verdict.as_json()) == verdict and verdict.headline
    assert finding(verdict) and first_screen(verdict)["rows"] is not None
    every = [one for row in verdict.rows for one in (row.difference.mean, *row.from_single_site.values()) if one]
    assert all((one.patients or 0) >= LEAST_PATIENTS and one.seeds >= LEAST_SEEDS for one in every if one.sure)
    assert all(
        np.isfinite([one.low, one.high, *one.interval]).all() and one.low <= one.mean <= one.high for one in every
    )
    for one in verdict.hospitals.values():
        assert "nan" not in verdict_in_words(one) and "inf" not in verdict_in_words(one)
