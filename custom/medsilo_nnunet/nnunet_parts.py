"""Create nnU-Net's preprocessing, patches, augmentation, loss and inference from nnU-Net's plans.

All functions in this module call nnU-Net's code. For reproducibility, the functions of this module seed the random
generators of Python, NumPy and PyTorch, and afterwards restore the generators' states.
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

# an image [C, D, H, W] and labels [D, H, W]; empty voxels of the image have the label -1
Case = tuple[Tensor, Tensor]
# A case, and the voxels of its structures as rows [n, 4]: index of the structure, z, y, x.
Placed = tuple[Any, Any, Tensor]  # the image and the labels are read from files only when they are needed
NONE = torch.empty(0, 4, dtype=torch.int32)
# Variants of nnU-Net's trainer that change only loss, augmentation or mirroring. The trainer's epochs, optimizer and
# learning rate are not used, because these are keys of medsilo's plan.
TrainerName = Literal[
    "nnUNetTrainer",
    "nnUNetTrainerDA5",
    "nnUNetTrainerDiceLoss",
    "nnUNetTrainerDiceTopK10Loss",
    "nnUNetTrainerNoDA",
    "nnUNetTrainerNoMirroring",
]
FOREGROUND = 0.33  # fraction of patches in a batch that nnU-Net guarantees to contain a structure


class NnUNetParts:
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
            # With cuDNN's benchmarking, measured speed would choose the algorithm, and equal seeds could give different
            # patches.
            if hasattr(one, "benchmark"):
                one.benchmark = False
        self.drawing = (patch, changed)
        self.shuffled = [(one, tuple(one.channel_idx)) for one in _within(changed) if hasattr(one, "channel_idx")]
        self.regions = labels.foreground_regions if labels.has_regions else ()
        self.sought: list[Any] = list(self.regions) or list(labels.foreground_labels)
        self.cutting = (own.patch_size, self.trainer.get_validation_transforms(None))

    @property
    def _managers(self) -> tuple[Any, Any]:
        return self.trainer.plans_manager, self.trainer.configuration_manager

    # ------------------------------------------------------------------ data
    def read(self, files: Sequence[Path]) -> tuple[np.ndarray, dict[str, Any]]:
        try:
            values, notes = self._managers[0].image_reader_writer_class().read_images(list(map(str, files)))
        # libraries that read images raise many kinds of errors, so all errors are caught
        except Exception as error:
            raise DataError("nnU-Net can't read an image; copy or export it again", str(error)) from error
        return values, notes

    def on_its_grid(self, values: np.ndarray, notes: dict[str, Any]) -> Tensor:
        """Resample an image [C, D, H, W] to the voxel grid of the plans. Resampling adds the cropped margins to
        `notes`.
        """
        preprocessor = self._managers[1].preprocessor_class(verbose=False)
        image, _, _ = preprocessor.run_case_npy(values, None, notes, *self._managers, self.settings)
        return torch.from_numpy(image)

    def labels_back(self, output: Tensor, notes: dict[str, Any]) -> Tensor:
        """Return the label of each voxel on the original grid of an image. `output` [outputs, D, H, W] is the network's
        output on the voxel grid of the plans.
        """
        from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

        labels = convert_predicted_logits_to_segmentation_with_correct_shape(
            # nnU-Net resamples predictions in half precision; medsilo also rounds them to half precision, so that ties
            # between equal scores break as in nnU-Net
            output.half(),
            *self._managers,
            self.trainer.label_manager,
            notes,
            num_threads_torch=torch.get_num_threads(),
        )
        return torch.from_numpy(labels)

    def prepared(self, images: Sequence[Path], label: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
        preprocessor, files = self._managers[1].preprocessor_class(verbose=False), list(map(str, images))
        try:
            image, labels, notes = preprocessor.run_case(files, str(label), *self._managers, self.settings)
        # libraries that read images raise many kinds of errors, so all errors are caught
        except Exception as error:
            raise DataError("nnU-Net can't preprocess a case; check its image and labels", str(error)) from error
        return torch.from_numpy(image), torch.from_numpy(labels[0]), notes

    def own_labels(self, file: Path) -> Tensor:
        return torch.from_numpy(self._managers[0].image_reader_writer_class().read_seg(str(file))[0][0])

    def draw_patch(self, case: Placed, seed: int, certain: bool) -> Case:
        """Return an augmented patch of a case. If `certain` is true and the case has a structure, the patch contains a
        voxel of a structure.
        """
        return self._patch(case, seed, certain, *self.drawing)

    def cut(self, case: Case, seed: int) -> Case:
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
        # nnU-Net shuffles its list of channels in place; afterwards, the list is restored, so that no patch depends on
        # earlier patches
        for transform, channels in self.shuffled:
            transform.channel_idx = list(channels)
        with _seeded(seed), _threads_known():
            batch = loader.generate_train_batch()
        return batch["data"][0], batch["target"][0, 0].long()

    # ------------------------------------------------------------------ loss and inference
    def loss(self, output: Tensor | list[Tensor], target: Tensor, drawn: Sequence[int] | None = None) -> Tensor:
        """Return nnU-Net's loss. In training, the loss covers the outputs at all resolutions; in evaluation, it covers
        only the finest output.

        Args:
            drawn: The positions of the annotated regions, for which `output` has channels; by default all regions.
        """
        labels = target[:, None].clamp(min=0)
        if self.regions:
            regions = self.regions if drawn is None else [self.regions[place] for place in drawn]
            values = [labels.new_tensor(region if isinstance(region, tuple) else (region,)) for region in regions]
            labels = torch.cat([torch.isin(labels, value) for value in values], 1)
        if isinstance(output, Tensor):
            return self.criterion.loss(output, labels)
        from batchgeneratorsv2.transforms.utils.deep_supervision_downsampling import DownsampleSegForDSTransform

        coarser = DownsampleSegForDSTransform(self.scales)
        each = [coarser(segmentation=label if self.regions else label.short())["segmentation"] for label in labels]
        return self.criterion(output, [torch.stack(scale) for scale in zip(*each, strict=True)])

    def predicted(self, output: Tensor) -> Tensor:
        if not self.regions:
            # max returns the same indices as argmax, but on a CPU, argmax over channels is ten times slower
            return output.max(1).indices
        found = self.trainer.label_manager.convert_logits_to_segmentation
        return torch.stack([found(one) for one in output])

    def inferred(self, network: Callable[[Tensor], Tensor], image: Tensor, mirror: bool) -> Tensor:
        """Return a network's output [outputs, D, H, W] for a whole case, which is predicted in nnU-Net's sliding
        windows.
        """
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        gpu, by_stopwatch = image.device.type == "cuda", torch.backends.cudnn.benchmark
        with redirect_stdout(io.StringIO()):
            predictor = nnUNetPredictor(
                use_mirroring=mirror, perform_everything_on_device=gpu, device=image.device, allow_tqdm=False
            )
        # restores the setting of cuDNN's benchmarking: nnU-Net turns benchmarking on, and results would then depend on
        # measured speed
        torch.backends.cudnn.benchmark = by_stopwatch
        module = network if isinstance(network, nn.Module) else _FunctionModule(network)
        predictor.manual_initialization(module, *self._managers, None, self.settings, "nnUNetTrainer", self.mirrored)
        return predictor.predict_sliding_window_return_logits(image).float()


class _FunctionModule(nn.Module):
    """Wraps a function as a PyTorch module, because nnU-Net's predictor only accepts modules."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class _PatchSource:
    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        self.shape, self.read = shape, read

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        return self.read(slices).numpy()


class _OneCase:
    identifiers = ("case",)

    def __init__(self, case: Placed, sought: Sequence[Any]) -> None:
        self.case, self.sought = case, sought

    def load_case(self, identifier: str) -> tuple[_PatchSource, _PatchSource, None, dict[str, Any]]:
        """Return four values: the image, the labels, None, and the voxels of the structures. None stands for the result
        of an earlier stage, which does not exist.
        """
        whole, labels, places = self.case[0], self.case[1], self.case[2].numpy()
        found = {own: places[places[:, 0] == number] for number, own in enumerate(self.sought, 1)}
        image = _PatchSource(tuple(whole.shape), lambda cut: whole[cut])
        right = _PatchSource((1, *labels.shape), lambda cut: labels[cut[1:]][None])
        return image, right, None, {"class_locations": found}


def places_in(tables: Mapping[int, Any]) -> Tensor:
    """Return the voxels of all structures in one tensor. Each row begins with the index of a structure, counted from
    1.
    """
    # nnU-Net's voxel lists begin with a column for the channel, which is always 0 and is dropped
    each = [np.insert(voxels[:, 1:], 0, number, 1) for number, voxels in enumerate(tables.values(), 1) if len(voxels)]
    return torch.from_numpy(np.concatenate(each).astype(np.int32)) if each else NONE


@cache
def _trainer(name: TrainerName) -> Any:
    """Create a subclass of nnU-Net's trainer that creates no folders, writes no logs and selects no device."""
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
    """Let nnU-Net's data loader limit the number of threads without a search for all loaded libraries in each batch.

    In each batch, searching for loaded libraries took half as long as augmenting a patch.
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
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed is not used: on a machine with a GPU, each call of it would format a traceback
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
