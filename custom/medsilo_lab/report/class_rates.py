"""Say how well each class is told from the rest, from what a site tells of its decisions."""

from collections.abc import Sequence
from typing import NamedTuple

from medsilo.runs.schema import Decisions, SiteResult


class ClassRates(NamedTuple):
    """A class against the rest, where the most probable class is what was found. None where there is no such case."""

    name: str
    cases: int
    sensitivity: float | None
    specificity: float | None
    auroc: float | None


def by_class(site: SiteResult, names: Sequence[str]) -> list[ClassRates]:
    """Return how well each class is told from the rest; nothing where the site does not tell classes."""
    if site.decisions is None:
        return []
    rates = []
    for label, name in enumerate(names):
        own, right, others, rejected = against_rest(site.decisions, label)
        area = site.figures.get("auroc" if len(names) == 2 else f"auroc_{label}")
        rates.append(ClassRates(name, own, right / own if own else None, rejected / others if others else None, area))
    return rates


def against_rest(decisions: Decisions, label: int) -> tuple[int, int, int, int]:
    """Return a class's cases and those of them found, the others' cases and those of them not taken for it."""
    everyone = sum(map(sum, decisions.confusion))
    own, right = sum(decisions.confusion[label]), decisions.confusion[label][label]
    others, wrong = everyone - own, sum(row[label] for row in decisions.confusion) - right
    return own, right, others, others - wrong
