"""Calculate the rates of each class from a site's disclosed counts, with confidence intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from medsilo.runs.schema import Decisions, SiteResult
from medsilo_lab.study.evidence import LEVEL
from medsilo_lab.study.law import Interval

# number of standard deviations of a normal distribution within which a fraction LEVEL of the distribution lies
REACH = NormalDist().inv_cdf((1 + LEVEL) / 2)


class ClassRates(NamedTuple):
    """The rates of one class against all other classes. The predicted class is the most probable class.

    A rate at 90 % specificity or at 90 % sensitivity belongs to another threshold on the class's probability. The
    rates of a class without cases are missing (None).
    """

    name: str
    cases: int
    sensitivity: float | None
    specificity: float | None
    precision: float | None
    f1: float | None
    auroc: float | None
    pr_auc: float | None
    sensitivity_at_90_specificity: float | None
    specificity_at_90_sensitivity: float | None
    intervals: Mapping[str, Interval]


AT_RATE = ("sensitivity_at_90_specificity", "specificity_at_90_sensitivity")


def by_class(site: SiteResult, names: Sequence[str]) -> list[ClassRates]:
    """Return the rates of each class, or an empty list if the site does not disclose its confusion matrix."""
    if site.decisions is None:
        return []
    return [of_class(site.decisions, site.figures, label, name, len(names) == 2) for label, name in enumerate(names)]


def of_class(decisions: Decisions, figures: Mapping[str, float | None], label: int, name: str, two: bool) -> ClassRates:
    own, right, others, rejected = against_rest(decisions, label)
    wrong = others - rejected
    counted = {
        "sensitivity": (right, own),
        "specificity": (rejected, others),
        "precision": (right, right + wrong),
    }
    rates = {of: part / whole if whole else None for of, (part, whole) in counted.items()}
    rates["f1"] = 2 * right / (own + right + wrong) if own + right + wrong else None
    rates["auroc"] = figures.get("auroc" if two else f"auroc_{label}")
    rates |= {of: figures.get(f"{of}_{label}") for of in ("pr_auc", *AT_RATE)}
    intervals = {of: wilson(part, whole) for of, (part, whole) in counted.items() if whole}
    if own + wrong:
        intervals["f1"] = interval_of_f1(right, own + wrong)
    for of, whole in zip(AT_RATE, (own, others), strict=True):
        if (rate := rates[of]) is not None:
            intervals[of] = wilson(rate * whole, whole)
    if rates["auroc"] is not None and own and others:
        intervals["auroc"] = interval_of_auroc(rates["auroc"], own, others)
    if rates["pr_auc"] is not None and own:
        intervals["pr_auc"] = interval_of_pr_auc(rates["pr_auc"], own)
    return ClassRates(name, own, **rates, intervals=intervals)


def against_rest(decisions: Decisions, label: int) -> tuple[int, int, int, int]:
    """Return four numbers: cases of the class, true positives among them, cases of all other classes, and true
    negatives among them.
    """
    everyone = sum(map(sum, decisions.confusion))
    own, right = sum(decisions.confusion[label]), decisions.confusion[label][label]
    others, wrong = everyone - own, sum(row[label] for row in decisions.confusion) - right
    return own, right, others, others - wrong


# ---------------------------------------------------------------------------------------------------- intervals
def wilson(part: float, whole: float) -> Interval:
    """Return Wilson's confidence interval (1927) of a proportion."""
    share, square = part / whole, REACH**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    reach = REACH / (1 + square / whole) * math.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    # at a share of 0 or 1, a rounding error could leave the share outside its interval
    return min(max(middle - reach, 0.0), share), max(min(middle + reach, 1.0), share)


def interval_of_f1(right: float, whole: float) -> Interval:
    """Return the confidence interval of F1.

    F1 is 2 J / (1 + J). J is the fraction of true positives among the cases that belong to the class or are assigned
    to it. J is a proportion, so the ends are those of Wilson's interval of J.
    """
    low, high = wilson(right, whole)
    return 2 * low / (1 + low), 2 * high / (1 + high)


def interval_of_auroc(area: float, own: float, others: float) -> Interval:
    """Return Newcombe's confidence interval (2006, method 5) of an AUROC, with the variance of Hanley and McNeil."""
    beyond = max((own + others) / 2 - 1, 0.0)

    def off(other: float) -> float:
        variance = other * (1 - other) * (1 + beyond * ((1 - other) / (2 - other) + other / (1 + other)))
        return REACH**2 * variance / (own * others) - (other - area) ** 2

    return _end(off, area, 0.0), _end(off, area, 1.0)


def _end(off: Callable[[float], float], area: float, outside: float) -> float:
    """Return the point between `area` and `outside` at which the function `off` becomes negative."""
    inside = area
    for _ in range(60 if area != outside else 0):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if off(middle) >= 0 else (inside, middle)
    return inside


def interval_of_pr_auc(area: float, own: float) -> Interval:
    """Return the confidence interval of an area under the precision-recall curve: the logit interval of Boyd, Eng and
    Page (2013). If the area is so close to 0 or 1 that the logit interval would cover almost all areas, the interval is
    that of a proportion.
    """
    if own * area * (1 - area) < 1:
        return wilson(area * own, own)
    middle, reach = math.log(area / (1 - area)), REACH / math.sqrt(own * area * (1 - area))
    return 1 / (1 + math.exp(reach - middle)), 1 / (1 + math.exp(-reach - middle))
