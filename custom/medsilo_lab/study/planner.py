"""Estimate the power of a planned comparison from assumptions, or the power of a finished comparison from its
scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from medsilo.core.errors import MedsiloError
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from medsilo_lab.study.cells import Cell, Row
from medsilo_lab.study.detectable import Design, Pilot
from medsilo_lab.study.evidence import LEAST_PATIENTS, LEAST_SEEDS, LEVEL, Difference
from medsilo_lab.study.law import Variance
from medsilo_lab.study.verdict import Statistics
from medsilo_lab.study.verdict_file import Needed, read_verdict
from medsilo_lab.study.words import LITTLE, needed_in_words, repetitions

# pairs of assumed standard deviations of the difference between methods: between patients, and between seeds
SPREADS = ((0.03, 0.0), (0.03, 0.01), (0.1, 0.0), (0.1, 0.03), (0.3, 0.03))
ASSUMED = 1000


@dataclass(frozen=True)
class Power:
    # the case for which the power is estimated: a hospital, all hospitals together, or assumed standard deviations
    whose: str
    patients: tuple[int, ...]
    seeds: int
    least: float | None
    reach: float
    needed: Needed

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed.as_json()}

    def __str__(self) -> str:
        whom = "too few for a verdict"
        if self.seeds >= LEAST_SEEDS and sum(self.patients) >= LEAST_PATIENTS:
            shown = "no difference" if self.least is None else f"differences from {100 * self.least:.1f} points on"
            whom = f"four of five such studies show {shown}"
        numbers = " + ".join(map(str, self.patients))
        told = f"{self.whose}: {numbers} test patients, {repetitions(self.seeds)} (±{100 * self.reach:.1f} points): "
        return f"{told}{whom}; {needed_in_words(self.needed)}"


def power_of(whose: str, pilot: Pilot, design: Design, difference: float, questions: int = 1) -> Power:
    """Return the power of a study with the sample `design`. The result also contains the sample with which a study
    would detect the difference `difference`.
    """
    error = (1 - LEVEL) / questions
    missing = pilot.needed(difference, error)
    needed = Needed(
        of=missing.of, number=missing.number, seeds=missing.seeds, difference=difference, hospitals=len(design.patients)
    )
    return Power(whose, *design, pilot.least(design, error), min(pilot.reach(design, error), 1.0), needed)


def after(folder: Path, difference: float = LITTLE) -> list[Power]:
    """Estimate the power of a finished comparison from its scores, for all hospitals together and for each hospital."""
    verdict = read_verdict(folder)
    rows = {row.title: Row(row.title, tuple(row.changes)) for row in verdict.rows}
    runs = [(rows[one.row], one.seed, folder / one.run) for one in verdict.runs]
    cells = [Cell(row, seed, load_plan(run / paths.PLAN), run) for row, seed, run in runs]
    found = Statistics(cells, verdict.baseline).pilots() if cells else {}
    if not found:
        raise MedsiloError(
            f"{folder.name}: the scores do not show how patients and repetitions differ; compare with local, with two "
            "repetitions and two test patients at a hospital"
        )
    sites = len(found) - 1
    return [
        power_of(whose, pilot, pilot.design, difference, 1 if len(pilot.ways) > 1 else max(sites, 1))
        for whose, pilot in found.items()
    ]


def before(patients: Mapping[str, int], seeds: int, difference: float = LITTLE) -> list[Power]:
    """Estimate the power for hospitals with the given numbers of test patients, under several assumptions about
    variances.
    """
    sizes = tuple(patients.values())
    if not sizes or min(sizes) < 2:
        few = next((site for site, number in patients.items() if number < 2), "no hospital")
        raise MedsiloError(f"{few} has fewer than two test patients, from which no power can be estimated")
    found = []
    for people, luck in SPREADS:
        ways = people * scipy.special.ndtri((np.arange(200) + 0.5) / 200)
        variance = sum(people**2 / size for size in sizes) / len(sizes) ** 2
        known = Difference(0.0, 0.0, 0.0, 1.0, max(seeds, 2), sum(sizes), Variance(variance, ASSUMED))
        seen = replace(known, between=Variance(luck**2, ASSUMED))
        pilot = Pilot(seen, [ways] * len(sizes), [np.full(len(ways), 0.5)] * len(sizes), assumed=Design(sizes, seeds))
        whose = f"if patients' differences spread by {100 * people:g} points, and repetitions' by {100 * luck:g}"
        found.append(power_of(whose, pilot, Design(sizes, seeds), difference))
    return found


def tested(cells: Sequence[Cell], settings: SiteSettings) -> dict[str, int]:
    """Count the test patients of each hospital in a planned comparison. To count test patients, the data of all
    hospitals are read.
    """
    plan, found = cells[0].plan, {}
    sites = sorted(plan.participation.everyone)
    for site in sites:
        facts = plan.task.survey(site, sites, plan.seed, settings.of(site).data).parts.get("test")
        number = facts and (facts.patients or facts.cases)
        if not number:
            raise MedsiloError(f"{site}: no test patients were found; 'medsilo check' says what is wrong with its data")
        found[site] = number
    return found


def told(powers: Sequence[Power], folder: Path | None = None) -> list[str]:
    if folder is None:
        head = "Before a comparison nobody knows how far patients and repetitions differ. What could be shown:"
    else:
        head = f"What these hospitals can show, as the scores in {folder.name} tell it:"
    return [head, *(f"  {power}" for power in powers)]
