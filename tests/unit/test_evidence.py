"""Intervals and tests against scipy and cases worked out by hand; how often an A/A study names a winner."""

import numpy as np
import pytest
from scipy import stats

from medsilo_lab.study.evidence import (
    Scores,
    compare,
    interval,
    parts_of_concordance,
    seeds_of,
)
from medsilo_lab.study.training_luck import luck_beside
from medsilo_lab.study.verdict import _tested
from results import intervals
from tests.patient_scores import scores


def test_many_seeds_and_patients_that_are_all_alike_are_the_paired_t_test_and_no_verdict() -> None:
    """If every patient of a seed differs by the same amount, only the variance between seeds is left, and nobody knows
    how patients differ."""
    random = np.random.default_rng(3)
    effects = random.normal(0.2, 0.05, 8)
    mine = [{"a": scores(np.full(40, 0.5 + effect))} for effect in effects]
    theirs = [{"a": scores(np.full(40, 0.5))} for _ in effects]
    found = compare(mine, theirs)
    low, high = stats.ttest_rel(0.5 + effects, np.full(8, 0.5)).confidence_interval(0.95)
    assert found.mean == pytest.approx(effects.mean()) and found.people == 40
    assert found.low < low and found.high > high and not found.decides


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
    five = compare([{"a": scores(difference + 0.7)}] * 5, [{"a": scores(np.zeros(50))}] * 5)
    assert five.high - five.low == pytest.approx(one.high - one.low, rel=0.25)
    assert five.low > 0 and not five.decides  # seeds that are all alike tell nothing of their luck


def test_the_interval_reaches_as_far_as_cochran_and_cox_say() -> None:
    """Both parts by hand: over patients, and over seeds less what a seed does to single patients (Hillis 2007)."""
    random = np.random.default_rng(9)
    patients, seeds = 400, 4
    cells = random.normal(0.05, 0.1, patients) + random.normal(0, 0.2, (seeds, patients))
    cells += np.array([-0.04, 0.0, 0.03, 0.05])[:, None]
    found = compare([{"a": scores(one)} for one in cells], [{"a": scores(np.zeros(patients))}] * seeds)
    by_patient, by_seed = cells.mean(0).var(ddof=1) / patients, cells.mean(1).var(ddof=1) / seeds
    rest = cells - cells.mean(0) - cells.mean(1, keepdims=True) + cells.mean()
    both = (rest**2).sum() / ((patients - 1) * (seeds - 1)) / patients / seeds
    critical = by_patient * stats.t.ppf(0.975, patients - 1) + (by_seed - both) * stats.t.ppf(0.975, seeds - 1)
    reach = critical / np.sqrt(by_patient + by_seed - both)
    assert found.high - found.mean == pytest.approx(reach)
    just = compare([{"a": scores(one - found.low)} for one in cells], [{"a": scores(np.zeros(patients))}] * seeds)
    assert just.p == pytest.approx(0.05, rel=1e-3)  # moved until the interval touches zero


def test_a_difference_and_its_reverse_have_the_same_interval() -> None:
    random = np.random.default_rng(15)
    mine, theirs = (
        [{"a": scores(random.uniform(size=9)), "b": scores(random.uniform(size=4))} for _ in range(4)] for _ in "xy"
    )
    one, other = compare(mine, theirs), compare(theirs, mine)
    assert (one.mean, one.low, one.high, one.p) == pytest.approx((-other.mean, -other.high, -other.low, other.p))
    assert one.reversed() == compare(mine, theirs).reversed() and one.reversed().reversed() == one


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
        tested = _tested({name: compare(study(), baseline) for name in "bcd"})
        named += any(one.sure and one.mean > 0 for one in tested.values())
    assert named <= 1


def test_a_clear_gain_is_named() -> None:
    random = np.random.default_rng(8)

    def study(gain: float) -> list[dict[str, Scores]]:
        return [{"a": scores(0.6 + gain + random.normal(0, 0.02, 80))} for _ in range(4)]

    baseline = study(0.0)
    differences = {"same": compare(study(0.0), baseline), "better": compare(study(0.2), baseline)}
    differences["worse"] = compare(study(-0.2), baseline)
    tested = _tested(differences)
    assert [name for name, one in tested.items() if one.sure] == ["better", "worse"]
    assert tested["better"].low > 0 and tested["worse"].high < 0
    assert not compare(study(0.2)[:3], baseline[:3]).decides  # of three seeds there is no verdict


def test_methods_that_give_the_same_are_no_verdict() -> None:
    """Two models that name one class were told as a difference of +0.0 (+0.0 to +0.0)."""
    same = [{"a": scores([0.1, 0.5, 0.9])}, {"a": scores([0.2, 0.4, 0.9])}] * 2
    found = compare(same, same)
    assert (found.mean, found.p) == (0, 1) and found.low < -0.3 and found.high > 0.3 and not found.decides


def test_one_number_tells_nothing_of_others() -> None:
    found = compare([{"a": scores([0.9])}], [{"a": scores([0.1])}])
    assert (found.low, found.high, found.p) == (-np.inf, np.inf, 1.0) and not found.decides


def test_one_patient_leaves_the_seeds() -> None:
    mine = [{"a": scores([0.5 + luck] * 3, [0, 0, 0])} for luck in (0.1, 0.2, 0.3)]
    found = compare(mine, [{"a": scores([0.5] * 3, [0, 0, 0])}] * 3)
    assert found.p == pytest.approx(stats.ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)


def test_sites_that_are_one_person_each_are_compared_as_people() -> None:
    """With seeds that are nearly alike the interval is that of the same people at one site; one person decides
    nothing."""
    random = np.random.default_rng(30)
    moves, person = random.normal(0.2, 0.1, 12), [0] * 5
    mine = [
        {f"{k}": scores(np.full(5, 0.5 + move + 1e-6 * random.normal()), person) for k, move in enumerate(moves)}
        for _ in range(3)
    ]
    theirs = [{f"{k}": scores(np.full(5, 0.5), person) for k in range(12)}] * 3
    found = compare(mine, theirs)
    expected = compare([{"a": scores(0.5 + moves)}] * 3, [{"a": scores(np.full(12, 0.5))}] * 3)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.02) and found.people == 12
    best = f"{int(moves.argmax())}"
    assert compare(mine, theirs, [best]).low > 0 and not compare(mine, theirs, [best]).decides


def test_what_is_not_paired_is_refused() -> None:
    one = [{"a": scores([0.1, 0.2])}]
    with pytest.raises(ValueError, match="same ones"):
        compare(one, one * 2)
    with pytest.raises(ValueError, match="same cases"):
        compare(one, [{"a": scores([0.1, 0.2], [0, 0])}])
    with pytest.raises(ValueError, match="2 scores of 1"):
        Scores(np.zeros(2), np.zeros(1, dtype=int))


# ------------------------------------------------------------------------------------------------ by simulation
def drawn(random: np.random.Generator, sizes: tuple[int, ...], seeds: int) -> tuple[list, list]:
    """A study of two methods that are alike: the same patients in all seeds, and luck of seeds and of single cases."""
    patients = [random.normal(0, 0.3, size) for size in sizes]
    mine = [
        {f"{site}": scores(own + random.normal(0, 0.1, len(own))) for site, own in enumerate(patients)}
        for _ in range(seeds)
    ]
    theirs = [{f"{site}": scores(np.zeros(size)) for site, size in enumerate(sizes)}] * seeds
    return mine, theirs


def test_one_person_s_cases_decide_nothing() -> None:
    """Two seeds with the same difference have no variance; that gave p = 0."""
    person = [0] * 20
    mine, theirs = (scores([1.0] * right + [0.0] * (20 - right), person) for right in (18, 8))
    found = compare([{"a": mine}] * 4, [{"a": theirs}] * 4)
    assert found.mean == pytest.approx(0.5) and found.p > 0 and not found.decides and found.people == 1


def studies(random: np.random.Generator, gain: float, unsteady: float = 1.0, times: int = 3000) -> np.ndarray:
    """Studies of six rows and three seeds, [times, rows, seeds]: row 1 may be unsteady, row 2 gains. The spread is one
    at which a row by itself finds 6 points in 11 % and 10 points in 27 % of studies."""
    drawn = random.normal(0, 0.0225, (times, 6, 3))
    drawn[:, 1] *= unsteady
    drawn[:, 2] += gain
    return drawn + random.normal(0, 0.05, (times, 1, 3))


def sure(studies: np.ndarray, pooled: bool) -> np.ndarray:
    """Return which differences are sure after Bonferroni's correction, [times, rows but the first], as `compare` has it
    without patients."""
    ways = studies[:, 1:] - studies[:, :1]
    variance, degrees = ways.var(-1, ddof=1), np.full(ways.shape[:2], 2.0)
    if pooled:
        common, known, use = luck_beside(studies, 0)
        variance = np.where(use, np.maximum(common[:, None], variance), variance)
        degrees = np.where(use, known[:, None], degrees)
    p = 2 * stats.t.sf(np.abs(ways.mean(-1)) / np.sqrt(variance / 3), degrees)
    return p * 5 < 0.05


def test_the_luck_of_all_rows_together_finds_gains_that_one_row_does_not() -> None:
    """The power table: 11 % and 27 % of gains of 6 and 10 points by the row alone, above 30 % and 60 % together."""
    random = np.random.default_rng(23)
    power = {
        gain: [sure(studies(random, gain), pooled)[:, 1].mean() for pooled in (False, True)] for gain in (0.06, 0.1)
    }
    assert power[0.06][0] < 0.15 and power[0.06][1] > 0.3
    assert power[0.1][0] < 0.33 and power[0.1][1] > 0.6


@pytest.mark.parametrize(("unsteady", "most"), [(1.0, 0.05), (2.0, 0.06), (3.0, 0.08)])
def test_a_row_that_is_far_unsteadier_than_the_rest_raises_few_false_alarms(unsteady: float, most: float) -> None:
    """Without the check, a row that is three times as unsteady would be falsely sure in more than 15 % of studies."""
    alarms = sure(studies(np.random.default_rng(24), 0.0, unsteady), True).any(-1).mean()
    assert alarms <= most


def test_the_worst_site_is_each_methods_own() -> None:
    mine = [{"a": scores([0.9, 0.7]), "b": scores([0.5, 0.7])}] * 2
    theirs = [{"a": scores([0.2, 0.4]), "b": scores([0.8, 0.8])}] * 2
    assert compare(mine, theirs, endpoint="worst-site").mean == pytest.approx(0.6 - 0.3)
    assert seeds_of(mine, endpoint="worst-site").tolist() == pytest.approx([0.6, 0.6])


# ------------------------------------------------------------------------------------------------ what is covered
@pytest.mark.long
@pytest.mark.parametrize("patients", [2, 4, 8, 16])
@pytest.mark.parametrize("name", [*intervals.SCORES, *intervals.RANKED])
def test_intervals_of_a_score_cover_what_other_patients_give(name: str, patients: int) -> None:
    """It was .40 to .84 where one of ten patients has a Dice of 0 beside 0.9."""
    assert intervals.covered_score(name, patients, 200) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [one for one in intervals.COVERED if one.patients in (2, 8)], ids=lambda one: one.words
)
def test_intervals_of_a_difference_cover_it(setting: intervals.DrawnStudy) -> None:
    """Also where a few patients fail with one method, and where the baseline is the unsteady one."""
    assert intervals.covered_difference(setting, 60)[0] >= 0.93


def test_parts_of_a_concordance_have_its_mean_and_vary_with_all_pairs() -> None:
    """One case by one: without a case the concordance moves as its part says."""
    random = np.random.default_rng(31)
    drawn = intervals.RANKED["concordance .73"](random, 200)
    parts = parts_of_concordance(*drawn)
    whole = intervals._concordance(*drawn)
    assert parts.mean() == pytest.approx(whole)
    left = [intervals._concordance(*(np.delete(own, place) for own in drawn)) for place in range(40)]
    moved = [(whole - one) * 199 for one in left]
    assert np.corrcoef(moved, parts[:40] - whole)[0, 1] > 0.99


def test_one_patient_gives_no_interval() -> None:
    assert interval(Scores(np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=int))) is None
