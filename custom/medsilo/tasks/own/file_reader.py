"""The files of one case: its channels on one grid, and its mask on the same."""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from medsilo.tasks.listing import Entry
from medsilo.tasks.scans import Scan, read_scan, refuse_palette
from medsilo.tasks.volumes import mask_of, refuse_another_place


class CaseReader(Protocol):
    """Reads a case's files."""

    def scan(self, entry: Entry) -> Scan:
        """Return a case's image."""

    def mask(self, scan: Scan, path: Path) -> np.ndarray:
        """Return its mask's values on the image's grid, whole numbers [(D,) H, W]."""


class FileReader:
    """Reads a file for each channel, and one for the mask."""

    def scan(self, entry: Entry) -> Scan:
        first, *others = [_scan_of(path) for path in entry.images]
        for scan in others:
            refuse_another_place(first, scan, "channels of a case")
        return replace(first, values=np.concatenate([one.values for one in (first, *others)])) if others else first

    def mask(self, scan: Scan, path: Path) -> np.ndarray:
        mask = mask_of(path)
        refuse_another_place(scan, mask, "an image and its mask")
        return mask.values[0]


def _scan_of(path: Path) -> Scan:
    refuse_palette(path)
    return read_scan(path)
