"""The files of one case: its channels on one grid, and its mask on the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from medsilo.core.errors import DataError
from medsilo.tasks.listing import Entry
from medsilo.tasks.scans import Scan, read_scan, refuse_palette
from medsilo.tasks.volumes import SAME_PLACE

GREATEST = 65_535  # value of a mask


class CaseReader(Protocol):
    """Reads a case's files."""

    def scan(self, entry: Entry) -> Scan:
        """Return a case's image."""

    def mask(self, scan: Scan, path: Path) -> np.ndarray:
        """Return its mask's values on the image's grid, whole numbers [(D,) H, W]."""


class FileReader:
    """Reads a file for each channel, and one for the mask."""

    def scan(self, entry: Entry) -> Scan:
        return _together([_scan_of(path) for path in entry.images])

    def mask(self, scan: Scan, path: Path) -> np.ndarray:
        return _mask_of(scan, path)


def _scan_of(path: Path) -> Scan:
    refuse_palette(path)
    return read_scan(path)


def _together(scans: Sequence[Scan]) -> Scan:
    """The channels of one case, which must lie on one grid."""
    first, *others = scans
    if not others:
        return first
    for scan in others:
        _refuse_another_place(first, scan, "channels of a case")
    values = np.concatenate([scan.values for scan in scans])
    return Scan(values, first.affine, first.spacing, first.header, first.turn)


def _mask_of(scan: Scan, path: Path) -> np.ndarray:
    """A mask's values on the image's grid, whole numbers."""
    try:
        mask = _scan_of(path)
    except DataError as error:
        raise DataError(str(error).replace("an image", "a mask"), error.private) from error
    if len(mask.values) != 1:
        raise DataError("masks have several channels; save them with one number per place, not as colours")
    _refuse_another_place(scan, mask, "an image and its mask")
    values = mask.values[0]
    whole = np.rint(values) if values.dtype.kind == "f" else values
    if whole is not values and not np.allclose(values, whole, atol=1e-3):
        raise DataError("masks have values that are no whole numbers; save the labels and not probabilities")
    if whole.min() < 0 or whole.max() > GREATEST:
        raise DataError(f"masks have values below 0 or above {GREATEST}; is an image among them?")
    return whole.astype(np.int64)


def _refuse_another_place(one: Scan, other: Scan, what: str) -> None:
    if one.values.shape[1:] != other.values.shape[1:]:
        raise DataError(f"{what} have different sizes; export both on one grid")
    if one.values.ndim == 4 and not np.allclose(one.affine, other.affine, atol=SAME_PLACE):
        raise DataError(f"{what} lie in different places; export both on one grid")
