"""Volumes from a folder: `nifti-folder`, and what it has in common with `dicom-folder`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from medsilo.core import optional
from medsilo.models.network import Dimensions
from medsilo.tasks.inference import IN_MONAI
from medsilo.tasks.own.folder import Distance, FolderTask, Name

if TYPE_CHECKING:  # only a site reads cases
    from medsilo.tasks.cache import Facts


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

    @model_validator(mode="after")
    def _spacing_fits(self) -> Self:
        if self.target_spacing is not None and len(self.target_spacing) != self.axes:
            raise ValueError(f"target_spacing {list(self.target_spacing)}: give {self.axes} numbers")
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
        """The modalities."""
        return len(self.modalities)

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
        return optional.image_patches.grid_at(grid, tuple(spacing)[: self.axes][::-1], self.voxel)

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

    def _chosen(self, facts: "Facts") -> list[int]:
        if self.axes == 2 and self.segments and self.slices == "labelled":
            return [case for case, shown in enumerate(facts.shown) if any(shown)]
        return super()._chosen(facts)


class NiftiFolder(VolumeFolder):
    """Volumes of NIfTI, MHA, NRRD, or a folder for each DICOM series; masks are files on the same grid."""

    title: ClassVar[str] = "A hospital's own volumes: segmentation or classification, 3-D or slices"

    name: Literal["nifti-folder"] = "nifti-folder"

    def across_patients(self) -> str:
        return super().across_patients()  # an image is scaled by its own intensities alone
