"""Define functions that synthetic tasks share, for example for names of patients and for smooth noise.

No function in this module uses BLAS, so that synthetic cases do not depend on the number of threads.
"""

from collections.abc import Sequence

import numpy as np

from medsilo.core.errors import PlanError
from medsilo.learning.seeds import seed_for


def numbers_for(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, *purpose))


def position_of(site: str, sites: Sequence[str], most: int | None = None) -> int:
    """Return the index of a site among the study's sorted sites. Raises PlanError if the study has too many sites."""
    if site not in sites:
        raise PlanError(f"participation.sites: '{site}' is not in this list; add it or start another site")
    if most is not None and len(sites) > most:
        raise PlanError(f"participation.sites: {len(sites)} sites, but this synthetic task has {most}; name fewer")
    return sorted(sites).index(site)


def patient_names(position: int, patients: int) -> list[str]:
    return [f"synthetic-{position + 1}-{patient + 1:03d}" for patient in range(patients)]


def blur(images: np.ndarray, sigma: float) -> np.ndarray:
    """Blur images [..., H, W] with a Gaussian filter; outside the image, the values at the edges are repeated."""
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
    """Return Gaussian noise, blurred along the last two axes and scaled to standard deviation 1."""
    field = blur(random.standard_normal(shape, np.float32), sigma)
    return field / field.std()


def per_case(values: np.ndarray, axes: int) -> np.ndarray:
    """Reshape an array [cases] to [cases, 1, ..., 1] in float32."""
    return values.astype(np.float32).reshape(-1, *(1,) * axes)
