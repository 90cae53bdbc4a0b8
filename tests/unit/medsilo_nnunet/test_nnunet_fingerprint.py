"""Hospitals disclose nnU-Net's fingerprints of their data, and the server merges the hospitals' fingerprints."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from medsilo.core.errors import Refused
from medsilo_nnunet.fingerprint import (
    DIGITS,
    CaseFacts,
    Fingerprint,
    FloatHistogram,
    MeasuredSite,
    covering,
    extents_of,
    rounded,
    samples_of,
)
from tests.federations import federation, intensities_are_near, pooled_fingerprint


def numbers(seed: int, size: int = 4000) -> np.ndarray:
    drawn = np.random.default_rng(seed)
    return drawn.normal(size=size) * 10.0 ** drawn.integers(-6, 7, size) * (drawn.uniform(size=size) > 0.01)


def told(cases: Sequence[CaseFacts], samples: int, least: int = 1) -> Fingerprint:
    return Fingerprint.received(json.loads(Fingerprint.of(cases, samples, least).model_dump_json()))


# ------------------------------------------------------------------------------------------------------ bins
def test_a_number_moves_by_its_share_and_whole_numbers_of_ct_do_not() -> None:
    values = numbers(1)
    moved = np.abs(rounded(values) - values)
    assert (moved <= 2.0**-DIGITS * np.abs(values)).all()
    assert moved.max() > 0
    assert np.array_equal(rounded(np.arange(-8192, 8193)), np.arange(-8192, 8193))
    assert np.array_equal(rounded(rounded(values)), rounded(values))


@pytest.mark.parametrize("percent", [0.0, 0.5, 37.2, 50.0, 99.5, 100.0])
@pytest.mark.parametrize("size", [1, 2, 3, 4000])
def test_percentiles_are_numpys(percent: float, size: int) -> None:
    values = rounded(numbers(2, size))
    assert FloatHistogram.of(values).percentile(percent) == pytest.approx(np.percentile(values, percent), rel=1e-14)


def test_histograms_add_up() -> None:
    first, second = numbers(3), numbers(4)
    both = FloatHistogram.of(np.concatenate([first, second]))
    merged = FloatHistogram.merged([FloatHistogram.of(first), FloatHistogram.of(second)])
    assert np.array_equal(both.values, merged.values) and np.array_equal(both.counts, merged.counts)
    assert merged.mean == pytest.approx(rounded(np.concatenate([first, second])).mean(), rel=1e-12)
    assert merged.deviation == pytest.approx(rounded(np.concatenate([first, second])).std(), rel=1e-12)


def test_neighbouring_bins_are_put_together_until_enough_cases_have_a_part() -> None:
    cases = [FloatHistogram.of(own) for own in ([1, 1, 10], [2, 10, 14], [3, 10, 4], [90])]
    kept = covering(cases, 3)
    assert (kept.values, kept.counts) == ([1, 10], [4, 6])
    assert covering(cases, 4).counts == [10]
    assert covering(cases, 5).total == 0
    assert covering(cases, 1).counts == [2, 1, 1, 1, 3, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_no_group_of_bins_has_fewer_cases(seed: int) -> None:
    drawn, least = np.random.default_rng(seed), 4
    cases = [rounded(drawn.normal(size=int(drawn.integers(0, 30)))) for _ in range(9)]
    kept = covering([FloatHistogram.of(case) for case in cases], least)
    ordered = np.sort(np.concatenate(cases))
    ends = np.cumsum(kept.counts)
    assert ends[-1] == len(ordered)
    for begin, end, value in zip([0, *ends[:-1]], ends, kept.values, strict=True):
        low, high = ordered[begin], ordered[end - 1]
        assert sum(((case >= low) & (case <= high)).any() for case in cases) >= least
        assert value == ordered[begin + (end - begin - 1) // 2]


# ------------------------------------------------------------------------------------------------------ fingerprints
@pytest.mark.parametrize("number", range(14))
def test_medians_are_those_of_all_data_in_one_place(number: int) -> None:
    drawn = federation(number)
    parts = [told(cases, drawn.samples) for cases in drawn.hospitals.values()]
    own, pooled = Fingerprint.merged(parts).in_nnunet(), pooled_fingerprint(drawn.cases)
    for axis in range(3):
        assert along(own, axis) == along(pooled, axis)
    assert own["median_relative_size_after_cropping"] == pooled["median_relative_size_after_cropping"]
    intensities_are_near(own, pooled, drawn.cases)


def along(fingerprint: dict[str, Any], axis: int) -> list[tuple[float, int]]:
    cases = zip(fingerprint["spacings"], fingerprint["shapes_after_crop"], strict=True)
    return sorted((spacing[axis], size[axis]) for spacing, size in cases)


def test_no_axis_tells_of_another() -> None:
    cases = federation(1).cases
    own = Fingerprint.of(cases, 200).in_nnunet()
    pairs = {
        tuple(zip(spacing, size, strict=True))
        for spacing, size in zip(own["spacings"], own["shapes_after_crop"], strict=True)
    }
    assert pairs != {tuple(zip(case.spacing, case.size, strict=True)) for case in cases}


@pytest.mark.parametrize("number", range(0, 35, 7))
def test_with_a_smallest_group_each_number_covers_so_many_cases(number: int) -> None:
    least = 5
    cases = federation(number + 1, least).hospitals["hospital-0"]
    own = told(cases, 200, least)
    groups = len(cases) // least
    assert own.cases == groups * least
    for axis, counted in enumerate(own.extents):
        assert all(one.cases % least == 0 for one in counted)
        # If sorted cases are divided into g groups of equal size, the k-th of g disclosed values lies within the k-th
        # group.
        real = sorted(case.spacing[axis] for case in cases)
        for group, value in enumerate(sorted(spacing for spacing, _ in extents_of(counted))[::least]):
            low, high = real[group * len(real) // groups], real[min((group + 1) * len(real) // groups, len(real) - 1)]
            assert low <= value <= high


def test_fewer_cases_than_the_smallest_group_tell_nothing() -> None:
    with pytest.raises(Refused, match="fewer than 5 cases"):
        Fingerprint.of(federation(1).cases[:4], 200, 5)


# ------------------------------------------------------------------------------------------------------ messages
def good() -> dict[str, Any]:
    cases = [CaseFacts((3.0, 1.0, 1.0), (20 + n, 100, 120), 0.8, [[1.0 * n, 7.0]]) for n in range(4)]
    sent: dict[str, Any] = json.loads(Fingerprint.of(cases, 2).model_dump_json())
    return sent


def changed(path: Sequence[str | int], value: Any) -> dict[str, Any]:
    sent = place = good()
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return sent


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["extents", 0, 0, "spacing"], 0.0, "spacing"),
        (["extents", 0, 0, "spacing"], float("nan"), "spacing"),
        (["extents", 0, 0, "size"], 70_000, "size"),
        (["extents", 0, 0, "size"], 20.5, "size"),
        (["extents", 0, 0, "cases"], 2, "differ from axis to axis"),
        (["extents", 0, 0, "size"], 50, "ascending"),
        (["extents", 1], [], "differ from axis to axis"),
        (["extents"], [], "extents"),
        (["shares", 0, "share"], 1.5, "share"),
        (["channels", 0, "values", 0], 9.0, "ascending"),
        (["channels", 0, "values", 0], 1e-9 + 0.1, "binary digits"),
        (["channels", 0, "counts", 0], 10**7, "more than 2 intensities of each case"),
        (["channels", 0, "counts", 0], -1, "counts"),
        (["channels", 0, "counts"], [1], "counts"),
        (["patients"], ["Doe"], "extra inputs are not permitted"),
    ],
)
def test_nobody_is_believed(path: Sequence[str | int], value: Any, reason: str) -> None:
    Fingerprint.received(good())
    with pytest.raises(Refused, match=reason):
        Fingerprint.received(changed(path, value))


def test_a_fingerprint_is_of_what_was_agreed_on() -> None:
    asked = federation(1).question

    two = asked.model_copy(update={"channels": ("T1", "T2")})
    sent = MeasuredSite(question=two.hash, reader="SimpleITKIO", fingerprint=Fingerprint.received(good()))
    with pytest.raises(Refused, match="it has 1 channels, and the study 2"):
        sent.check(two)


def test_all_draw_as_many_intensities_as_nnunet_from_all_data() -> None:
    assert samples_of(27) == int(10e7 // 27)


def test_a_message_is_of_the_question_that_was_asked() -> None:
    asked = federation(1).question
    sent = MeasuredSite(question=asked.hash, reader="SimpleITKIO", fingerprint=Fingerprint.received(good()))
    MeasuredSite.received(json.loads(sent.model_dump_json())).check(asked)
    assert sent.fingerprint.cases == 4
    with pytest.raises(Refused, match="another question"):
        sent.check(federation(2).question)
