"""Segment the optic disc and cup in retinal images from six sources, as in the FedSM paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import DataError, Segmentation, SiteData
from medsilo_papers.public_files import PictureTask, files_in, monai_loss, read_labels, read_picture, site_folder

ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
FOLDERS = ("images", "masks")
LAYOUT = "images/ and masks/ with files of the same names"


class DiscAndCup(Segmentation):
    """Soft Dice scores of the optic disc, and of the optic cup inside the disc. The probability of the disc is the sum
    of the probabilities of rim and cup.
    """

    def __init__(self) -> None:
        super().__init__(3, self._dice, {"disc": (1, 2), "cup": (2,)})

    def _dice(self, output: Tensor, target: Tensor) -> Tensor:
        chances = output.softmax(1)
        found = torch.stack([chances[:, list(part)].sum(1) for part in self.structures.values()], 1)
        return monai_loss("DiceLoss")(found, self.masks(target).float())


class Fundus(PictureTask):
    """RGB images [3, size, size] with values from 0 to 1, and masks with the value 1 in the disc's rim and 2 in the
    cup.

    Dice and loss are computed for the whole disc, which consists of rim and cup, and for the cup. A site reads the
    folder that has the site's name. No source of images identifies the patients, so each image counts as a separate
    patient.
    """

    title: ClassVar[str] = "Optic disc and cup in retinal pictures of six sources"
    goal: ClassVar[DiscAndCup] = DiscAndCup()

    name: Literal["fundus"] = "fundus"
    size: int = Field(
        default=256,
        ge=16,
        le=1024,
        multiple_of=16,
        description="height and width in pixels to which images are resized",
    )
    shares: SiteData.Shares = Field(
        default=(0.5, 0.25, 0.25), description="shares of images for training, validation and test, as in the paper"
    )

    def default_network(self) -> str:
        return "unet"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        place = site_folder(self.name, site, sites, folder, lambda path: bool(pictures_in(path)), LAYOUT)
        items = pictures_in(place)
        patients = [f"images/{image.stem}" for image, _ in items]
        return self.read_once(items, patients, self.parts_of(patients, site, seed))

    def case_of(self, item: tuple[Path, Path]) -> tuple[Tensor, Tensor]:
        picture, labels = read_picture(item[0]), read_labels(item[1])
        if labels.shape != picture.shape[1:]:
            shapes = f"{list(picture.shape[1:])} and {list(labels.shape)} pixels"
            raise DataError(f"a picture and its mask have {shapes}; they must have the same size", private=str(item[0]))
        if not {*np.unique(labels)} <= {0, 1, 2}:
            raise DataError(
                "a mask has other values than 0, 1 (rim) and 2 (cup); save it without smoothing or compression"
            )
        return self.inputs_of(picture)[0], self.labels_of(labels)


def pictures_in(folder: Path) -> list[tuple[Path, Path]]:
    images, masks = ([one for one in files_in(folder / name) if one.suffix.lower() in ENDINGS] for name in FOLDERS)
    found = {path.stem: path for path in masks}
    if found and (without := [image.name for image in images if image.stem not in found]):
        message = f"{len(without)} of {len(images)} pictures in images/ have no mask of the same name in masks/"
        raise DataError(message, private=", ".join(without))
    return [(image, found[image.stem]) for image in images if found]
