"""A hospital's own volumes in nnU-Net's layout, learned as nnU-Net learns them."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.errors import DataError
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.models.network import Network
from medsilo.models.nnunet_network import NnUNet
from medsilo.tasks.listing import Entry, Listing
from medsilo.tasks.own.dividing import divided
from medsilo.tasks.own.nnunet_files import RawData
from medsilo.tasks.own.nnunet_parts import NnUNetParts
from medsilo.tasks.own.nnunet_plans_file import Configuration, NnUNetPlans
from medsilo.tasks.own.question import SegmentationQuestion
from medsilo.tasks.ready import Cache, Facts, PreparedEntry, ReadyCases, kept_case
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import Shares
from medsilo.tasks.survey import PARTS, digest
from medsilo.tasks.task import SiteData, refuse_links

FLAT = 4  # axes of a batch of patches in two dimensions
FEWEST_STAGES = 3  # nnU-Net's loss has no part of the lowest resolution, and divides by the sum of the others' weights


class NnUNetFolder(Segmentation):
    """nnU-Net's training from plans that were made for all hospitals' data together ([nnunet.md](nnunet.md)).

    A case is a whole volume as nnU-Net preprocesses it, [C, D, H, W]. The network learns from augmented patches, and is
    evaluated on whole volumes through nnU-Net's windows, on the grid that its plans resample to.
    """

    title: ClassVar[str] = "a hospital's own volumes in nnU-Net's layout"
    needs_data: ClassVar[bool] = True
    split_by_site: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    crops: ClassVar[bool] = True
    by_case: ClassVar[bool] = False
    evaluation_batch: ClassVar[int] = 1

    name: Literal["nnunet"] = "nnunet"
    question: SegmentationQuestion = Field(
        description="channels and labels, as in `medsilo nnunet-measure`, or that file"
    )
    plans: NnUNetPlans = Field(description="what `medsilo nnunet-plan` writes, or that file")
    configuration: Literal["2d", "3d_fullres", "3d_lowres"] = Field(
        "2d", description="the configuration of the plans that is trained"
    )
    foreground: float = Field(
        0.33, ge=0, le=1, description="share of each batch, its last patches, that have a structure for certain"
    )
    mirror: bool = Field(True, description="whether evaluation averages over mirrored volumes, as nnU-Net does")
    shares: Shares = Field(
        default=(0.6, 0.2, 0.2), description="of patients in training, validation and test, if the site fixes no parts"
    )
    split: int = Field(default=0, ge=0, lt=2**32, description="another number splits the patients in another way")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        labels = list(self.question.labels.values())
        if labels != list(range(len(labels))) or self.question.regions_class_order:
            raise ValueError("question.labels: give 0, 1, 2, ... in order; regions and ignored labels are not learned")
        if self.configuration not in self.plans.configurations:
            raise ValueError(f"plans: they have no configuration {self.configuration}; make them anew")
        if self._own.architecture.arch_kwargs.n_stages < FEWEST_STAGES:
            raise ValueError(
                f"plans: for so small images their network has under {FEWEST_STAGES} stages, whose loss is 0/0"
            )
        if len(self._own.normalization_schemes) != self.channels:
            raise ValueError("plans: they are of other channels than the question; make them anew")
        return self

    def __getstate__(self) -> dict[Any, Any]:
        """Return what another process needs, which puts nnU-Net's parts together itself."""
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "parts"}}

    @cached_property
    def parts(self) -> NnUNetParts:
        """nnU-Net's own parts for these plans."""
        return NnUNetParts(self.question, self.plans, self.configuration)

    @property
    def _own(self) -> Configuration:
        own = self.plans.configurations[self.configuration]
        assert isinstance(own, Configuration)
        return own

    # ------------------------------------------------------------------------------------------ what is learned
    @property
    def channels(self) -> int:  # type: ignore[override]
        """The channels of the question."""
        return len(self.question.channels)

    @property
    def classes(self) -> int:  # type: ignore[override]
        """The labels, background included."""
        return len(self.question.labels)

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(self.question.labels)

    @property
    def structures(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        """The label of each structure."""
        return {name: (number,) for number, name in enumerate(self.question.labels) if number}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self._own.patch_size)

    def default_network(self) -> Network:
        return NnUNet(architecture=self._own.architecture)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.parts.loss(output, target)

    def drawn(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        return _Patches(self.parts, cases, batch, steps, self.foreground, seed)

    def cropped(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        return self.parts.cut(case, seed, self.foreground)

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        if inputs.ndim == FLAT:  # patches; those in three dimensions go through one window
            return network(inputs)
        return torch.stack([self.parts.inferred(network, image, self.mirror) for image in inputs])

    # ------------------------------------------------------------------------------------------ from files
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        return self.read(site, sites, seed, None if folder is None else DataSource(folder=folder))

    def read(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
        self.check_source(source)
        assert source is not None
        if any((source.images, source.labels, source.patient, source.table, source.label_map)):
            raise DataError(
                "task nnunet reads nnU-Net's own layout, a case for each patient; say no more of it in 'data'"
            )
        refuse_links(source.folder)
        own = source.folder / site
        data = RawData.of(own if own.is_dir() and not own.is_symlink() else source.folder, self.question)
        if data.reader != self.plans.image_reader_writer:
            raise DataError(
                f"nnU-Net reads these files with {data.reader}, and the plans are of {self.plans.image_reader_writer}; "
                "convert the files"
            )
        entries = [Entry(name, case.images, case.label, name) for name, case in data.cases.items()]
        parts = divided(Listing(entries), source, self.shares, self.split)
        unfolded = self.model_copy(update={"fold": None})  # cases are prepared once for all folds
        cache = Cache(source, partial(_made, self.parts), unfolded.model_dump_json())
        ready = {}
        for part in PARTS:
            held = [cache.hold(entry) for entry in parts[part]]
            ready[part] = ReadyCases(held, [(0,)] * len(held))
        return SiteData(*(ready[part] for part in PARTS))


class _Patches(Dataset):
    """Augmented patches of so many batches; cases are drawn with replacement, as by nnU-Net's loader."""

    def __init__(
        self, parts: NnUNetParts, cases: Dataset, batch: int, steps: int, foreground: float, seed: int
    ) -> None:
        self.parts, self.cases, self.batch, self.seed = parts, cases, batch, seed
        self.certain = round(batch * (1 - foreground))  # the first patch of a batch that has a structure for certain
        order = generator_for(seed, "cases")
        self.chosen = torch.randint(len(cases), (steps * batch,), generator=order).tolist()  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, labels, places = kept_case(self.cases, self.chosen[number])
        assert places is not None
        certain = number % self.batch >= self.certain
        return self.parts.drawn((image, labels, places), seed_for(self.seed, number), certain)


def _made(parts: NnUNetParts, entry: Entry) -> PreparedEntry:
    """Prepare one case."""
    assert isinstance(entry.label, Path)
    image, labels, places = parts.prepared(entry.images, entry.label)
    shown = tuple(value for value in torch.unique(labels).tolist() if value >= 0)
    low, high = image.aminmax()
    facts = Facts(1, digest(image), tuple(image.shape[:0:-1]), (), (float(low), float(high)), shown, (shown,))
    return PreparedEntry(image[None], labels[None], facts, places)
