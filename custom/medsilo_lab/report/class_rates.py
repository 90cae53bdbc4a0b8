"""Calculate sensitivity and specificity of each class against the other classes, from a site's disclosed decisions."""

from collections.abc import Sequence
from typing import NamedTuple

from medsilo.runs.schema import Decisions, SiteResult


class ClassRates(NamedTuple):
    """The results of one class against the others, with the most probable class as the decision. A class without cases
    has None in place of a rate.
    """

    name: str
    cases: int
    sensitivity: float | None
    specificity: float | None
    auroc: float | None


def by_class(site: SiteResult, names: Sequence[str]) -> list[ClassRates]:
    """Return sensitivity and specificity of each class; empty if the site does not disclose its class counts."""
    if site.decisions is None:
        return []
    rates = []
    for label, name in enumerate(names):
        own, right, others, rejected = against_rest(site.decisions, label)
        area = site.figures.get("auroc" if len(names) == 2 else f"auroc_{label}")
        rates.append(ClassRates(name, own, right / own if own else None, rejected / others if others else None, area))
    return rates


def against_rest(decisions: Decisions, label: int) -> tuple[int, int, int, int]:
    """Return four counts: cases of a class, its true positives, cases of other classes, and its true negatives."""
    everyone = sum(map(sum, decisions.confusion))
    own, right = sum(decisions.confusion[label]), decisions.confusion[label][label]
    others, wrong = everyone - own, sum(row[label] for row in decisions.confusion) - right
    return own, right, others, others - wrong
