"""DICOM series as scans."""

from dataclasses import replace
from typing import Any

import numpy as np

from medsilo.extend import Scan, scan_of
from medsilo_dicom.series import ImageSeries, values_of


def scan_of_series(series: ImageSeries) -> Scan:
    """Return a series' values as tasks want them."""
    return replace(scan_of(_image(values_of(series), series)), source=series)


def mask_as_scanned(mask: np.ndarray, series: ImageSeries) -> np.ndarray:
    """Return a mask on a series' grid as its scan's values are turned."""
    return scan_of(_image(mask.astype(np.float32), series)).values[0].astype(np.int64)


def _image(values: np.ndarray, series: ImageSeries) -> Any:
    """Return values on a series' grid as a SimpleITK image."""
    import SimpleITK

    image = SimpleITK.GetImageFromArray(values)
    spacing = np.linalg.norm(series.affine[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(series.affine[:3, 3].tolist())
    image.SetDirection((series.affine[:3, :3] / spacing).ravel().tolist())
    return image
