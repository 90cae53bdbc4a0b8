"""Segment the prostate in T2-weighted MRI slices from several hospitals, as the HarmoFL and FedSM papers do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.extend import DataError, Scan, Segmentation, SiteData
from medsilo_papers.public_files import PictureTask, Split, files_in, monai_loss, site_folder

ENDINGS = (".nii.gz", ".nii", ".mha", ".mhd")
LAYOUT = (
    "volumes (.nii.gz, .nii, .mha, .mhd), each Case00.nii.gz with its Case00_segmentation.nii.gz, or Image/ and Mask/ "
    "with files of the same names"
)
BRIGHTEST = 2048  # FedSM clips intensities to the range from 0 to 2048


class Prostate(PictureTask):
    """One slice or several neighbouring slices, [slices, size, size], and the mask of the prostate in the middle slice.
    Slices that show no prostate are left out.

    A site reads the folder that has the site's name.

    Args:
        slices: With 3, neighbouring slices are channels, and the first and last slice of a volume are left out
            (HarmoFL). With 1, each slice is a case (FedSM).
        intensity: With "percentile", each volume is clipped at its 99th percentile and scaled to the range from 0 to
            `brightest`. With "fixed", each volume is clipped to the range from 0 to 2048 and scaled in 256 steps.
    """

    title: ClassVar[str] = "Prostate in MRI of six hospitals, slice by slice"
    sliced: ClassVar[bool] = True

    name: Literal["prostate"] = "prostate"
    slices: Literal[1, 3] = Field(3, description="number of slices in one input: 1, or 3 with both neighbours")
    size: int = Field(
        default=384,
        ge=16,
        le=1024,
        multiple_of=16,
        description="height and width in pixels to which slices are resized",
    )
    intensity: Literal["percentile", "fixed"] = Field("percentile", description="scaling of intensities")
    brightest: float = Field(
        default=1.0, gt=0, description="maximum of the scaled intensities; HarmoFL's released code uses 255"
    )
    augment: bool = Field(
        default=True, description="whether training images are randomly flipped and rotated by multiples of 90 degrees"
    )
    objective: Literal["dice-ce", "dice"] = Field(
        default="dice-ce",
        description="`dice-ce` is the mean of cross entropy and Dice, as in HarmoFL; `dice` is Dice alone, as in FedSM",
    )
    split: Split = Field(
        default="patient", description="`paper` splits slices at random, as HarmoFL's released code does"
    )
    shares: SiteData.Shares = (0.64, 0.16, 0.2)

    @property
    def goal(self) -> Segmentation:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(self.objective)(output, target[:, None])

        share = 0.5 if self.objective == "dice-ce" else 0.0
        return Segmentation(2, loss, {"prostate": (1,)}, cross_entropy=share)

    @property
    def channels(self) -> int:
        return self.slices

    @property
    def largest_input(self) -> float:
        return self.brightest

    def default_network(self) -> str:
        return "basic-unet"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        place = site_folder(self.name, site, sites, folder, lambda path: any(masks_of(path).values()), LAYOUT)
        found = masks_of(place)
        pairs = [(image, mask) for image, mask in found.items() if mask]
        if len(pairs) < len(found):
            without = ", ".join(image.name for image, mask in found.items() if not mask)
            message = f"{len(found) - len(pairs)} of {len(found)} volumes have no mask; expected {LAYOUT}"
            raise DataError(message, private=without)
        images, masks, cases, patients = [], [], [], []
        for image_path, mask_path in pairs:
            scan = Scan.read(image_path)
            organ = (scan.mask(mask_path) > 0).astype(np.float32)
            images.append(self._single(scan.values))
            masks.append((Scan.slices_of(organ[None], (1, self.size, self.size))[:, 0] > 0.5).byte())
            reach = self.slices // 2
            shown = np.flatnonzero(organ.any((1, 2)))
            own = shown[(shown >= reach) & (shown < len(organ) - reach)]
            cases += [(len(images) - 1, int(middle)) for middle in own]
            patients += [image_path.name] * len(own)
        if not cases:
            raise DataError("all masks of the site's volumes are empty; mark the prostate with values above 0")

        def chosen(own: np.ndarray) -> Slices:
            return Slices(images, masks, [cases[place] for place in own], [patients[place] for place in own], reach)

        return SiteData.in_parts(self.parts_of(patients, site, seed), chosen)

    def inputs_of(self, values: np.ndarray) -> Tensor:
        """Return all slices of a volume, each with its neighbouring slices. At both ends of the volume, the first or
        last slice replaces the missing neighbour.
        """
        single = self._single(values)
        reach = self.slices // 2
        near = torch.arange(len(single))[:, None] + torch.arange(-reach, reach + 1)
        return single[near.clamp(0, len(single) - 1)]

    @property
    def variation(self) -> Callable[[tuple[Tensor, Tensor], int], tuple[Tensor, Tensor]] | None:
        return self.augmented if self.augment else None

    def augmented(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """Rotate a case by a random multiple of 90 degrees, and flip each axis with probability 1/2; the seed
        determines the rotation and the flips.
        """
        random = torch.Generator().manual_seed(seed)
        turns = int(torch.randint(4, (), generator=random))
        flips = (torch.randint(2, (2,), generator=random).nonzero()[:, 0] - 2).tolist()
        image, mask = (torch.rot90(part, turns, (-2, -1)).flip(flips) for part in case)
        return image, mask

    def _single(self, volume: np.ndarray) -> Tensor:
        if not np.isfinite(volume).all():
            raise DataError("a volume has values that are NaN or infinite; correct or remove the volume")
        if self.intensity == "percentile":
            clipped = np.minimum(volume, np.percentile(volume, 99))
            least = clipped.min()
            values = (clipped - least) / max(float(clipped.max() - least), 1e-12)
        else:
            values = np.floor(np.clip(volume, 0, BRIGHTEST) * (255 / BRIGHTEST)) / 255
        scaled = (values * self.brightest).astype(np.float32)
        return Scan.slices_of(scaled, (1, self.size, self.size))[:, 0]


class Slices(Dataset):
    """Slices of volumes, each together with its neighbouring slices. All volumes are in memory, and a case is cut out
    of its volume when the case is read.
    """

    def __init__(
        self, volumes: list[Tensor], masks: list[Tensor], cases: list[tuple[int, int]], patients: list[str], reach: int
    ) -> None:
        self.volumes, self.masks, self.cases, self.reach = volumes, masks, cases, reach
        self.patients = tuple(patients)

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        volume, middle = self.cases[index]
        near = self.volumes[volume][middle - self.reach : middle + self.reach + 1]
        return near, self.masks[volume][middle].long()


def masks_of(folder: Path) -> dict[Path, Path | None]:
    """Return the path of each volume's mask, or None for a volume without a mask; the function knows both layouts of
    the data set.
    """
    images = folder / "Image" if (folder / "Image").is_dir() else folder
    found: dict[Path, Path | None] = {}
    for image in files_in(images):
        ending = next((ending for ending in ENDINGS if image.name.lower().endswith(ending)), None)
        if ending is None or "_segmentation" in image.name.lower():
            continue
        stem = image.name[: -len(ending)]
        beside = [folder / f"{stem}_{word}{end}" for word in ("segmentation", "Segmentation") for end in ENDINGS]
        paths = beside if images == folder else [folder / "Mask" / image.name]
        found[image] = next((path for path in paths if path.is_file()), None)
    return found


def loss_of(objective: str) -> nn.Module:
    """Return the Dice loss of the prostate. For the objective dice-ce, return the mean of cross entropy and Dice loss,
    over both classes and the whole batch.
    """
    if objective == "dice":
        return monai_loss("DiceLoss", include_background=False, to_onehot_y=True, softmax=True)
    return monai_loss("DiceCELoss", to_onehot_y=True, softmax=True, batch=True, lambda_dice=0.5, lambda_ce=0.5)
