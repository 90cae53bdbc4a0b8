"""nnU-Net's plans.json as a part of our plan: typed, so that nothing in it is imported that nnU-Net did not write."""

from operator import not_
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from medsilo.extend import Section
from medsilo_nnunet.nnunet_network import Architecture

Voxels = Annotated[int, Field(ge=1, le=65_536)]
Length = Annotated[float, Field(ge=1e-4, le=1e6)]
Shape = Annotated[tuple[Voxels, ...], Field(min_length=2, max_length=3)]
Spacing = Annotated[tuple[Length, ...], Field(min_length=2, max_length=3)]
Axes = Annotated[tuple[Annotated[int, Field(ge=0, le=2)], ...], Field(min_length=3, max_length=3)]
Named = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
Resampling = Literal["resample_data_or_seg_to_shape"]
Scheme = Literal[
    "CTNormalization", "NoNormalization", "ZScoreNormalization", "RescaleTo01Normalization", "RGBTo01Normalization"
]
Reader = Literal[
    "NaturalImage2DIO", "SimpleITKIO", "SimpleITKIOWithReorient", "Tiff3DIO", "NibabelIO", "NibabelIOWithReorient"
]
ConfigurationName = Literal["2d", "3d_fullres", "3d_lowres"]
Cascade = Literal["3d_cascade_fullres"]  # nnU-Net plans it, of two others; it is not trained here
SecondStage = dict[Literal["inherits_from", "previous_stage"], ConfigurationName]


class ResamplingNumbers(Section):
    """The numbers by which images or masks are resampled."""

    is_seg: bool
    order: int = Field(ge=0, le=5)
    order_z: int = Field(ge=0, le=5)
    force_separate_z: bool | None


class Configuration(Section):
    """One of nnU-Net's configurations: its spacing, patches and network."""

    data_identifier: Named
    preprocessor_name: Literal["DefaultPreprocessor"]
    batch_size: int = Field(ge=1, le=65_536)
    patch_size: Shape
    median_image_size_in_voxels: tuple[float, ...] = Field(min_length=2, max_length=3)
    spacing: Spacing
    normalization_schemes: tuple[Scheme, ...] = Field(min_length=1, max_length=32)
    use_mask_for_norm: tuple[bool, ...] = Field(min_length=1, max_length=32)
    resampling_fn_data: Resampling
    resampling_fn_seg: Resampling
    resampling_fn_data_kwargs: ResamplingNumbers
    resampling_fn_seg_kwargs: ResamplingNumbers
    resampling_fn_probabilities: Resampling
    resampling_fn_probabilities_kwargs: ResamplingNumbers
    architecture: Architecture
    batch_dice: bool
    next_stage: Cascade | None = Field(None, exclude_if=not_)


class IntensityFigures(Section):
    """Figures of the foreground's intensities in one channel."""

    mean: float
    median: float
    std: float = Field(ge=0)
    min: float
    max: float
    percentile_99_5: float
    percentile_00_5: float


class NnUNetPlans(Section):
    """The content of plans.json."""

    dataset_name: Named
    plans_name: Named
    original_median_spacing_after_transp: tuple[Length, ...] = Field(min_length=3, max_length=3)
    original_median_shape_after_transp: tuple[Voxels, ...] = Field(min_length=3, max_length=3)
    image_reader_writer: Reader
    transpose_forward: Axes
    transpose_backward: Axes
    configurations: dict[ConfigurationName | Cascade, Configuration | SecondStage]
    experiment_planner_used: Named
    label_manager: Literal["LabelManager"]
    foreground_intensity_properties_per_channel: dict[Annotated[str, Field(pattern=r"^\d{1,2}$")], IntensityFigures] = (
        Field(max_length=32)
    )

    @model_validator(mode="after")
    def _stages_are_there(self) -> Self:
        for name, own in self.configurations.items():
            if isinstance(own, dict) != (name == "3d_cascade_fullres"):
                raise ValueError(f"configurations: {name} is no configuration of nnU-Net's; take plans as it made them")
            others = own.values() if isinstance(own, dict) else ()
            if lacking := [other for other in others if other not in self.configurations]:
                raise ValueError(f"configurations: {name} needs {lacking[0]}, which they lack; make them again")
        return self

    def numbers_of(self, name: ConfigurationName) -> Configuration:
        """Return the numbers of a configuration."""
        own = self.configurations[name]
        assert isinstance(own, Configuration)
        return own

    def in_nnunet(self) -> dict[str, Any]:
        """Return the content of plans.json as nnU-Net reads it."""
        return self.model_dump(mode="json", by_alias=True)
