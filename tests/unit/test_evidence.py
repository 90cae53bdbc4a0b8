"""Intervals and tests against scipy and cases worked out by hand; how often an A/A study names a winner."""

import numpy as np
import pytest
from scipy import stats

from medsilo.study.evidence import Difference, Scores, compare, holm, winner


def scores(values: list[float] | np.ndarray, patients: list[int] | None = None) -> Scores:
    values = np.asarray(values, dtype=np.float64)
    return Scores(values, np.arange(len(values)) if patients is None else np.asarray(patients))


def test_many_seeds_and_patients_that_are_all_alike_give_the_paired_t_test() -> None:
    """Where every patient of a seed differs by the same amount, only the seeds' variance is left."""
    random = np.random.default_rng(3)
    effects = random.normal(0.02, 0.05, 8)
    mine = [{"a": scores(np.full(40, 0.5 + effect))} for effect in effects]
    theirs = [{"a": scores(np.full(40, 0.5))} for _ in effects]
    found = compare(mine, theirs)
    expected = stats.ttest_rel(0.5 + effects, np.full(8, 0.5))
    low, high = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(effects.mean())
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p == pytest.approx(expected.pvalue)


def test_one_seed_gives_the_interval_over_patients_and_decides_nothing() -> None:
    random = np.random.default_rng(4)
    difference = random.normal(0.1, 0.2, 400)
    base = random.uniform(size=400)
    found = compare([{"a": scores(base + difference)}], [{"a": scores(base)}])
    error = difference.std(ddof=1) / 20
    assert found.mean == pytest.approx(difference.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.06)  # the bootstrap's own scatter
    assert found.low > 0 and not found.decides


def test_patients_and_not_cases_are_resampled() -> None:
    """Ten copies of each patient's case tell no more than one."""
    random = np.random.default_rng(5)
    difference = random.normal(0.0, 0.2, 60)
    once = compare([{"a": scores(difference)}], [{"a": scores(np.zeros(60))}])
    patients = np.repeat(np.arange(60), 10).tolist()
    often = compare([{"a": scores(np.repeat(difference, 10), patients)}], [{"a": scores(np.zeros(600), patients)}])
    assert (often.mean, often.low, often.high) == pytest.approx((once.mean, once.low, once.high))


def test_sites_count_alike_whatever_their_size() -> None:
    mine = [{"a": scores([1.0, 1.0, 1.0, 1.0]), "b": scores([0.0])}]
    theirs = [{"a": scores([0.0] * 4), "b": scores([1.0])}]
    assert compare(mine, theirs).mean == 0
    assert compare(mine, theirs, ["a"]).mean == 1


def test_testing_the_same_patients_with_more_seeds_does_not_shrink_their_share() -> None:
    random = np.random.default_rng(6)
    difference = random.normal(0.0, 0.3, 50)
    one = compare([{"a": scores(difference)}], [{"a": scores(np.zeros(50))}])
    five = compare([{"a": scores(difference)}] * 5, [{"a": scores(np.zeros(50))}] * 5)
    assert five.high - five.low == pytest.approx(one.high - one.low)
    assert five.decides is (five.low > 0 or five.high < 0)


def test_the_interval_reaches_as_far_as_cochran_and_cox_say() -> None:
    """Both parts by hand: sums over patients, and over seeds."""
    random = np.random.default_rng(9)
    patients, seeds = 40, 3
    own = random.normal(0.05, 0.1, patients)
    values = [own + shift for shift in (-0.02, 0.0, 0.03)]
    zero = [{"a": scores(np.zeros(patients))}] * seeds
    found = compare([{"a": scores(one)} for one in values], zero)
    by_patient = own.var() / patients  # the bootstrap's, which divides by n
    by_seed = np.var([one.mean() for one in values], ddof=1) / seeds
    critical = by_patient * stats.t.ppf(0.975, patients - 1) + by_seed * stats.t.ppf(0.975, seeds - 1)
    reach = critical / np.sqrt(by_patient + by_seed)
    assert found.high - found.mean == pytest.approx(reach, rel=0.05)  # the bootstrap's own scatter
    just = compare([{"a": scores(one - found.low)} for one in values], zero)
    assert just.p == pytest.approx(0.05, rel=1e-6)  # moved until the interval touches zero


@pytest.mark.parametrize("share", [0.0, 1.0, 10.0])
def test_intervals_hold_what_they_promise(share: float) -> None:
    """Where the truth is zero, at most about 5 in 100 miss it, whether patients or seeds make most of the variance."""
    random, missed, times = np.random.default_rng(10), 0, 120
    for _ in range(times):
        own = random.normal(0, 0.1, 12)
        trained = random.normal(0, np.sqrt(3 * share * 0.01 / 12), 3)
        found = compare([{"a": scores(own + luck)} for luck in trained], [{"a": scores(np.zeros(12))}] * 3)
        missed += not found.low <= 0 <= found.high
    assert missed / times <= 0.08


def test_an_a_a_study_names_no_winner() -> None:
    """Four methods of the same quality, three seeds, three sites: in at least 19 of 20 studies nobody wins."""
    named = 0
    for number in range(20):
        random = np.random.default_rng(100 + number)
        patients = [random.normal(0.7, 0.1, 30) for _ in range(3)]

        def study(random: np.random.Generator = random, patients: list = patients) -> list[dict[str, Scores]]:
            return [
                {
                    f"site-{place}": scores(own + random.normal(0, 0.02) + random.normal(0, 0.05, 30))
                    for place, own in enumerate(patients)
                }
                for _ in range(3)
            ]

        baseline = study()
        named += winner({name: compare(study(), baseline) for name in "bcd"}) is not None
    assert named <= 1


def test_a_clear_gain_is_named() -> None:
    random = np.random.default_rng(8)

    def study(gain: float) -> list[dict[str, Scores]]:
        return [{"a": scores(0.6 + gain + random.normal(0, 0.02, 80))} for _ in range(3)]

    baseline = study(0.0)
    differences = {"same": compare(study(0.0), baseline), "better": compare(study(0.2), baseline)}
    differences["worse"] = compare(study(-0.2), baseline)
    assert winner(differences) == "better"
    assert differences["worse"].high < 0


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert holm({}) == {}


def test_equal_methods_differ_by_nothing() -> None:
    same = [{"a": scores([0.1, 0.5])}, {"a": scores([0.2, 0.4])}]
    assert compare(same, same) == Difference(0.0, 0.0, 0.0, 1.0, 2)


def test_one_number_tells_nothing_of_others() -> None:
    found = compare([{"a": scores([0.9])}], [{"a": scores([0.1])}])
    assert (found.low, found.high, found.p) == (-np.inf, np.inf, 1.0) and not found.decides


def test_one_patient_leaves_the_seeds() -> None:
    mine = [{"a": scores([0.5 + luck] * 3, [0, 0, 0])} for luck in (0.1, 0.2, 0.3)]
    found = compare(mine, [{"a": scores([0.5] * 3, [0, 0, 0])}] * 3)
    assert found.p == pytest.approx(stats.ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)


def test_what_is_not_paired_is_refused() -> None:
    one = [{"a": scores([0.1, 0.2])}]
    with pytest.raises(ValueError, match="same ones"):
        compare(one, one * 2)
    with pytest.raises(ValueError, match="same cases"):
        compare(one, [{"a": scores([0.1, 0.2], [0, 0])}])
    with pytest.raises(ValueError, match="2 scores of 1"):
        Scores(np.zeros(2), np.zeros(1, dtype=int))
