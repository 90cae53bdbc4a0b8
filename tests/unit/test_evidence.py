"""Intervals and tests against scipy and cases worked out by hand; how often an A/A study names a winner."""

import numpy as np
import pytest
from scipy import stats

from medsilo.study.evidence import (
    Difference,
    Scores,
    Variance,
    compare,
    holm,
    interval,
    interval_of_concordance,
    luck_beside,
    luck_of,
    pooled_luck,
    seeds_of,
    sensitivity,
)
from medsilo.study.verdict import _tested


def scores(values: list[float] | np.ndarray, patients: list[int] | None = None) -> Scores:
    values = np.asarray(values, dtype=np.float64)
    return Scores(values, np.arange(len(values)) if patients is None else np.asarray(patients))


def test_many_seeds_and_patients_that_are_all_alike_give_the_paired_t_test() -> None:
    """If every patient of a seed differs by the same amount, only the variance between seeds is left."""
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
    reach = stats.t.isf(0.025, 399) * difference.std(ddof=1) / 20
    assert found.mean == pytest.approx(difference.mean())
    assert found.high - found.low == pytest.approx(2 * reach)
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
    five = compare([{"a": scores(difference + 1)}] * 5, [{"a": scores(np.zeros(50))}] * 5)
    assert five.high - five.low == pytest.approx(one.high - one.low)
    assert five.low > 0 and not five.decides  # seeds that are all alike tell nothing of their luck


def test_the_interval_reaches_as_far_as_cochran_and_cox_say() -> None:
    """Both parts by hand: sums over patients, and over seeds."""
    random = np.random.default_rng(9)
    patients, seeds = 40, 3
    own = random.normal(0.05, 0.1, patients)
    values = [own + shift for shift in (-0.02, 0.0, 0.03)]
    zero = [{"a": scores(np.zeros(patients))}] * seeds
    found = compare([{"a": scores(one)} for one in values], zero)
    by_patient = own.var(ddof=1) / patients
    by_seed = np.var([one.mean() for one in values], ddof=1) / seeds
    critical = by_patient * stats.t.ppf(0.975, patients - 1) + by_seed * stats.t.ppf(0.975, seeds - 1)
    reach = critical / np.sqrt(by_patient + by_seed)
    assert found.high - found.mean == pytest.approx(reach)
    just = compare([{"a": scores(one - found.low)} for one in values], zero)
    assert just.p == pytest.approx(0.05, rel=1e-6)  # moved until the interval touches zero


@pytest.mark.parametrize("share", [0.0, 1.0, 10.0])
def test_intervals_hold_what_they_promise(share: float) -> None:
    """If the truth is zero, about 5 in 100 intervals miss it at most, whether patients or seeds make most of the
    variance."""
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
        tested = _tested({name: compare(study(), baseline) for name in "bcd"})
        named += any(one.sure and one.mean > 0 for one in tested.values())
    assert named <= 1


def test_a_clear_gain_is_named() -> None:
    random = np.random.default_rng(8)

    def study(gain: float) -> list[dict[str, Scores]]:
        return [{"a": scores(0.6 + gain + random.normal(0, 0.02, 80))} for _ in range(3)]

    baseline = study(0.0)
    differences = {"same": compare(study(0.0), baseline), "better": compare(study(0.2), baseline)}
    differences["worse"] = compare(study(-0.2), baseline)
    tested = _tested(differences)
    assert [name for name, one in tested.items() if one.sure] == ["better", "worse"]
    assert tested["better"].low > 0 and tested["worse"].high < 0


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


def test_sites_that_are_one_person_each_are_compared_as_people() -> None:
    """With seeds that are nearly alike the interval is that of a t test over people; one person makes nothing sure."""
    random = np.random.default_rng(30)
    moves, person = random.normal(0.05, 0.1, 12), [0] * 5
    mine = [
        {f"{k}": scores(np.full(5, 0.5 + move + 1e-6 * random.normal()), person) for k, move in enumerate(moves)}
        for _ in range(3)
    ]
    theirs = [{f"{k}": scores(np.full(5, 0.5), person) for k in range(12)}] * 3
    expected = stats.ttest_1samp(moves, 0).confidence_interval(0.95)
    found = compare(mine, theirs)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-4)
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


@pytest.mark.parametrize("sizes", [(2, 60, 60), (3, 40, 40)])
@pytest.mark.parametrize("seeds", [3, 10])
def test_a_site_of_two_or_three_patients_is_covered(sizes: tuple[int, ...], seeds: int) -> None:
    """With the degrees of freedom added over sites, and without n / (n - 1), this was 78 % and 85 % at ten seeds."""
    random, times = np.random.default_rng(20), 250
    covered = 0
    for _ in range(times):
        found = compare(*drawn(random, sizes, seeds))
        covered += found.low <= 0 <= found.high
    assert covered / times >= 0.93


def test_many_small_sites_do_not_widen_the_interval_beyond_use() -> None:
    """Twenty sites of three patients are sixty patients: hardly more than a quarter wider than it has to be."""
    random = np.random.default_rng(21)
    reaches, means = [], []
    for _ in range(100):
        found = compare(*drawn(random, (3,) * 20, 10))
        reaches.append(found.high - found.mean)
        means.append(found.mean)
    assert np.median(reaches) < 1.4 * 1.96 * np.std(means)
    assert np.mean(np.abs(means) <= reaches) >= 0.93


@pytest.mark.parametrize("cases", [10, 20, 40])
@pytest.mark.parametrize("seeds", [2, 3])
def test_the_same_method_twice_at_a_one_person_site_is_not_sure_by_rounding(cases: int, seeds: int) -> None:
    """Two seeds with the same difference have no variance; that gave p = 0, and 7 to 11 % were falsely sure."""
    random, times = np.random.default_rng(22), 500
    one_person = np.zeros(cases, dtype=int)
    sure = 0
    for _ in range(times):
        right = random.random((2, seeds, cases)) < 0.8
        found = compare(*([{"a": Scores(own.astype(float), one_person)} for own in method] for method in right))
        sure += found.decides
        assert found.p > 0
    assert sure / times <= 0.05


def test_seeds_without_any_spread_leave_it_undecided() -> None:
    person = [0] * 20
    mine, theirs = (scores([1.0] * right + [0.0] * (20 - right), person) for right in (18, 8))
    found = compare([{"a": mine}] * 2, [{"a": theirs}] * 2)
    assert found.mean == pytest.approx(0.5) and found.p > 0 and not found.decides


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


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("rows", [4, 6, 10])
def test_intervals_cover_where_the_baseline_is_the_unsteady_row(rows: int, seeds: int) -> None:
    """With one spread of all rows it was .89 to .93 where the baseline varies two to four times as much."""
    random, times = np.random.default_rng(27), 3000
    for unsteady in (1, 2, 3, 4, 10):
        drawn = random.normal(0, 0.02, (times, rows, seeds))
        drawn[:, 0] *= unsteady
        ways = drawn[:, 1:] - drawn[:, :1]
        common, degrees, use = luck_beside(drawn, 0)
        own = ways.var(-1, ddof=1)
        variance = np.where(use, np.maximum(common[:, None], own), own)
        reach = stats.t.isf(0.025, np.where(use, degrees[:, None], seeds - 1.0)) * np.sqrt(variance / seeds)
        assert (np.abs(ways.mean(-1)) <= reach).mean() >= 0.93, unsteady


def test_one_seeds_variance_by_hand() -> None:
    """Two rows: that of their differences. Rows alike but for a constant, and for what a seed gives all: none."""
    random = np.random.default_rng(25)
    two = random.normal(size=(2, 4))
    variance, degrees, _ = pooled_luck(two)
    assert (float(variance), float(degrees)) == pytest.approx(((two[0] - two[1]).var(ddof=1), 3))
    alike = np.add.outer([0.1, 0.4, 0.2], random.normal(size=5))
    assert float(pooled_luck(alike)[0]) == pytest.approx(0) and luck_of(alike, 0) != []
    unsteady = random.normal(0, 0.01, (6, 8))
    unsteady[3] *= 100
    steady = pooled_luck(unsteady)[2]
    assert not steady[3] and steady.sum() == 5 and luck_of(unsteady, 0)[3] is None


@pytest.mark.slow
def test_a_study_says_what_it_could_have_seen() -> None:
    """The gain that it names is found in about 80 % of such studies, on average over what they know of their spread."""
    random = np.random.default_rng(26)
    found = []
    for rows in studies(random, 0.0, times=40):
        ways = [[{"a": scores([value])} for value in row] for row in rows]
        each = [compare(way, ways[0], luck=luck) for way, luck in zip(ways[1:], luck_of(rows, 0)[1:], strict=True)]
        found.append(sensitivity(each))
    gains = [own.gain for own in found if own]
    power = [sure(studies(random, gain, times=300), True)[:, 1].mean() for gain in gains]
    assert len(gains) == 40 and 0.68 < np.mean(power) < 0.9 and 0.7 < np.median(power) < 0.95
    true = next(
        gain for gain in np.arange(0, 1, 0.005) if sure(studies(random, gain, times=1000), True)[:, 1].mean() > 0.8
    )
    assert np.mean([own is not None and own.low <= true <= own.high for own in found]) > 0.75
    luck = Variance(2 * 0.0225**2, 10)
    told = sensitivity([Difference(0, 0, 0, 1, 3, luck=luck)] * 5)
    assert told is not None and told.seeds == 3 and told.low < told.gain < told.high
    assert told.words.startswith("With 3 seeds and this spread, a gain of") and "80 % of such studies" in told.words
    few = sensitivity([Difference(0, 0, 0, 1, 3, patients=Variance(0.01, 5), luck=luck)] * 5)
    assert few is not None and few.words.endswith("as the test patients are too few.")
    assert sensitivity([Difference(0, 0, 0, 1, 1)]) is None


def test_the_worst_site_is_each_methods_own() -> None:
    mine = [{"a": scores([0.9, 0.7]), "b": scores([0.5, 0.7])}] * 2
    theirs = [{"a": scores([0.2, 0.4]), "b": scores([0.8, 0.8])}] * 2
    assert compare(mine, theirs, endpoint="worst-site").mean == pytest.approx(0.6 - 0.3)
    assert seeds_of(mine, endpoint="worst-site").tolist() == pytest.approx([0.6, 0.6])


# ---------------------------------------------------------------------------------------------------- one model's score
def cases_of(patients: int, right: float, akin: float, kind: str, random: np.random.Generator) -> Scores:
    """One to twelve cases of each patient, right with this probability, or with a Dice around it. akin: correlation of
    a patient's cases."""
    owners = np.repeat(np.arange(patients), random.integers(1, 13, patients))
    if kind == "dice":
        alike, alone = random.normal(size=patients)[owners], random.normal(size=len(owners))
        logits = np.log(right / (1 - right)) + np.sqrt(akin) * alike + np.sqrt(1 - akin) * alone
        return Scores(1 / (1 + np.exp(-logits)), owners)
    chances = random.beta(right * (1 / akin - 1), (1 - right) * (1 / akin - 1), patients) if akin else right
    return Scores((random.random(len(owners)) < np.broadcast_to(chances, patients)[owners]).astype(float), owners)


@pytest.mark.parametrize("patients", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", ["accuracy", "dice"])
def test_intervals_of_a_score_cover_what_other_patients_give(kind: str, patients: int) -> None:
    random, draws = np.random.default_rng(7), 600
    for right in (0.6, 0.85):
        everybody = cases_of(40_000, right, 0.0, kind, random)
        truth = float(everybody.values.mean())
        for akin in (0.0, 0.3):
            found = [interval(cases_of(patients, right, akin, kind, random)) for _ in range(draws)]
            covers = np.mean([own is not None and own[0] <= truth <= own[1] for own in found])
            assert covers >= 0.93, (right, akin)


@pytest.mark.parametrize("patients", [2, 3, 4, 8, 16])
def test_intervals_of_concordance_cover_what_other_patients_give(patients: int) -> None:
    random = np.random.default_rng(8)

    def drawn(number: int, seen: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        risk = random.normal(size=number)
        time, end = random.exponential(np.exp(-risk)), random.exponential(1 / seen, number)
        return np.minimum(time, end), (time <= end).astype(int), risk

    for seen in (0.1, 1.0):
        time, event, risk = drawn(2_000, seen)
        later = (time[:, None] < time) & (event[:, None] == 1)
        truth = float((later & (risk[:, None] > risk)).sum() / later.sum())
        found = [own for own in (interval_of_concordance(*drawn(patients, seen)) for _ in range(600)) if own]
        assert len(found) > 200 and np.mean([low <= truth <= high for low, high in found]) >= 0.93


def test_the_interval_of_cases_that_are_a_patient_each_is_wilson_s_with_few_degrees() -> None:
    values = np.array([1.0] * 27 + [0.0] * 5)
    low, high = interval(scores(values)) or (0, 0)
    wilson = stats.binomtest(27, 32).proportion_ci(method="wilson")
    assert low < wilson.low + 0.02 and high > wilson.high - 0.02 and high - low < 1.15 * (wilson.high - wilson.low)
    of_four = interval(Scores(values, np.arange(32) % 4)) or (0, 0)
    assert of_four[1] - of_four[0] > 2 * (wilson.high - wilson.low)  # four patients tell less than 32 cases


def test_one_patient_gives_no_interval() -> None:
    assert interval(Scores(np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=int))) is None
