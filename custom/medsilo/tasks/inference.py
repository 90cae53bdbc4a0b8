"""How a task's models are applied to new cases: from images to inputs, and from outputs to predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # not at run time, because only `medsilo predict` reads images
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.sources import DataSource

IN_MONAI = "scripts.in_monai"  # module in a MONAI bundle with transforms that MONAI lacks
Words = dict[str, Any]  # MONAI bundle configuration: a class under "_target_", and its arguments


@dataclass(frozen=True)
class InMonai:
    """Preprocessing and inference of a task as MONAI bundle configuration.

    `transforms` follow the reading of an image under the key "image", and must be invertible. The inferer's batch size
    is the bundle's "batch".
    """

    transforms: list[Words]
    inferer: Words
    channels: Sequence[str] = field(default=("image",), kw_only=True)  # names of channels in separate files
    flat: bool = field(default=False, kw_only=True)  # True for pictures, False for volumes
    classes: Sequence[str] = field(default=(), kw_only=True)  # names of the network's outputs, if known
    classifies: bool = field(default=False, kw_only=True)  # True for a classification, False for a segmentation
    converter: str = field(default="opaque", kw_only=True)  # name of the first transform of pictures, in IN_MONAI


def whole_images(
    size: Sequence[int], *, sliced: bool, windows: bool = False, overlap: float = 0.0, classifies: bool = False
) -> Words:
    """Return the configuration of an inferer that gives the same results as `medsilo predict`."""
    how = {"sliced": sliced, "windows": windows, "overlap": overlap, "classifies": classifies}
    return {"_target_": f"{IN_MONAI}.WholeImages", "size": list(size), **how}


class Inference:
    """How models of a task are applied to new cases.

    `predictor` names an entry point of the group `medsilo.predictors`. Without it, `medsilo predict` cannot use the
    task's models.

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
        """`inputs` converts an image to the network's input, [cases, *shape], in training and inference. By default, an
        image is one case.

        `in_monai` describes preprocessing and inference for a MONAI bundle, if MONAI supports them.

        `own_values` returns the values of labels in a hospital's masks, if they may differ from the plan's.
        """
        self.predictor, self.inputs_of, self.in_monai = predictor, inputs, in_monai
        self.own_values = own_values

    def images_among(self, files: Sequence[Path]) -> list[tuple[Path, ...]]:
        """Group files into images, each with the files of its channels in order. By default, each file is an image."""
        return [(file,) for file in files]

    def scan_of(self, image: tuple[Path, ...]) -> "Scan | None":
        """Read an image as a scan. The default None means that SimpleITK reads its file."""
        return None

    def labels_on(self, scan: "Scan", output: Tensor) -> Tensor | None:
        """Return the label of each pixel or voxel of an image, from the network's output for the image or its slices.

        The default None means the label with the largest output.
        """
        return None
