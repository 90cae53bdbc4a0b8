"""The use of a task's models: how new cases become inputs, and outputs answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # only who predicts reads images here
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.sources import DataSource

IN_MONAI = "scripts.in_monai"  # where a bundle holds what MONAI has not got
Words = dict[str, Any]  # a class under "_target_", and its arguments


@dataclass(frozen=True)
class InMonai:
    """A task in a bundle's words. `transforms` follow reading, can be inverted and have the image under "image".

    The inferer gets how many cases go through the network together from the bundle, under "batch".
    """

    transforms: list[Words]
    inferer: Words
    channels: Sequence[str] = field(default=("image",), kw_only=True)  # that lie in files of their own
    flat: bool = field(default=False, kw_only=True)  # whether images are flat, and no volumes
    classes: Sequence[str] = field(default=(), kw_only=True)  # names of the network's outputs, where they are known
    classifies: bool = field(default=False, kw_only=True)  # whether images get one class, and no mask
    converter: str = field(default="opaque", kw_only=True)  # what a flat picture passes first, in IN_MONAI


def whole_images(
    size: Sequence[int], *, sliced: bool, windows: bool = False, overlap: float = 0.0, classifies: bool = False
) -> Words:
    """Return the inferer that uses the network as `medsilo predict` does."""
    how = {"sliced": sliced, "windows": windows, "overlap": overlap, "classifies": classifies}
    return {"_target_": f"{IN_MONAI}.WholeImages", "size": list(size), **how}


class Inference:
    """The use of models on new cases: who predicts them, of the entry points `medsilo.predictors`; of images also how.

    Nobody predicts them where no predictor is named.

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
        """inputs: what the network reads of an image, [cases, *shape], in training, too; by default one case, as it is.
        in_monai: reading and use of the network in a MONAI bundle's words, where MONAI has them. own_values: the
        values that labels have in a hospital's own masks, where they may differ from the plan's.
        """
        self.predictor, self.inputs_of, self.in_monai = predictor, inputs, in_monai
        self.own_values = own_values

    def images_among(self, files: Sequence[Path]) -> list[tuple[Path, ...]]:
        """Return the images among files, each with its channels' files in order; by default each file is one."""
        return [(file,) for file in files]

    def scan_of(self, image: tuple[Path, ...]) -> "Scan | None":
        """Return one of these images; by default None, and its file is read as it is."""
        return None

    def labels_on(self, scan: "Scan", output: Tensor) -> Tensor | None:
        """Return the label of each place of an image, from the network's output for its cases: an image's, or that of
        its slices; by default None, and each place gets the likeliest one."""
        return None
