"""Turn the values of images into numbers for a network: the same at all sites, by MONAI."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.core.section import Section


class ZScore(Section):
    """Mean 0 and standard deviation 1 of every image and channel: for MRI."""

    largest: ClassVar[float] = 1000.0  # a single bright place in a million
    kind: Literal["z-score"] = "z-score"

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        from monai.transforms import NormalizeIntensity

        return _as_float32(NormalizeIntensity(channel_wise=True)(image))

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        return [{"_target_": "NormalizeIntensityd", "keys": "image", "channel_wise": True}]


class Percentiles(Section):
    """Two percentiles of every image and channel become 0 and 1; what lies beyond is cut off."""

    largest: ClassVar[float] = 1.0
    kind: Literal["percentiles"] = "percentiles"
    low: float = Field(0.5, ge=0, lt=100, description="the percentile that becomes 0")
    high: float = Field(99.5, gt=0, le=100, description="the percentile that becomes 1")

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        from monai.transforms import ScaleIntensityRangePercentiles

        scale = ScaleIntensityRangePercentiles(self.low, self.high, 0.0, 1.0, clip=True, channel_wise=True)
        return _as_float32(scale(image))

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        own = {"lower": self.low, "upper": self.high, "b_min": 0.0, "b_max": 1.0, "clip": True, "channel_wise": True}
        return [{"_target_": "ScaleIntensityRangePercentilesd", "keys": "image", **own}]


class Window(Section):
    """Two values become 0 and 1, the same at all sites; what lies beyond is cut off: for CT, in Hounsfield units."""

    largest: ClassVar[float] = 1.0
    kind: Literal["window"] = "window"
    low: float = Field(-160.0, description="the value that becomes 0")
    high: float = Field(240.0, description="the value that becomes 1")

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        from monai.transforms import ScaleIntensityRange

        return _as_float32(ScaleIntensityRange(self.low, self.high, 0.0, 1.0, clip=True)(image))

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        own = {"a_min": self.low, "a_max": self.high, "b_min": 0.0, "b_max": 1.0, "clip": True}
        return [{"_target_": "ScaleIntensityRanged", "keys": "image", **own}]


class Bytes(Section):
    """0 to 255 becomes 0 to 1; images with other numbers are refused: for photographs."""

    largest: ClassVar[float] = 1.0
    kind: Literal["bytes"] = "bytes"

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        return image / 255.0

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        own = {"a_min": 0.0, "a_max": 255.0, "b_min": 0.0, "b_max": 1.0}
        return [{"_target_": "ScaleIntensityRanged", "keys": "image", **own}]


class AsStored(Section):
    """Values stay as they are in the files."""

    largest: ClassVar[float] = 65_535.0  # 16 bits
    kind: Literal["none"] = "none"

    def apply(self, image: Tensor) -> Tensor:
        """[C, ...] to the same shape."""
        return image

    def in_monai(self) -> list[dict[str, Any]]:
        """Return the same in a MONAI bundle's words."""
        return []


Intensity = Annotated[ZScore | Percentiles | Window | Bytes | AsStored, Field(discriminator="kind")]


def check_kind(values: np.ndarray, intensity: Section) -> None:
    """Raises DataError where 0 to 255 is asked for and a file holds other numbers."""
    if isinstance(intensity, Bytes) and values.dtype != np.uint8:
        raise DataError(
            f"images have {8 * values.dtype.itemsize} bits per value where the plan reads 8; save them with 8 bits, or "
            "agree on another task.intensity"
        )


def _as_float32(image: Any) -> Tensor:
    return torch.as_tensor(image.as_tensor() if hasattr(image, "as_tensor") else image, dtype=torch.float32)
