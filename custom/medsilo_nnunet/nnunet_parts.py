"""nnU-Net's own parts, put together from its plans: preprocessing, patches, augmentation, loss and inference.

All of it is called where nnU-Net has it. Chance comes from a seed: nnU-Net draws from the generators of Python, NumPy
and PyTorch, which are put back afterwards.
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

# Image [C, D, H, W] and labels [D, H, W], which are -1 where the image was empty.
Case = tuple[Tensor, Tensor]
# A case, and voxels of structures, [n, 4]: the structure's number, z, y, x.
Placed = tuple[Any, Any, Tensor]  # what of image and labels is looked at is read then; places of structures
NONE = torch.empty(0, 4, dtype=torch.int32)
# nnU-Net's variants of its trainer that have another loss, augmentation or mirroring, and nothing else; those that are
# chosen between most. What others change (epochs, optimizer, learning rate) are keys of a plan.
TrainerName = Literal[
    "nnUNetTrainer",
    "nnUNetTrainerDA5",
    "nnUNetTrainerDiceLoss",
    "nnUNetTrainerDiceTopK10Loss",
    "nnUNetTrainerNoDA",
    "nnUNetTrainerNoMirroring",
]
FOREGROUND = 0.33  # share of patches that have a structure for certain, as nnU-Net has it


class NnUNetParts:
    """The parts that one configuration of the plans asks for."""

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
            if hasattr(one, "benchmark"):  # chosen by a stopwatch, equal seeds would not give equal patches everywhere
                one.benchmark = False
        self.drawing = (patch, changed)
        self.shuffled = [(one, tuple(one.channel_idx)) for one in _within(changed) if hasattr(one, "channel_idx")]
        self.regions = labels.foreground_regions if labels.has_regions else ()
        self.sought: list[Any] = list(self.regions) or list(labels.foreground_labels)  # what patches are drawn for
        self.cutting = (own.patch_size, self.trainer.get_validation_transforms(None))

    @property
    def _managers(self) -> tuple[Any, Any]:
        return self.trainer.plans_manager, self.trainer.configuration_manager

    # ------------------------------------------------------------------ data
    def read(self, files: Sequence[Path]) -> tuple[np.ndarray, dict[str, Any]]:
        """Return an image as nnU-Net reads it, [C, D, H, W], and what it notes of it."""
        try:
            values, notes = self._managers[0].image_reader_writer_class().read_images(list(map(str, files)))
        except Exception as error:  # of any of the libraries that read images
            raise DataError("nnU-Net can't read an image; copy or export it again", str(error)) from error
        return values, notes

    def on_its_grid(self, values: np.ndarray, notes: dict[str, Any]) -> Tensor:
        """Return what was read on the grid of the plans, [C, D, H, W]; what is cut off is in the notes then."""
        preprocessor = self._managers[1].preprocessor_class(verbose=False)
        image, _, _ = preprocessor.run_case_npy(values, None, notes, *self._managers, self.settings)
        return torch.from_numpy(image)

    def labels_back(self, output: Tensor, notes: dict[str, Any]) -> Tensor:
        """Return the label of each place as it was read, from the output [outputs, D, H, W] on the plans' grid."""
        from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

        labels = convert_predicted_logits_to_segmentation_with_correct_shape(
            output.half(),  # as nnU-Net's windows give it, and as it resamples it: ties go to the same label
            *self._managers,
            self.trainer.label_manager,
            notes,
            num_threads_torch=torch.get_num_threads(),
        )
        return torch.from_numpy(labels)

    def prepared(self, images: Sequence[Path], label: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return a case as nnU-Net preprocesses it, and its notes."""
        preprocessor, files = self._managers[1].preprocessor_class(verbose=False), list(map(str, images))
        try:
            image, labels, notes = preprocessor.run_case(files, str(label), *self._managers, self.settings)
        except Exception as error:  # of any of the libraries that read images
            raise DataError("nnU-Net can't preprocess a case; check its image and labels", str(error)) from error
        return torch.from_numpy(image), torch.from_numpy(labels[0]), notes

    def own_labels(self, file: Path) -> Tensor:
        """Return a mask as nnU-Net reads it, [D, H, W]."""
        return torch.from_numpy(self._managers[0].image_reader_writer_class().read_seg(str(file))[0][0])

    def draw_patch(self, case: Placed, seed: int, certain: bool) -> Case:
        """Return an augmented patch. certain: whether it has a structure, if the case has one."""
        return self._patch(case, seed, certain, *self.drawing)

    def cut(self, case: Case, seed: int) -> Case:
        """Return a patch as it is."""
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
        for transform, channels in self.shuffled:  # which nnU-Net reorders in place: a patch would follow from the last
            transform.channel_idx = list(channels)
        with _seeded(seed), _threads_known():
            batch = loader.generate_train_batch()
        return batch["data"][0], batch["target"][0, 0].long()

    # ------------------------------------------------------------------ loss and inference
    def loss(self, output: Tensor | list[Tensor], target: Tensor, drawn: Sequence[int] | None = None) -> Tensor:
        """Return nnU-Net's loss: of all resolutions in training, of the finest alone in evaluation.

        drawn: the places of the regions that these outputs are of; by default all.
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
        """Return the label of each place, [batch, *grid], from outputs [batch, outputs, *grid]."""
        if not self.regions:
            return output.max(1).indices  # as argmax, which takes ten times as long over channels on a CPU
        found = self.trainer.label_manager.convert_logits_to_segmentation
        return torch.stack([found(one) for one in output])

    def inferred(self, network: Callable[[Tensor], Tensor], image: Tensor, mirror: bool) -> Tensor:
        """Return a network's output for a whole case, [outputs, D, H, W], through windows as nnU-Net lays them."""
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        gpu, by_stopwatch = image.device.type == "cuda", torch.backends.cudnn.benchmark
        with redirect_stdout(io.StringIO()):
            predictor = nnUNetPredictor(
                use_mirroring=mirror, perform_everything_on_device=gpu, device=image.device, allow_tqdm=False
            )
        torch.backends.cudnn.benchmark = by_stopwatch  # which nnU-Net sets, and with which bits would depend on speed
        module = network if isinstance(network, nn.Module) else _FunctionModule(network)
        predictor.manual_initialization(module, *self._managers, None, self.settings, "nnUNetTrainer", self.mirrored)
        return predictor.predict_sliding_window_return_logits(image).float()


class _FunctionModule(nn.Module):
    """A function as nnU-Net's predictor wants it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class _PatchSource:
    """An array of which nnU-Net's loader cuts a patch; nothing else of it is read."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        self.shape, self.read = shape, read

    def __getitem__(self, places: tuple[slice, ...]) -> np.ndarray:
        return self.read(places).numpy()


class _OneCase:
    """A data set of one case, as nnU-Net's loader wants it."""

    identifiers = ("case",)

    def __init__(self, case: Placed, sought: Sequence[Any]) -> None:
        self.case, self.sought = case, sought

    def load_case(self, identifier: str) -> tuple[_PatchSource, _PatchSource, None, dict[str, Any]]:
        """Return image, labels, none of a first stage, and where the structures are."""
        whole, labels, places = self.case[0], self.case[1], self.case[2].numpy()
        found = {own: places[places[:, 0] == number] for number, own in enumerate(self.sought, 1)}
        image = _PatchSource(tuple(whole.shape), lambda cut: whole[cut])
        right = _PatchSource((1, *labels.shape), lambda cut: labels[cut[1:]][None])
        return image, right, None, {"class_locations": found}


def places_in(found: Mapping[int, Any]) -> Tensor:
    """Return the places of all structures, by their number from 1, in one tensor."""
    # nnU-Net has the channel in front, which is always 0.
    each = [np.insert(voxels[:, 1:], 0, number, 1) for number, voxels in enumerate(found.values(), 1) if len(voxels)]
    return torch.from_numpy(np.concatenate(each).astype(np.int32)) if each else NONE


@cache
def _trainer(name: TrainerName) -> Any:
    """Return a trainer of nnU-Net's without what it does to folders, logs and devices."""
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
    """Yield a transform and all inside it."""
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
    """Let nnU-Net's loader limit threads, as it does for each batch, without looking for all libraries anew.

    It took half as long as the augmented patch itself.
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
    """Draw from a seed inside, with all generators that nnU-Net draws from."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a traceback each time, for GPUs
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
