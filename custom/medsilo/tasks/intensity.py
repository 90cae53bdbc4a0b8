"""Scale the intensities of images. All sites, and exported MONAI bundles, use the same transform of MONAI."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.core.section import Section

PER_BYTE = 257.0  # 65535 / 255, the divisor that converts 16-bit values to 8-bit values


class _ByMonai(Section):
    """Base class of intensity scalings, each of which applies one transform of MONAI."""

    largest: ClassVar[float] = 1.0

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    def apply(self, image: Tensor) -> Tensor:
        from monai import transforms

        name, how = self._transform
        scaled = getattr(transforms, name)(**how)(image)
        return torch.as_tensor(scaled.as_tensor() if hasattr(scaled, "as_tensor") else scaled, dtype=torch.float32)

    def in_monai(self) -> list[dict[str, Any]]:
        name, how = self._transform
        return [{"_target_": f"{name}d", "keys": "image", **how}]


class ZScore(_ByMonai):
    """Scaling for MRI: shift and scale every channel of every image to mean 0 and standard deviation 1."""

    # value of a bright voxel after scaling, if it is alone among a million equally dark voxels
    largest: ClassVar[float] = 1000.0
    kind: Literal["z-score"] = "z-score"
    _transform: ClassVar = ("NormalizeIntensity", {"channel_wise": True})


class Percentiles(_ByMonai):
    """Scaling that maps two percentiles of every image channel to 0 and 1, and clips the results to this range."""

    kind: Literal["percentiles"] = "percentiles"
    low: float = Field(0.5, ge=0, lt=100, description="percentile of an image's values that is mapped to 0")
    high: float = Field(99.5, gt=0, le=100, description="percentile of an image's values that is mapped to 1")

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        ends = {"lower": self.low, "upper": self.high, "b_min": 0.0, "b_max": 1.0}
        return "ScaleIntensityRangePercentiles", {**ends, "clip": True, "channel_wise": True}


class Window(_ByMonai):
    """Scaling for CT: map two fixed values in Hounsfield units to 0 and 1, and clip the results to this range."""

    kind: Literal["window"] = "window"
    low: float = Field(-160.0, description="image value that is mapped to 0")
    high: float = Field(240.0, description="image value that is mapped to 1")

    @property
    def _transform(self) -> tuple[str, dict[str, Any]]:
        return "ScaleIntensityRange", {"a_min": self.low, "a_max": self.high, "b_min": 0.0, "b_max": 1.0, "clip": True}


class Bytes(_ByMonai):
    """Scaling for photographs: divide 8-bit or 16-bit values by the largest such value. Images with other types of
    values are rejected.
    """

    kind: Literal["bytes"] = "bytes"
    _transform: ClassVar = ("ScaleIntensityRange", {"a_min": 0.0, "a_max": 255.0, "b_min": 0.0, "b_max": 1.0})


class AsStored(_ByMonai):
    """No scaling: the network gets the values that the files contain."""

    largest: ClassVar[float] = 65_535.0  # largest 16-bit value
    kind: Literal["none"] = "none"
    _transform: ClassVar = ("Identity", {})


Intensity = Annotated[ZScore | Percentiles | Window | Bytes | AsStored, Field(discriminator="kind")]


def numbers_of(values: np.ndarray, intensity: Section) -> np.ndarray:
    """Convert an image's values to float32.

    For the scaling of photographs, divide 16-bit values by 257, so that they become 8-bit values, and raise DataError
    for values with another number of bits.
    """
    numbers = np.ascontiguousarray(values, np.float32)
    if not isinstance(intensity, Bytes) or values.dtype == np.uint8:
        return numbers
    if values.dtype != np.uint16:
        raise DataError(
            f"images have {8 * values.dtype.itemsize} bits per value{'' if values.dtype.kind == 'u' else ' and signs'}"
            ", but the plan reads 8 or 16 without signs; save them so, or agree on another task.intensity"
        )
    return numbers / np.float32(PER_BYTE)
