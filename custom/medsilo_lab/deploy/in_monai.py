"""Transforms for a MONAI Bundle. Some transforms of MONAI differ from medsilo's preprocessing in training; each class
replaces one of these transforms.

A bundle contains copies of this file and of image_patches.py, which import no other file of medsilo.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer
from monai.transforms import MapTransform, Resized
from torch import Tensor

from medsilo.tasks.own.image_patches import from_windows, grid_at, middle_of


class ToSpacingd(Resized):
    """Resample an image to a spacing without moving the outer edges of the image. The transform is invertible.

    pixdim: Millimetres along each axis; 0 keeps the spacing of an axis.
    """

    def __init__(self, keys: str, pixdim: Sequence[float]) -> None:
        super().__init__(keys, [-1] * len(pixdim), mode="trilinear", align_corners=False)
        self.wanted = tuple(pixdim)

    def __call__(self, data: Mapping[Any, Any], lazy: bool | None = None) -> dict[Any, Tensor]:
        image = data[self.first_key(dict(data))]
        self.resizer.spatial_size = grid_at(image.shape[1:], image.pixdim.tolist(), self.wanted)
        return super().__call__(data, lazy)


class Coloured(MapTransform):
    """Repeat the single channel of a grey image three times."""

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        changed = dict(data)
        for key in self.key_iterator(changed):
            image = changed[key]
            changed[key] = image.repeat(3, *[1] * (image.ndim - 1)) if len(image) == 1 else image
        return changed


class Middled(MapTransform):
    """Crop the centre of an image. If the image is smaller than the crop, pad the image with the minimum of its values.

    size: Size of the crop along each axis; 0 keeps the size of an axis.
    """

    def __init__(self, keys: str, size: Sequence[int]) -> None:
        super().__init__(keys)
        self.size = tuple(size)

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        changed = dict(data)
        for key in self.key_iterator(changed):
            image = changed[key]
            own = image.shape[-len(self.size) :]
            changed[key] = middle_of(image, [size or here for size, here in zip(self.size, own, strict=True)])
        return changed


class WholeImages(Inferer):
    """Apply the network to a single image, which is cut into slices or overlapping windows if necessary.

    Args:
        size: size of the network's input
        sliced: True if the network's inputs are the slices along the last axis of an image
        windows: True if images are predicted in overlapping windows of the size `size`
        overlap: overlap of two windows, as a fraction of the window
        classifies: True if the result is the probability of each class, averaged over all slices
        batch: number of slices in a batch
    """

    def __init__(
        self, size: Sequence[int], sliced: bool, windows: bool, overlap: float, classifies: bool, batch: int
    ) -> None:
        super().__init__()
        self.size, self.sliced, self.windows = tuple(size), sliced, windows
        self.overlap, self.classifies, self.batch = overlap, classifies, batch

    def __call__(self, inputs: Tensor, network: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if len(inputs) != 1:
            raise ValueError("set the data loader's batch_size to 1: images differ in size")
        image = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs
        cases = image[0].movedim(-1, 0) if self.sliced else image
        output = torch.cat([self._of(network, several.contiguous()).float() for several in cases.split(self.batch)])
        if self.classifies:
            return output.double().softmax(1).mean(0, keepdim=True)
        scores = output.movedim(0, -1)[None] if self.sliced else output
        # the result keeps the list of transforms of the image, so that MONAI can invert the transforms
        return MetaTensor(scores).copy_meta_from(inputs) if isinstance(inputs, MetaTensor) else scores

    def _of(self, network: Callable[..., Tensor], cases: Tensor) -> Tensor:
        return from_windows(network, cases, self.size, self.overlap) if self.windows else network(cases)


def one_file_per_case(folder: str, channels: Sequence[str], suffixes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a dictionary for each case in a folder, with the paths of the case's images. If images have several
    channels, each channel has a subfolder, and a case has one file in each subfolder.
    """

    def files(folder: Path) -> list[str]:
        return sorted(str(path) for path in folder.iterdir() if path.name.lower().endswith(tuple(suffixes)))

    if len(channels) == 1:
        return [{"image": path} for path in files(Path(folder))]
    columns = [files(Path(folder, channel)) for channel in channels]
    names = [[Path(path).name for path in column] for column in columns]
    if any(name != names[0] for name in names):
        raise ValueError(f"each of the folders {', '.join(channels)} needs a file of the same name for each case")
    return [{"image": list(paths)} for paths in zip(*columns, strict=True)]


def opaque(image: Any) -> Any:
    return image.convert("RGB" if image.mode == "RGBA" else "L") if image.mode in ("RGBA", "LA") else image


def in_bytes(image: Any) -> Any:
    """Remove the alpha channel of an image, and rescale 16-bit values from 0–65535 to 0–255."""
    from PIL import Image

    deep = image.mode.startswith("I;16")
    return Image.fromarray(np.asarray(image, np.float32) / np.float32(257)) if deep else opaque(image)
