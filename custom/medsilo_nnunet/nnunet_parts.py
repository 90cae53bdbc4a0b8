"""Create nnU-Net's preprocessing, patches, augmentation, loss and inference from nnU-Net's plans.

All functions in this module call nnU-Net's code. For reproducibility, these functions seed the random generators of
Python, NumPy and PyTorch, and restore the generators' states afterwards.
"""

import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.extend import DataError, MedsiloError
from medsilo_nnunet import NEEDED
from medsilo_nnunet.nnunet_network import ConfigurationName, NnUNetPlans
from medsilo_nnunet.question import SegmentationQuestion

# An image [C, D, H, W] and labels [D, H, W]. The label is -1 for voxels that were empty in the image.
Case = tuple[Tensor, Tensor]
# A case, and the voxels of its structures as rows [n, 4]: number of the structure, z, y and x.
Placed = tuple[Any, Any, Tensor]  # an image and labels that are read when they are needed, and the voxels of structures
NONE = torch.empty(0, 4, dtype=torch.int32)
# The most common variants of nnU-Net's trainer that change only loss, augmentation or mirroring. Epochs, optimizer and
# learning rate are keys of a plan instead.
TrainerName = Literal[
    "nnUNetTrainer",
    "nnUNetTrainerDA5",
    "nnUNetTrainerDiceLoss",
    "nnUNetTrainerDiceTopK10Loss",
    "nnUNetTrainerNoDA",
    "nnUNetTrainerNoMirroring",
]
FOREGROUND = 0.33  # nnU-Net's fraction of patches that are guaranteed to contain a structure


class NnUNetParts:
    """The objects that nnU-Net creates for one configuration of the plans."""

    def __init__(
        self,
        question: SegmentationQuestion,
        plans: NnUNetPlans,
        configuration: ConfigurationName,
        trainer: TrainerName = "nnUNetTrainer",
    ) -> None:
        self.settings = {**question.in_nnunet(), "file_ending": ".nii.gz"}
        self.trainer = _trainer(trainer)(plans.in_nnunet(), configuration, self.settings)
        rotation, dummy_2d, patch, mirrored = self.trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
        self.mirrored = mirrored
        own = self.trainer.configuration_manager
        self.scales = self.trainer._get_deep_supervision_scales()
        self.criterion = self.trainer._build_loss()
        labels = self.trainer.label_manager
        changed = self.trainer.get_training_transforms(
            own.patch_size, rotation, None, mirrored, dummy_2d, use_mask_for_norm=own.use_mask_for_norm
        )
        for one in _within(changed):
            # With benchmarking, a measurement of speed would choose the algorithm, so that equal seeds could give
            # different patches.
            if hasattr(one, "benchmark"):
                one.benchmark = False
        self.drawing = (patch, changed)
        self.shuffled = [(one, tuple(one.channel_idx)) for one in _within(changed) if hasattr(one, "channel_idx")]
        self.regions = labels.foreground_regions if labels.has_regions else ()
        # Patches are sampled at voxels of structures.
        self.sought: list[Any] = list(self.regions) or list(labels.foreground_labels)
        self.cutting = (own.patch_size, self.trainer.get_validation_transforms(None))

    @property
    def _managers(self) -> tuple[Any, Any]:
        return self.trainer.plans_manager, self.trainer.configuration_manager

    # ------------------------------------------------------------------ data
    def read(self, files: Sequence[Path]) -> tuple[np.ndarray, dict[str, Any]]:
        """Read an image with nnU-Net, and return its values [C, D, H, W] and nnU-Net's metadata."""
        try:
            values, notes = self._managers[0].image_reader_writer_class().read_images(list(map(str, files)))
        # The libraries that read images raise many kinds of errors, so all errors are caught.
        except Exception as error:
            raise DataError("nnU-Net can't read an image; copy or export it again", str(error)) from error
        return values, notes

    def on_its_grid(self, values: np.ndarray, notes: dict[str, Any]) -> Tensor:
        """Resample an image to the voxel grid of the plans, and return it as [C, D, H, W]. Resampling adds the cropped
        margins to `notes`.
        """
        preprocessor = self._managers[1].preprocessor_class(verbose=False)
        image, _, _ = preprocessor.run_case_npy(values, None, notes, *self._managers, self.settings)
        return torch.from_numpy(image)

    def labels_back(self, output: Tensor, notes: dict[str, Any]) -> Tensor:
        """Return the label of each voxel on the image's original grid, given the network's output [outputs, D, H, W] on
        the grid of the plans.
        """
        from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

        labels = convert_predicted_logits_to_segmentation_with_correct_shape(
            # nnU-Net resamples predictions in half precision; the same rounding here makes equal scores break ties in
            # the same way.
            output.half(),
            *self._managers,
            self.trainer.label_manager,
            notes,
            num_threads_torch=torch.get_num_threads(),
        )
        return torch.from_numpy(labels)

    def prepared(self, images: Sequence[Path], label: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return a case after nnU-Net's preprocessing, together with nnU-Net's metadata."""
        preprocessor, files = self._managers[1].preprocessor_class(verbose=False), list(map(str, images))
        try:
            image, labels, notes = preprocessor.run_case(files, str(label), *self._managers, self.settings)
        # The libraries that read images raise many kinds of errors, so all errors are caught.
        except Exception as error:
            raise DataError("nnU-Net can't preprocess a case; check its image and labels", str(error)) from error
        return torch.from_numpy(image), torch.from_numpy(labels[0]), notes

    def own_labels(self, file: Path) -> Tensor:
        """Read a mask [D, H, W] with nnU-Net."""
        return torch.from_numpy(self._managers[0].image_reader_writer_class().read_seg(str(file))[0][0])

    def draw_patch(self, case: Placed, seed: int, certain: bool) -> Case:
        """Return an augmented patch of a case. If `certain` is true and the case has a structure, the patch contains
        voxels of a structure.
        """
        return self._patch(case, seed, certain, *self.drawing)

    def cut(self, case: Case, seed: int) -> Case:
        """Return a patch of a case without augmentation."""
        from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor

        certain, places = bool(np.random.default_rng(seed).uniform() < FOREGROUND), NONE
        if certain:
            found = DefaultPreprocessor._sample_foreground_locations(case[1][None].numpy(), self.sought)
            places = places_in(found)
        return self._patch((*case, places), seed, certain, *self.cutting)

    def _patch(
        self, case: Placed, seed: int, certain: bool, patch: Sequence[int], transforms: Callable[..., Any]
    ) -> Case:
        from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader

        final, labels = self.trainer.configuration_manager.patch_size, self.trainer.label_manager
        one = _OneCase(case, self.sought)
        loader = nnUNetDataLoader(one, 1, patch, final, labels, transforms=transforms)
        loader.get_do_oversample = lambda _: certain
        # nnU-Net shuffles this list of channels in place, so that each patch would depend on the previous patches.
        for transform, channels in self.shuffled:
            transform.channel_idx = list(channels)
        with _seeded(seed), _threads_known():
            batch = loader.generate_train_batch()
        return batch["data"][0], batch["target"][0, 0].long()

    # ------------------------------------------------------------------ loss and inference
    def loss(self, output: Tensor | list[Tensor], target: Tensor, drawn: Sequence[int] | None = None) -> Tensor:
        """Return nnU-Net's loss: of the outputs at all resolutions in training, and of the finest output in evaluation.

        Args:
            output: The network's output, with one tensor for each resolution in training.
            target: The labels.
            drawn: The positions of the regions that the output has; by default all regions.
        """
        labels = target[:, None].clamp(min=0)
        if self.regions:
            regions = self.regions if drawn is None else [self.regions[place] for place in drawn]
            values = [labels.new_tensor(region if isinstance(region, tuple) else (region,)) for region in regions]
            labels = torch.cat([torch.isin(labels, one) for one in values], 1)
        if isinstance(output, Tensor):
            return self.criterion.loss(output, labels)
        from batchgeneratorsv2.transforms.utils.deep_supervision_downsampling import DownsampleSegForDSTransform

        coarser = DownsampleSegForDSTransform(self.scales)
        each = [coarser(segmentation=one if self.regions else one.short())["segmentation"] for one in labels]
        return self.criterion(output, [torch.stack(scale) for scale in zip(*each, strict=True)])

    def predicted(self, output: Tensor) -> Tensor:
        """Return the label of each voxel or pixel, [batch, *grid], given outputs [batch, outputs, *grid]."""
        if not self.regions:
            # The indices that max returns equal argmax; on a CPU, argmax over channels would be ten times slower.
            return output.max(1).indices
        found = self.trainer.label_manager.convert_logits_to_segmentation
        return torch.stack([found(one) for one in output])

    def inferred(self, network: Callable[[Tensor], Tensor], image: Tensor, mirror: bool) -> Tensor:
        """Return a network's output for a whole case, [outputs, D, H, W], which nnU-Net predicts in sliding windows."""
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        gpu, by_stopwatch = image.device.type == "cuda", torch.backends.cudnn.benchmark
        with redirect_stdout(io.StringIO()):
            predictor = nnUNetPredictor(
                use_mirroring=mirror, perform_everything_on_device=gpu, device=image.device, allow_tqdm=False
            )
        # nnU-Net turns cuDNN's benchmarking on, and results would then depend on measured speed.
        torch.backends.cudnn.benchmark = by_stopwatch
        module = network if isinstance(network, nn.Module) else _FunctionModule(network)
        predictor.manual_initialization(module, *self._managers, None, self.settings, "nnUNetTrainer", self.mirrored)
        return predictor.predict_sliding_window_return_logits(image).float()


class _FunctionModule(nn.Module):
    """Wraps a function as a module, because nnU-Net's predictor needs a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class _PatchSource:
    """An array from which nnU-Net's data loader reads only a patch."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        self.shape, self.read = shape, read

    def __getitem__(self, places: tuple[slice, ...]) -> np.ndarray:
        return self.read(places).numpy()


class _OneCase:
    """A data set with a single case, for nnU-Net's data loader."""

    identifiers = ("case",)

    def __init__(self, case: Placed, sought: Sequence[Any]) -> None:
        self.case, self.sought = case, sought

    def load_case(self, identifier: str) -> tuple[_PatchSource, _PatchSource, None, dict[str, Any]]:
        """Return image, labels, None in place of the result of an earlier stage, and the voxels of the structures."""
        whole, labels, places = self.case[0], self.case[1], self.case[2].numpy()
        found = {own: places[places[:, 0] == number] for number, own in enumerate(self.sought, 1)}
        image = _PatchSource(tuple(whole.shape), lambda cut: whole[cut])
        right = _PatchSource((1, *labels.shape), lambda cut: labels[cut[1:]][None])
        return image, right, None, {"class_locations": found}


def places_in(found: Mapping[int, Any]) -> Tensor:
    """Return the voxels of all structures in one tensor, in which each row begins with the number of a structure,
    counted from 1.
    """
    # The first column of nnU-Net's voxel lists is the channel; it is always 0 and is dropped.
    each = [np.insert(voxels[:, 1:], 0, number, 1) for number, voxels in enumerate(found.values(), 1) if len(voxels)]
    return torch.from_numpy(np.concatenate(each).astype(np.int32)) if each else NONE


@cache
def _trainer(name: TrainerName) -> Any:
    """Create a trainer class of nnU-Net whose objects create no folders, write no logs and select no device."""
    with MedsiloError.needing(NEEDED):
        from nnunetv2.training.nnUNetTrainer import variants
        from nnunetv2.utilities.find_class_by_name import recursive_find_python_class as find
        from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    places = ("loss", "data_augmentation")
    found = [find(f"{variants.__path__[0]}/{place}", name, f"{variants.__name__}.{place}") for place in places]
    base = next(filter(None, found))

    class Trainer(base):  # type: ignore[misc, valid-type]
        def __init__(self, plans: dict[str, Any], configuration: str, settings: dict[str, Any]) -> None:
            self.plans_manager = PlansManager(plans)
            self.configuration_manager = self.plans_manager.get_configuration(configuration)
            self.label_manager = self.plans_manager.get_label_manager(settings)
            self.enable_deep_supervision, self.is_ddp, self.device = True, False, torch.device("cpu")

        def print_to_log_file(self, *args: object, **options: object) -> None:
            pass

    return Trainer


def _within(transform: Any) -> Iterator[Any]:
    """Yield a transform and all transforms that it contains."""
    yield transform
    for inner in (*getattr(transform, "transforms", ()), getattr(transform, "transform", None)):
        if inner is not None:
            yield from _within(inner)


@cache
def _threads() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def _threads_known() -> Iterator[None]:
    """Let nnU-Net's data loader limit the number of threads without searching for all loaded libraries in each batch.

    The search took half as long as the augmentation of a patch.
    """
    from nnunetv2.training.dataloading import data_loader

    anew = data_loader.threadpool_limits
    data_loader.threadpool_limits = _threads().limit
    try:
        yield
    finally:
        data_loader.threadpool_limits = anew


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that nnU-Net uses, and restore the generators' states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # If there is a GPU, torch.manual_seed would format a traceback at each call.
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
