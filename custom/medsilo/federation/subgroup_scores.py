"""Decide which subgroup scores over a site's test patients the site may send, and round these scores.

The score of a level with fewer patients than the hospital's minimum does not leave the hospital. A score also stays at
the hospital if it would reveal the score of a group with fewer patients than the minimum. Sums and
differences of disclosed scores (of all patients, classes and subgroups) could reveal the score of a small group.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.rounding import Resolution
from medsilo.runs.messages import SubgroupScore
from medsilo.tasks.metrics import Measures
from medsilo.tasks.objective import Objective
from medsilo.tasks.site_data import Cases, CaseSubset, labels_of, patients_of
from medsilo.tasks.subgroups import HOSPITAL, Members

if TYPE_CHECKING:
    from medsilo.tasks.subgroups import Subgroup

Group = frozenset[str]
Level = tuple[str, str]  # the name of a subgroup, and the name of a level of the subgroup
# maximum number of sets of small atoms to check; a score that needs more sets is suppressed
MOST_SETS = 200_000
SAME = 1 - 1e-9
# bound on the square of one patient's contribution to a score over pairs; one patient is in many pairs
PAIRS = 4.0
SLACK = 1e-6  # tolerance for a mean that lies outside its range because of floating-point errors


def levels_of(
    declared: Mapping[str, "Subgroup"], members: Members, patients: Sequence[str], site: str
) -> dict[Level, Group]:
    """Return the patients of each declared subgroup level. If any level is declared, the hospital itself also counts as
    a level with all patients.
    """
    found: dict[Level, Group] = {}
    for name, own in declared.items():
        for word in own.words:
            found[name, word] = frozenset(who for who in patients if members.get(name, {}).get(who) == word)
    return found | {(HOSPITAL, site): frozenset(patients)} if found else {}


def safe_levels(
    levels: Mapping[Level, Group], known: Sequence[Group], least: int, may: Callable[[Level], bool]
) -> list[Level]:
    """Return the levels, largest first, whose scores the site may send in addition to the scores that are already
    disclosed.

    The function decides as if an empty level could also have one patient, so the decision does not reveal whether a
    level is empty.

    Args:
        known: all patients, then the patients of each class
        may: a further check of each level that passes the other checks
    """
    worlds = [_World(levels, known)]
    worlds += [
        _World(levels, known, level, place)
        for level, own in levels.items()
        for place in range(1, max(len(known), 2))
        if not own
    ]
    kept = []
    for level in sorted(levels, key=lambda one: (-len(levels[one]), one)):
        large = len(levels[level]) >= max(least, 1)
        if large and all(world.takes(level, least) for world in worlds) and may(level):
            for world in worlds:
                world.told.append(world.levels[level])
            kept.append(level)
    return kept


class _World:
    """All subgroup levels and all groups with disclosed scores, to which one hypothetical patient may be added."""

    def __init__(
        self, levels: Mapping[Level, Group], known: Sequence[Group], to: Level | None = None, index: int = 0
    ) -> None:
        """If `to` is a level, add a hypothetical patient to this level, to the hospital and to a class; otherwise, add
        no patient.

        Args:
            to: the level of the added patient
            index: the index of the patient's class in `known`
        """
        added: Group = frozenset() if to is None else frozenset({"a patient who is not there"})
        joined = {to, *(level for level in levels if level[0] == HOSPITAL)}
        self.levels = {level: own | added if level in joined else own for level, own in levels.items()}
        told = [own | added if number in (0, index) else own for number, own in enumerate(known)]
        self.told = [own for own in told if own]

    def takes(self, level: Level, least: int) -> bool:
        """True if a level's score, combined with the disclosed scores, does not reveal the score of a small group of
        patients.
        """
        own = self.levels[level]
        return own in self.told or not reveals_few([*self.told, own], least)


def reveals_few(groups: Sequence[Group], least: int) -> bool:
    """True if sums and differences of the disclosed totals reveal a total over fewer than `least` patients.

    All patients who belong to exactly the same groups form one atom. Each group is a row of 0 and 1 over the atoms, and
    the groups' totals reveal every linear combination of the rows. A linear combination reveals a total of few patients
    if all atoms with a nonzero coefficient together have fewer than `least` patients.
    """
    everyone = sorted(frozenset[str]().union(*groups))
    marks: dict[tuple[bool, ...], int] = {}
    for who in everyone:
        mark = tuple(who in group for group in groups)
        marks[mark] = marks.get(mark, 0) + 1
    atoms, sizes = np.array([*marks], float), np.array([*marks.values()])
    _, strengths, rows = np.linalg.svd(atoms.T, full_matrices=False)
    basis = rows[strengths > 1e-9 * strengths[0]]
    projector = basis.T @ basis
    few = np.flatnonzero(sizes < least)
    for number in range(1, min(least - 1, len(few)) + 1):
        if comb(len(few), number) > MOST_SETS:
            # there are too many sets to check all, so assume that the score reveals the score of a small group
            return True
        several = np.array([*combinations(few.tolist(), number)])
        several = several[sizes[several].sum(1) < least]
        within = projector[several[:, :, None], several[:, None, :]]
        if len(several) and float(np.linalg.eigvalsh(within)[:, -1].max()) > SAME:
            return True
    return False


def scores_of(
    objective: Objective,
    measures: Measures,
    patients: Sequence[str],
    levels: Mapping[Level, Group],
    resolutions: Mapping[Level, Resolution],
) -> list[SubgroupScore]:
    """Return the rounded score of each subgroup level.

    Args:
        resolutions: the rounding of each level whose score may leave the hospital
    """
    low, high = objective.metric_range
    found = []
    for (name, word), level in levels.items():
        resolution = resolutions.get((name, word))
        if resolution is None:
            found.append(SubgroupScore(subgroup=name, level=word))
            continue
        places = torch.tensor([place for place, who in enumerate(patients) if who in level])
        parts = objective.parts(measures, places)
        score = float(parts.mean())
        known = bool(torch.isfinite(parts).all()) and low - SLACK <= score <= high + SLACK
        most = 1.0 if objective.by_case else PAIRS
        spread = min(_spread(parts, [patients[place] for place in places.tolist()], most), most) if known else 0.0
        # Add half a rounding step, because a variance that is rounded down would make a confidence interval too narrow.
        off = resolution.step(0, most) / 2
        found.append(
            SubgroupScore(
                subgroup=name,
                level=word,
                patients=resolution.counted,
                score=resolution.mean(min(max(score, low), high), low, high) if known else None,
                spread=min(resolution.mean(spread, 0, most) + off, most) if known else None,
                step=resolution.step(low, high),
            )
        )
    return found


def _spread(parts: Tensor, patients: Sequence[str], most: float) -> float:
    """Return the variance between patients of their contributions to a mean over cases.

    Args:
        most: upper bound on one patient's squared contribution
    """
    number = {who: place for place, who in enumerate(dict.fromkeys(patients))}
    sums = torch.zeros(len(number), dtype=parts.dtype)
    sums.index_add_(0, torch.tensor([number[who] for who in patients]), parts - parts.mean())
    moves = (sums * len(number) / len(parts)) ** 2
    return float(moves.clamp(max=most).sum()) / max(len(number) - 1, 1)


def some_of(data: Dataset, indices: Sequence[int]) -> Dataset:
    """Return a subset of the cases; the function does not read the data of the cases."""
    if isinstance(data, Cases):
        return Cases(data.inputs[indices], data.targets[indices], [data.patients[place] for place in indices])
    return CaseSubset(data, indices, patients_of(data), labels_of(data))
