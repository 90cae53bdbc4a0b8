"""Define the task `nifti-folder`, whose cases are volumes, and the base class of the tasks `nifti-folder` and
`dicom-folder`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.models.network import Dimensions
from medsilo.tasks.inference import IN_MONAI
from medsilo.tasks.own.folder import Distance, FolderTask, Name

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    from medsilo.tasks.cache import Facts
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.sources import DataSource


class VolumeFolder(FolderTask):
    """Base class of tasks whose cases are volumes, or slices of volumes, in a folder. The labels of the cases are masks
    or classes.

    Subclasses may override `listing_of`, which lists cases, `scan_of`, which reads images, and `mask_reader`, which
    reads masks. Every volume is reoriented to LPS.

    With a target spacing in the plan, volumes are resampled to this spacing, and a segmentation trains on patches of
    the plan's size. Without it, volumes are resized to the plan's size.

    With `dimensions: 2`, every slice is a case, and lists with one number per axis have the order x, y. All slices of a
    volume are in the same part (training, validation or test).

    >>> class Stored(VolumeFolder):  # with numpy
    ...     def scan_of(self, files): return Scan(np.load(files[0])[None], np.eye(4), (1.0, 1.0, 1.0), header=None)
    >>> Stored(name="stored", labels=["liver"], size=[64, 64, 32]).shape
    (1, 32, 64, 64)
    """

    dimensions: Dimensions = Field(default=3, description="3: cases are volumes; 2: cases are slices")
    modalities: tuple[Name, ...] = Field(
        default=("image",), min_length=1, max_length=64, description="names of the channels of a volume, in order"
    )
    target_spacing: tuple[Distance, ...] | None = Field(
        default=None,
        description="voxel spacing in mm to which sites resample volumes; `null`: sites resize volumes to `size`",
    )
    slices: Literal["labelled", "all"] = Field(
        default="labelled",
        description="slices that a segmentation uses: only slices with a structure, or all slices",
    )

    @model_validator(mode="after")
    def _spacing_fits(self) -> Self:
        if self.target_spacing is not None and len(self.target_spacing) != self.axes:
            raise ValueError(f"target_spacing {list(self.target_spacing)}: give {self.axes} numbers")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        return (*super().words, *self.modalities)

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
        return len(self.modalities)

    @property
    def voxel(self) -> tuple[float, ...] | None:
        return self.target_spacing and self.target_spacing[::-1]

    def as_cases(self, image: Tensor) -> Tensor:
        return image[None] if self.axes == 3 else image.transpose(0, 1)

    @property
    def alike(self) -> bool:
        return self.target_spacing is None

    def grid_of(self, grid: tuple[int, ...], spacing: Sequence[float]) -> tuple[int, ...]:
        from medsilo.tasks.own import image_patches

        if self.voxel is None:
            return super().grid_of(grid, spacing)
        return image_patches.grid_at(grid, tuple(spacing)[: self.axes][::-1], self.voxel)

    def listing_of(self, source: "DataSource", folder: Path) -> "CaseIndex":
        """List the images in a folder; channels that the site names are sorted in the plan's order."""
        if not isinstance(source.images, dict):
            return super().listing_of(source, folder)
        own = source.images
        if strange := sorted({*own} ^ {*self.modalities}):
            what = "names no" if strange[0] in self.modalities else "names a strange"
            raise DataError(
                f"data.images: {what} channel {strange[0]!r}; the plan's are {', '.join(self.modalities)}: give a "
                "pattern for each of these names"
            )
        from medsilo.tasks.survey import Problem

        ordered = tuple(own[name] for name in self.modalities)
        listing = super().listing_of(source.model_copy(update={"images": ordered}), folder)
        files = tuple(f"{name}: {own[name]}" for name in self.modalities)
        told = f"channels are matched by name, in the plan's order: {', '.join(self.modalities)}"
        listing.problems.append(Problem("note", told, private=files))
        return listing

    @property
    def _channel_names(self) -> tuple[str, ...]:
        return self.modalities

    def _on_the_grid(self) -> list[dict[str, Any]]:
        """Return the MONAI bundle configuration that reorients and resamples volumes; if slices are the cases, the axis
        across slices is last.
        """
        turned = {"_target_": "Orientationd", "keys": "image", "axcodes": "SPL", "labels": None}
        rest = [] if self.axes == 3 else [0]
        if rest:
            turned["axcodes"] = "PLS"
        if self.voxel is None:
            size = [*self.size[::-1], *(-1 for _ in rest)]
            return [turned, {"_target_": "Resized", "keys": "image", "spatial_size": size, "mode": "trilinear"}]
        return [turned, {"_target_": f"{IN_MONAI}.ToSpacingd", "keys": "image", "pixdim": [*self.voxel, *rest]}]

    def chosen_cases(self, facts: "Facts") -> list[int]:
        if self.axes == 2 and self.segments and self.slices == "labelled":
            return [case for case, shown in enumerate(facts.shown) if any(shown)]
        return super().chosen_cases(facts)


class NiftiFolder(VolumeFolder):
    """A task whose cases are volumes; a volume is a file, such as a NIfTI file, or a folder with one DICOM series. A
    mask is a file with the same grid as its image.
    """

    title: ClassVar[str] = "A hospital's own volumes: segmentation or classification, 3-D or slices"

    name: Literal["nifti-folder"] = "nifti-folder"

    def across_patients(self) -> str:
        return super().across_patients()  # the images of a patient are prepared independently of other patients
