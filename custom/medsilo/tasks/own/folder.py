"""Define what the tasks `nifti-folder` and `image-folder` have in common, such as keys of a plan."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.learning.compute import Case
from medsilo.learning.seeds import seed_for
from medsilo.models.architectures import DenseNet121, UNet
from medsilo.models.network import Dimensions, Network
from medsilo.tasks.inference import IN_MONAI, Inference, InMonai, whole_images
from medsilo.tasks.intensity import Bytes, Intensity, Percentiles
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.scored_together import Classifying, classification
from medsilo.tasks.segmentation import Segmentation, dice_and_entropy

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    import numpy as np

    from medsilo.learning.sampling import Draw, DrawBatch
    from medsilo.tasks.cache import HeldEntry, PreparedEntry
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.sources import DataSource

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+ -]{0,62}$")]
Length = Annotated[int, Field(ge=4, le=4096)]
Distance = Annotated[float, Field(ge=0.01, le=1000)]
MOST_VOXELS = 2**27  # limit on the number of voxels in a case: 512 along each of three axes
BACKGROUND = "background"
Augmentation = Literal["flip-x", "flip-y", "flip-z", "rotate90", "affine", "intensity", "noise"]


class FolderTask(OwnFolder, Classifying):
    """Base class of tasks whose cases are image files, which each site's settings describe.

    Lists with one number for each axis have the order x, y (and z). The task either resizes all images to the plan's
    `size`, or keeps their sizes.

    If the task keeps their sizes, a segmentation trains on random patches of this size, and evaluates whole images by
    sliding windows. A classification crops or pads each image to this size.
    """

    kind: Literal["segmentation", "classification"] = Field(
        "segmentation", description="whether networks predict masks of structures, or one class per image"
    )
    labels: tuple[Name, ...] = Field(
        default=("structure",),
        min_length=1,
        max_length=254,
        description="names of the structures (labels 1, 2, ...), or of the classes (labels 0, 1, ...)",
    )
    size: tuple[Length, ...] = Field(default=(96, 96, 32), description="size of the network's input in training")
    intensity: Intensity = Field(Percentiles(), description="scaling of intensities")
    augmentation: tuple[Augmentation, ...] = Field(default=(), description="random changes of training images")
    foreground: float = Field(
        default=0.5, ge=0, le=1, description="share of training patches that are centred on a structure"
    )
    overlap: float = Field(
        default=0.25, ge=0, lt=1, description="fraction by which neighbouring sliding windows overlap in evaluation"
    )

    @field_validator("labels")
    @classmethod
    def _names(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) < len(labels) or BACKGROUND in labels:
            raise ValueError(f"{list(labels)}: name each label once, and the background not at all")
        return labels

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.size) != self.axes:
            raise ValueError(
                f"size {list(self.size)} has {len(self.size)} numbers; give {self.axes}, in the order x, y, z"
            )
        if math.prod(self.size) > MOST_VOXELS:
            raise ValueError(f"size {list(self.size)} is more than {MOST_VOXELS} voxels; give a smaller size")
        if not self.segments and len(self.labels) < 2:
            raise ValueError(f"labels {list(self.labels)}: a classification needs two or more")
        if "rotate90" in self.augmentation and self.size[0] != self.size[1]:
            raise ValueError("augmentation: rotate90 needs the same size along x and y")
        if self.segments and self.partition and self.partition.kind == "dirichlet":
            raise ValueError(
                "partition: dirichlet divides cases by class, and a segmentation has no classes; take iid or column"
            )
        if "flip-z" in self.augmentation and self.axes == 2:
            raise ValueError("augmentation: flip-z needs volumes")
        return self

    # ----------------------------------------------------------------------------------------- the kind of task
    @property
    def stored(self) -> int:
        """Number of spatial axes of the images in files."""
        return 2

    @property
    def axes(self) -> Dimensions:
        """Number of spatial axes of the network's inputs."""
        return 2

    @property
    def segments(self) -> bool:
        return self.kind == "segmentation"

    @property
    def alike(self) -> bool:
        """True if all images are resized to the plan's size."""
        return True

    @property
    def crops(self) -> bool:
        """True if networks train on patches of images that keep their sizes."""
        return self.segments and not self.alike

    @property
    def largest_input(self) -> float:
        """The order of magnitude of the largest image value after intensity scaling."""
        return self.intensity.largest

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size[::-1])

    @property
    def evaluation_batch(self) -> int:
        """Number of cases in an evaluation batch; one if cases may differ in size."""
        return 1 if self.crops else 16 if self.axes == 2 else 4

    @property
    def voxel(self) -> tuple[float, ...] | None:
        """Voxel spacing of the network's output in millimetres, in the order (z,) y, x; None if it differs between
        cases.
        """
        return None

    @property
    def goal(self) -> Objective:
        if not self.segments:
            return classification(self.labels, self.score)
        return segmentation(self.labels, self.voxel)

    @property
    def use(self) -> Inference:
        return Inference("images", self.inputs_of, self.in_monai(), self.own_values)

    def default_network(self) -> Network:
        return UNet(dimensions=self.axes) if self.segments else DenseNet121(dimensions=self.axes)

    # ------------------------------------------------------------------------------------------ in training and use
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        piece = self._own_piece if self.crops else None
        if not self.augmentation:
            return piece
        from medsilo.learning.sampling import DrawBatch

        return DrawBatch(piece, self.augmented)

    def _own_piece(self, case: Case, seed: int) -> Case:
        return self.cropped(case, seed_for(seed, "piece"))

    @property
    def piece(self) -> "Draw | None":
        return self.cropped if self.crops else None

    def cropped(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """Return a random patch of a case in the plan's size, or the whole case if images are resized.

        Args:
            case: the image and the target
            seed: determines the patch
        """
        if not self.crops:
            return case
        from medsilo.tasks.own import image_patches

        return image_patches.patch(case, self.size[::-1], self.foreground, seed)

    def augmented(self, batch: Case, seeds: Sequence[int]) -> Case:
        """Augment a batch, and return the batch.

        Args:
            batch: the images and the targets, which are changed in place
            seeds: the seed of each case
        """
        from medsilo.tasks.own.augmentation import augmented

        return augmented(batch, self.augmentation, self.segments, seeds)

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        if not self.crops:
            return network(inputs)
        from medsilo.tasks.own import image_patches

        return image_patches.from_windows(network, inputs, self.size[::-1], self.overlap)

    def in_monai(self) -> InMonai:
        """Return the preprocessing and the inference as MONAI bundle configuration."""
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
        """A name for each file of an image: the name of its channel, or one name if a file contains all channels."""

    @abstractmethod
    def _on_the_grid(self) -> list[dict[str, Any]]:
        """Return the MONAI bundle configuration that reorients and resamples images as training does."""

    # ------------------------------------------------------------------------------------------ from files
    def scan_of(self, files: tuple[Path, ...]) -> "Scan":
        """Read an image from files; by default, each file contains one channel."""
        from medsilo.tasks.scans import Scan

        return Scan.of_channels(files)

    def mask_reader(self, source: "DataSource") -> "Callable[[Scan, Path], np.ndarray]":
        """Return a function that reads a mask, given an image and the path of its mask. The mask consists of integers
        [(D,) H, W] on the image's grid.
        """
        from medsilo.tasks.scans import Scan

        return Scan.mask

    def maker(self, source: "DataSource") -> "Callable[..., PreparedEntry]":
        from medsilo.tasks.own import image_reading

        return partial(image_reading.made, self, mask=self.mask_reader(source), numbers=self.mask_values(source))

    def own_values(self, source: "DataSource") -> dict[int, int]:
        """Map each label of the plan to the value that predicted masks have for it at this site. If several values of
        the site's masks stand for one label, this is the first of them.
        """
        own = {label: value for value, label in reversed(self.mask_values(source).items())}
        for label in self.undrawn(source):
            if own.get(label, label) in {value for one, value in own.items() if one != label}:
                # the site's masks use this number for another label, so the label that the site did not annotate gets a
                # new number
                own[label] = max(*own.values(), self.goal.classes) + 1
        return own

    def mask_values(self, source: "DataSource") -> dict[int, int]:
        """Map each value in the site's masks to a label of the plan."""
        if not self.segments:
            return {}
        if source.label_map:
            own = [str(value) for value in source.label_map]
            if wrong := [value for value in own if not value.isdecimal()]:
                raise DataError(f"data.label_map: {wrong[0]!r} is not a value of a mask; give whole numbers from 0 on")
            return {0: 0} | {int(value): self.number_of(plans) for value, plans in source.label_map.items()}
        numbers = {number: number for number in range(self.goal.classes)}
        # Masks of a single structure often contain the values 0 and 255.
        return numbers | {255: 1} if len(self.labels) == 1 else numbers

    def inputs_of(self, scan: "Scan") -> Tensor:
        from medsilo.tasks.own import image_reading

        return image_reading.inputs_of(self, scan)

    def as_cases(self, image: Tensor) -> Tensor:
        """Divide an image [C, (D,) H, W] into cases, [cases, C, *grid]."""
        return image[None]

    def grid_of(self, grid: tuple[int, ...], spacing: Sequence[float]) -> tuple[int, ...]:
        """Return the grid to which an image's cases are resized.

        Args:
            grid: the grid of the image's cases, [(D,) H, W]
            spacing: millimetres between neighbouring voxels along x, y (and z)
        """
        return self.size[::-1] if self.alike else grid

    def note(self, listing: "CaseIndex", every: "Sequence[HeldEntry]", source: "DataSource") -> None:
        from medsilo.tasks.own import image_reading

        image_reading.note(self, listing, every, source)


@cache
def segmentation(labels: tuple[str, ...], voxel: tuple[float, ...] | None = None) -> Segmentation:
    """Return the segmentation of structures with the labels 1, 2, ..."""
    structures = {name: (number,) for number, name in enumerate(labels, 1)}
    return Segmentation((BACKGROUND, *labels), dice_and_entropy, structures, cross_entropy=1.0, voxel=voxel)
