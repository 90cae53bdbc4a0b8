"""A hospital's own images in a plan's words, of `nifti-folder` and `image-folder`. image_reading.py reads them."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from medsilo.core import optional
from medsilo.core.errors import DataError
from medsilo.learning.compute import Case
from medsilo.learning.seeds import seed_for
from medsilo.models.architectures import DenseNet121, UNet
from medsilo.models.network import Dimensions, Network
from medsilo.tasks.classification import Classification
from medsilo.tasks.inference import IN_MONAI, Inference, InMonai, whole_images
from medsilo.tasks.intensity import Bytes, Intensity, Percentiles
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.segmentation import Segmentation, dice_and_entropy

if TYPE_CHECKING:  # only a site reads cases
    import numpy as np

    from medsilo.learning.drawn import Draw, DrawBatch
    from medsilo.tasks.cache import HeldEntry, PreparedEntry
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.sources import DataSource

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+ -]{0,62}$")]
Length = Annotated[int, Field(ge=4, le=4096)]
Distance = Annotated[float, Field(ge=0.01, le=1000)]
MOST_VOXELS = 2**27  # of a case: 512 along each of three axes
BACKGROUND = "background"
Augmentation = Literal["flip-x", "flip-y", "flip-z", "rotate90", "affine", "intensity", "noise"]


class FolderTask(OwnFolder):
    """The agreement of sites that learn from folders of their own. Where the files lie is each site's own affair.

    Numbers along axes are given as x, y (and z). Images are resized to `size`; or they keep a size of their own. Then a
    segmentation's training takes pieces of `size`, and it is evaluated on whole images, through windows of that size; a
    classification's images are cut or filled up to `size`.
    """

    kind: Literal["segmentation", "classification"] = Field("segmentation", description="what is learned")
    labels: tuple[Name, ...] = Field(
        default=("structure",),
        min_length=1,
        max_length=254,
        description="structures, which have the labels 1, 2, ... (0 is background); or classes, which are 0, 1, ...",
    )
    size: tuple[Length, ...] = Field(default=(96, 96, 32), description="what the network reads in training")
    intensity: Intensity = Field(Percentiles(), description="how intensities are scaled")
    augmentation: tuple[Augmentation, ...] = Field(default=(), description="changes by chance in training")
    foreground: float = Field(default=0.5, ge=0, le=1, description="share of training pieces with a structure in them")
    overlap: float = Field(default=0.25, ge=0, lt=1, description="of the windows in evaluation")

    @field_validator("labels")
    @classmethod
    def _names(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) < len(labels) or BACKGROUND in labels:
            raise ValueError(f"{list(labels)}: name each label once, and the background not at all")
        return labels

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.size) != self.axes:
            raise ValueError(f"size {list(self.size)} has {len(self.size)} numbers; give {self.axes}: x, y, z in turn")
        if math.prod(self.size) > MOST_VOXELS:
            raise ValueError(f"size {list(self.size)} is more than {MOST_VOXELS} places; give a smaller one")
        if not self.segments and len(self.labels) < 2:
            raise ValueError(f"labels {list(self.labels)}: a classification needs two or more")
        if "rotate90" in self.augmentation and self.size[0] != self.size[1]:
            raise ValueError("augmentation: rotate90 needs a size that is the same along x and y")
        if self.segments and self.partition and self.partition.kind == "dirichlet":
            raise ValueError("partition: dirichlet deals classes, and a segmentation has none; take iid or column")
        if "flip-z" in self.augmentation and self.axes == 2:
            raise ValueError("augmentation: flip-z needs volumes")
        return self

    # ------------------------------------------------------------------------------------------ what kind it is
    @property
    def stored(self) -> int:
        """Axes of the images in the files."""
        return 2

    @property
    def axes(self) -> Dimensions:
        """Axes of what the network reads."""
        return 2

    @property
    def segments(self) -> bool:
        """Return whether structures are found; else images are classified."""
        return self.kind == "segmentation"

    @property
    def alike(self) -> bool:
        """Return whether all images are resized to `size`."""
        return True

    @property
    def crops(self) -> bool:
        """Return whether cases have sizes of their own, and networks learn from pieces of them."""
        return self.segments and not self.alike

    @property
    def largest_input(self) -> float:
        """By how intensities are scaled."""
        return self.intensity.largest

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size[::-1])

    @property
    def evaluation_batch(self) -> int:
        """Cases of different sizes go one by one."""
        return 1 if self.crops else 16 if self.axes == 2 else 4

    @property
    def voxel(self) -> tuple[float, ...] | None:
        """Millimetres between places of the network's output, slowest axis first; None where they differ by case."""
        return None

    @property
    def goal(self) -> Objective:
        return goal_of(self.kind, self.labels, self.voxel)

    @property
    def use(self) -> Inference:
        return Inference("images", self.inputs_of, self.in_monai(), self.own_values)

    def default_network(self) -> Network:
        return UNet(dimensions=self.axes) if self.segments else DenseNet121(dimensions=self.axes)

    # ------------------------------------------------------------------------------------------ in training and use
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        piece = self._own_piece if self.crops else None
        return optional.DrawBatch(piece, self.augmented) if self.augmentation else piece

    def _own_piece(self, case: Case, seed: int) -> Case:
        return self.cropped(case, seed_for(seed, "piece"))

    @property
    def piece(self) -> "Draw | None":
        return self.cropped if self.crops else None

    def cropped(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """Return a piece of a case, of the plan's size, where it has a size of its own."""
        return optional.image_patches.patch(case, self.size[::-1], self.foreground, seed) if self.crops else case

    def augmented(self, batch: Case, seeds: Sequence[int]) -> Case:
        """Return a batch, changed in place: each case by its own seed."""
        return optional.augmented(batch, self.augmentation, self.segments, seeds)

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        return (
            optional.image_patches.from_windows(network, inputs, self.size[::-1], self.overlap)
            if self.crops
            else network(inputs)
        )

    def in_monai(self) -> InMonai:
        """Return reading and use of the network in a MONAI bundle's words."""
        sliced, size = self.stored > self.axes, list(self.size[::-1])
        rest = [0] if sliced else []
        middle = {"_target_": f"{IN_MONAI}.Middled", "keys": "image", "size": size + rest}
        return InMonai(
            [*self._on_the_grid(), *self.intensity.in_monai(), *([] if self.segments else [middle])],
            whole_images(size, sliced=sliced, windows=self.crops, overlap=self.overlap, classifies=not self.segments),
            channels=self._channel_names,
            flat=self.stored == 2,
            converter="in_bytes" if isinstance(self.intensity, Bytes) else "opaque",
            classes=self.goal.label_names,
            classifies=not self.segments,
        )

    @property
    @abstractmethod
    def _channel_names(self) -> tuple[str, ...]:
        """Return the names of the channels that lie in files of their own."""

    @abstractmethod
    def _on_the_grid(self) -> list[dict[str, Any]]:
        """Return the turns and resampling of `inputs_of` in a MONAI bundle's words."""

    # ------------------------------------------------------------------------------------------ from files
    def scan_of(self, files: tuple[Path, ...]) -> "Scan":
        """Return the image of an entry's files: by default of one for each channel."""
        return optional.Scan.of_channels(files)

    def mask_reader(self, source: "DataSource") -> "Callable[[Scan, Path], np.ndarray]":
        """Return what reads a mask's file, as whole numbers [(D,) H, W] on the grid of its image."""
        return optional.Scan.mask

    def maker(self, source: "DataSource") -> "Callable[..., PreparedEntry]":
        return partial(
            optional.image_reading.made, self, mask=self.mask_reader(source), numbers=self.mask_values(source)
        )

    def own_values(self, source: "DataSource") -> dict[int, int]:
        """Return the value of each label in a site's own masks; of several that mean one structure the first."""
        own = {label: value for value, label in reversed(self.mask_values(source).items())}
        for label in self._undrawn(source):
            if own.get(label, label) in {value for one, value in own.items() if one != label}:
                own[label] = max(*own.values(), self.goal.classes) + 1  # a value that means nothing else here
        return own

    def mask_values(self, source: "DataSource") -> dict[int, int]:
        """Return the plan's labels by the values that masks have."""
        if not self.segments:
            return {}
        if source.label_map:
            own = [str(value) for value in source.label_map]
            if wrong := [value for value in own if not value.isdecimal()]:
                raise DataError(f"data.label_map: {wrong[0]!r} is no value of a mask; give whole numbers from 0 on")
            return {0: 0} | {int(value): self.number_of(plans) for value, plans in source.label_map.items()}
        numbers = {number: number for number in range(self.goal.classes)}
        return numbers | {255: 1} if len(self.labels) == 1 else numbers  # a mask of one structure is often 0 and 255

    def inputs_of(self, scan: "Scan") -> Tensor:
        """Return what the network reads of an image: [cases, C, *grid]."""
        return optional.image_reading.inputs_of(self, scan)

    def _cases(self, image: Tensor) -> Tensor:
        """An image [C, (D,) H, W] as the network's cases [cases, C, *grid]."""
        return image[None]

    def _grid(self, grid: tuple[int, ...], spacing: Sequence[float]) -> tuple[int, ...]:
        """Return how many places the network's grid has along each axis."""
        return self.size[::-1] if self.alike else grid

    def note(self, listing: "CaseIndex", every: "Sequence[HeldEntry]", source: "DataSource") -> None:
        optional.image_reading.note(self, listing, every, source)


@cache
def goal_of(kind: str, labels: tuple[str, ...], voxel: tuple[float, ...] | None = None) -> Objective:
    """Return what is learned: structures, which have the labels 1, 2, ..., or classes."""
    if kind == "classification":
        return Classification(labels)
    structures = {name: (number,) for number, name in enumerate(labels, 1)}
    return Segmentation((BACKGROUND, *labels), dice_and_entropy, structures, cross_entropy=1.0, voxel=voxel)
