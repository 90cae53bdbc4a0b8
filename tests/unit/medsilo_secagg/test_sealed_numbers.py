"""Test fixed-point numbers, mask streams that are never used twice, and secrets that are split into shares."""

import math
from itertools import combinations, permutations, product
from secrets import token_bytes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medsilo.core.errors import MedsiloError, PlanError, Refused
from medsilo_secagg import member
from medsilo_secagg.fixed_point import CHECK, FixedPoint, Flat, as_tensor, as_words
from medsilo_secagg.shamir import PRIME, combine, split
from medsilo_secagg.streams import Stream, Words, add_streams, derive, statement
from tests.sealed import Hospitals, as_groups, block, numbers, terms


# ------------------------------------------------------------ fixed point
def test_the_scale_follows_from_range_and_weights() -> None:
    """With 6 sites and weights up to 8, the fixed-point scale is 2^63 / 6 / 8, rounded down to the power of two
    2^57.
    """
    assert FixedPoint(8.0, 6).scale == 2.0**57
    assert FixedPoint(8.0, 12).scale == 2.0**56
    assert FixedPoint(8.0, 1 << 16).scale == 2.0**43
    for bound, weights in ((0.0, 1), (math.inf, 1), (1.0, 0), (1.0, 1 << 60)):
        with pytest.raises(PlanError, match="must be positive"):
            FixedPoint(bound, weights)


@given(
    values=st.lists(st.floats(-16, 16, width=32), min_size=3, max_size=3),
    weights=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_sums_are_right_in_every_order(values: list[float], weights: list[int]) -> None:
    fixed = FixedPoint(16.0, 15, 5)
    flat = Flat.of({"x": torch.zeros(1)})
    words = [flat.encode({"x": torch.tensor([v])}, fixed, w) for v, w in zip(values, weights, strict=True)]
    sums = {sum(order[1:], order[0]).tobytes() for order in permutations(words)}
    assert len(sums) == 1
    wide = Flat.of({"x": torch.zeros(1, dtype=torch.float64)})
    got = wide.decode(np.frombuffer(sums.pop(), words[0].dtype), fixed, 15, 1)["x"].item()
    wanted = math.fsum(v * w for v, w in zip(values, weights, strict=True))
    # the expected sum is computed in double precision, and has a rounding error
    assert abs(got - wanted) <= 15 / fixed.scale / 2 + 3 * math.ulp(5 * 16.0)


@pytest.mark.parametrize("cases", [30, 30_000, 300_000])
def test_a_mean_by_numbers_of_cases_keeps_its_digits(cases: int) -> None:
    """A mean with weights proportional to the numbers of cases is accurate to 5e-7, even with 30,000 cases.

    An earlier version multiplied by the number of cases after rounding, so the mean was accurate only to 1e-3.
    """
    shares = [cases, cases // 3, cases // 10]
    fixed, flat = FixedPoint(2.0**38, 3 * cases, cases), Flat.of({"x": torch.zeros(200)})
    values = [torch.randn(200, generator=torch.Generator().manual_seed(site)) for site in range(3)]
    words = sum(flat.encode({"x": own}, fixed, weight) for own, weight in zip(values, shares, strict=True))
    exact = sum(own.double() * weight for own, weight in zip(values, shares, strict=True)) / sum(shares)
    found = flat.decode(words, fixed, sum(shares), sum(shares))["x"]
    assert float((found - exact).abs().max()) < 5e-7


def test_the_largest_numbers_do_not_wrap_around() -> None:
    for bound, weights in product((8.0, 10.0), ((7, 1), (7, 7), (1 << 24, 1 << 24), (3 << 20, 1 << 20))):
        total, one = weights
        fixed = FixedPoint(bound, *weights)
        flat = Flat.of({"x": torch.zeros(2, dtype=torch.float64)})
        words = flat.encode({"x": torch.tensor([bound, -bound], dtype=torch.float64)}, fixed, one) * (total // one)
        assert flat.decode(words, fixed, total, total)["x"].tolist() == pytest.approx([bound, -bound])


def test_floats_of_every_width_come_back() -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    tensors = {str(kind): torch.tensor([[1.5, -0.25]], dtype=kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 3), "one": torch.tensor(2.0)}
    flat, fixed = Flat.of(tensors), FixedPoint(4.0, 3)
    words = flat.encode(tensors, fixed)
    assert len(words) == 4 * 2 + 1 + CHECK
    back = flat.decode(words, fixed, 1, 1)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    with pytest.raises(MedsiloError, match=r"steps has the type torch\.int64"):
        Flat.of({"steps": torch.tensor(3)})
    with pytest.raises(Refused, match="one is missing or has another shape"):
        flat.encode({**tensors, "one": torch.zeros(2)}, fixed)


def test_words_travel_without_a_copy() -> None:
    words = np.array([1, 2**64 - 1], "<u8")
    tensor = as_tensor(words)
    assert tensor.tolist() == [1, -1]
    words[0] = 5
    assert tensor[0] == 5 and as_words("s", tensor, 2)[1] == 2**64 - 1


# ------------------------------------------------------------ streams
def test_a_stream_comes_off_again() -> None:
    words, key = np.arange(50_001, dtype="<u8"), token_bytes(32)
    for sign in (1, -1):
        masked = words.copy()
        add_streams(masked, [(key, sign)])
        assert (masked == words).mean() < 0.01
        add_streams(masked, [(key, -sign)])
        assert (masked == words).all()


def test_a_stream_is_chacha20_of_its_key() -> None:
    """The mask stream equals test vector 1 in appendix A.1 of RFC 8439, with zeros as key, nonce and counter."""
    words = np.zeros(4, "<u8")
    add_streams(words, [(bytes(32), 1)])
    assert words.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"


def test_no_two_purposes_are_told_in_the_same_words() -> None:
    purposes = [("a", "b"), ("ab",), ("a", "", "b"), ("a", b"b"), (1, 2), (12,), ("1", "2"), (b"",), ()]
    assert len({statement(*purpose) for purpose in purposes}) == len(purposes)
    assert len({derive(b"secret", *purpose) for purpose in purposes}) == len(purposes)


def test_no_stream_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site uses each mask stream only once in all blocks, rounds and studies, even if the site repeats a round after
    a restart.
    """
    used: list[bytes] = []

    def recorded(words: Words, streams: list[Stream]) -> None:
        used.extend(key for key, _ in streams)
        add_streams(words, streams)

    monkeypatch.setattr(member, "add_streams", recorded)
    models, site = numbers(4), "site-1"
    blocks = [block(models, name) for name in ("one", "other")]
    for study in ("one", "two"):
        hospitals = Hospitals(terms(4, study=study))
        for number in (1, 2, 2, 3):
            hospitals.restart(site)
            groups = as_groups(models, "one", "other")[site]
            deal = hospitals.begin(number, blocks).deals()[site]
            hospitals.members[site].seal(deal, blocks, groups)
    a_round = (3 + 1) * 2  # each block has the masks of three pairs of sites and the site's own mask
    assert len(used) == len(set(used)) == 2 * 4 * a_round


# ------------------------------------------------------------ shares
@pytest.mark.parametrize("threshold, count", [(1, 1), (2, 3), (4, 6), (6, 6)])
def test_any_shares_of_the_threshold_give_the_secret(threshold: int, count: int) -> None:
    for secret in (token_bytes(32), bytes(32), b"\xff" * 32):
        shares = dict(enumerate(split(secret, threshold, count), 1))
        for places in combinations(shares, threshold):
            assert combine({place: shares[place] for place in places}, threshold) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """Two of three shares reveal nothing about the secret, because each secret fits a possible third share."""
    shares = dict(enumerate(split(token_bytes(32), 3, 3), 1))
    for secret in (bytes(32), token_bytes(32)):
        # A polynomial p of degree at most 2 satisfies p(3) = p(0) - 3 p(1) + 3 p(2).
        zero, one, two = (int.from_bytes(each, "big") for each in (secret, shares[1], shares[2]))
        third = (zero - 3 * one + 3 * two) % PRIME
        assert combine({**shares, 3: third.to_bytes(33, "big")}, 3) == secret


def test_sharing_that_makes_no_sense() -> None:
    for secret, threshold, count in ((bytes(31), 2, 3), (bytes(32), 4, 3), (bytes(32), 0, 3)):
        with pytest.raises(ValueError, match="32 bytes"):
            split(secret, threshold, count)
    with pytest.raises(ValueError, match="fewer"):
        combine({1: bytes(33)}, 2)
    assert combine({1: (1 << 256).to_bytes(33, "big")}, 1) is None
