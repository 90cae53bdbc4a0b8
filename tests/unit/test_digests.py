"""Every method gives the numbers that it gave before the code was reshaped (tests/digests.py)."""

import json
from typing import Any

import pytest

from tests.digests import CASES, FILE, left_by, this_processor

KNOWN: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
IN_EVERY_RUN = [case for case in CASES if "synthetic-prostate" not in case]


@pytest.mark.parametrize(
    "case", [case if case in IN_EVERY_RUN else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_same_numbers_as_before(case: str) -> None:
    found, known = left_by(case), KNOWN["cases"][case]
    assert found["sizes"] == pytest.approx(known["sizes"], rel=0.02)
    assert found["tests"] == pytest.approx(known["tests"], rel=0.2, abs=0.05)
    if KNOWN["processor"] == this_processor():
        assert found["bits"] == known["bits"]
        assert found["tests"] == known["tests"]
