"""Choose who is trained on and who is tested: patients (or other groups) go whole to training, validation or test."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator

from medsilo.core.errors import DataError
from medsilo.learning.seeds import seed_for
from medsilo.tasks.survey import PARTS

Split = Literal["patient", "paper"]
NEAR = 1e-9  # by which a product of shares may miss a whole number


def _whole(shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError("give three shares above 0 that add up to 1: train, validation and test")
    return shares


Shares = Annotated[tuple[float, float, float], AfterValidator(_whole)]


def parts_by_draw(groups: Sequence[str], shares: Shares, seed: int) -> np.ndarray:
    """0 train, 1 validation, 2 test of every case, [cases]: groups go whole and no part is empty, near the shares.

    groups: [cases] who or what must not be in two parts. The order in which they are dealt is drawn from the seed.
    """
    names, places, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    if len(names) < 3:
        raise DataError(
            f"the site's data are of {len(names)} patients (or images); train, validation and test need one each"
        )
    part, held = np.zeros(len(names), np.int64), np.zeros(3)
    for done, group in enumerate(np.random.default_rng(seed).permutation(len(names))):
        wanted = np.asarray(shares) * len(groups) - held
        if np.count_nonzero(held == 0) >= len(names) - done:
            wanted[held > 0] = -np.inf
        part[group] = wanted.argmax()
        held[part[group]] += sizes[group]
    return part[places.reshape(-1)]


def split_seed(seed: int, *site: str) -> int:
    """Return what a split is drawn from."""
    return seed_for(seed, *site, "split")


def part_alone(patient: str, shares: Sequence[float], split: int) -> str:
    """Return a patient's part by a hash of the name alone: near the shares, and the same whoever else comes."""
    place = seed_for(split, "alone", patient) / 2**63
    return PARTS[int(place >= shares[0]) + int(place >= shares[0] + shares[1])]


def parts_by_rank(
    classes: Mapping[str, str], shares: Sequence[float], split: int, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the part of every patient, near the shares in all and within each class; no part is empty if that can be.

    classes: what each patient's images show, the same for all where they have no class; known: the parts of patients
    who have one already and keep it. Without those, the patients of a class are ranked by the hash of their names and
    cut at the shares. With them, newcomers come in that order, each to the part that lacks most.
    """
    ranked = sorted(classes, key=lambda patient: (seed_for(split, "part", patient), patient))
    if kept := {patient: part for patient, part in (known or {}).items() if patient in classes}:
        return _with_newcomers(ranked, classes, shares, kept)
    of_class: defaultdict[str, list[str]] = defaultdict(list)
    for patient in ranked:
        of_class[classes[patient]].append(patient)
    names = sorted(of_class)
    found: dict[str, str] = {}
    for name, numbers in zip(names, _numbers([len(of_class[name]) for name in names], shares), strict=True):
        parts = [part for part, number in zip(PARTS, numbers, strict=True) for _ in range(number)]
        found |= dict(zip(of_class[name], parts, strict=True))
    return found


def _numbers(sizes: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Return how many patients of each class, [classes], go into each part, [parts].

    Whole numbers below the shares first; what is left of a class goes where its fraction is largest, as long as the
    part lacks patients in all.
    """
    totals = _totals(sum(sizes), shares)
    wanted = np.outer(sizes, totals) / max(sum(sizes), 1)
    numbers = np.floor(wanted + NEAR).astype(int)
    lacks = totals - numbers.sum(0)
    for of_class, exact, size in zip(numbers, wanted, sizes, strict=True):
        over = exact - of_class
        while of_class.sum() < size:
            part = max(range(len(PARTS)), key=lambda place: (lacks[place] > 0, over[place]))
            of_class[part] += 1
            over[part] -= 1
            lacks[part] -= 1
    return numbers.tolist()


def _totals(patients: int, shares: Sequence[float]) -> np.ndarray:
    """Return how many patients each part has: by largest remainders, and one at least where there are enough."""
    exact = np.asarray(shares) * patients
    totals = np.floor(exact + NEAR).astype(int)
    for part in np.argsort(totals - exact, kind="stable")[: patients - totals.sum()]:
        totals[part] += 1
    while patients >= len(PARTS) and totals.min() == 0:
        totals[totals.argmin()] += 1
        totals[totals.argmax()] -= 1
    return totals


def _with_newcomers(
    ranked: Sequence[str], classes: Mapping[str, str], shares: Sequence[float], known: Mapping[str, str]
) -> dict[str, str]:
    """Return everybody's part: those who have one keep it, the others fill up what lacks most, in all and by class."""
    found = dict(known)
    held, of_class = Counter(found.values()), Counter((classes[patient], part) for patient, part in found.items())
    newcomers = [patient for patient in ranked if patient not in found]
    for left, patient in zip(range(len(newcomers), 0, -1), newcomers, strict=True):
        own = classes[patient]
        here, alike = len(found) + 1, 1 + sum(of_class[own, part] for part in PARTS)
        lacks = {
            part: share * (here + alike) - held[part] - of_class[own, part]
            for part, share in zip(PARTS, shares, strict=True)
        }
        empty = [part for part in PARTS if not held[part]]
        part = max(empty if len(empty) >= left else PARTS, key=lambda name: lacks[name])
        found[patient] = part
        held[part] += 1
        of_class[own, part] += 1
    return found
