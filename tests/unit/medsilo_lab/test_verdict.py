"""Test verdicts, the correction for multiple tests, and endpoints on random scores without training."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.runs import paths
from medsilo_lab.cli.comparing import _say_answer
from medsilo_lab.report.differences import finding, first_screen
from medsilo_lab.study.cells import Row, cells_of
from medsilo_lab.study.evidence import Difference, Scores
from medsilo_lab.study.law import Variance
from medsilo_lab.study.verdict import Statistics, _tested, usable
from medsilo_lab.study.verdict_file import HospitalVerdict, Needed, PairedDifference, Verdict, read_verdict
from medsilo_lab.study.words import points, verdict_in_words
from tests.conftest import SITES, make_plan, wanted

Drawn = Callable[[str, int, str], np.ndarray]
SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1"]


def statistics_of(tmp_path: Path, titles: list[str], seeds: list[int], drawn: Drawn) -> Statistics:
    plan = make_plan("fedavg", *SMALL)
    found = Statistics(cells_of(plan, [Row.parse(title) for title in titles], seeds, [], tmp_path), None)
    for row in found.rows:
        for seed in seeds:
            values = {site: drawn(row.title, seed, site) for site in plan.participation.sites}
            found.scores[row][seed] = {site: Scores(own, np.arange(len(own))) for site, own in values.items()}
    return found


def verdict_of(statistics: Statistics, tmp_path: Path) -> Verdict:
    from medsilo_lab.study.verdict_file import About

    return statistics.verdict(About(title="x"), [])


def test_joining_is_corrected_over_sites_and_methods_together() -> None:
    """In earlier versions, 18 % of comparisons of two methods at twenty equal sites had a false positive result."""
    random, told = np.random.default_rng(1), 0
    for _ in range(400):
        p = random.uniform(size=(20, 2))
        found = {
            (site, row): Difference(0.1, 0.01, 0.2, float(p[site, row]), 4, 10, patients=Variance(0.01, 9))
            for site in range(20)
            for row in range(2)
        }
        told += any(one.sure for one in _tested(found).values())
    assert 0 < told / 400 <= 0.07


def test_whether_joining_pays_is_asked_of_one_federation_first(tmp_path: Path) -> None:
    """In earlier versions, correction for all methods made 40 points at one hospital inconclusive."""
    random = np.random.default_rng(5)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        alone = 0.18 if site == "hospital-a" else 0.5
        gain = 0.0 if title == "local" else 0.4 if site == "hospital-a" else 0.1
        luck = {"local": 0.0, "fedavg": 0.004, "fedbn": 0.03, "fedprox": 0.02}[title] * (seed - 1)
        return np.clip(alone + gain + luck + random.normal(0, 0.03, 12), 0, 1)

    seeds = [0, 1, 2, 3]
    found = verdict_of(statistics_of(tmp_path, ["local", "fedavg", "fedbn", "fedprox"], seeds, scores), tmp_path)
    assert found.declared == "fedavg" and found.first and found.first.sure and found.first.mean > 0.15
    assert found.headline.startswith("Federated training with fedavg is better")
    assert found.hospitals["hospital-a"].word == "better"
    alone = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], seeds, scores), tmp_path)
    assert alone.hospitals["hospital-a"].word == "better" and not alone.between


def test_one_difference_has_one_interval_on_a_page(tmp_path: Path) -> None:
    """In earlier versions, a page's headline and table had different intervals for the same difference."""
    random = np.random.default_rng(7)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        better = 0.0 if title == "local" else 0.15
        return np.clip(0.5 + better + 0.02 * random.normal() + random.normal(0, 0.1, 16), 0, 1)

    titles = ["local", "fedavg", "fedbn", "fedprox", "ditto"]
    verdict = verdict_of(statistics_of(tmp_path, titles, [0, 1, 2, 3, 4], scores), tmp_path)
    [alone] = [row for row in verdict.rows if row.title == "local"]
    [asked] = [row for row in verdict.rows if row.title == verdict.declared]
    pairs = [(verdict.first, alone.difference.mean)]
    pairs += [(asked.from_single_site[site], alone.difference.sites[site]) for site in verdict.sites]
    for one, other in pairs:
        assert one and other
        assert (one.mean, one.low, one.high) == (-other.mean, -other.high, -other.low)
        assert (one.p, one.adjusted, one.sure) == (other.p, other.adjusted, other.sure)
        assert one.interval == (-other.interval[1], -other.interval[0])
    assert verdict.first and verdict.first.sure and verdict.first.patients == 16 * len(verdict.sites)


def test_no_interval_that_is_shown_contradicts_its_verdict(tmp_path: Path) -> None:
    """With p = 0.03, the plain interval excludes zero, but the interval that is corrected for three hospitals includes
    zero.
    """
    random = np.random.default_rng(11)
    own = {site: 0.1 * random.normal(size=40) for site in SITES}
    gains = {site: 0.03 + values - values.mean() for site, values in own.items()}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return 0.5 + 0.001 * random.normal() + (gains[site] if title == "fedavg" else np.zeros(40))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2, 3], scores), tmp_path)
    assert verdict.first and verdict.first.sure and not verdict.first.corrected
    alone = [one.difference for one in verdict.hospitals.values() if one.difference.low > 0 and not one.difference.sure]
    assert alone and {one.word for one in verdict.hospitals.values()} == {"inconclusive"}
    assert all(one.interval[0] <= 0 < one.low and one.corrected for one in alone)
    assert finding(verdict) == "Federated training with fedavg helps on average; for no single hospital shown"
    told = first_screen(verdict)
    assert all(points(one.interval[0]) in row["interval"] for one, row in zip(alone, told["rows"][1:], strict=False))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_fewer_than_four_seeds_give_no_verdict(seeds: int, tmp_path: Path) -> None:
    random = np.random.default_rng(8)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return np.clip(random.normal(0.1 if title == "local" else 0.9, 0.02, 30), 0, 1)

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], list(range(seeds)), scores), tmp_path)
    assert verdict.first and not verdict.first.sure and "4 repetitions" in verdict.headline
    for one in verdict.hospitals.values():
        assert (one.word, one.difference.patients, one.needed and one.needed.number) == ("inconclusive", 30, 4)


def test_models_that_all_name_one_class_give_no_verdict(tmp_path: Path) -> None:
    """In earlier versions, medsilo reported a difference without any variance as "no gain, +0.0 (+0.0 to +0.0)"."""
    verdict = verdict_of(
        statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2, 3], lambda *_: np.repeat([0.0, 1.0], 4)), tmp_path
    )
    for one in verdict.hospitals.values():
        assert one.word == "inconclusive" and one.difference.open and one.needed is None
        assert "no interval" in verdict_in_words(one)


def test_four_test_patients_decide_nothing(tmp_path: Path) -> None:
    """In earlier versions, a decision sheet called a difference on four test patients promising."""
    random = np.random.default_rng(9)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return np.clip(random.normal(0.6 if title == "local" else 0.75, 0.02, 4), 0, 1)

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2, 3, 4], scores), tmp_path)
    for one in verdict.hospitals.values():
        assert one.word == "inconclusive" and one.difference.patients == 4
        assert one.needed and one.needed.of == "test patients" and one.needed.number == 25
        assert "too few for a verdict (now 4); 25 test patients would show ±" in verdict_in_words(one)


@pytest.mark.slow
def test_chance_is_told_as_a_false_yes_in_few_studies(tmp_path: Path) -> None:
    random, told, draws = np.random.default_rng(6), 0, 25
    found = statistics_of(tmp_path, ["local", "fedavg", "fedbn"], [0, 1, 2, 3], lambda *_: np.zeros(8))
    for _ in range(draws):
        for seeds in found.scores.values():
            for scores in seeds.values():
                for site in scores:
                    scores[site] = Scores(random.normal(0.5, 0.1, 8), np.arange(8))
        told += "better" in {one.word for one in verdict_of(found, tmp_path).hospitals.values()}
    assert told / draws <= 0.08


def test_the_verdict_corrects_joining_over_all_sites(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    drawn = {}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        gain = 0.02 if title == "fedavg" and site == "hospital-a" else 0.0
        return drawn.setdefault((title, seed, site), 0.5 + gain + random.normal(0, 0.03, 25))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg", "fedbn"], [0, 1, 2, 3], scores), tmp_path)
    for title in ("fedavg", "fedbn"):
        [row] = [row for row in verdict.rows if row.title == title]
        found = [one for one in row.from_single_site.values() if one]
        assert len(found) == len(verdict.sites)
        smallest = min(found, key=lambda one: one.p)
        assert smallest.adjusted == pytest.approx(min(1.0, len(found) * smallest.p))


def test_rows_of_other_norms_get_a_local_row_of_their_own() -> None:
    command = ["compare", "--task", "synthetic-histology", "--seeds", "0", "--methods", "local,fedavg,fedbn"]
    command += ["--row", "frozen: algorithm.name=fedavg network.norm=batch-statistics"]
    cells = wanted(command).all_cells()
    assert [cell.row.title for cell in cells] == ["local", "fedavg", "fedbn", "frozen", "local (batch-statistics)"]
    found = Statistics(cells, None)
    alone = {row.title: own and own.title for row, own in found.alone.items()}
    assert alone["frozen"] == "local (batch-statistics)" and alone["fedavg"] == alone["fedbn"] == "local"
    frozen = next(row for row in found.rows if row.title == "frozen")
    assert found._unlike(frozen, found.base[frozen]) == "normalisation layer batch-statistics instead of batch"  # type: ignore[arg-type]
    without = [cell for cell in cells if cell.row.title != "local (batch-statistics)"]
    assert frozen not in Statistics(without, None).alone


def test_where_a_site_tests_one_patient_intervals_are_said_to_be_for_other_seeds_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    found = statistics_of(tmp_path, ["fedavg", "fedbn"], [0, 1], lambda *_: random.uniform(0.4, 0.9, 20))
    assert verdict_of(found, tmp_path).single == []
    assert verdict_of(found, tmp_path).holds_for.startswith("other patients and other repetitions")

    def of_one_patient(sites: set[str]) -> Verdict:
        for seeds in found.scores.values():
            for scores in seeds.values():
                for site in sites:
                    scores[site] = Scores(scores[site].values, np.zeros(20, dtype=int))
        return verdict_of(found, tmp_path)

    one = of_one_patient({"hospital-b"})
    assert one.single == ["hospital-b"] and "at hospital-b for these alone" in one.holds_for
    every = of_one_patient(set(one.sites))
    assert every.single == every.sites and every.holds_for.startswith("other people and other repetitions")


def test_the_last_lines_give_each_hospital_s_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each hospital's line has the interval, the numbers of test patients and seeds, and the number of patients that
    are needed.
    """
    gain = PairedDifference(mean=0.2, low=0.01, high=0.4, p=0.04, seeds=6, patients=5, adjusted=0.12, sure=False)
    more = Needed(of="test patients", number=14, difference=0.2)
    told = {"a": HospitalVerdict(word="inconclusive", method="FedAvg", difference=gain, needed=more)}
    told["b"] = told["a"].changed(needed=more.changed(number=None))
    found = statistics_of(tmp_path, ["fedavg", "local"], [0, 1], lambda *_: np.linspace(0, 1, 8))
    verdict = verdict_of(found, tmp_path).changed(hospitals=told, headline="H.", between="B.")
    write_json(tmp_path / "verdict.json", verdict.as_json())
    _say_answer(Console(), tmp_path, tmp_path / "report.html", "next")
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0] == "H." and lines[3] == "B." and lines[-1] == "next"
    words = (
        "inconclusive: FedAvg +20.0 points (95 % interval +1.0 to +40.0 for patients like these; 5 test patients, 6 "
    )
    words += "repetitions of the training)"
    assert lines[1] == f"  a: {words}; about 14 test patients (now 5) would show a difference of 20.0 points"
    assert lines[2].startswith(
        f"  b: {words}; this cannot be settled here: neither 300 test patients nor 30 repetitions of "
    )
    assert lines[2].endswith("20.0 points; another score, or all hospitals together, may")


def test_a_difference_that_rounds_to_nothing_is_not_below_it() -> None:
    """In earlier versions, a comparison of equal models reported a difference of −0.0 points."""
    assert [points(value) for value in (-1e-17, -0.0004, -0.0006, 0.001)] == ["+0.0", "+0.0", "−0.1", "+0.1"]


def test_a_pilot_of_five_patients_is_told_to_be_too_few(tmp_path: Path) -> None:
    """In earlier versions, the verdict demanded 1,000 more patients, but did not call five patients too few."""
    random = np.random.default_rng(3)
    own = {site: 0.03 * random.normal(size=5) for site in SITES}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return 0.8 + 0.001 * random.normal() + (0.03 + own[site] if title == "fedavg" else np.zeros(5))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2, 3], scores), tmp_path)
    assert verdict.first and verdict.first.unseen and verdict.first.failing == pytest.approx(1 - 0.025 ** (1 / 15))
    low, high = verdict.first.interval
    # The first interval is for the tested patients, and the second, wider interval is for patients who were not tested.
    assert high - low < 0.08 and verdict.first.unseen[0] < low - 0.1
    for one in verdict.hospitals.values():
        assert one.word == "inconclusive" and one.needed and one.needed.reach and one.needed.reach < 0.04
        assert "too few for a verdict (now 5); 25 test patients would show ±" in verdict_in_words(one)


def test_a_pilot_with_six_patients_in_all_does_not_call_a_clear_difference_chance(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    own = {site: 0.01 * random.normal(size=2) for site in SITES}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        return 0.7 + 0.001 * random.normal() + (0.2 + own[site] if title == "fedavg" else np.zeros(2))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2, 3], scores), tmp_path)
    assert verdict.first and verdict.first.low > 0 and not verdict.first.sure
    assert "A verdict needs 8 test patients" in verdict.headline and "chance" not in verdict.headline


@pytest.mark.slow
def test_forty_configurations_at_six_hospitals_take_seconds(tmp_path: Path) -> None:
    """The test's time limit does not include reading the scores."""
    random, sites = np.random.default_rng(0), "abcdef"
    plan = make_plan("fedavg", *SMALL, f"participation.sites=[{','.join(sites)}]")
    titles = [
        "local",
        "fedavg",
        *(f"r{n}: algorithm.name=fedavg training.learning_rate=0.{n + 1:03d}" for n in range(38)),
    ]
    found = Statistics(cells_of(plan, [Row.parse(title) for title in titles], range(6), [], tmp_path), None)
    for row in found.rows:
        for seed in range(6):
            found.scores[row][seed] = {site: Scores(random.uniform(0.4, 0.9, 50), np.arange(50)) for site in sites}
    began = time.process_time()
    assert len(verdict_of(found, tmp_path).rows) == 40
    assert time.process_time() - began < 20


# ------------------------------------------------------------------ any table of scores
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "any": lambda random, number: random.uniform(0, 1, number),
    "ties": lambda random, number: random.integers(0, 2, number).astype(float),
    "perfect": lambda _, number: np.ones(number),
    "none right": lambda _, number: np.zeros(number),
    "alike but for the last bit": lambda random, number: 0.7 + random.choice([0, 1e-16, 2e-16], number),
    "steps": lambda random, number: random.choice([0.25, 0.5, 0.75], number),
    "a few fail": lambda random, number: np.where(random.random(number) < 0.1, 0.0, random.normal(0.9, 0.02, number)),
    "no numbers": lambda random, number: np.where(random.random(number) < 0.3, np.nan, 0.5),
    "infinite": lambda random, number: np.where(random.random(number) < 0.3, np.inf, 0.5),
}


def any_table(random: np.random.Generator, folder: Path) -> Statistics:
    sites = list("abc"[: random.integers(1, 4)])
    titles = ["local", "fedavg", "fedprox", "fedbn"][: random.integers(2, 5)]
    seeds = range(int(random.choice([1, 2, 4, 5])))
    plan = make_plan("fedavg", *SMALL, f"participation.sites=[{','.join(sites)}]")
    found = Statistics(cells_of(plan, [Row.parse(title) for title in titles], seeds, [], folder), None)
    patients = {
        site: np.repeat(np.arange(count := random.choice([1, 2, 4, 7, 8, 30, 60])), random.integers(1, 4, count))
        for site in sites
    }
    kinds, lost, gain = random.choice([*KINDS], 2), random.random() < 0.3, 0.2 * (random.random() < 0.3)
    base = {site: random.uniform(0.2, 0.7, len(own)) for site, own in patients.items()}
    for row in found.rows:
        for seed in seeds:
            there = [site for site in sites if not lost or random.random() < 0.8]
            if there and (not lost or random.random() < 0.9):
                own = {site: KINDS[random.choice(kinds)](random, len(patients[site])) for site in there}
                if gain:
                    more = gain * (row.title == "fedavg")
                    own = {site: values + more + random.normal(0, 0.02, len(values)) for site, values in base.items()}
                    own = {site: own[site] for site in there}
                found.scores[row][seed] = usable({site: Scores(own[site], patients[site]) for site in there})
    return found


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_any_table_of_scores_gives_a_verdict_or_one_line(block: int, tmp_path: Path) -> None:
    """Random scores never lead to a traceback, to NaN, or to a verdict from too few patients or seeds."""
    random, told = np.random.default_rng(block), {"sure": 0, "unsure": 0}
    for _ in range(100):
        table = any_table(random, tmp_path)
        try:
            verdict = verdict_of(table, tmp_path)
        except MedsiloError as error:
            assert str(error) and "\n" not in str(error)
            continue
        every = [one for row in verdict.rows for one in (row.difference.mean, row.difference.pooled) if one]
        for row in verdict.rows:
            every += [one for own in (row.difference.sites, row.from_single_site) for one in own.values() if one]
        for one in every:
            assert one.low <= one.mean <= one.high and one.interval[0] <= one.interval[1]
            if one.sure:
                assert one.seeds >= 4 and (one.patients or 0) >= 8 and not one.interval[0] <= 0 <= one.interval[1]
            told["sure" if one.sure else "unsure"] += 1
        lines = [verdict.headline, *first_screen(verdict).values(), *map(verdict_in_words, verdict.hospitals.values())]
        assert not re.search(r"\bnan\b|\binf\b", " ".join(map(str, lines))), lines
        write_json(tmp_path / paths.VERDICT, verdict.as_json())
        assert read_verdict(tmp_path).headline == verdict.headline
    assert min(told.values()) > 5, told
