"""A hospital's own flat images."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from medsilo.tasks.inference import IN_MONAI
from medsilo.tasks.intensity import Bytes, Intensity
from medsilo.tasks.own.folder import FolderTask, Length

if TYPE_CHECKING:  # only a site reads cases
    from medsilo.tasks.scans import Scan


class ImageFolder(FolderTask):
    """Flat images (PNG, JPEG, TIFF) and their masks or classes, from a folder that the site describes itself.

    Images are resized to `size`; with `resize: false` they keep their own, and a segmentation learns from pieces.
    """

    title: ClassVar[str] = "A hospital's own flat images: segmentation or classification"

    name: Literal["image-folder"] = "image-folder"
    size: tuple[Length, ...] = Field(default=(256, 256), description="what the network reads in training")
    intensity: Intensity = Field(Bytes(), description="how intensities are scaled")
    colours: Literal["rgb", "grey"] = Field(
        "rgb", description="read three channels, of a grey image three equal ones; or one"
    )
    resize: bool = Field(default=True, description="false: images keep their size")

    def across_patients(self) -> str:
        return super().across_patients()  # an image is scaled by its own intensities alone

    @property
    def channels(self) -> int:
        """Red, green and blue, or grey."""
        return 3 if self.colours == "rgb" else 1

    @property
    def alike(self) -> bool:
        return self.resize

    @property
    def _channel_names(self) -> tuple[str, ...]:
        return (self.colours,)  # in one file

    def inputs_of(self, scan: "Scan") -> Tensor:
        if self.channels > len(scan.values) == 1:
            scan = replace(scan, values=np.repeat(scan.values, self.channels, 0))
        return super().inputs_of(scan)

    def _on_the_grid(self) -> list[dict[str, Any]]:
        turned: list[dict[str, Any]] = [{"_target_": "Transposed", "keys": "image", "indices": [0, 2, 1]}]  # x is first
        if self.channels > 1:
            turned.append({"_target_": f"{IN_MONAI}.Coloured", "keys": "image"})
        if not self.resize:
            return turned
        size = list(self.size[::-1])
        return [*turned, {"_target_": "Resized", "keys": "image", "spatial_size": size, "mode": "bilinear"}]
