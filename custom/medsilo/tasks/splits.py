"""Split patients into training, validation and test, and distribute cases to simulated sites."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from medsilo.core.errors import DataError, PlanError
from medsilo.core.text import safe_name
from medsilo.learning.seeds import seed_for
from medsilo.tasks.cells import level
from medsilo.tasks.shares import PARTS, Partition, Shares

# The parts of ten consecutive patients: train (0), validation (1), test (2). Even three patients fill all parts.
TEN_IN_TURN = np.array([0, 2, 1, 0, 0, 2, 0, 1, 0, 2])
NEAR = 1e-9  # tolerance for rounding errors, so that 2.9999999999 counts as 3


def parts_in_turn(patients: int) -> np.ndarray:
    """Return the part of each patient, [patients]: one half for training, one fifth for validation, three tenths for
    test.

    >>> sorted(parts_in_turn(10).tolist())
    [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    """
    return TEN_IN_TURN[np.arange(patients) % len(TEN_IN_TURN)]


def parts_by_draw(groups: Sequence[str], shares: Shares, seed: int) -> np.ndarray:
    """Assign cases to parts at random: 0 train, 1 validation, 2 test.

    None of the three parts is empty, and their sizes approximate the given fractions.

    Args:
        groups: for each case, the name of the patient, or of another group that must not be divided
        shares: the fractions of cases for training, validation and test
        seed: seed of the random assignment
    """
    names, places, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    if len(names) < 3:
        raise DataError(
            "the site has fewer than 3 patients (or images); training, validation and test need at least one each"
        )
    part, held = np.zeros(len(names), np.int64), np.zeros(3)
    for done, group in enumerate(np.random.default_rng(seed).permutation(len(names))):
        wanted = np.asarray(shares) * len(groups) - held
        if np.count_nonzero(held == 0) >= len(names) - done:
            wanted[held > 0] = -np.inf
        part[group] = wanted.argmax()
        held[part[group]] += sizes[group]
    return part[places.reshape(-1)]


def part_alone(patient: str, shares: Sequence[float], split: int) -> str:
    """Assign a patient to training, validation or test by a hash of the patient's name, regardless of all other
    patients.
    """
    place = seed_for(split, "alone", patient) / 2**63
    return PARTS[int(place >= shares[0]) + int(place >= shares[0] + shares[1])]


def parts_by_rank(
    classes: Mapping[str, str], shares: Sequence[float], split: int, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Assign patients to training, validation and test.

    Each part gets about the given fraction of all patients, and of each class's patients. If there are at least three
    patients, no part is empty.

    The patients of each class are sorted by a hash of their names, and divided in this order. Patients whom earlier
    studies assigned keep their part. New patients then follow in the order of their hashes, each into the part that
    lacks most patients.

    Args:
        classes: the class of each patient, or the same value for all patients
        split: the seed of the hashes
        known: the parts of patients from earlier studies
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
    """For each class, return the number of patients in each part.

    First, all numbers are rounded down. Then each remaining patient of a class goes to the part with the largest
    remainder, if possible to a part that is not full.
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
    """Return the number of patients in each part, by the largest remainder method. If there are at least three
    patients, each part gets at least one.
    """
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
    """Assign each new patient to the part that lacks most patients. Known patients stay in their parts."""
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


DRAWS = 20


def deal(
    partition: Partition, patients: Sequence[str], classes: Sequence[int], natural: Sequence[str], sites: Sequence[str]
) -> list[np.ndarray]:
    """Distribute cases to sites, and return a sorted array of case indices for each site.

    Args:
        natural: the site that the table names for each case
    """
    if partition.kind == "column":
        return by_column(natural, sites)
    names, owner = np.unique(np.asarray(patients), return_inverse=True)
    if partition.kind == "iid":
        dealt = iid(len(names), len(sites), partition.seed, partition.minimum)
    else:
        table = np.zeros((len(names), max(classes, default=0) + 1), np.int64)
        np.add.at(table, (owner, np.asarray(classes, np.int64)), 1)
        dealt = dirichlet(table.argmax(1), len(sites), partition.alpha, partition.seed, partition.minimum)
    return [np.flatnonzero(np.isin(owner, chosen)) for chosen in dealt]


def iid(samples: int, sites: int, seed: int, minimum: int = 1) -> list[np.ndarray]:
    """Distribute samples to sites at random, and return a sorted array of sample indices for each site.

    The numbers of samples at two sites differ by at most one.
    """
    check(samples, sites, minimum)
    order = np.random.default_rng(seed_for(seed, "iid")).permutation(samples)
    return [np.sort(order[site::sites]) for site in range(sites)]


def by_column(natural: Sequence[str], sites: Sequence[str]) -> list[np.ndarray]:
    """Return, for each site, the indices of the samples that a table's column assigns to it. Raises DataError if a site
    has no sample.

    Samples without a known site are left out. The cell 3.0 matches the site 3, and a cell with characters that site
    names can't have matches the site with replaced characters.
    """
    places = {level(site): number for number, site in enumerate(sites)}
    owners = {  # compares each distinct name only once
        name: places.get(level(name), places.get(level(safe_name(name)), -1)) for name in dict.fromkeys(natural)
    }
    column = np.fromiter((owners[name] for name in natural), int, len(natural))
    dealt = [np.flatnonzero(column == number) for number in range(len(sites))]
    without = [site for site, chosen in zip(sites, dealt, strict=True) if not len(chosen)]
    if without:
        raise DataError(f"the table's site column gives no case to {', '.join(without)}; name sites as the table does")
    return dealt


def dirichlet(labels: ArrayLike, sites: int, alpha: float, seed: int, minimum: int = 1) -> list[np.ndarray]:
    """Distribute samples to sites: for each class, sample the sites' proportions from Dirichlet(alpha) (Yurochkin et
    al. 2019).

    If a site gets too few samples, the proportions are sampled again. If all attempts fail, the best attempt is used,
    and random samples move from its largest to its smallest sites.

    Args:
        labels: the class of each sample, [n] integers
        sites: the number of sites
        alpha: a small value gives few classes at each site, and large differences between the sizes of sites
        seed: seed of the random distribution
        minimum: smallest number of samples of a site

    Returns a sorted array of sample indices for each site; each index occurs at one site only.
    """
    classes = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    check(len(classes), sites, minimum)
    random = np.random.default_rng(seed_for(seed, "dirichlet"))
    best, least = np.zeros(0, np.int64), math.inf
    for _ in range(DRAWS):
        owners = draw(classes, sites, alpha, random)
        missing = np.maximum(minimum - np.bincount(owners, minlength=sites), 0).sum()
        if missing < least:
            best, least = owners, missing
        if least == 0:
            break
    fill_up(best, sites, minimum, random)
    return [np.flatnonzero(best == site) for site in range(sites)]


def check(samples: int, sites: int, minimum: int) -> None:
    if sites * minimum > samples:
        raise PlanError(
            f"minimum: {sites} sites with at least {minimum} samples each need {sites * minimum}, but there are "
            f"{samples}; take fewer sites, a smaller minimum or more samples"
        )


def draw(classes: np.ndarray, sites: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    """Sample the sites' proportions for each class, and return the site of every sample, [n]."""
    owners = np.zeros(len(classes), np.int64)
    for label in range(classes.max(initial=-1) + 1):
        members = random.permutation(np.flatnonzero(classes == label))
        ends = np.floor(np.cumsum(random.dirichlet(np.full(sites, alpha))) * len(members))
        # the last site gets all remaining samples, so its end is not needed
        owners[members] = np.searchsorted(ends[:-1], np.arange(len(members)), side="right")
    return owners


def fill_up(owners: np.ndarray, sites: int, minimum: int, random: np.random.Generator) -> None:
    """Move samples from the largest site to the smallest site, in place, until every site has enough samples."""
    sizes = np.bincount(owners, minlength=sites)
    while sizes.min() < minimum:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        count = min(minimum - sizes[poor], sizes[rich] - minimum)
        owners[random.choice(np.flatnonzero(owners == rich), count, replace=False)] = poor
        sizes[poor] += count
        sizes[rich] -= count
