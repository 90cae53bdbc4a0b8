"""Turn the values of images into numbers for a network: the same at all sites, by MONAI."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.core.section import Section

PER_BYTE = 257.0  # 65535 / 255: what a step of 8 bits is in 16


class _ByMonai(Section):
    """A scale that one of MONAI's transforms makes, here and in a bundle."""

    largest: ClassVar[float] = 1.0

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        """Return MONAI's name of it, and its arguments."""
        raise NotImplementedError

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        from monai import transforms

        name, how = self._transform
        scaled = getattr(transforms, name)(**how)(image)
        return torch.as_tensor(scaled.as_tensor() if hasattr(scaled, "as_tensor") else scaled, dtype=torch.float32)

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        name, how = self._transform
        return [{"_target_": f"{name}d", "keys": "image", **how}]


class ZScore(_ByMonai):
    """Mean 0 and standard deviation 1 of every image and channel: for MRI."""

    largest: ClassVar[float] = 1000.0  # a single bright place in a million
    kind: Literal["z-score"] = "z-score"
    _transform: ClassVar = ("NormalizeIntensity", {"channel_wise": True})


class Percentiles(_ByMonai):
    """Two percentiles of every image and channel become 0 and 1; what lies beyond is cut off."""

    kind: Literal["percentiles"] = "percentiles"
    low: float = Field(0.5, ge=0, lt=100, description="the percentile that becomes 0")
    high: float = Field(99.5, gt=0, le=100, description="the percentile that becomes 1")

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        ends = {"lower": self.low, "upper": self.high, "b_min": 0.0, "b_max": 1.0}
        return "ScaleIntensityRangePercentiles", {**ends, "clip": True, "channel_wise": True}


class Window(_ByMonai):
    """Two values become 0 and 1, the same at all sites; what lies beyond is cut off: for CT, in Hounsfield units."""

    kind: Literal["window"] = "window"
    low: float = Field(-160.0, description="the value that becomes 0")
    high: float = Field(240.0, description="the value that becomes 1")

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        return "ScaleIntensityRange", {"a_min": self.low, "a_max": self.high, "b_min": 0.0, "b_max": 1.0, "clip": True}


class Bytes(_ByMonai):
    """0 to 255 becomes 0 to 1, of 16 bits 0 to 65535; images with other numbers are refused: for photographs."""

    kind: Literal["bytes"] = "bytes"
    _transform: ClassVar = ("ScaleIntensityRange", {"a_min": 0.0, "a_max": 255.0, "b_min": 0.0, "b_max": 1.0})


class AsStored(_ByMonai):
    """Values stay as they are in the files."""

    largest: ClassVar[float] = 65_535.0  # 16 bits
    kind: Literal["none"] = "none"
    _transform: ClassVar = ("Identity", {})


Intensity = Annotated[ZScore | Percentiles | Window | Bytes | AsStored, Field(discriminator="kind")]


def numbers_of(values: np.ndarray, intensity: Section) -> np.ndarray:
    """Return an image's values as float32; where 0 to 255 is asked for, those of 16 bits from 0 to 65535 become that.

    Raises DataError for other numbers there.
    """
    numbers = np.ascontiguousarray(values, np.float32)
    if not isinstance(intensity, Bytes) or values.dtype == np.uint8:
        return numbers
    if values.dtype != np.uint16:
        raise DataError(
            f"images have {8 * values.dtype.itemsize} bits per value{'' if values.dtype.kind == 'u' else ' and signs'} "
            "where the plan reads 8 or 16; save them so, or agree on another task.intensity"
        )
    return numbers / np.float32(PER_BYTE)
