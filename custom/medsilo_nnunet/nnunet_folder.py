"""Train on a hospital's own images in nnU-Net's layout, with nnU-Net's own preprocessing, augmentation and loss."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.extend import CaseIndex, DataError, DataSource, Inference, Network, OwnFolder, Scan, Segmentation, Task
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_network import Configuration, ConfigurationName, NnUNet, NnUNetPlans
from medsilo_nnunet.nnunet_parts import FOREGROUND, NnUNetParts, TrainerName, places_in
from medsilo_nnunet.question import SegmentationQuestion

CHANNEL = re.compile(r"_(\d{4})\.[A-Za-z0-9.]+$")
# for an image whose orientation is not changed: the axis order, and whether each axis is flipped
AS_STORED = ((0, 1, 2), (False, False, False))
FLAT = 4
# keys of a plan that change only training and not the test cases
HOW_LEARNED = ("plans", "configuration", "trainer", "mirror")
# minimum number of stages of a network; with fewer stages, nnU-Net's loss would give no resolution a weight
FEWEST_STAGES = 3


class NnUNetFolder(OwnFolder):
    """Trains like nnU-Net, with plans that were made from the joint fingerprint of all hospitals.

    A case is a whole image that nnU-Net has preprocessed, [C, D, H, W]. The network is trained on augmented patches. In
    validation, nnU-Net's sliding windows predict whole images on the voxel grid of the plans. In tests, results are
    computed on the original voxel grid of each image.
    """

    title: ClassVar[str] = "a hospital's own volumes in nnU-Net's layout"
    draws: ClassVar[bool] = True
    evaluation_batch: ClassVar[int] = 1

    name: Literal["nnunet"] = "nnunet"
    question: SegmentationQuestion = Field(
        description="the study's channels and labels, or the name of the YAML file from which `medsilo nnunet "
        "measure` reads channels and labels"
    )
    plans: NnUNetPlans = Field(description="the file that `medsilo nnunet plan` writes")
    configuration: ConfigurationName = Field(
        "2d", description="the configuration in nnU-Net's plans that medsilo trains"
    )
    trainer: TrainerName = Field(
        "nnUNetTrainer", description="nnU-Net's trainer class, which determines loss, augmentation and mirroring"
    )
    mirror: bool = Field(True, description="whether predictions are averaged over mirrored images, as in nnU-Net")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.configuration not in self.plans.configurations:
            raise ValueError(f"plans: the plans have no configuration {self.configuration}; make the plans again")
        if self._numbers.architecture.arch_kwargs.n_stages < FEWEST_STAGES:
            raise ValueError(
                f"plans: for such small images, the network has fewer than {FEWEST_STAGES} stages, "
                "so nnU-Net's loss would divide by zero"
            )
        if len(self._numbers.normalization_schemes) != len(self.question.channels):
            raise ValueError("plans: the channels differ from the question's channels; make the plans again")
        return self

    def __getstate__(self) -> dict[Any, Any]:
        """Pickle no objects of nnU-Net, because the process that reads the pickle creates such objects itself."""
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "parts"}}

    @cached_property
    def parts(self) -> NnUNetParts:
        return NnUNetParts(self.question, self.plans, self.configuration, self.trainer)

    @property
    def _numbers(self) -> Configuration:
        return self.plans.numbers_of(self.configuration)

    # ------------------------------------------------------------------------------------------ objective
    @property
    def words(self) -> tuple[str, ...]:
        return (*super().words, *self.question.channels)

    @property
    def goal(self) -> "NnUNetObjective":
        return NnUNetObjective(self)

    @property
    def use(self) -> "NnUNetInference":
        return NnUNetInference(self)

    @property
    def channels(self) -> int:
        return len(self.question.channels)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self._numbers.patch_size)

    def default_network(self) -> Network:
        return NnUNet(architecture=self._numbers.architecture)

    def draw_batches(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        return _Patches(self.parts, cases, batch, steps, seed)

    @property
    def piece(self) -> Callable[[tuple[Tensor, Tensor], int], tuple[Tensor, Tensor]]:
        return self._piece

    def _piece(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        mark = self.goal.mark_in(case[1])
        image, labels = self.parts.cut((case[0], case[1] - mark), seed)
        return image, self.goal.marked(labels, mark)

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        # 2D patches go directly through the network, and a 3D patch is predicted as a single window
        if inputs.ndim == FLAT:
            return network(inputs)
        return torch.stack([self.parts.inferred(network, image, self.mirror) for image in inputs])

    def tests_as(self, other: Task) -> bool:
        """Return True if both tasks have the same test cases. Tasks with different plans may have the same test cases,
        because test results are computed on the images' original voxel grids.
        """
        one, same = (task.model_dump(exclude={*HOW_LEARNED}) for task in (self, other))
        return one == same

    # ------------------------------------------------------------------------------------------ files
    def listing_of(self, source: DataSource, folder: Path) -> CaseIndex:
        data = RawData.of(folder, self.question, source)
        if data.reader != self.plans.image_reader_writer:
            raise DataError(
                f"nnU-Net reads these files with {data.reader}, but the plans name {self.plans.image_reader_writer}; "
                "convert the files"
            )
        return data.listing

    def maker(self, source: DataSource) -> Callable[..., Any]:
        return self._made

    def _made(self, files: tuple[Path, ...], label: Path, patient: str) -> Any:
        image, labels, notes = self.parts.prepared(files, label)
        shown = tuple(value for value in torch.unique(labels).tolist() if value >= 0)
        last = len(self.question.names) - 1
        if shown and shown[-1] > last:
            raise DataError(f"masks have values above {last}, which are not labels of the question; correct them")
        places, size = places_in(notes["class_locations"]), tuple(image.shape[:0:-1])
        return self.prepared(image[None], labels[None], [shown], places, size=size, values=shown)

    def note(self, listing: CaseIndex, every: Sequence[Any], source: DataSource) -> None:
        absent = self.absent(source)
        not_drawn = [set(region) for name, region in self.question.regions.items() if name in absent]
        here = [set(own) for name, own in self.question.regions.items() if name not in absent]
        # If a region without annotations contains an annotated region, labels may occur inside the annotated region,
        # but not in the rest of the outer region.
        gone = {value for one in not_drawn for value in one.difference(*(own for own in here if own <= one))}
        drawn = [one.entry.name for one in every if gone & set(one.facts.values)]
        listing.add(
            "stops", "masks show a structure that data.unannotated names; correct data.unannotated or the masks", drawn
        )
        empty = [one.entry.name for one in every if not any(one.facts.values)]
        listing.add("note", "masks are empty: no structure of the question is in them", empty)


class NnUNetObjective(Segmentation):
    """nnU-Net's loss, and metrics on the images' original voxel grids."""

    unbounded = "nnU-Net's loss is one of whole batches, so no bound holds for a case; choose task nifti-folder"

    def __init__(self, task: NnUNetFolder) -> None:
        question = task.question
        # if the question has regions, the network has an output for each region
        regions = len(question.regions) if question.has_regions else None
        super().__init__(question.names, lambda *told: task.parts.loss(*told), question.regions, outputs=regions)
        self.task, self.overlaps = task, question.has_regions

    def predicted(self, output: Tensor, target: Tensor) -> Tensor:
        return self.task.parts.predicted(output)

    def measuring(self, cases: Dataset) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """Return a function that computes metrics on the images' original voxel grids, with surface distances in
        millimetres. The returned function must be called with the cases in the order of `cases`.
        """
        numbers = count()

        def measured(output: Tensor, target: Tensor) -> dict[str, Tensor]:
            each = []
            for one in output:
                held, _ = NnUNetFolder.load_held(cases, next(numbers))
                found, right, spacing = self._on_own_grid(held.entry.images, held.entry.label, one)
                each.append(self.compared(found[None], self.marked(right, held.mark)[None], spacing))
            return {name: torch.cat([own[name] for own in each]) for name in each[0]}

        return measured

    def _on_own_grid(
        self, files: tuple[Path, ...], label: Path | str, output: Tensor
    ) -> tuple[Tensor, Tensor, tuple[float, ...]]:
        values, notes = self.task.parts.read(files)
        self.task.parts.on_its_grid(values, notes)  # resampling adds the cropped margins to the dictionary `notes`
        right = self.task.parts.own_labels(Path(label))
        return self.task.parts.labels_back(output.cpu(), notes), right, tuple(notes["spacing"])


class NnUNetInference(Inference):
    """Reads new images with nnU-Net, and maps predictions back to the original voxel grid of each image."""

    def __init__(self, task: NnUNetFolder) -> None:
        super().__init__("images", self._inputs)
        self.task = task

    def images_among(self, files: Sequence[Path]) -> list[tuple[Path, ...]]:
        if len(self.task.question.channels) == 1:
            return super().images_among(files)
        cases: dict[str, dict[int, Path]] = {}
        for file in files:
            channel = CHANNEL.search(file.name)
            if channel is None:
                raise DataError("images of several channels are named as nnU-Net names them: case_0000.nii.gz, ...")
            cases.setdefault(str(file)[: -len(channel.group())], {})[int(channel.group(1))] = file
        wanted = list(range(len(self.task.question.channels)))
        if any(sorted(case) != wanted for case in cases.values()):
            raise DataError(f"an image lacks a channel; the study has {', '.join(self.task.question.channels)}")
        return [tuple(case[number] for number in wanted) for case in cases.values()]

    def scan_of(self, image: tuple[Path, ...]) -> Scan:
        # the header is read first, so that a file is rejected if its header announces a huge size
        header, *_ = [Scan.header_of(file) for file in image]
        values, notes = self.task.parts.read(image)
        if len(values) != len(self.task.question.channels):
            raise DataError(
                f"an image has {len(values)} channels; the study has {', '.join(self.task.question.channels)}"
            )
        spacing = tuple(float(along) for along in notes["spacing"][::-1])
        return Scan(values, np.diag([*spacing, 1.0]), spacing, header, AS_STORED, notes)

    def _inputs(self, scan: Scan) -> Tensor:
        return self.task.parts.on_its_grid(scan.values, scan.source)[None]

    def labels_on(self, scan: Scan, output: Tensor) -> Tensor:
        return self.task.parts.labels_back(output[0], scan.source)


class _Patches(Dataset):
    """A given number of batches of augmented patches; the cases are sampled with replacement, as in nnU-Net's data
    loader.
    """

    def __init__(self, parts: NnUNetParts, cases: Dataset, batch: int, steps: int, seed: int) -> None:
        self.parts, self.cases, self.batch, self.seed = parts, cases, batch, seed
        # in each batch, the patches from this index on must contain a structure
        self.certain = round(batch * (1 - FOREGROUND))
        order = torch.Generator().manual_seed(Task.seed_for(seed, "cases"))
        self.chosen = torch.randint(len(cases), (steps * batch,), generator=order).tolist()  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        held, place = NnUNetFolder.load_held(self.cases, self.chosen[number])
        certain = number % self.batch >= self.certain
        with held.opened(place) as (image, labels, places):
            assert places is not None
            patch, found = self.parts.draw_patch((image, labels, places), Task.seed_for(self.seed, number), certain)
        return patch, NnUNetObjective.marked(found, held.mark)
