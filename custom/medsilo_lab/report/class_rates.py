"""Calculate the sensitivity and the specificity of each class from a site's disclosed confusion matrix."""

from collections.abc import Sequence
from typing import NamedTuple

from medsilo.runs.schema import Decisions, SiteResult


class ClassRates(NamedTuple):
    """The sensitivity, specificity and AUROC of one class against all other classes. The predicted class is the most
    probable class. The rates of a class without cases have the value None.
    """

    name: str
    cases: int
    sensitivity: float | None
    specificity: float | None
    auroc: float | None


def by_class(site: SiteResult, names: Sequence[str]) -> list[ClassRates]:
    """Return the rates of each class, or an empty list if the site does not disclose its confusion matrix."""
    if site.decisions is None:
        return []
    rates = []
    for label, name in enumerate(names):
        own, right, others, rejected = against_rest(site.decisions, label)
        area = site.figures.get("auroc" if len(names) == 2 else f"auroc_{label}")
        rates.append(ClassRates(name, own, right / own if own else None, rejected / others if others else None, area))
    return rates


def against_rest(decisions: Decisions, label: int) -> tuple[int, int, int, int]:
    """Return four numbers: cases of the class, true positives among them, cases of all other classes, and true
    negatives among them.
    """
    everyone = sum(map(sum, decisions.confusion))
    own, right = sum(decisions.confusion[label]), decisions.confusion[label][label]
    others, wrong = everyone - own, sum(row[label] for row in decisions.confusion) - right
    return own, right, others, others - wrong
