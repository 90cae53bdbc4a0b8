"""An update that goes further than any honest one costs its sender the round, in whatever order answers come."""

from itertools import permutations

import pytest
import torch

from medsilo.core.errors import Refused
from medsilo.federation.directions import RoundDirections
from tests.conftest import SITES

GIVEN = {"w": torch.ones(100)}


def sent(far: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": GIVEN["w"] + far}}


def answered(opened: RoundDirections, lengths: dict[str, float]) -> list[str]:
    """Return whose updates are taken."""
    taken = []
    for site, far in lengths.items():
        directions = opened.measure(sent(far), lambda group: GIVEN)
        try:
            opened.check(directions)
        except Refused as error:
            assert "its update of model is" in str(error) and "beyond any honest one" in str(error)
        else:
            opened.note(site, directions)
            taken.append(site)
    return sorted(taken)


@pytest.mark.parametrize("evil", [2e4, 1e20, 1e37])
def test_in_the_first_round_no_weight_goes_beyond_all(evil: float) -> None:
    lengths = {SITES[0]: 1.0, SITES[1]: evil, SITES[2]: 9e3}
    for order in permutations(lengths):
        opened = RoundDirections({"model": GIVEN}, {"w"}, 0)
        assert answered(opened, {site: lengths[site] for site in order}) == [SITES[0], SITES[2]]


def test_later_rounds_are_held_to_the_last_one() -> None:
    """Growing by less than the factor in each round gains nothing, as the middle one of a round counts."""
    first = RoundDirections({"model": GIVEN}, {"w"}, 0)
    lengths = {SITES[0]: 1e-4, SITES[1]: 2e-4, SITES[2]: 9e3}
    assert answered(first, lengths) == SITES
    for order in permutations(lengths):
        second = RoundDirections({"model": GIVEN}, {"w"}, 1, first)
        assert answered(second, {site: lengths[site] for site in order}) == SITES[:2]
        assert answered(second, {SITES[2]: 150.0}) == [SITES[2]]  # 10^6 times the middle one is 200
    still = RoundDirections({"model": GIVEN}, {"w"}, 0)
    assert answered(still, dict.fromkeys(SITES, 0.0)) == SITES
    third = RoundDirections({"model": GIVEN}, {"w"}, 1, still)  # nobody moved, so there is nothing to compare with
    assert answered(third, dict.fromkeys(SITES, 1.0)) == SITES
