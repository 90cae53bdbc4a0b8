"""Choose who is trained on and who is tested: patients (or other groups) go whole to training, validation or test."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator

from medsilo.core.errors import DataError
from medsilo.learning.seeds import seed_for
from medsilo.tasks.survey import PARTS

Split = Literal["patient", "paper"]


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


def parts_by_hash(patients: Iterable[str], shares: Sequence[float], split: int) -> dict[str, str]:
    """The part of every patient, by the patient's name alone: one that comes later moves no other.

    Only where a part would be empty, the patient that stands nearest to it moves there, if there are enough.
    """
    places = {patient: seed_for(split, "part", patient) / 2**63 for patient in sorted(patients)}
    ends = np.cumsum(shares)[:2]
    found = {patient: PARTS[int(np.searchsorted(ends, place, side="right"))] for patient, place in places.items()}
    middles = dict(zip(PARTS, np.cumsum(shares) - np.array(shares) / 2, strict=True))
    for part in PARTS:
        sizes = Counter(found.values())
        if len(found) >= len(PARTS) and not sizes[part]:
            rich = max(PARTS, key=lambda name: sizes[name])
            near = [patient for patient in found if found[patient] == rich]
            found[min(near, key=lambda patient: abs(places[patient] - middles[part]))] = part
    return found
