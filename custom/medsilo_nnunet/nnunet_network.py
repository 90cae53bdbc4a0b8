"""Validate nnU-Net's plans.json as a section of medsilo's plan, and build the networks that plans.json describes.

nnU-Net imports the classes that plans.json names. medsilo accepts only class names that nnU-Net's planner writes, so
that plans.json cannot make a hospital import any other class.
"""

from operator import not_
from typing import Annotated, Any, Literal, Self, cast

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from medsilo.extend import MedsiloError, Network, Section
from medsilo_nnunet import NEEDED

MOST_STAGES = 12
Along = Annotated[tuple[Annotated[int, Field(ge=1, le=7)], ...], Field(min_length=2, max_length=3)]
Blocks = Annotated[tuple[Annotated[int, Field(ge=1, le=20)], ...], Field(min_length=1, max_length=MOST_STAGES)]
PLAIN = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
RESIDUAL = "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet"


class NormNumbers(Section):
    eps: float = Field(1e-5, gt=0, le=1)
    affine: Literal[True] = True


class ArchitectureNumbers(Section):
    """The settings of a U-Net. Each list has a value for each stage, from the finest to the coarsest resolution."""

    n_stages: int = Field(ge=1, le=MOST_STAGES)
    features_per_stage: tuple[Annotated[int, Field(ge=1, le=2048)], ...] = Field(max_length=MOST_STAGES)
    conv_op: Literal["torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv.Conv3d"]
    kernel_sizes: tuple[Along, ...] = Field(max_length=MOST_STAGES)
    strides: tuple[Along, ...] = Field(max_length=MOST_STAGES)
    n_conv_per_stage: Blocks | None = Field(None, exclude_if=not_)  # for PlainConvUNet
    n_blocks_per_stage: Blocks | None = Field(None, exclude_if=not_)  # for ResidualEncoderUNet
    n_conv_per_stage_decoder: tuple[Annotated[int, Field(ge=1, le=20)], ...] = Field(max_length=MOST_STAGES)
    conv_bias: bool = True
    norm_op: Literal["torch.nn.modules.instancenorm.InstanceNorm2d", "torch.nn.modules.instancenorm.InstanceNorm3d"]
    norm_op_kwargs: NormNumbers = NormNumbers()
    dropout_op: None = None
    dropout_op_kwargs: None = None
    nonlin: Literal["torch.nn.LeakyReLU"] = "torch.nn.LeakyReLU"
    nonlin_kwargs: dict[Literal["inplace"], bool] = {"inplace": True}

    @property
    def dimensions(self) -> int:
        return int(self.conv_op[-2])

    @model_validator(mode="after")
    def _agree(self) -> Self:
        lengths = {len(self.features_per_stage), len(self.kernel_sizes), len(self.strides)}
        if lengths != {self.n_stages} or len(self.n_conv_per_stage_decoder) != self.n_stages - 1:
            raise ValueError(f"it lacks numbers for one of {self.n_stages} stages; use unchanged plans of nnU-Net")
        if {len(along) for along in (*self.kernel_sizes, *self.strides)} != {self.dimensions}:
            raise ValueError(f"kernels and strides do not have {self.dimensions} axes; use unchanged plans of nnU-Net")
        if int(self.norm_op[-2]) != self.dimensions:
            raise ValueError("norm_op has other axes than conv_op; use unchanged plans of nnU-Net")
        return self


class Architecture(Section):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    network_class_name: Literal[
        "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet",
    ]
    arch_kwargs: ArchitectureNumbers
    imported: tuple[Literal["conv_op", "norm_op", "dropout_op", "nonlin"], ...] = Field(
        ("conv_op", "norm_op", "dropout_op", "nonlin"), alias="_kw_requires_import"
    )

    @model_validator(mode="after")
    def _has_its_blocks(self) -> Self:
        wanted = {PLAIN: "n_conv_per_stage", RESIDUAL: "n_blocks_per_stage"}[self.network_class_name]
        given = {name: getattr(self.arch_kwargs, name) for name in ("n_conv_per_stage", "n_blocks_per_stage")}
        if [name for name, blocks in given.items() if blocks] != [wanted] or len(
            given[wanted]
        ) != self.arch_kwargs.n_stages:
            raise ValueError(f"it needs {wanted} for each stage, and no numbers for the other kind of network")
        return self


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
# A configuration of nnU-Net's planner that medsilo does not train, because the configuration has two stages of
# training.
Cascade = Literal["3d_cascade_fullres"]
SecondStage = dict[Literal["inherits_from", "previous_stage"], ConfigurationName]


class ResamplingNumbers(Section):
    is_seg: bool
    order: int = Field(ge=0, le=5)
    order_z: int = Field(ge=0, le=5)
    force_separate_z: bool | None


class Configuration(Section):
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
    mean: float
    median: float
    std: float = Field(ge=0)
    min: float
    max: float
    percentile_99_5: float
    percentile_00_5: float


class NnUNetPlans(Section):
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
        for name, configuration in self.configurations.items():
            if isinstance(configuration, dict) != (name == "3d_cascade_fullres"):
                raise ValueError(
                    f"configurations: {name} is not a configuration of nnU-Net; use unchanged plans of nnU-Net"
                )
            others = configuration.values() if isinstance(configuration, dict) else ()
            if lacking := [other for other in others if other not in self.configurations]:
                raise ValueError(f"configurations: {name} needs {lacking[0]}, which is missing; make the plans again")
        return self

    def numbers_of(self, name: ConfigurationName) -> Configuration:
        own = self.configurations[name]
        assert isinstance(own, Configuration)
        return own

    def in_nnunet(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


class DeeplySupervised(nn.Module):
    """nnU-Net's network. In training, the network returns the output at every resolution, the finest first; otherwise,
    it returns only the finest output.

    nnU-Net's modules register most tensors several times, under different names. The state dict of this class contains
    each tensor once, so that each tensor is sent and stored only once.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.other_names = _other_names(self)
        self.register_state_dict_post_hook(_name_once)
        self.register_load_state_dict_pre_hook(_name_all)

    def forward(self, inputs: Tensor) -> Tensor | list[Tensor]:
        self.network.decoder.deep_supervision = self.training  # type: ignore[union-attr]
        return self.network(inputs)


def _other_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = ((name, first.setdefault(id(own), name)) for name, own in module.named_parameters(remove_duplicate=False))
    return {name: known for name, known in named if name != known}


def _name_once(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    for name in cast(DeeplySupervised, module).other_names:
        state.pop(prefix + name, None)


def _name_all(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    for name, known in cast(DeeplySupervised, module).other_names.items():
        if prefix + known in state:
            state.setdefault(prefix + name, state[prefix + known])


class NnUNet(Network):
    """The network in nnU-Net's plans, which maps [B, channels, (D,) H, W] to logits [B, classes, (D,) H, W]."""

    name: Literal["nnunet"] = "nnunet"
    architecture: Architecture = Field(
        description="the network's architecture, in the format of nnU-Net's plans; the default is the architecture in "
        "the task's plans"
    )

    def build(self, channels: int, classes: int) -> nn.Module:
        with MedsiloError.needing(NEEDED):
            # nnU-Net is imported only when a network is built, because its import takes seconds
            from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
        network = get_network_from_plans(
            self.architecture.network_class_name,
            self.architecture.arch_kwargs.model_dump(mode="json"),
            self.architecture.imported,
            channels,
            classes,
            allow_init=True,
            deep_supervision=True,
        )
        return DeeplySupervised(network)
