"""Simulate intervals: their coverage, their width, and the power that is reported.

    python -m results.intervals [--write]

Patients, seeds and scores are drawn, also ones of which a few are 0 beside 0.9. Of one model's score: accuracy, Dice,
concordance and the area under the ROC curve. Of differences between two methods: hospitals, patients and seeds, and a
baseline that varies more from seed to seed. Width: half of it, in standard deviations of the difference; 1.96 is
needed. Found: studies with the difference that `medsilo_lab.study.detectable` says of a study without one that it would
be found in 80 %. Then results/power.py.

Prints results/intervals.csv, which --write writes.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.timing import run
from medsilo_lab.study.detectable import detects
from medsilo_lab.study.evidence import Difference, Interval, Scores, Study, compare, interval, interval_of_concordance
from results import power, result_files
from results.result_files import Table

FILE = result_files.FOLDER / "intervals.csv"
TIMES, STUDIES = 400, 250  # intervals of a score; of a difference
FOUND, EACH = 100, 8  # studies that tell a difference, and how often each is looked for
PATIENTS = (2, 3, 4, 6, 8, 12, 16)
ERROR, STEPS = 0.05, 2000  # of the differences that are tried, up to 1
LEVEL = 0.7  # of Dice, where nobody fails
Random = np.random.Generator
Ranked = tuple[np.ndarray, np.ndarray, np.ndarray]


# ---------------------------------------------------------------------------------------------------- one score
def accuracy(random: Random, patients: int, right: float, akin: float = 0.0) -> Scores:
    """Draw one to twelve cases of each patient; akin: the correlation of a patient's cases. Of 0 each has one."""
    owners = np.repeat(np.arange(patients), random.integers(1, 13, patients) if akin else 1)
    chances = (
        random.beta(right * (1 / akin - 1), (1 - right) * (1 / akin - 1), patients)
        if akin
        else np.full(patients, right)
    )
    return Scores((random.random(len(owners)) < chances[owners]).astype(float), owners)


def dice(random: Random, patients: int, failing: float) -> Scores:
    """Draw scores about 0.9, of which a share is 0."""
    values = np.clip(random.normal(0.9, 0.03, patients), 0, 1)
    return Scores(np.where(random.random(patients) < failing, 0.0, values), np.arange(patients))


def survival(random: Random, patients: int, seen: float, effect: float) -> Ranked:
    """Draw times that a risk explains, cut off by an end that comes about as soon."""
    risk = random.normal(size=patients)
    time, end = random.exponential(np.exp(-effect * risk)), random.exponential(1 / seen, patients)
    return np.minimum(time, end), (time <= end).astype(int), risk


def classes(random: Random, patients: int, apart: float, failing: float = 0.0) -> Ranked:
    """Draw two classes as the area under the curve sees them; a share of the ill is ranked the wrong way round."""
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
    """Return how often the interval of one model's score covers what everybody's would be."""
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


# ---------------------------------------------------------------------------------------------------- differences
class DrawnStudy(NamedTuple):
    """A kind of study. failing: the share of patients whom either method fails; luck: how far seeds differ."""

    kind: str
    hospitals: int
    patients: int
    seeds: int
    failing: tuple[float, float] = (0.0, 0.0)
    luck: float = 0.5
    unsteady: float = 1.0  # times as much for the baseline

    @property
    def apart(self) -> float:
        """How far the methods' true means are apart without a gain: patients whom one of them fails."""
        return LEVEL * (self.failing[1] - self.failing[0])

    @property
    def words(self) -> str:
        failing = f", {self.failing[0]:.0%} and {self.failing[1]:.0%} fail" if any(self.failing) else ""
        unsteady = ", unsteady baseline" if self.unsteady > 1 else ""
        return f"{self.kind}, {self.hospitals} x {self.patients}, {self.seeds} seeds{failing}{unsteady}"


def study(random: Random, one: DrawnStudy, gain: float = 0.0) -> tuple[Study, Study]:
    """Draw two methods' scores on the same patients: some are harder than others, and seeds vary.

    The gain is that of the mean over all patients, so those whom a method does not fail gain more.
    """
    scale = 0.1 if one.kind == "accuracy" else 0.015
    shifts = [random.normal(0, times * one.luck * scale, one.seeds) for times in (1.0, one.unsteady)]
    methods: tuple[list[dict[str, Scores]], ...] = ([{} for _ in range(one.seeds)], [{} for _ in range(one.seeds)])
    for hospital in range(one.hospitals):
        hard = random.normal(size=one.patients)
        for better, method, by_seed, failing in zip((gain, 0.0), methods, shifts, one.failing, strict=True):
            own, fails = random.normal(size=one.patients), random.random(one.patients) < failing
            for shift, scores in zip(by_seed, method, strict=True):
                noise = random.normal(size=one.patients)
                values = _score(one, better / (1 - failing), hard, own, noise, float(shift))
                scores[f"{hospital}"] = Scores(np.where(fails, 0.0, values), np.arange(one.patients))
    return methods


def _score(
    one: DrawnStudy, gain: float, hard: np.ndarray, own: np.ndarray, noise: np.ndarray, shift: float
) -> np.ndarray:
    if one.kind == "accuracy":
        level = stats.norm.ppf(0.65 + gain) * 1.5
        return (hard + own / 2 + noise + level + shift > 0).astype(float)
    return np.clip(LEVEL + gain + 0.06 * hard + 0.05 * own + 0.03 * noise + shift, 0, 1)


COVERED = tuple(
    DrawnStudy(kind, hospitals, patients, seeds, failing, unsteady=unsteady)
    for hospitals, patients, seeds in ((1, 2, 4), (1, 4, 4), (1, 8, 4), (1, 16, 5), (3, 4, 4), (3, 8, 6), (3, 20, 6))
    for kind, failing, unsteady in (
        ("accuracy", (0.0, 0.0), 1.0),
        ("accuracy", (0.0, 0.0), 3.0),
        ("Dice", (0.1, 0.1), 3.0),
        ("Dice", (0.1, 0.0), 1.0),
        ("Dice", (0.25, 0.05), 1.0),
    )
)
TOLD = (
    DrawnStudy("accuracy", 3, 20, 4),
    DrawnStudy("accuracy", 3, 20, 6),
    DrawnStudy("accuracy", 4, 40, 5),
    DrawnStudy("accuracy", 1, 40, 6),
    DrawnStudy("accuracy", 6, 10, 5, unsteady=3.0),
    DrawnStudy("Dice", 3, 20, 6),
    DrawnStudy("Dice", 3, 8, 4),
    DrawnStudy("Dice", 1, 40, 5, unsteady=3.0),
    DrawnStudy("Dice", 3, 30, 5, (0.08, 0.08)),
)


def differences(random: Random, one: DrawnStudy, times: int, gain: float = 0.0) -> list[Difference]:
    """Draw studies and analyse them."""
    return [compare(*study(random, one, gain)) for _ in range(times)]


def covered_difference(one: DrawnStudy, times: int) -> tuple[float, float]:
    """Return how often the interval of a difference covers the truth, and half its width in standard deviations."""
    found = differences(np.random.default_rng(one.patients), one, times)
    covers = float(np.mean([each.low <= one.apart <= each.high for each in found]))
    return covers, float(
        np.median([each.high - each.low for each in found]) / 2 / np.std([each.mean for each in found])
    )


def least_found(one: Difference, seeds: int, error: float) -> float:
    """Return the least difference that four of five studies find, if the variances are those of `one`."""
    steps = range(1, STEPS + 1)
    place = bisect_left(steps, True, key=lambda step: detects(one, step / STEPS, one.people, seeds, error))
    return min(place + 1, STEPS) / STEPS


def told_and_found(one: DrawnStudy, times: int, each: int) -> tuple[float, float]:
    """Return the difference that studies without one tell (their median), and how often what each tells is found."""
    random = np.random.default_rng(one.patients + one.seeds)
    told = [least_found(alike, one.seeds, ERROR) for alike in differences(random, one, times)]
    found = [own.decides for gain in told for own in differences(random, one, each, gain)]
    return float(np.median(told)), float(np.mean(found))


# ----------------------------------------------------------------------------------------------------- the file
def tables() -> list[Table]:
    """Simulate all."""
    scored = [(name, *(f"{covered_score(name, n, TIMES):.3f}" for n in PATIENTS)) for name in (*SCORES, *RANKED)]
    covers = [(one.words, *covered_difference(one, STUDIES)) for one in COVERED]
    told = [(one.words, *told_and_found(one, FOUND, EACH)) for one in TOLD]
    return [
        Table(("score", *(f"covered, {number} patients" for number in PATIENTS)), scored, "one model's score"),
        Table(
            ("study", "covered", "half its width, in standard deviations"),
            [(words, f"{share:.3f}", f"{width:.1f}") for words, share, width in covers],
            "a difference",
        ),
        Table(
            ("study", "reported with power .80, in points, median", "found"),
            [(words, f"{100 * gain:.1f}", f"{share:.3f}") for words, gain, share in told],
            "reported power",
        ),
        power.table(),
    ]


def main() -> None:
    """Print the file, and write it if asked."""
    write = "--write" in sys.argv[1:]
    header = {
        "title": "Coverage and power of medsilo's intervals",
        "data": "simulated patients, seeds and scores",
        "command": "python -m results.intervals --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "about": (
            f"Coverage is of 95 % intervals, in {TIMES} draws of a score and {STUDIES} of a study. Half its width is "
            "in standard deviations of the difference; 1.96 is needed. A study's name has hospitals x patients.",
            f"Told: the difference that a study without one tells as found with power .80, of {FOUND} studies; each "
            f"is then looked for {EACH} times.",
            power.WORDS,
        ),
    }
    found = result_files.Study(header, tables()).text()
    print(found)
    if write:
        FILE.write_text(found, "utf-8")
        result_files.write_index()


if __name__ == "__main__":
    run(main, globals(), TIMES=10, STUDIES=6, FOUND=2, EACH=2)
