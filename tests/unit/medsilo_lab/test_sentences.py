"""Test under which conditions a page includes each conditional sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo_lab.report import study_page
from medsilo_lab.report.differences import answer
from medsilo_lab.study.detectable import Pilot
from medsilo_lab.study.evidence import LEAST_SEEDS, Scores, compare
from medsilo_lab.study.verdict_file import (
    About,
    Differences,
    HospitalVerdict,
    Needed,
    PairedDifference,
    Verdict,
    VerdictRow,
)
from medsilo_lab.study.words import if_unseen, in_patients, in_points, needed_in_words, verdict_in_words
from tests.unit.medsilo_lab.test_verdict import statistics_of, verdict_of


def difference(mean: float, low: float, high: float, **changes: Any) -> PairedDifference:
    told = {"p": 0.5, "seeds": 5, "patients": 12, "adjusted": 0.5, "sure": False} | changes
    return PairedDifference(mean=mean, low=low, high=high, **told)


def gain(word: str, mean: float = 0.076, needed: Needed | None = None) -> HospitalVerdict:
    found = difference(mean, mean - 0.1, mean + 0.1, sure=word != "inconclusive")
    return HospitalVerdict(word=word, method="FedAvg", difference=found, needed=needed)


FEW = Needed(of="test patients", number=1000, difference=0.076)


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (
            in_points(difference(0.076, 0.021, 0.132)),
            "+7.6 points (95 % interval +2.1 to +13.2 for patients like these; 12 test patients",
        ),
        (
            if_unseen(difference(0.076, 0.021, 0.132, unseen_low=-0.1, unseen_high=0.25, failing=0.218)),
            "at most 22 % of all, −10.0 to +25.0",
        ),
        (if_unseen(difference(0.076, 0.021, 0.132)), ""),
        (in_points(difference(0.0, -1.0, 1.0)), "no interval"),
        (
            in_points(difference(-0.05, -0.09, -0.01, patients=1, seeds=1)),
            "−9.0 to −1.0 for patients like these; 1 test patient, 1 repetition of the training)",
        ),
        (in_patients("accuracy", 0.076), "100 test cases, 8 more"),
        (in_patients("accuracy", -0.011), "100 test cases, 1 fewer"),
        (in_patients("accuracy", 0.004), "1,000 test cases, 4 more"),
        (in_patients("accuracy", 0.0), "1,000 test cases, as many"),
        (in_patients("concordance", 0.03), "100 pairs of patients, 3 more"),
        (in_patients("dice", 0.3), ""),  # a Dice of 0.3 is not a fraction of cases
        (verdict_in_words(gain("inconclusive", needed=FEW)), "1,000 test patients"),
        (needed_in_words(FEW.changed(number=None)), "cannot be settled here: neither 300 test patients nor 30"),
        (needed_in_words(FEW.changed(number=None, hospitals=3)), "another score, or more hospitals, may"),
        (needed_in_words(FEW.changed(seeds=12)), "1,000 test patients and 12 repetitions of the training"),
        (
            needed_in_words(Needed(of="test patients", number=25, reach=0.041), difference(0.1, -0.1, 0.3, patients=5)),
            "too few for a verdict (now 5); 25 test patients would show ±4.1 points",
        ),
        (needed_in_words(Needed(of="seeds", number=4)), "4 repetitions of the training"),
        (
            needed_in_words(Needed(of="seeds", number=10, difference=0.174), difference(0.1, -0.1, 0.3, seeds=4)),
            "10 repetitions of the training (now 4) would show a difference of 17.4 points",
        ),
        (needed_in_words(FEW.changed(difference=0.02)), "2.0 points, the least worth planning for"),
        (needed_in_words(None), ""),
        (answer("accuracy", "b", gain("better")), "100 test cases, 8 more"),
        (
            answer("dice", "b", gain("worse", -0.076)),
            "95 % interval −17.6 to +2.4 for patients like these; 12 test patients, 5 repetitions of the training",
        ),
    ],
)
def test_a_gain_s_numbers(said: str, numbers: str) -> None:
    assert numbers in said and bool(said) == bool(numbers)


VERDICTS = [
    (0.2, 0.05, 40, 4, "better", "Federated training with fedavg is better: mean test accuracy is "),
    (-0.2, 0.05, 40, 4, "worse", "Federated training with fedavg is worse: mean test accuracy is "),
    (0.02, 0.1, 12, 4, "inconclusive", "Inconclusive: with fedavg, mean test accuracy is "),
    (0.01, 0.5, 8, 5, "inconclusive", "Inconclusive: with fedavg, mean test accuracy is "),
    (0.2, 0.05, 40, 3, "inconclusive", "Inconclusive: with fedavg, mean test accuracy is "),
    (0.2, 0.05, 40, 1, "inconclusive", "Inconclusive: with fedavg, mean test accuracy is "),
]


@pytest.mark.parametrize(("mean", "spread", "patients", "seeds", "word", "begin"), VERDICTS)
def test_each_verdict_is_given_where_it_holds(
    mean: float, spread: float, patients: int, seeds: int, word: str, begin: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(1)
    own = mean + spread * np.linspace(-1.6, 1.6, patients)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        luck = 0.002 * random.normal()
        return 0.5 + luck + (own if title == "fedavg" else np.zeros(patients))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], list(range(seeds)), scores), tmp_path)
    assert {one.word for one in verdict.hospitals.values()} == {word}
    assert verdict.headline.startswith(begin)
    assert f"{patients * len(verdict.sites)} test patients, {seeds} repetition" in verdict.headline
    for one in verdict.hospitals.values():
        assert (one.needed is None) == (word != "inconclusive") and one.difference.patients == patients
        if one.needed:
            assert seeds >= LEAST_SEEDS or one.needed.of == "seeds"
            assert one.needed.number is None or one.needed.number > (seeds if seeds < LEAST_SEEDS else patients)
        # A verdict must not contradict its confidence interval.
        assert word == (
            "better"
            if one.difference.sure and one.difference.interval[0] > 0
            else "worse"
            if one.difference.sure
            else "inconclusive"
        )


def test_as_many_patients_as_are_needed_find_the_difference() -> None:
    """With the stated number of patients, 80 % of simulated studies find the difference; with half of this number,
    fewer studies find the difference.
    """
    spread, gain, random = 0.1, 0.04, np.random.default_rng(0)
    own = spread * np.linspace(-1.6, 1.6, 30)

    def found(people: int) -> float:
        decided = 0
        for _ in range(200):
            ways = gain + own[random.integers(0, len(own), people)]
            mine = [{"a": Scores(0.5 + ways + luck, np.arange(people))} for luck in random.normal(0, 1e-3, 4)]
            decided += compare(mine, [{"a": Scores(np.full(people, 0.5), np.arange(people))}] * 4).decides
        return decided / 200

    def pilot(unsteady: float, people: int = 30) -> Pilot | None:
        luck = unsteady * np.array([-1.2, -0.4, 0.4, 1.2])
        mine = [{"a": Scores(0.5 + own[:people] + one, np.arange(people))} for one in luck]
        theirs = [{"a": Scores(np.full(people, 0.5), np.arange(people))}] * 4
        return Pilot.of(compare(mine, theirs), mine, theirs, ["a"])

    seen = pilot(1e-3)
    assert seen and pilot(1e-3, 1) is None
    what, number, _ = seen.needed(gain, 0.05)
    assert what == "test patients" and number and 30 < number < 150
    assert found(number) == pytest.approx(0.8, abs=0.1) and found(number // 2) < 0.65
    lucky = pilot(0.05)
    assert lucky and lucky.needed(0.06, 0.05).of == "seeds"
    # the needed number of test patients is larger than the largest number that a page states
    assert seen.needed(0.001, 0.05) == ("test patients", None, None)
    # a mean difference of 0.9 between two scores is impossible in this study
    assert seen.needed(0.9, 0.05).number is None


def study(**changes: Any) -> str:
    one = difference(0.1, -0.1, 0.3)
    row = VerdictRow(title="FedProx", method="fedprox", baseline="FedAvg", from_single_site={"a": one})
    row = row.changed(sites={"a": None}, difference=Differences(mean=one, sites={"a": None}))
    values: dict[str, Any] = {"task": "t", "task_title": "T", "synthetic": False, "metric": "accuracy", "network": "n"}
    values |= {"seeds": [0, 1], "sites": ["a"], "level": 0.95, "baseline": "FedAvg", "headline": "H.", "rows": [row]}
    values |= {"about": About(title="Title"), "runs": [], "declared": "FedAvg"}
    values |= {"first": difference(0.1, 0.0, 0.2), "between": "B.", "hospitals": {"a": gain("inconclusive")}}
    verdict = Verdict(**(values | changes))
    return study_page.render(verdict, {row.title: [] for row in verdict.rows})


ANY = {"first": None, "declared": None}
OF_STUDY: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("asked before the runs", {}, ANY),
    ("corrected for 1 hospital and all methods", ANY, {}),
    ("data are synthetic", {"synthetic": True}, {}),
    ("for other patients only", {"seeds": [0]}, {}),
    ("in 3 folds", {"folds": 3}, {}),
    ("whole patients count", {}, {"single": ["a"]}),
    ("it failed", {"about": About(title="T", failures=["it failed"])}, {}),
]


@pytest.mark.parametrize(("sentence", "where", "elsewhere"), OF_STUDY)
def test_a_sentence_of_a_comparison(sentence: str, where: dict[str, Any], elsewhere: dict[str, Any]) -> None:
    assert sentence in study(**where) and sentence not in study(**elsewhere)
