"""The common ground of the synthetic hospitals: seeds, splits by patient, and random fields.

Everything here is numpy without BLAS, so that the numbers do not depend on how many threads there are.
"""

from collections.abc import Sequence

import numpy as np
import torch

from medsilo.core.errors import PlanError
from medsilo.learning.seeds import seed_for
from medsilo.tasks.task import Cases, SiteData

# Ten patients in a row: train (0), validation (1), test (2). Three in a row from the start already fill all parts.
TEN_IN_TURN = np.array([0, 2, 1, 0, 0, 2, 0, 1, 0, 2])


def numbers_for(seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for this purpose."""
    return np.random.default_rng(seed_for(seed, *purpose))


def position_of(site: str, sites: Sequence[str], most: int | None = None) -> int:
    """Return where the site stands among the study's sites in sorted order; at most `most` sites are allowed."""
    if site not in sites:
        raise PlanError(f"participation.sites: '{site}' is not among them; add it or start another site")
    if most is not None and len(sites) > most:
        raise PlanError(f"participation.sites: {len(sites)} sites, but this synthetic task has {most}; name fewer")
    return sorted(sites).index(site)


def split_by_patient(
    inputs: np.ndarray, targets: np.ndarray, patients: np.ndarray, names: Sequence[str], parts: np.ndarray | None = None
) -> SiteData:
    """Puts each patient's cases into the patient's part.

    inputs: [cases, ...]; targets: [cases, ...]; patients: [cases] numbers of patients; names and parts: per patient.

    >>> import numpy as np
    >>> patients, parts = np.array([0, 0, 1, 2]), np.array([0, 1, 2])  # each patient in one part
    >>> data = split_by_patient(np.zeros((4, 3)), np.zeros(4), patients, ["p", "q", "r"], parts)
    >>> len(data.train), len(data.validation), len(data.test)
    (2, 1, 1)
    """
    parts = parts_in_turn(len(names)) if parts is None else parts
    divided = []
    for part in range(3):
        chosen = np.flatnonzero(parts[patients] == part)
        divided.append(
            Cases(
                torch.from_numpy(np.ascontiguousarray(inputs[chosen], np.float32)),
                torch.from_numpy(np.ascontiguousarray(targets[chosen], np.int64)),
                [names[patient] for patient in patients[chosen]],
            )
        )
    return SiteData(*divided)


def parts_in_turn(patients: int) -> np.ndarray:
    """The part of each patient, [patients]: half train, a fifth validation, three tenths test, from 3 patients on.

    >>> sorted(parts_in_turn(10).tolist())
    [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    """
    return TEN_IN_TURN[np.arange(patients) % len(TEN_IN_TURN)]


def patient_names(position: int, patients: int) -> list[str]:
    """Names of a site's synthetic patients."""
    return [f"synthetic-{position + 1}-{patient + 1:03d}" for patient in range(patients)]


def blur(images: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur along the last two axes, borders repeated: [..., H, W] to [..., H, W]."""
    reach = int(np.ceil(2.5 * sigma))
    if reach == 0:
        return images
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    taps = (taps / taps.sum()).astype(np.float32)
    for axis in (-2, -1):
        widths = [(0, 0)] * images.ndim
        widths[axis] = (reach, reach)
        padded = np.moveaxis(np.pad(images, widths, mode="edge"), axis, -1)
        length = images.shape[axis]
        images = sum(tap * padded[..., shift : shift + length] for shift, tap in enumerate(taps))
        images = np.moveaxis(images, -1, axis)
    return images


def smooth_noise(shape: tuple[int, ...], sigma: float, random: np.random.Generator) -> np.ndarray:
    """Noise of unit standard deviation that is smooth along the last two axes."""
    field = blur(random.standard_normal(shape, np.float32), sigma)
    return field / field.std()


def per_case(values: np.ndarray, axes: int) -> np.ndarray:
    """[cases] to [cases, 1, ..., 1] with so many axes behind, as float32."""
    return values.astype(np.float32).reshape(-1, *(1,) * axes)
