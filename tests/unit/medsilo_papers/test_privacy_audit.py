"""Test the audit of whether a model reveals its training patients (python -m results.analyses privacy)."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from results.analyses.membership import membership


@pytest.mark.parametrize(
    "shift, verdict, against", [(0.0, "nothing found", False), (0.35, "with care", False), (2.0, "DO NOT", True)]
)
def test_a_release_is_judged_by_how_well_members_are_told(shift: float, verdict: str, against: bool) -> None:
    generator = np.random.default_rng(3)
    found = membership(generator.normal(size=400) + shift, generator.normal(size=400))
    assert verdict in found.verdict and found.advises_against == against
    assert found.lowest < norm.cdf(shift / math.sqrt(2)) < found.highest
