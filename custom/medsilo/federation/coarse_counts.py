"""Round the counts over a hospital's test cases before the counts leave the hospital.

In the rounded counts, each patient counts once, even if the patient has several cases. Each rounded count is a multiple
of a minimum number of patients.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch

from medsilo.core.rounding import Resolution
from medsilo.tasks.measuring import WIDE, judged, places_of
from medsilo.tasks.metrics import BROAD, BY_PATIENT, CHANCES, CONFUSION, RELIABILITY, WEIGHT, Counts, Measures
from medsilo.tasks.objective import Objective


def coarse_counts(
    objective: Objective, measures: Measures, patients: Sequence[str], resolution: Resolution, least: int, of_class: int
) -> Counts:
    """Return rounded counts over a hospital's test cases.

    Args:
        least: minimum number of patients that a mean must cover
        of_class: minimum number of patients that each class must have
    """
    pairs = {name for name, length in objective.layout.items() if length == 2}
    cut = {
        name: measure.clamp(*objective.told_range(name)) if name in pairs else measure
        for name, measure in measures.items()
    }
    told = {}
    for name, own in objective.counts(cut, patients, 0).items():
        known = ~cut.get(name, measures[WEIGHT]).isnan()
        people = int(own[1]) if name.endswith(BY_PATIENT) else len({*compress(patients, known.tolist())})
        if name in pairs and not 0 < people < least:
            told[name] = _coarse_mean(objective, name, own, people, len(patients), resolution) if people else [0.0, 0.0]
    # If a mean error or distance rounds to 0, the function leaves the mean out, because a disclosed error of 0 would
    # look perfect.
    errors = {name for name in told if objective.told_range(name) != objective.metric_range}
    told = {name: own for name, own in told.items() if own[0] or not own[1] or name not in errors}
    whole = objective.counts(cut, patients, of_class)
    if CONFUSION in whole:
        told[CONFUSION] = resolution.shared_out(whole[CONFUSION])
        told[CHANCES] = coarse_chances(whole[CHANCES], objective.classes, resolution)
        told[RELIABILITY] = coarse_reliability(
            whole[RELIABILITY], whole[CHANCES], told[CHANCES], objective.classes, resolution
        )
    return told


def _coarse_mean(
    objective: Objective, name: str, values: Sequence[float], people: int, cases: int, resolution: Resolution
) -> list[float]:
    """Return a rounded mean as two numbers: the mean times the rounded number of patients, and the rounded number of
    patients.
    """
    total, number = values
    # A mean over patients is computed from one value per patient.
    if name.endswith(BY_PATIENT):
        cases, resolution = resolution.size, replace(resolution, weight=1 / resolution.size)
    mean = resolution.among(number / cases).mean(total / number, *objective.told_range(name.removesuffix(BY_PATIENT)))
    return [mean * resolution.count(people), float(resolution.count(people))]


def coarse_chances(histograms: Sequence[float], classes: int, resolution: Resolution) -> list[float]:
    """Return histograms whose counts are rounded and whose bins are merged into BROAD bins. In each class, the rounded
    counts of the bins add up to the rounded total.
    """
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BROAD, WIDE).sum(-1)
    told = torch.zeros(classes, 2, BROAD, WIDE, dtype=torch.float64)
    for label in range(classes):
        units = resolution.shared_out(counts[label].flatten().tolist())
        told[label, :, :, WIDE // 2] = torch.tensor(units, dtype=torch.float64).reshape(2, BROAD)
    return told.flatten().tolist()


def coarse_reliability(
    sums: Sequence[float], histograms: Sequence[float], counts: Sequence[float], classes: int, resolution: Resolution
) -> list[float]:
    """Return, for each bin of probabilities, the rounded number of cases times the rounded mean probability.

    If one patient could move a bin's mean by the bin's width, the function uses the bin's middle instead of the mean.

    Args:
        histograms: the exact histograms
        counts: the rounded histograms
    """
    cases, shown = (places_of(one, classes).sum(1).flatten().tolist() for one in (histograms, counts))
    everyone = sum(cases) / len(judged(classes))
    found = []
    for number, (total, count, told_count) in enumerate(zip(sums, cases, shown, strict=True)):
        low, high = number % BROAD / BROAD, (number % BROAD + 1) / BROAD
        mean = (low + high) / 2
        if told_count and count:
            here = resolution.among(count / everyone)
            if here.step(low, high) < high - low:
                mean = min(max(here.mean(total / count, low, high), low), high)
        found.append(told_count * mean)
    return found
