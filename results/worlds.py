"""Simulate kinds of comparison with a known truth: patients, hospitals and seeds are drawn at random. The tables are a
part of results/intervals.csv.

No number in this module was chosen to change an interval's coverage. The worlds combine seven kinds of patients with
four shapes of a study. The shapes range from one hospital with five patients to three hospitals with a hundred patients
each. The spread of scores between seeds is at least zero, and at most the spread between patients. In some worlds, the
methods fail completely on some of the patients. In other worlds, the score is an AUROC, a balanced accuracy or a
concordance, which compares patients or classes and is no mean over patients.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from medsilo.tasks.scored_together import AUROC, BALANCED, contributions
from medsilo_lab.study.detectable import POWER, Pilot
from medsilo_lab.study.evidence import (
    LEVEL,
    Difference,
    Scores,
    Study,
    compare,
    parts_of_concordance,
    seeds_of,
)
from medsilo_lab.study.training_luck import luck_of
from medsilo_lab.study.verdict import _tested
from results.result_files import Table

Random = np.random.Generator
STUDIES = 1600  # number of simulated studies of each world
FOUND, EACH = 200, 5  # number of studies that report a difference, and number of repetitions of each of these studies
# mean score; spread of differences; spread of patients' scores; spread of the residual
USUAL, SPREAD, HARD, CELLS = 0.7, 0.05, 0.06, 0.3
# patients of each hospital, number of seeds, and the spread of the seeds divided by the spread of the patients
SHAPES = {
    "1 x 5 patients, 4 seeds": ((5,), 4, 0.0),
    "1 x 20, 6 seeds": ((20,), 6, 0.3),
    "5, 12 and 40, 4 seeds": ((5, 12, 40), 4, 0.5),
    "3 x 100, 6 seeds": ((100, 100, 100), 6, 1.0),
}
SKEWED, DICE, RIGHT, MOVED = (
    "skewed as waiting times are",
    "bounded (Dice)",
    "ties (right or wrong)",
    "seeds move single",
)
KINDS = ("normal", "a little skewed", SKEWED, "heavy tails", DICE, RIGHT, f"{MOVED} patients")
# pairs: the fractions of patients on whom the first and the second method fail
FAILING = ((0.05, 0.0), (0.1, 0.0), (0.25, 0.0), (0.1, 0.1), (0.05, 0.25))
WITH_FAILING = {
    "1 x 5 patients, 4 seeds": ((5,), 4, 0.3),
    "1 x 20, 6 seeds": ((20,), 6, 0.3),
    "5, 12 and 40, 4 seeds": ((5, 12, 40), 4, 0.3),
    "3 x 20, 6 seeds": ((20, 20, 20), 6, 0.3),
}


# kinds of world whose score compares patients: for each, the fraction of patients who are ill or have the event
AUROC_COMMON, AUROC_RARE = "AUROC, 3 of 10 are ill", "AUROC, 1 of 10 is ill"
CLASSES, EVENTS, FEW_EVENTS = (
    "balanced accuracy, 4 of 10 are ill",
    "concordance, 6 of 10 die",
    "concordance, 2 of 10 die",
)
ILL = {AUROC_COMMON: 0.3, AUROC_RARE: 0.1, CLASSES: 0.4, EVENTS: 0.6, FEW_EVENTS: 0.2}
RANK_SHAPES = {
    "1 x 60, 6 seeds": ((60,), 6, 0.2),
    "3 x 40, 4 seeds": ((40, 40, 40), 4, 0.2),
    "30, 60 and 200, 6 seeds": ((30, 60, 200), 6, 0.4),
}
APART, SHARED, NOISE = 1.2, 0.57, 0.5  # distance of the classes; correlation of methods; spread of a seed's predictions


class World(NamedTuple):
    """A kind of simulated comparison: the kind of patients, the number of patients at each hospital, the number of
    seeds, and the spread of seeds.

    Args:
        failing: For each of the two methods, the fraction of patients on whom the method fails.
        akin: Correlation of failures among a hospital's patients, so that hospitals differ in their fraction of
            failures.
    """

    kind: str
    shape: str
    sizes: tuple[int, ...]
    seeds: int
    luck: float
    failing: tuple[float, float] = (0.0, 0.0)
    akin: float = 0.0

    @property
    def words(self) -> str:
        told = f"{self.kind}; {self.shape}"
        if any(self.failing):
            told += f"; {self.failing[0]:.0%} and {self.failing[1]:.0%} fail"
        return f"{told}, hospitals differ in it" if self.akin else told


WORLDS = tuple(World(kind, name, *shape) for kind in KINDS for name, shape in SHAPES.items())
FAILING_WORLDS = tuple(
    World("normal", name, *shape, failing) for name, shape in WITH_FAILING.items() for failing in FAILING
)
RANK_WORLDS = tuple(World(kind, name, *shape) for kind in ILL for name, shape in RANK_SHAPES.items())
AKIN = tuple(
    World("normal", name, *WITH_FAILING[name], failing, 0.1)
    for name in ("5, 12 and 40, 4 seeds", "3 x 20, 6 seeds")
    for failing in FAILING
)


def study(random: Random, one: World, difference: float = 0.0) -> tuple[Study, Study, float]:
    """Simulate the scores of two methods on the same patients; return the scores and the true difference between the
    methods.

    Args:
        random: The source of randomness.
        one: The simulated kind of comparison.
        difference: The number that is added to the first method's scores.
    """
    if one.kind in ILL:
        return *_ranked(random, one, difference), difference
    luck = one.luck * random.normal(0, 1, (one.seeds, 1))
    pairs, truths = [], []
    for size in one.sizes:
        mine, theirs = _pair(random, one, size, luck)
        lost = 0.0
        for values, share, sign in ((mine, one.failing[0], -1), (theirs, one.failing[1], 1)):
            count = 1 / one.akin - 1 if one.akin else 0.0
            own = float(random.beta(share * count, (1 - share) * count)) if count and share else share
            values[:, random.random(size) < own] = 0.0
            lost += sign * own * USUAL
        pairs.append((_better(random, one, mine, difference) if difference else mine, theirs))
        truths.append(lost)
    made = [
        [
            {
                f"{place}": Scores(pair[which][seed], np.arange(size))
                for place, (pair, size) in enumerate(zip(pairs, one.sizes, strict=True))
            }
            for seed in range(one.seeds)
        ]
        for which in (0, 1)
    ]
    return made[0], made[1], difference + truth(one) + float(np.mean(truths))


def _ranked(random: Random, one: World, difference: float) -> tuple[Study, Study]:
    """Simulate two methods whose predictions rank patients. The methods are equal, unless the first method's AUROC is
    higher by `difference`.

    A patient's prediction is the true class or risk plus three errors. Both methods share the first error. The second
    error is the method's, and the third error is the seed's.
    """
    spread = math.sqrt(2 * (1 + NOISE**2) + one.luck**2)  # of the difference between an ill and a healthy patient
    further = spread * float(stats.norm.ppf(stats.norm.cdf(APART / spread) + difference)) if difference else APART
    hospitals = [(random.normal(0, math.sqrt(SHARED), size), *_outcomes(random, one, size)) for size in one.sizes]
    return _method(random, one, further, hospitals), _method(random, one, APART, hospitals)


def _outcomes(random: Random, one: World, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each patient's risk, whether the patient is ill or dies, and the time of death or of the last visit."""
    if one.kind not in (EVENTS, FEW_EVENTS):
        ill = np.arange(size) < round(ILL[one.kind] * size)
        return ill.astype(float), ill, np.zeros(size)
    longest = 0.2 if one.kind == FEW_EVENTS else 1.5  # mean time to the last visit
    while True:
        risk = random.normal(0, 1, size)
        death, visit = random.exponential(np.exp(-risk)), longest * random.exponential(1.0, size)
        if (death <= visit).sum() > 1:  # without deaths, the concordance is undefined and the hospital is left out
            return risk, death <= visit, np.minimum(death, visit)


def _method(
    random: Random, one: World, apart: float, hospitals: Sequence[tuple[np.ndarray, ...]]
) -> list[dict[str, Scores]]:
    luck = apart + one.luck * random.normal(0, 1, one.seeds)
    errors = [shared + random.normal(0, math.sqrt(1 - SHARED), len(shared)) for shared, *_ in hospitals]
    made = []
    for strength in luck.tolist():
        seed = {}
        for place, (error, (_, risk, ill, time)) in enumerate(zip(errors, hospitals, strict=True)):
            predicted = strength * risk + error + random.normal(0, NOISE, len(risk))
            seed[f"{place}"] = Scores(_contributions(one, predicted, ill, time), np.arange(len(risk)))
        made.append(seed)
    return made


def _contributions(one: World, predicted: np.ndarray, ill: np.ndarray, time: np.ndarray) -> np.ndarray:
    if one.kind in (EVENTS, FEW_EVENTS):
        return parts_of_concordance(time, ill.astype(int), predicted)
    chances = torch.from_numpy(predicted - APART / 2).sigmoid()
    metric = BALANCED if one.kind == CLASSES else AUROC
    return contributions(metric, torch.from_numpy(ill).long(), torch.stack([1 - chances, chances], 1)).numpy()


def _better(random: Random, one: World, scores: np.ndarray, difference: float) -> np.ndarray:
    """Return the scores of a method whose mean over all patients is higher by `difference`. Scores of right and wrong
    answers stay 1 or 0.
    """
    if one.kind == RIGHT:
        return np.where(random.random(scores.shape[1]) < difference / (1 - _level(one)), 1.0, scores)
    return scores + difference * (1 - scores) / (1 - _level(one)) if one.kind == DICE else scores + difference


def _level(one: World) -> float:
    return _levels(one.kind, one.luck)[0]


@cache
def _levels(kind: str, luck: float) -> tuple[float, float]:
    random, one = np.random.default_rng(0), World(kind, "", (500,), 50, luck)
    blocks = [_pair(random, one, 500, luck * random.normal(0, 1, (50, 1))) for _ in range(400)]
    return float(np.mean([mine.mean() for mine, _ in blocks])), float(np.mean([theirs.mean() for _, theirs in blocks]))


def _pair(random: Random, one: World, size: int, luck: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shape, kind = (len(luck), size), one.kind
    hard, rest = random.normal(0, 1, size), random.normal(0, 1, shape)
    if kind in (DICE, RIGHT):
        mine, theirs = (random.normal(0, 1, size) + 0.4 * random.normal(0, 1, shape) for _ in range(2))
        if kind == RIGHT:
            right = [hard + 0.5 * own + level > 0 for own, level in ((mine + luck, 0.8), (theirs, 0.5))]
            return right[0].astype(float), right[1].astype(float)
        logits = [1.6 + 0.8 * hard + 0.35 * own for own in (mine + luck + 0.6, theirs)]
        return 1 / (1 + np.exp(-logits[0])), 1 / (1 + np.exp(-logits[1]))
    own = {
        "normal": lambda: random.normal(0, 1, size),
        "a little skewed": lambda: (random.gamma(6, 1, size) - 6) / math.sqrt(6),
        SKEWED: lambda: random.exponential(1, size) - 1,
        "heavy tails": lambda: random.standard_t(5, size) / math.sqrt(5 / 3),
        f"{MOVED} patients": lambda: random.normal(0, 1, size),
    }[kind]()
    theirs = USUAL + HARD * hard + 0 * rest
    return theirs + SPREAD * (own + luck + rest * (1.5 if kind.startswith(MOVED) else CELLS)), theirs


def truth(one: World) -> float:
    """Return the true difference between the methods over all possible patients and seeds, if neither method fails."""
    if one.kind not in (DICE, RIGHT):
        return 0.0
    mine, theirs = _levels(one.kind, one.luck)
    return mine - theirs


def found(one: World, times: int, seed: int, asked: list[str] | None = None) -> list[tuple[Difference, float]]:
    random, all_found = np.random.default_rng(seed), []
    for _ in range(times):
        mine, theirs, true = study(random, one)
        all_found.append((compare(mine, theirs, asked), true))
    return all_found


def covered(one: World, times: int, seed: int) -> tuple[float, float, float]:
    """Return two coverages, of the usual interval and of the interval for unseen failures, and the usual interval's
    half width in standard errors.

    Studies in which all patients are identical have no interval, and are left out.
    """
    drawn = [each for each in found(one, times, seed) if each[0].law and each[0].law.variance]
    first = float(np.mean([each.low <= true <= each.high for each, true in drawn]))
    second = float(np.mean([low <= true <= high for each, true in drawn for low, high in [each.if_unseen(1 - LEVEL)]]))
    width = float(np.median([each.high - each.low for each, _ in drawn])) / 2
    return first, second, width / float(np.std([each.mean - true for each, true in drawn]))


# ---------------------------------------------------------------------------------------------------- width and power
EXACT = World(
    "normal", "", (20,), 4, 0.0
)  # if seeds do not differ and patients are normally distributed, Student's interval is exact


def width_of_students(times: int) -> dict[int, float]:
    """For each number of patients, return the median ratio of the interval's width to the width of Student's interval
    over patients.
    """
    widths = {}
    for size in (5, 10, 20, 50):
        random, ratios = np.random.default_rng(size), []
        for _ in range(times):
            mine, theirs, _ = study(random, EXACT._replace(sizes=(size,)))
            own = np.mean([a["0"].values - b["0"].values for a, b in zip(mine, theirs, strict=True)], 0)
            low, high = stats.t.interval(LEVEL, size - 1, 0, own.std(ddof=1) / math.sqrt(size))
            each = compare(mine, theirs)
            ratios.append((each.high - each.low) / (high - low))
        widths[size] = float(np.median(ratios))
    return widths


def patients_that_find(times: int, difference: float = 0.035) -> tuple[int, int]:
    """Return two numbers of patients with which four of five studies find the given difference: with medsilo's test,
    and with Student's test.
    """
    spread = SPREAD * math.sqrt(1 + CELLS**2 / EXACT.seeds)

    def students(size: int) -> bool:
        away = difference / spread * math.sqrt(size)
        return float(stats.nct.sf(stats.t.ppf(0.975, size - 1), size - 1, away)) >= POWER

    def ours(size: int) -> bool:
        random, one = np.random.default_rng(size), EXACT._replace(sizes=(size,))
        return float(np.mean([compare(*study(random, one, difference)[:2]).low > 0 for _ in range(times)])) >= POWER

    return next(size for size in range(5, 400) if ours(size)), next(size for size in range(5, 400) if students(size))


def false_verdicts(one: World, times: int, rows: int = 4) -> float:
    """Return the fraction of comparisons that call a row better or worse although all rows are equal."""
    random, told = np.random.default_rng(7), 0
    for _ in range(times):
        hard = [random.normal(0, HARD, size) for size in one.sizes]
        every = [[_harder(seed, hard) for seed in study(random, one)[0]] for _ in range(rows + 1)]
        luck = luck_of(np.array([seeds_of(each) for each in every]), 0)
        found = {row: compare(every[row], every[0], luck=luck[row]) for row in range(1, rows + 1)}
        told += any(one.sure for one in _tested(found).values())
    return told / times


def _harder(seed: Mapping[str, Scores], hard: Sequence[np.ndarray]) -> dict[str, Scores]:
    return {site: Scores(own.values / 2 + hard[int(site)], own.patients) for site, own in seed.items()}


TOLD = (
    World("normal", "3 x 20 patients, 4 seeds", (20,) * 3, 4, 0.3),
    World("normal", "3 x 20 patients, 6 seeds", (20,) * 3, 6, 1.0),
    World("normal", "1 x 40 patients, 6 seeds", (40,), 6, 0.3),
    World(SKEWED, "3 x 20 patients, 5 seeds", (20,) * 3, 5, 0.3),
    World("heavy tails", "1 x 30 patients, 5 seeds", (30,), 5, 0.3),
    World(DICE, "3 x 20 patients, 6 seeds", (20,) * 3, 6, 0.3),
    World(DICE, "5, 12 and 40 patients, 6 seeds", (5, 12, 40), 6, 0.3),
    World(RIGHT, "3 x 40 patients, 6 seeds", (40,) * 3, 6, 0.1),
    World(f"{MOVED} patients", "3 x 20 patients, 6 seeds", (20,) * 3, 6, 0.3),
    World(AUROC_COMMON, "1 x 100 patients, 4 seeds", (100,), 4, 0.2),
    World(AUROC_COMMON, "1 x 100 patients, 6 seeds", (100,), 6, 0.2),
    World(AUROC_COMMON, "3 x 40 patients, 6 seeds", (40,) * 3, 6, 0.2),
    World(AUROC_RARE, "3 x 100 patients, 6 seeds", (100,) * 3, 6, 0.2),
)


def told_and_found(one: World, times: int, each: int) -> tuple[float, float]:
    """Return the median of the differences that studies report as detectable with power .80, and the fraction of
    repetitions that find the reported difference.
    """
    random, told, hits = np.random.default_rng(sum(one.sizes) + one.seeds), [], []
    names = [f"{place}" for place in range(len(one.sizes))]
    for _ in range(times):
        mine, theirs, _ = study(random, one)
        pilot = Pilot.of(compare(mine, theirs), mine, theirs, names)
        least = pilot.least(pilot.design, 1 - LEVEL) if pilot else None
        if least is None:
            continue
        told.append(least)
        hits += [compare(*study(random, one, least - truth(one))[:2]).low > 0 for _ in range(each)]
    return float(np.median(told)), float(np.mean(hits))


# ----------------------------------------------------------------------------------------------------- the file
def tables() -> list[Table]:
    heads = ("study", "covered, patients like these", "covered, if an unseen kind fails", "half its width")
    rows = {}
    drawn_worlds = {
        "a difference": WORLDS,
        "a difference of ranks": RANK_WORLDS,
        "a difference, patients fail": (*FAILING_WORLDS, *AKIN),
    }
    for part, drawn in drawn_worlds.items():
        times = STUDIES if drawn is WORLDS else STUDIES * 5 // 8
        found = [(one.words, covered(one, times, place)) for place, one in enumerate(drawn)]
        rows[part] = [(words, f"{a:.3f}", f"{b:.3f}", f"{c:.1f}") for words, (a, b, c) in found]
    needed, students = patients_that_find(STUDIES // 2)
    exact = [(f"{size} patients", f"{ratio:.2f}") for size, ratio in width_of_students(STUDIES // 4).items()]
    exact.append(("patients that find 3.5 points", f"{needed / students:.2f}"))
    chance = [(one.words, f"{false_verdicts(one, STUDIES):.3f}") for one in WORLDS if one.kind in ("normal", SKEWED)]
    told = [(one.words, *told_and_found(one, FOUND, EACH)) for one in TOLD]
    return [
        *(Table(heads, own, part) for part, own in rows.items()),
        Table(("", "over Student's"), exact, "beside Student's interval, where that is exact"),
        Table(("study", "false verdicts"), chance, "four rows without a difference"),
        Table(
            ("study", "reported with power .80, in points, median", "found"),
            [(words, f"{100 * difference:.1f}", f"{share:.3f}") for words, difference, share in told],
            "reported power",
        ),
    ]


def words() -> tuple[str, ...]:
    return (
        f"A difference: {STUDIES} drawn studies of each world (results/worlds.py), {STUDIES * 5 // 8} where patients "
        "fail. Half its width is in standard "
        "deviations of the difference.",
        f"Reported power: the median of the differences that {FOUND} studies report as detectable with power .80. Each "
        f"difference is then added to {EACH} new studies.",
    )
