"""A verdict's families, norms and endpoints, from scores that are drawn and not trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.results.tables import sure
from medsilo.cli.running import _say_answer
from medsilo.cli.show import Screen
from medsilo.core.files import write_json
from medsilo.runs.schema import HospitalGain, PairedDifference, Verdict
from medsilo.study.cells import Row, cells_of
from medsilo.study.evidence import LEVEL, Difference, Scores, Variance
from medsilo.study.verdict import Statistics, _tested
from tests.conftest import make_plan, wanted

Drawn = Callable[[str, int, str], np.ndarray]
SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1"]


def statistics_of(tmp_path: Path, titles: list[str], seeds: list[int], drawn: Drawn, **options: Any) -> Statistics:
    """The statistics of a study whose cells have these scores, although nothing ran."""
    plan = make_plan("fedavg", *SMALL)
    found = Statistics(cells_of(plan, [Row.parse(title) for title in titles], seeds, [], tmp_path), None, **options)
    for row in found.rows:
        for seed in seeds:
            values = {site: drawn(row.title, seed, site) for site in plan.participation.sites}
            found.found[row][seed] = {site: Scores(own, np.arange(len(own))) for site, own in values.items()}
    return found


def verdict_of(statistics: Statistics, tmp_path: Path) -> Verdict:
    from medsilo.runs.schema import About

    return statistics.verdict(About(title="x"), [])


def test_joining_is_corrected_over_sites_and_methods_together() -> None:
    """Twenty sites without any effect: some hospital was told a false yes in 18 % of studies with two methods."""
    random, told = np.random.default_rng(1), 0
    for _ in range(400):
        p = random.uniform(size=(20, 2))
        found = {
            (site, row): Difference(0.1, 0.01, 0.2, float(p[site, row]), 3, patients=Variance(0.01, 9))
            for site in range(20)
            for row in range(2)
        }
        told += any(one.sure for one in _tested(found, 1 - LEVEL).values())
    assert 0 < told / 400 <= 0.07


def test_whether_joining_pays_is_asked_of_one_federation_first(tmp_path: Path) -> None:
    """Three seeds, four rows: at one hospital the gain is 40 points with all. Corrected for all methods it was open."""
    random = np.random.default_rng(5)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        alone = 0.18 if site == "hospital-a" else 0.5
        gain = 0.0 if title == "local" else 0.4 if site == "hospital-a" else 0.1
        luck = {"local": 0.0, "fedavg": 0.004, "fedbn": 0.03, "fedprox": 0.02}[title] * (seed - 1)
        return np.clip(alone + gain + luck + random.normal(0, 0.03, 12), 0, 1)

    found = verdict_of(statistics_of(tmp_path, ["local", "fedavg", "fedbn", "fedprox"], [0, 1, 2], scores), tmp_path)
    assert found.declared == "fedavg" and found.first and found.first.sure and found.first.mean > 0.15
    assert found.headline.startswith("Yes, joining pays: with fedavg, mean test accuracy is ")
    assert found.gains["hospital-a"].word == "worth it"
    alone = verdict_of(statistics_of(tmp_path, ["local", "fedavg"], [0, 1, 2], scores), tmp_path)
    assert alone.gains["hospital-a"].word == "worth it" and not alone.between  # no rival, no word of one


def test_chance_is_told_as_a_false_yes_in_few_studies(tmp_path: Path) -> None:
    random, told, draws = np.random.default_rng(6), 0, 50
    found = statistics_of(tmp_path, ["local", "fedavg", "fedbn"], [0, 1, 2], lambda *_: np.zeros(8))
    for _ in range(draws):
        for seeds in found.found.values():
            for scores in seeds.values():
                for site in scores:
                    scores[site] = Scores(random.normal(0.5, 0.1, 8), np.arange(8))
        told += "worth it" in {one.word for one in verdict_of(found, tmp_path).gains.values()}
    assert told / draws <= 0.08


def test_the_verdict_corrects_joining_over_all_sites(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    drawn = {}

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        gain = 0.02 if title == "fedavg" and site == "hospital-a" else 0.0
        return drawn.setdefault((title, seed, site), 0.5 + gain + random.normal(0, 0.03, 25))

    verdict = verdict_of(statistics_of(tmp_path, ["local", "fedavg", "fedbn"], [0, 1, 2, 3], scores), tmp_path)
    for title in ("fedavg", "fedbn"):  # the declared one, and what is exploratory
        [row] = [row for row in verdict.rows if row.title == title]
        found = [one for one in row.joining.values() if one]
        assert len(found) == len(verdict.sites)
        smallest = min(found, key=lambda one: one.p)
        assert smallest.adjusted == pytest.approx(min(1.0, len(found) * smallest.p))


def test_a_comparison_says_which_gain_it_could_have_seen(tmp_path: Path) -> None:
    random = np.random.default_rng(3)

    def scores(title: str, seed: int, site: str) -> np.ndarray:
        base = {"hospital-a": 0.4, "hospital-b": 0.7}.get(site, 0.8)
        gain = 0.2 if title == "fedbn" and site == "hospital-a" else -0.1 if title == "fedbn" else 0.0
        return base + gain + random.normal(0, 0.02, 30)

    titles, seeds = ["fedavg", "fedbn", "fedper"], [0, 1, 2]
    mean = verdict_of(statistics_of(tmp_path, titles, seeds, scores), tmp_path)
    assert mean.could_have_seen and "3 seeds" in mean.could_have_seen.words


def test_rows_of_other_norms_get_a_local_row_of_their_own() -> None:
    command = ["compare", "--task", "synthetic-histology", "--seeds", "0", "--methods", "local,fedavg,fedbn"]
    command += ["--row", "frozen: algorithm.name=fedavg network.norm=batch-statistics"]
    cells = wanted(command).all_cells()
    assert [cell.row.title for cell in cells] == ["local", "fedavg", "fedbn", "frozen", "local (batch-statistics)"]
    found = Statistics(cells, None)
    alone = {row.title: own and own.title for row, own in found.alone.items()}
    assert alone["frozen"] == "local (batch-statistics)" and alone["fedavg"] == alone["fedbn"] == "local"
    frozen = next(row for row in found.rows if row.title == "frozen")
    assert found._unlike(frozen, found.base[frozen]) == "norm batch-statistics against batch"  # type: ignore[arg-type]
    without = [cell for cell in cells if cell.row.title != "local (batch-statistics)"]
    assert frozen not in Statistics(without, None).alone


def test_where_a_site_tests_one_patient_intervals_are_said_to_be_for_other_seeds_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    found = statistics_of(tmp_path, ["fedavg", "fedbn"], [0, 1], lambda *_: random.uniform(0.4, 0.9, 20))
    assert verdict_of(found, tmp_path).single == []
    assert verdict_of(found, tmp_path).holds_for.startswith("other patients and other seeds (whole")

    def of_one_patient(sites: set[str]) -> Verdict:
        for seeds in found.found.values():
            for scores in seeds.values():
                for site in sites:
                    scores[site] = Scores(scores[site].values, np.zeros(20, dtype=int))
        return verdict_of(found, tmp_path)

    one = of_one_patient({"hospital-b"})
    assert one.single == ["hospital-b"] and "at hospital-b for other seeds alone" in one.holds_for
    assert "hospital-b for other seeds alone" in "\n".join(sure(one))
    every = of_one_patient(set(one.sites))
    assert every.single == every.sites and every.holds_for.startswith("other people and other seeds")


def test_the_last_lines_give_each_hospital_s_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interval that leaves zero out and is not sure after correction for all hospitals is promising, not open."""
    gain = PairedDifference(mean=0.2, low=0.01, high=0.4, p=0.04, seeds=6, adjusted=0.12, sure=False)
    told = {"a": HospitalGain(word="promising", method="FedAvg", gain=gain, patients=4, needed=6)}
    told["b"] = told["a"].changed(word="too few patients", needed=1200)
    found = statistics_of(tmp_path, ["fedavg", "local"], [0, 1], lambda *_: np.linspace(0, 1, 8))
    verdict = verdict_of(found, tmp_path).changed(gains=told, headline="H.", between="B.")
    write_json(tmp_path / "verdict.json", verdict.as_json())
    _say_answer(Screen(), tmp_path, tmp_path / "report.html", "next")
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0] == "H." and lines[3] == "B." and lines[-1] == "next"
    words = "FedAvg: +20.0 points (+1.0 to +40.0), of 100 test cases, 20 more are classified correctly"
    assert lines[1:3] == [f"  a: promising; {words}", f"  b: too few patients: 1,200 needed; {words}"]
