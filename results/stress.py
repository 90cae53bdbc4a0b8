"""Create hospitals from the volumes of one hospital so that they differ in only one way, as stress tests of federated
learning do.

Each volume gives one slice. Volumes are dealt to four hospitals in turn, and the program changes each hospital's slices
with the strength in POWERS. The changed property is the outlined structure, or a property of the appearance (gamma,
blur or pixel size). All other properties are equal, so a result depends only on the changed property.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image
from scipy import ndimage

from medsilo.core.errors import DataError

HOSPITALS = ("a", "b", "c", "d")
EACH = 40  # number of volumes of a hospital
SIZE = (32, 48)
ANTERIOR, POSTERIOR = 1, 2
POWERS: Mapping[str, tuple[float, ...]] = {
    "alike": (0.0, 0.0, 0.0, 0.0),
    "gamma": (0.6, 0.85, 1.2, 1.7),
    "blur": (0.0, 0.7, 1.4, 2.1),  # standard deviation in pixels
    "scale": (0.6, 0.85, 1.2, 1.6),
    "structure": (ANTERIOR, POSTERIOR, ANTERIOR, POSTERIOR),
}
Slice = tuple[np.ndarray, np.ndarray]  # the intensities of an image, from 0 to 1, and the image's labels


def _gamma(image: np.ndarray, labels: np.ndarray, power: float) -> Slice:
    return image**power, labels > 0


def _blur(image: np.ndarray, labels: np.ndarray, power: float) -> Slice:
    return ndimage.gaussian_filter(image, power), labels > 0


def _scale(image: np.ndarray, labels: np.ndarray, power: float) -> Slice:
    return _cut(ndimage.zoom(image, power, order=1)), _cut(ndimage.zoom(labels > 0, power, order=0))


def _structure(image: np.ndarray, labels: np.ndarray, power: float) -> Slice:
    return image, labels == power


def _alike(image: np.ndarray, labels: np.ndarray, _power: float) -> Slice:
    return image, labels > 0


CHANGES: Mapping[str, Callable[[np.ndarray, np.ndarray, float], Slice]] = {
    "alike": _alike,
    "gamma": _gamma,
    "blur": _blur,
    "scale": _scale,
    "structure": _structure,
}


def _cut(values: np.ndarray) -> np.ndarray:
    """Return the middle of a slice, padded with zeros if the slice is too small."""
    for axis, size in enumerate(SIZE):
        lacks = max(size - values.shape[axis], 0)
        around = [(0, 0), (0, 0)]
        around[axis] = (lacks // 2, lacks - lacks // 2)
        values = np.pad(values, around)
        first = (values.shape[axis] - size) // 2
        values = values.take(range(first, first + size), axis)
    return values


def slice_of(image: np.ndarray, labels: np.ndarray) -> Slice:
    """Return the slice with the largest area of the rarer structure, scaled to 0 to 1."""
    seen = [
        min((labels[:, :, place] == one).sum() for one in (ANTERIOR, POSTERIOR)) for place in range(labels.shape[2])
    ]
    place = int(np.argmax(seen))
    chosen = image[:, :, place].astype(np.float64)
    low, high = np.percentile(chosen, (1, 99))
    return _cut(np.clip((chosen - low) / (high - low), 0, 1)), _cut(labels[:, :, place])


def write_stress(source: Path, target: Path, kind: str) -> Path:
    import nibabel

    files = sorted((source / "images").glob("*.nii.gz"))
    if len(files) < len(HOSPITALS) * 3:
        raise DataError("hippocampus has too few volumes in images; --data names the folder with it", str(source))
    if target.exists():
        return target
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for number, path in enumerate(files[: EACH * len(HOSPITALS)]):
        place = number % len(HOSPITALS)
        volumes = (
            np.asarray(cast(nibabel.Nifti1Image, nibabel.load(one)).dataobj)
            for one in (path, source / "labels" / path.name)
        )
        image, mask = CHANGES[kind](*slice_of(*volumes), POWERS[kind][place])
        for folder, values in (("images", 255 * np.clip(image, 0, 1)), ("labels", mask)):
            own = unfinished / HOSPITALS[place] / folder
            own.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.round(values).astype(np.uint8)).save(own / f"{number:03}.png")
    return unfinished.rename(target)
