"""Optic disc and cup in pictures of the retina from six sources, as in the FedSM paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import DataError, Segmentation, SiteData
from medsilo_papers.public_files import (
    PictureTask,
    bare_name,
    files_in,
    monai_loss,
    read_labels,
    read_picture,
    rows_of,
    site_folder,
)

ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
LAYOUT = (
    "Drishti-GS1 (Training/Images and Training/GT/<name>/SoftMap), REFUGE (pictures and Disc_Cup_Masks/**/*.bmp), "
    "RIGA+ (<source>_train.csv and _test.csv with the columns image and mask) or images/ and masks/ with files of the "
    "same names"
)
# The grey of the background, the disc's rim and the cup.
LABELS, REFUGE, RIGA = (0, 1, 2), (255, 128, 0), (0, 255, 128)
Item = tuple[Path, tuple[Path, ...], tuple[int, ...]]  # a picture, its masks, the greys of background, rim and cup


class DiscAndCup(Segmentation):
    """The disc, which holds its cup, by soft Dice: the disc's probability is that of rim or cup."""

    def __init__(self) -> None:
        super().__init__(3, self._dice, {"disc": (1, 2), "cup": (2,)})

    def _dice(self, output: Tensor, target: Tensor) -> Tensor:
        chances = output.softmax(1)
        found = torch.stack([chances[:, list(part)].sum(1) for part in self.structures.values()], 1)
        return monai_loss("DiceLoss")(found, self.masks(target).float())


class Fundus(PictureTask):
    """RGB pictures in 0 to 1, [3, size, size], and 1 in the disc's rim, 2 in its cup.

    The disc holds the cup: Dice and the loss are of the disc (both) and of the cup. A site takes the folder of its
    name; the layout is that of its source. No source tells whose eyes the pictures show: each picture is a patient.
    """

    title: ClassVar[str] = "Optic disc and cup in retinal pictures of six sources"
    goal: ClassVar[DiscAndCup] = DiscAndCup()

    name: Literal["fundus"] = "fundus"
    size: int = Field(default=256, ge=16, le=1024, multiple_of=16, description="pictures are resized to this")
    shares: SiteData.Shares = Field(
        default=(0.5, 0.25, 0.25), description="of train, validation and test, as the paper"
    )

    def default_network(self) -> str:
        return "unet"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        place = site_folder(self.name, site, sites, folder, lambda path: bool(pictures_in(path, site)), LAYOUT)
        items = pictures_in(place, site)
        patients = [image.relative_to(place).with_suffix("").as_posix() for image, _, _ in items]
        return self.read_once(items, patients, self.parts_of(patients, site, seed))

    def case_of(self, item: Item) -> tuple[Tensor, Tensor]:
        path, masks, greys = item
        picture = read_picture(path)
        labels = _labels([read_labels(mask) for mask in masks], greys)
        if labels.shape != picture.shape[1:]:
            shapes = f"{list(picture.shape[1:])} and {list(labels.shape)} pixels"
            raise DataError(f"a picture and its mask have {shapes}; they must be of one size", private=str(path))
        return self.inputs_of(picture)[0], self.labels_of(labels)


def _labels(masks: list[np.ndarray], greys: tuple[int, ...]) -> np.ndarray:
    """0, 1 and 2 from one mask of three greys, or from the experts' agreement on disc and cup (0 to 255)."""
    if len(masks) == 2:
        disc, cup = (mask > 127 for mask in masks)
        return np.where(cup, 2, np.where(disc, 1, 0))
    mask, known = masks[0], set(np.unique(masks[0]).tolist())
    if not known <= set(greys):
        expected = f"{greys[0]} (background), {greys[1]} (rim) and {greys[2]} (cup)"
        raise DataError(f"a mask has values beside {expected}; save it without smoothing or compression")
    return np.select([mask == greys[2], mask == greys[1]], [2, 1], 0)


def pictures_in(place: Path, site: str) -> list[Item]:
    """Every picture with its masks and their greys, in the first layout that the folder has."""
    return _drishti(place) or _refuge(place) or _riga(place, site) or _plain(place)


def _pictures(place: Path, deep: bool = False) -> list[Path]:
    return [path for path in files_in(place, "**/*" if deep else "*") if path.suffix.lower() in ENDINGS]


def _drishti(place: Path) -> list[Item]:
    found: list[Item] = []
    for part, truth in (("Training", "GT"), ("Test", "Test_GT")):
        for image in _pictures(place / part / "Images", deep=True):
            maps = place / part / truth / image.stem / "SoftMap"
            masks = tuple(maps / f"{image.stem}_{kind}segSoftmap.png" for kind in ("OD", "cup"))
            found += [(image, masks, LABELS)] if maps.is_dir() else []
    return found


def _refuge(place: Path) -> list[Item]:
    masks = {path.stem: path for path in files_in(place, "**/Disc_Cup_Masks/**/*.bmp")}
    images = [path for path in _pictures(place, deep=True) if path.suffix.lower() == ".jpg"] if masks else []
    return [(image, (masks[image.stem],), REFUGE) for image in images if image.stem in masks]


def _riga(place: Path, site: str) -> list[Item]:
    """Of several sources in one folder the one with the site's name."""
    found = [*files_in(place, "*_train.csv"), *files_in(place, "*_test.csv")]
    tables = {table: table.stem.split("_")[0] for table in found}
    several = len(set(tables.values())) > 1
    own = [table for table, source in tables.items() if not several or bare_name(source) == bare_name(site)]
    rows = [row for table in own for row in rows_of(table, ("image", "mask"))]
    paths = [Path(row[column]) for row in rows for column in ("image", "mask")]
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise DataError("a table of RIGA+ names files outside its folder; give paths from there on")
    return [(place / row["image"], (place / row["mask"],), RIGA) for row in rows]


def _plain(place: Path) -> list[Item]:
    masks = {path.stem: path for path in _pictures(place / "masks")}
    images = _pictures(place / "images") if masks else []
    if without := [image.name for image in images if image.stem not in masks]:
        message = f"{len(without)} of {len(images)} pictures in images/ have no mask of the same name in masks/"
        raise DataError(message, private=", ".join(without))
    return [(image, (masks[image.stem],), LABELS) for image in images]
