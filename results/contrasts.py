"""Compute the declared contrasts of results/contrasts.yaml from the stored scores of single patients.

    python -m results.contrasts [--write]

The program prints the content of results/contrasts.csv; with --write, the program also writes the file. The program
trains no model. Undeclared contrasts have no interval, and no page shows them.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import yaml

from medsilo.core.errors import MedsiloError
from medsilo_lab.study.evidence import compare, seeds_of
from medsilo_lab.study.training_luck import luck_of
from medsilo_lab.study.verdict import _tested
from medsilo_lab.study.verdict_file import PairedDifference
from results import kept, result_files
from results.kept import Kept
from results.result_files import MEAN, Table
from results.tables import difference, p_of

FILE = result_files.FOLDER / "contrasts.csv"
DECLARATION = result_files.FOLDER / "contrasts.yaml"
CHOSEN, UNSEEN = "chosen", "if an unseen kind fails"
Pair = tuple[str, str]


@dataclass(frozen=True)
class Declaration:
    date: str
    methods: tuple[str, ...]  # candidate methods; contrasts use the candidate with the highest validation score
    groups: Mapping[str, tuple[Pair, ...]]
    sets: Mapping[str, Mapping[str, Any]]

    def pairs(self, name: str) -> list[Pair]:
        own = self.sets.get(name, {}).get("groups", self.groups)
        return [pair for group in own for pair in self.groups[group]]

    def asks_of(self, name: str, configuration: str) -> bool:
        return any(configuration in pair for pair in self.pairs(name))


@cache
def declaration() -> Declaration:
    found = yaml.safe_load(DECLARATION.read_text("utf-8"))
    groups = {name: tuple((one, other) for one, other in pairs) for name, pairs in found["groups"].items()}
    return Declaration(str(found["declared"]), tuple(found["methods"]), groups, found["sets"])


@dataclass(frozen=True)
class Answers:
    name: str
    kept: Kept
    chosen: str | None
    found: Mapping[Pair, PairedDifference]

    @property
    def patients(self) -> int:
        first = next(iter(self.kept.scores.values()))[0]
        return sum(own.people for own in first.values())

    def pairs(self, group: str) -> list[Pair]:
        named = [(self.chosen if one == CHOSEN else one, other) for one, other in declaration().groups[group]]
        return [(one, other) for one, other in named if one and (one, other) in self.found]

    def of_hospitals(self, name: str, other: str) -> dict[str, PairedDifference]:
        """Return a contrast at each hospital; the p-values are corrected for the number of hospitals."""
        mine, theirs = self.kept.scores[name], self.kept.scores[other]
        return _tested({site: compare(mine, theirs, [site]) for site in sorted(mine[0])})

    def mean(self, name: str) -> float:
        study = self.kept.scores[name]
        return float(seeds_of(study, sorted(study[0]), "mean").mean())


def answer(name: str) -> Answers:
    """Compute a data set's contrasts; raise an error if the two configurations of a contrast differ in more than the
    method.
    """
    own, declared = Kept.read(kept.FOLDER / f"{name}.csv"), declaration()
    known = {one: own.validation[one] for one in declared.methods if one in own.validation}
    is_asked = any(one == CHOSEN for one, _ in declared.pairs(name))
    chosen = max(known, key=lambda one: known[one]) if known and is_asked else None
    asked = [(chosen if one == CHOSEN else one, other) for one, other in declared.pairs(name)]
    pairs = [(one, other) for one, other in dict.fromkeys(asked) if one in own.scores and other in own.scores]
    for one, other in pairs:
        if unlike := own.terms[one].unlike(own.terms[other]):
            told = f"{name}: {one} and {other} differ in {', '.join(unlike)}; a contrast of methods has the same"
            raise MedsiloError(told)
    found = {}
    for base in dict.fromkeys(other for _, other in pairs):
        rows = [base, *(one for one, other in pairs if other == base)]
        names = sorted(own.scores[base][0])
        levels = np.array([seeds_of(own.scores[row], names) for row in rows])
        lucks = luck_of(levels, 0) if len(rows) > 2 else [None] * len(rows)
        for row, luck in zip(rows[1:], lucks[1:], strict=True):
            found[row, base] = compare(own.scores[row], own.scores[base], names, luck=luck)
    return Answers(name, own, chosen, _tested(found))


@cache
def answers() -> tuple[Answers, ...]:
    return tuple(answer(name) for name in declaration().sets if (kept.FOLDER / f"{name}.csv").exists())


def unanswered() -> list[str]:
    return [name for name in declaration().sets if name not in {one.name for one in answers()}]


def tables() -> Iterator[Table]:
    for one in answers():
        seeds, patients = str(len(one.kept.seeds)), {MEAN: one.patients}
        told = [(name, f"{100 * one.mean(name):.1f} ± {_spread(one, name):.1f}") for name in one.kept.scores]
        yield Table(("", MEAN), told, one.name, seeds=seeds, patients=patients)
        for base in dict.fromkeys(other for _, other in one.found):
            rows = [
                (name, difference_of(found), p_of(found), unseen_of(found))
                for (name, other), found in one.found.items()
                if other == base
            ]
            yield Table(("", MEAN, "p", UNSEEN), rows, one.name, base, seeds=seeds, patients=patients)


def _spread(one: Answers, name: str) -> float:
    study = one.kept.scores[name]
    return 100 * float(seeds_of(study, sorted(study[0]), "mean").std(ddof=1))


def difference_of(found: PairedDifference) -> str:
    """Return a contrast in points with its interval, written in bold if the contrast is significant."""
    low, high = found.interval
    return difference(found.changed(low=low, high=high))


def unseen_of(found: PairedDifference) -> str:
    """Return a wider confidence interval, which allows for patients unlike those in the test set on whom the method
    fails.
    """
    return f"{100 * found.unseen[0]:+.1f} to {100 * found.unseen[1]:+.1f}" if found.unseen else ""


def text() -> str:
    asked = [one for one in answers() if any(own == CHOSEN for own, _ in declaration().pairs(one.name))]
    chosen = [f"{one.name}: {one.chosen or 'none, because too few validation cases have a score'}" for one in asked]
    header = {
        "title": "Declared contrasts, answered from kept scores of single patients",
        "data": "white blood cells, nuclei, hippocampus, UCI Heart Disease, TCGA-BRCA, IMPACT",
        "command": "python -m results.contrasts --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "declared": f"results/contrasts.yaml, {declaration().date}",
        "about": "Intervals are those on which a verdict rests, corrected for all contrasts of a set. Scores are in "
        "results/scores; `python -m results what-differs --write` makes them again.",
        "chosen by validation cases": chosen,
        "declared and not run": unanswered(),
    }
    return result_files.Study(header, list(tables())).text()


if __name__ == "__main__":
    result_files.print_or_write(FILE, text())
