"""Describe how to apply models to new cases: files become inputs, and outputs become predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # imported only for type checking, because only predictions read images
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.sources import DataSource

# Python module in the bundle with the transforms that MONAI lacks
IN_MONAI = "scripts.in_monai"
Words = dict[str, Any]  # MONAI bundle configuration: a class's name under "_target_", and the arguments of the class


@dataclass(frozen=True)
class InMonai:
    """A task's preprocessing and inference as MONAI bundle configuration.

    The bundle reads an image under the key "image" and applies the transforms to it. They must be invertible, because
    the bundle maps predictions back to the image.
    """

    transforms: list[Words]
    inferer: Words
    # names of an image's channels, each in a separate file
    channels: Sequence[str] = field(default=("image",), kw_only=True)
    flat: bool = field(default=False, kw_only=True)
    classes: Sequence[str] = field(default=(), kw_only=True)  # names of the network's outputs, if known
    classifies: bool = field(default=False, kw_only=True)
    # for flat images, the first transform, a function of the module IN_MONAI
    converter: str = field(default="opaque", kw_only=True)


def whole_images(
    size: Sequence[int], *, sliced: bool, windows: bool = False, overlap: float = 0.0, classifies: bool = False
) -> Words:
    """Return the configuration of a MONAI inferer whose predictions equal medsilo's predictions."""
    how = {"sliced": sliced, "windows": windows, "overlap": overlap, "classifies": classifies}
    return {"_target_": f"{IN_MONAI}.WholeImages", "size": list(size), **how}


class Inference:
    """Describes how to apply a task's models to new cases.

    The predictor is the name of an entry point of the group `medsilo.predictors`. Without a predictor, medsilo can't
    predict with the task's models.

    >>> import numpy, torch
    >>> from medsilo.extend import Scan, Inference
    >>> Inference("notes").predictor
    'notes'
    >>> use = Inference("images", lambda scan: torch.from_numpy(scan.values)[None])
    >>> use.inputs_of(Scan(numpy.zeros((3, 8, 8), "f4"), numpy.eye(4), (), None)).shape
    torch.Size([1, 3, 8, 8])
    """

    def __init__(
        self,
        predictor: str = "",
        inputs: "Callable[[Scan], Tensor]" = lambda scan: torch.from_numpy(scan.values)[None],
        in_monai: InMonai | None = None,
        own_values: "Callable[[DataSource], dict[int, int]]" = lambda source: {},
    ) -> None:
        """Describe how the task's models are applied to new cases.

        Args:
            predictor: the name of an entry point of the group `medsilo.predictors`
            inputs: a function that converts an image to the network's inputs, [cases, *shape], in training and
                inference; by default, an image is one case
            in_monai: the preprocessing and inference for a MONAI bundle, if MONAI supports them
            own_values: a function that returns, for each label of the plan, the value in a hospital's masks
        """
        self.predictor, self.inputs_of, self.in_monai = predictor, inputs, in_monai
        self.own_values = own_values

    def images_among(self, files: Sequence[Path]) -> list[tuple[Path, ...]]:
        """Group files into images; an image is a tuple with one file for each channel. By default, each file is an
        image.
        """
        return [(file,) for file in files]

    def scan_of(self, image: tuple[Path, ...]) -> "Scan | None":
        """Read an image from its files, one for each channel. By default, return None; SimpleITK then reads the
        image.
        """
        return None

    def labels_on(self, scan: "Scan", output: Tensor) -> Tensor | None:
        """Return a label for each pixel or voxel of an image.

        By default, return None; each pixel then gets the label with the largest output.

        Args:
            scan: the image
            output: the network's output for the cases into which the image was cut
        """
        return None
