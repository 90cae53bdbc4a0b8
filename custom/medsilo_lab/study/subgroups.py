"""Calculate the scores of subgroups of patients, and the differences between levels of a subgroup. Confidence intervals
of differences are corrected for multiple comparisons.

For a single run, scores are calculated from three numbers that each hospital discloses for a level: number of patients,
mean score and variance. For a comparison, scores are calculated from single test cases, as means over patients and
seeds.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch

from medsilo.core.errors import MedsiloError
from medsilo.federation.raw_results import LEVEL as LEVEL_COLUMN
from medsilo.federation.raw_results import PATIENT, SUBGROUP
from medsilo.runs import paths
from medsilo.runs.schema import SubgroupResult, Summary
from medsilo.runs.score import Score
from medsilo.tasks.scored_together import AUROC, BALANCED, contributions
from medsilo.tasks.subgroups import HOSPITAL
from medsilo_lab.study.evidence import (
    LEAST_PATIENTS,
    LEVEL,
    Difference,
    Key,
    Scores,
    compare,
    errors_of,
    holm,
    joined,
    level,
)
from medsilo_lab.study.law import Interval
from medsilo_lab.study.scores import CONCORDANCE, RANKED, SiteTest, parts_of_concordance
from medsilo_lab.study.subgroup_tables import SubgroupLevel, SubgroupPair, SubgroupTable

ERROR = 1 - LEVEL
STEPS = 40
Pair = tuple[str, str, str]
Level = tuple[str, str]


# ---------------------------------------------------------------------------------------------------- a single run
class DisclosedScore(NamedTuple):
    """The score of a level, calculated from the disclosures of hospitals."""

    low: float  # lower end of the range of a rounded score
    high: float
    variance: float
    patients: int
    hospitals: int

    @classmethod
    def of(cls, results: Sequence[SubgroupResult]) -> "DisclosedScore":
        """Combine the disclosed scores of a level at several hospitals to a score over all patients."""
        whole = sum(result.patients for result in results)
        ends = [sum((one.score or 0.0) * one.patients for one in results) / whole] * 2
        half = sum(one.step / 2 * one.patients for one in results) / whole
        spread = sum((one.spread or 0.0) * one.patients for one in results) / whole**2
        return cls(max(ends[0] - half, 0.0), min(ends[1] + half, 1.0), spread, whole, len(results))

    def within(self, error: float) -> Interval:
        """Return Wilson's confidence interval (1927) with Student's t, for the error rate `error`. The sample size in
        Wilson's formula is not the number of patients. It is the size at which a proportion would have the variance of
        the score.
        """
        degrees = max(self.patients - self.hospitals, 1)
        square = float(scipy.special.stdtrit(degrees, error / 2)) ** 2
        return self._wilson(self.low, square)[0], self._wilson(self.high, square)[1]

    def _wilson(self, mean: float, square: float) -> Interval:
        most = mean * (1 - mean)
        number = most / self.variance if most and self.variance else float(self.patients)
        middle = (mean * number + square / 2) / (number + square)
        reach = math.sqrt(square * (number * most + square / 4)) / (number + square)
        return max(middle - reach, 0.0), min(middle + reach, 1.0)

    def less(self, other: "DisclosedScore", error: float) -> Interval:
        """Return the confidence interval of the difference between two levels. The interval is Newcombe's method 10
        (1998), which is for levels with different patients.
        """
        (mine, above), (below, theirs) = self.within(error), other.within(error)
        low = self.low - other.high - math.hypot(self.low - mine, theirs - other.high)
        high = self.high - other.low + math.hypot(above - self.high, other.low - below)
        return max(low, -1.0), min(high, 1.0)


def of_run(summary: Summary) -> list[SubgroupTable]:
    """Return the tables of all subgroups that hospitals disclosed in a run. One more table treats each hospital as a
    level of a subgroup, and compares the hospitals.
    """
    results: dict[Level, list[SubgroupResult]] = {}
    for site in summary.sites.values():
        for subgroup in site.subgroups:
            results.setdefault((subgroup.subgroup, subgroup.level), []).append(subgroup)
    known = {key: DisclosedScore.of(own) for key, several in results.items() if (own := _with_score(several))}
    pairs = {
        (name, first, second): (known[name, first], known[name, second])
        for name in dict.fromkeys(name for name, _ in results)
        for first, second in combinations([word for of, word in results if of == name and (of, word) in known], 2)
    }
    found = {}
    for key, (first, second) in pairs.items():
        mean = (first.low + first.high - second.low - second.high) / 2
        enough, within = min(first.patients, second.patients) >= LEAST_PATIENTS, partial(first.less, second)
        found[key] = _Found(mean, _p(within), enough, within)
    levels = {key: _level_of_run(key[1], result, known.get(key)) for key, result in results.items()}
    return _tables(levels, found)


def _with_score(results: Sequence[SubgroupResult]) -> list[SubgroupResult]:
    return [result for result in results if result.score is not None and result.patients > 0]


def _level_of_run(word: str, results: Sequence[SubgroupResult], known: DisclosedScore | None) -> SubgroupLevel:
    if known is None:
        return SubgroupLevel(level=word, score=Score(kind="suppressed"), few=True)
    low, high = known.within(ERROR)
    parts = [Score.told(one.score, one.patients, one.step) for one in _with_score(results)]
    return SubgroupLevel(
        level=word,
        patients=known.patients,
        hospitals=known.hospitals,
        score=Score.mean(known.low, known.high, parts),
        low=low,
        high=high,
        few=known.patients < LEAST_PATIENTS,
    )


class _Found(NamedTuple):
    mean: float
    p: float
    enough: bool  # true if the number of patients is large enough for a significant difference
    within: Callable[[float], Interval]


def _p(within: Callable[[float], Interval]) -> float:
    """Return the p-value: the error rate for which one end of the confidence interval is zero."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        ends = within(middle)
        low, high = (middle, high) if ends[0] <= 0 <= ends[1] else (low, middle)
    return high


def _corrected(differences: Mapping[Key, _Found]) -> dict[Key, dict[str, Any]]:
    """Correct differences for multiple comparisons. Return the confidence interval, the p-value and the significance of
    each difference.
    """
    p_values = {key: difference.p for key, difference in differences.items()}
    adjusted, errors = holm(p_values), errors_of(p_values, ERROR)
    told = {}
    for key, own in differences.items():
        low, high = own.within(min(errors[key], ERROR))
        sure = own.enough and adjusted[key] < ERROR
        if not sure:
            low, high = min(low, 0.0), max(high, 0.0)
        ends = {"mean": own.mean, "low": max(low, -1.0), "high": min(high, 1.0)}
        told[key] = {**ends, "adjusted": adjusted[key], "sure": sure}
    return told


def _tables(
    levels: Mapping[Level, SubgroupLevel], differences: Mapping[Pair, _Found], row: str = "", baseline: str = ""
) -> list[SubgroupTable]:
    """Return a table with corrected differences for each subgroup. The last of the returned tables compares the
    hospitals.
    """
    told, tables = _corrected(differences), []
    for name in sorted(dict.fromkeys(name for name, _ in levels), key=lambda name: name == HOSPITAL):
        own = [level for (of, _), level in levels.items() if of == name]
        pairs = [SubgroupPair(first=key[1], second=key[2], **one) for key, one in told.items() if key[0] == name]
        if name != HOSPITAL or len(own) > 1:
            tables.append(SubgroupTable(subgroup=name, row=row, baseline=baseline, levels=own, pairs=pairs))
    return tables


# ---------------------------------------------------------------------------------------------------- level of a
# subgroup → indices of the level's patients in the list of the site's test patients
Members = dict[Level, np.ndarray]


def read_members(run: Path, site: str) -> Members:
    """From a run folder, read which test patients of a site belong to each level. If the score of a level is
    suppressed, the level has no patients.
    """
    path = paths.site_folder(run, site) / paths.SUBGROUPS
    if not path.exists():
        return {}
    found: dict[Level, list[int]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                own = found.setdefault((line[SUBGROUP], line[LEVEL_COLUMN]), [])
                own += [int(line[PATIENT])] if line[PATIENT] else []
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise MedsiloError(
            f"{paths.SUBGROUPS} of {site} in run '{run.resolve().name}' is damaged: repeat the run", str(error)
        ) from error
    return {key: np.array(sorted(own), int) for key, own in found.items()}


def _classes(test: SiteTest) -> int:
    return next(number for number in count() if f"p{number}" not in test.measures)


def level_scores(run: Path, site: str, metric: str) -> dict[Level, Scores | None]:
    """Return the scores of a site's test cases for each level. For a level with a suppressed score, return None."""
    members = read_members(run, site)
    if not members:
        return {}
    test = SiteTest.read(run, site, metric)
    found: dict[Level, Scores | None] = dict.fromkeys(members)
    for key, member in members.items():
        cases = np.flatnonzero(np.isin(test.scores.patients, member))
        if not len(cases):
            continue
        values = test.scores.values[cases]
        if metric == CONCORDANCE:  # a level's concordance counts only pairs in which both cases belong to the level
            values = parts_of_concordance(*(test.measures[name].numpy()[cases] for name in RANKED))
        if metric in (AUROC, BALANCED):
            chances = [test.measures[f"p{label}"][cases] for label in range(_classes(test))]
            values = contributions(metric, test.measures["label"][cases].long(), torch.stack(chances, 1)).numpy()
        if np.isfinite(values).all():
            found[key] = Scores(values, np.unique(test.scores.patients[cases], return_inverse=True)[1])
    return found


Levels = Mapping[Level, Scores | None]  # level of a subgroup → scores, or None if the score of the level is suppressed
Study = Sequence[Mapping[str, Levels]]  # for each seed: site → levels of subgroups with their scores


def of_row(row: str, study: Study, baseline: str = "", base: Study = ()) -> list[SubgroupTable]:
    """Return the tables of subgroups for a configuration. `base` contains the scores of the baseline, and `study`
    contains the scores of the configuration, for the same seeds.

    The score of a level is a mean over the patients of all hospitals that disclose this level in all runs.
    """
    every = dict.fromkeys(key for seed in study for levels in seed.values() for key in levels)
    runs = [*study, *base]
    sites = {key: [site for site in study[0] if all(run.get(site, {}).get(key) for run in runs)] for key in every}
    mine, theirs = (
        {key: [_together(run, own, key) for run in runs] for key, own in sites.items() if own} for runs in (study, base)
    )
    differences = {key: compare(own, theirs[key]) for key, own in mine.items() if base}
    pairs = {
        (name, first, second): _between(mine[name, first], mine[name, second])
        for name in dict.fromkeys(name for name, _ in mine)
        for first, second in combinations([word for of, word in mine if of == name], 2)
    }
    told = _corrected(
        {
            key: _Found(difference.mean, difference.p, difference.decides, difference.within)
            for key, difference in differences.items()
        }
    )
    levels = {key: SubgroupLevel(level=key[1], score=Score(kind="suppressed"), few=True) for key in every}
    for key, scores in mine.items():
        found = level(scores)
        levels[key] = SubgroupLevel(
            level=key[1],
            patients=found.people,
            hospitals=len(sites[key]),
            score=Score.told(found.mean, found.people),
            low=max(found.low, 0.0),
            high=min(found.high, 1.0),
            few=found.people < LEAST_PATIENTS,
            difference=SubgroupPair(first=row, second=baseline, **told[key]) if base else None,
        )
    asked = {}
    for pair, one in pairs.items():
        enough = not any(levels[pair[0], word].few for word in pair[1:])
        asked[pair] = _Found(2 * one.mean, one.p, one.decides and enough, partial(_twice, one))
    return _tables(levels, asked, row, baseline)


def _together(seed: Mapping[str, Levels], sites: Sequence[str], key: Level) -> dict[str, Scores]:
    return {"": joined([own for site in sites if (own := seed[site][key])])}


def _twice(difference: Difference, error: float) -> Interval:
    low, high = difference.within(error)
    return 2 * low, 2 * high


def _between(first: Sequence[Mapping[str, Scores]], second: Sequence[Mapping[str, Scores]]) -> Difference:
    """Return half of the difference between two levels. The two levels have different patients, but the same models
    were tested on both levels.

    Half of the difference between two levels equals the mean difference over two artificial sites. At the first
    artificial site, the difference is the first level's score. At the second artificial site, the difference is the
    second level's score with a minus sign. With the two artificial sites, the difference between levels can be
    estimated like a difference between two methods.
    """
    pairs = [(one[""], other[""]) for one, other in zip(first, second, strict=True)]
    mine = [{"first": one, "second": _nothing(other)} for one, other in pairs]
    theirs = [{"first": _nothing(one), "second": other} for one, other in pairs]
    return compare(mine, theirs)


def _nothing(scores: Scores) -> Scores:
    return Scores(np.zeros_like(scores.values), scores.patients)
