"""A short audit trains one model and guesses from the released model which canaries are in the hospital's folder."""

import math
from pathlib import Path

import pytest

from tests.conftest import slow_but
from tests.one_run import EPSILON, audit, kinds, lower_bound

CANARIES = 120


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["table"], ["table", "series", "image"], ()))
def test_a_hospitals_files_tell_less_than_is_claimed_and_too_little_noise_is_found(name: str, tmp_path: Path) -> None:
    kind = kinds(CANARIES)[name]
    kept = audit(kind, tmp_path / "kept", CANARIES, seed=2)
    assert kept.right < kept.guesses and kept.lower < EPSILON == kept.claimed
    broken = audit(kind, tmp_path / "broken", CANARIES, noise=0.1, seed=2)
    assert broken.lower > EPSILON, str(broken)


def test_the_bound_of_right_guesses() -> None:
    """If all of r guesses are right, the attacker's chance of a right guess is at least 0.05^(1/r), with 95 %
    confidence at δ = 0.

    If half of the guesses are right, the lower bound of ε is zero.
    """
    each = 0.05 ** (1 / 80)
    assert lower_bound(160, 80, 80, 0.0) == pytest.approx(math.log(each / (1 - each)), abs=2e-3)
    assert lower_bound(160, 80, 40, 1e-3) == 0 < lower_bound(160, 80, 80, 1e-3) < lower_bound(160, 80, 80, 0.0)
