"""Volumes from a folder: `nifti-folder`, and what it has in common with `dicom-folder`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.learning.compute import Case
from medsilo.learning.seeds import generator_for
from medsilo.models.network import Dimensions
from medsilo.tasks.cache import Facts
from medsilo.tasks.inference import IN_MONAI
from medsilo.tasks.own.folder import Distance, FolderTask, Name
from medsilo.tasks.own.image_patches import grid_at
from medsilo.tasks.sources import DataSource


class VolumeFolder(FolderTask):
    """A task over volumes and their masks or classes, from a folder that the site describes itself.

    A subclass may say in `listing_of` which cases a folder has, in `scan_of` how an image is read, and in `mask_reader`
    how a mask is. Every volume is turned to LPS. With `target_spacing` it is resampled to that, and a segmentation
    learns from pieces of `size`; without, it is resized to `size`. With `dimensions: 2` slices are the cases: numbers
    are x and y then, and slices of one volume stay in one part.

    >>> class Stored(VolumeFolder):  # with numpy
    ...     def scan_of(self, files): return Scan(np.load(files[0])[None], np.eye(4), (1.0, 1.0, 1.0), header=None)
    >>> Stored(name="stored", labels=["liver"], size=[64, 64, 32]).shape
    (1, 32, 64, 64)
    """

    dimensions: Dimensions = Field(default=3, description="3: volumes; 2: their slices")
    modalities: tuple[Name, ...] = Field(
        default=("image",), min_length=1, max_length=64, description="a volume's channels, in turn"
    )
    target_spacing: tuple[Distance, ...] | None = Field(default=None, description="mm between voxels, for all sites")
    slices: Literal["labelled", "all"] = Field(
        default="labelled", description="slices of a segmentation that are cases: those with a structure, or all"
    )

    lacking: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="hospitals may lack modalities, which are 0, and 1 in a channel more of each; in training this "
        "share of those that are there is dropped by chance, never all. `null`: none may",
    )

    @model_validator(mode="after")
    def _spacing_fits(self) -> Self:
        if self.target_spacing is not None and len(self.target_spacing) != self.axes:
            raise ValueError(f"target_spacing {list(self.target_spacing)}: give {self.axes} numbers")
        if self.lacking is not None and set(self.labels) & set(self.modalities):
            raise ValueError("labels and modalities share a name, so 'absent' at a site would mean both; rename one")
        return self

    @property
    def stored(self) -> int:
        return 3

    @property
    def axes(self) -> Dimensions:
        return self.dimensions

    @property
    def sliced(self) -> bool:
        return self.dimensions == 2

    @property
    def channels(self) -> int:
        """The modalities, and where some may be lacking what says so."""
        return self._read_channels * (1 if self.lacking is None else 2)

    @property
    def _read_channels(self) -> int:
        return len(self.modalities)

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        return (*super().may_be_absent, *(() if self.lacking is None else self.modalities))

    def absent(self, source: DataSource) -> tuple[str, ...]:
        names = super().absent(source)
        if set(self.modalities) <= set(names):
            raise DataError("data.unannotated names all modalities of the plan, so that nothing is read here")
        return names

    def lacking_of(self, source: DataSource) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.modalities) if name in source.unannotated)

    def _with_lacking(self, cases: Tensor, lacks: Sequence[int]) -> Tensor:
        if self.lacking is None:
            return cases
        whole = cases.new_zeros(len(cases), self.channels, *cases.shape[2:])
        whole[:, [place for place in range(self._read_channels) if place not in lacks]] = cases
        whole[:, [self._read_channels + place for place in lacks]] = 1
        return whole

    def _lacking_stays(self, images: Tensor, drop: Tensor | None = None) -> Tensor:
        """Return images [..., channels, *grid] whose lacking channels are 0 and say so everywhere, also at filled-up
        places; and those that are dropped."""
        if self.lacking is None:
            return images
        values, marks = images.split(self._read_channels, -self.axes - 1)
        marks = (marks.flatten(-self.axes).amax(-1) > 0).to(images.dtype)
        if drop is not None:
            marks = marks.where(~drop, 1)
        marks = marks.reshape(*marks.shape, *[1] * self.axes).expand(values.shape)
        return torch.cat([values * (1 - marks), marks], -self.axes - 1)

    def cropped(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        image, target = super().cropped(case, seed)
        return self._lacking_stays(image), target

    @property
    def _varies(self) -> bool:
        return super()._varies or self.lacking is not None

    def augmented(self, batch: Case, seeds: Sequence[int]) -> Case:
        """Return the same with channels dropped, after other changes, which are of values alone."""
        if self.lacking is None:
            return super().augmented(batch, seeds)
        values, marks = batch[0].split(self._read_channels, 1)
        values, targets = super().augmented((values, batch[1]), seeds)
        there = marks.flatten(2).amax(2) <= 0
        drawn = [torch.rand(self._read_channels, generator=generator_for(seed, "lacking")) for seed in seeds]
        chances = torch.stack(drawn).to(there.device)
        stays = chances.where(there, -1).argmax(1, keepdim=True)  # one that is there always does
        drop = ((chances < self.lacking) & there).scatter(1, stays, False)
        return self._lacking_stays(torch.cat([values, marks], 1), drop), targets

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        return super().infer(lambda images: network(self._lacking_stays(images)), inputs)

    @property
    def voxel(self) -> tuple[float, ...] | None:
        return self.target_spacing and self.target_spacing[::-1]

    def _cases(self, image: Tensor) -> Tensor:
        return image[None] if self.axes == 3 else image.transpose(0, 1)

    @property
    def alike(self) -> bool:
        return self.target_spacing is None

    def _grid(self, grid: tuple[int, ...], spacing: Sequence[float]) -> tuple[int, ...]:
        if self.voxel is None:
            return super()._grid(grid, spacing)
        return grid_at(grid, tuple(spacing)[: self.axes][::-1], self.voxel)

    @property
    def _channel_names(self) -> tuple[str, ...]:
        return self.modalities

    def _on_the_grid(self) -> list[dict[str, Any]]:
        """Put axes in the order of the network's; slices last."""
        turned = {"_target_": "Orientationd", "keys": "image", "axcodes": "SPL", "labels": None}
        rest = [] if self.axes == 3 else [0]
        if rest:
            turned["axcodes"] = "PLS"
        if self.voxel is None:
            size = [*self.size[::-1], *(-1 for _ in rest)]
            return [turned, {"_target_": "Resized", "keys": "image", "spatial_size": size, "mode": "trilinear"}]
        return [turned, {"_target_": f"{IN_MONAI}.ToSpacingd", "keys": "image", "pixdim": [*self.voxel, *rest]}]

    def _chosen(self, facts: Facts) -> list[int]:
        if self.axes == 2 and self.segments and self.slices == "labelled":
            return [case for case, shown in enumerate(facts.shown) if any(shown)]
        return super()._chosen(facts)


class NiftiFolder(VolumeFolder):
    """Volumes of NIfTI, MHA, NRRD, or a folder for each DICOM series; masks are files on the same grid."""

    title: ClassVar[str] = "A hospital's own volumes: segmentation or classification, 3-D or slices"

    name: Literal["nifti-folder"] = "nifti-folder"

    def across_patients(self) -> str:
        return super().across_patients()  # an image is scaled by its own intensities alone
