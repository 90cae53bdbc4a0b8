"""Simulate confidence intervals: their coverage, their width, and the reported power.

    python -m results.intervals [--write]

The program simulates patients, seeds and scores. In some simulations, a few scores are 0 and all other scores are about
0.9. The intervals of one model's score are simulated for accuracy, Dice, concordance and the area under the ROC curve.
The intervals of differences between two methods are simulated in the worlds of results/worlds.py. Some studies report
the difference that is detectable with 80 % power; the column "found" is the fraction of repetitions that find this
difference.

The program prints the content of results/intervals.csv; with --write, the program also writes the file.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.timing import run
from medsilo_lab.study.evidence import Scores, interval, interval_of_concordance
from medsilo_lab.study.law import Interval
from results import power, result_files, worlds
from results.result_files import Table

FILE = result_files.FOLDER / "intervals.csv"
TIMES = 400  # number of intervals that are simulated for one score
PATIENTS = (2, 3, 4, 6, 8, 12, 16)
Random = np.random.Generator
Ranked = tuple[np.ndarray, np.ndarray, np.ndarray]


# ---------------------------------------------------------------------------------------------------- one score
def accuracy(random: Random, patients: int, right: float, akin: float = 0.0) -> Scores:
    """Simulate one to twelve cases for each patient; `akin` is the correlation of a patient's cases. If `akin` is 0,
    each patient has one case.
    """
    owners = np.repeat(np.arange(patients), random.integers(1, 13, patients) if akin else 1)
    chances = (
        random.beta(right * (1 / akin - 1), (1 - right) * (1 / akin - 1), patients)
        if akin
        else np.full(patients, right)
    )
    return Scores((random.random(len(owners)) < chances[owners]).astype(float), owners)


def dice(random: Random, patients: int, failing: float) -> Scores:
    """Simulate scores near 0.9, and set each score to 0 with the probability `failing`."""
    values = np.clip(random.normal(0.9, 0.03, patients), 0, 1)
    return Scores(np.where(random.random(patients) < failing, 0.0, values), np.arange(patients))


def survival(random: Random, patients: int, seen: float, effect: float) -> Ranked:
    """Simulate survival times that depend on a risk, and censoring times with the rate `seen`."""
    risk = random.normal(size=patients)
    time, end = random.exponential(np.exp(-effect * risk)), random.exponential(1 / seen, patients)
    return np.minimum(time, end), (time <= end).astype(int), risk


def classes(random: Random, patients: int, apart: float, failing: float = 0.0) -> Ranked:
    """Simulate scores of two classes; each diseased patient's ranking is reversed with the probability `failing`."""
    ill = (random.random(patients) < 0.4).astype(int)
    sign = np.where(random.random(patients) < failing, -1, 1)
    return np.where(ill, 1.0, 2.0), ill, random.normal(size=patients) + sign * apart * ill


SCORES: dict[str, Callable[[Random, int], Scores]] = {
    "accuracy .6": lambda random, n: accuracy(random, n, 0.6),
    "accuracy .85": lambda random, n: accuracy(random, n, 0.85),
    "accuracy .85, akin": lambda random, n: accuracy(random, n, 0.85, 0.3),
    "Dice, 5 % fail": lambda random, n: dice(random, n, 0.05),
    "Dice, 10 % fail": lambda random, n: dice(random, n, 0.1),
    "Dice, 30 % fail": lambda random, n: dice(random, n, 0.3),
}
RANKED: dict[str, Callable[[Random, int], Ranked]] = {
    "concordance .73": lambda random, n: survival(random, n, 0.1, 1.0),
    "concordance .9": lambda random, n: survival(random, n, 1.0, 3.0),
    "AUROC .76": lambda random, n: classes(random, n, 1.0),
    "AUROC .89, 10 % fail": lambda random, n: classes(random, n, 3.0, 0.1),
}


def covered_score(name: str, patients: int, times: int) -> float:
    """Return the coverage: the fraction of simulated intervals of a model's score that contain the score over all
    possible patients.
    """
    random, found = np.random.default_rng(patients), list[Interval | None]()
    if name in SCORES:
        truth = float(SCORES[name](random, 40_000).values.mean())
        found = [interval(SCORES[name](random, patients)) for _ in range(times)]
    else:
        many = np.random.default_rng(0)
        truth = float(np.mean([_concordance(*RANKED[name](many, 600)) for _ in range(20)]))
        found = [interval_of_concordance(*RANKED[name](random, patients)) for _ in range(times)]
    known = [own for own in found if own]
    return float(np.mean([low <= truth <= high for low, high in known]))


def _concordance(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> float:
    later = ((time[:, None] < time) | ((time[:, None] == time) & (event == 0))) & (event[:, None] == 1)
    return float((later & (risk[:, None] > risk)).sum() / later.sum())


# ----------------------------------------------------------------------------------------------------- the file
def tables() -> list[Table]:
    scored = [(name, *(f"{covered_score(name, n, TIMES):.3f}" for n in PATIENTS)) for name in (*SCORES, *RANKED)]
    return [
        Table(("score", *(f"covered, {number} patients" for number in PATIENTS)), scored, "one model's score"),
        *worlds.tables(),
        power.table(),
    ]


def main() -> None:
    write = "--write" in sys.argv[1:]
    header = {
        "title": "Coverage and power of medsilo's intervals",
        "data": "simulated patients, seeds and scores",
        "command": "python -m results.intervals --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "about": (
            f"Coverage is of 95 % intervals, in {TIMES} draws of a score.",
            *worlds.words(),
            power.WORDS,
        ),
    }
    found = result_files.Study(header, tables()).text()
    print(found)
    if write:
        FILE.write_text(found, "utf-8")
        result_files.write_index()


if __name__ == "__main__":
    run(main, globals(), TIMES=10)
