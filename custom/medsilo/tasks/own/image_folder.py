"""Define the task `image-folder`, whose cases are a hospital's flat images."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from medsilo.tasks.inference import IN_MONAI
from medsilo.tasks.intensity import Bytes, Intensity
from medsilo.tasks.own.folder import FolderTask, Length

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    from medsilo.tasks.scans import Scan


class ImageFolder(FolderTask):
    """A task whose cases are flat images, such as PNG files, and whose labels are masks or classes.

    Images are resized to the plan's `size` unless `resize` is false.
    """

    title: ClassVar[str] = "A hospital's own flat images: segmentation or classification"

    name: Literal["image-folder"] = "image-folder"
    size: tuple[Length, ...] = Field(default=(256, 256), description="size of the network's input in training")
    intensity: Intensity = Field(Bytes(), description="scaling of intensities")
    colours: Literal["rgb", "grey"] = Field(
        "rgb", description="`rgb`: three channels, which are equal for grey images; `grey`: one channel"
    )
    resize: bool = Field(
        default=True, description="whether images are resized to `size`; false: images keep their sizes"
    )

    def across_patients(self) -> str:
        return super().across_patients()  # the images of a patient are prepared independently of other patients

    @property
    def channels(self) -> int:
        return 3 if self.colours == "rgb" else 1

    @property
    def alike(self) -> bool:
        return self.resize

    @property
    def _channel_names(self) -> tuple[str, ...]:
        return (self.colours,)  # only one channel name is needed, because one file contains all channels

    def inputs_of(self, scan: "Scan") -> Tensor:
        if self.channels > len(scan.values) == 1:
            scan = replace(scan, values=np.repeat(scan.values, self.channels, 0))
        return super().inputs_of(scan)

    def _on_the_grid(self) -> list[dict[str, Any]]:
        # MONAI reads flat images with x before y
        turned: list[dict[str, Any]] = [{"_target_": "Transposed", "keys": "image", "indices": [0, 2, 1]}]
        if self.channels > 1:
            turned.append({"_target_": f"{IN_MONAI}.Coloured", "keys": "image"})
        if not self.resize:
            return turned
        size = list(self.size[::-1])
        return [*turned, {"_target_": "Resized", "keys": "image", "spatial_size": size, "mode": "bilinear"}]
