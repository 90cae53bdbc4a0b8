"""Nuclei in H&E tiles: three public sets with plain differences of stain, one set per site."""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.errors import DataError
from medsilo.learning.seeds import seed_for
from medsilo.models.base import Network
from medsilo.models.unet import UNet
from medsilo.tasks.base import Cases, SiteData, Task, dice_per_case
from medsilo.tasks.scans import read_scan
from medsilo.tasks.volumes import resized

INDEX = "index.csv"
BARCODE = 12  # letters of a TCGA name that are the patient's: TCGA-G9-6356
# Shares of train, validation and test. The number was chosen because all three sets then come near to these shares.
SHARES, SPLIT = (0.55, 0.2, 0.25), 9


class Nuclei(Task):
    """RGB tiles in 0 to 1, [3, size, size], and which pixels are nuclei.

    The site's data folder holds `index.csv` (columns set and name) and `<set>/images/<name>.png` and
    `<set>/masks/<name>.png` (0 and 255). A folder with one set belongs to whatever site has it; where there are
    several, a site takes the set that has its name. Patients, where the name tells them (TCGA), else source images, go
    whole into one part, the same patient into the same part at every site; the split does not depend on the seed.
    """

    title: ClassVar[str] = "Nuclei in H&E tiles of three public sets"
    metric: ClassVar[str] = "dice"
    channels: ClassVar[int] = 3
    classes: ClassVar[int] = 2
    reads_images: ClassVar[bool] = True

    name: Literal["nuclei"] = "nuclei"
    size: int = Field(default=256, ge=16, le=2048, multiple_of=16, description="tiles are resized to this many pixels")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.size, self.size)

    def default_network(self) -> Network:
        return UNet()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        if folder is None:
            raise DataError("task nuclei needs data: set 'data' in the site's medsilo.yaml, or give --data")
        chosen, names = tiles_of(site, folder)
        parts = np.array([part_of(name) for name in names])
        return SiteData(*(self._read(folder / chosen, names[parts == part]) for part in range(3)))

    def inputs_of(self, values: np.ndarray) -> Tensor:
        if values.ndim != 3 or values.dtype.kind != "u":
            raise DataError("a volume or an image of numbers beside 0 to 255, where the task reads flat RGB images")
        if len(values) < 3:
            raise DataError("a tile is grey where the task's tiles have 3 channels (RGB)")
        colours = torch.from_numpy(np.ascontiguousarray(values[None, :3], np.float32)) / float(
            np.iinfo(values.dtype).max
        )
        size = (self.size, self.size)
        same = colours.shape[2:] == size
        return colours if same else functional.interpolate(colours, size, mode="bilinear", antialias=True)

    def labels_of(self, output: Tensor, grid: tuple[int, ...]) -> Tensor:
        return resized(output, grid).argmax(1)[0]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return soft_dice()(output, target[:, None])

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return dice_per_case(output, target)

    def _read(self, folder: Path, names: np.ndarray) -> Cases:
        size = (self.size, self.size)
        images = torch.empty(len(names), 3, *size)
        masks = torch.empty(len(names), *size, dtype=torch.int64)
        for place, name in enumerate(names):
            image, mask = read_tile(folder, str(name))
            if mask.shape != size:
                mask = functional.interpolate(mask[None, None], size, mode="area")[0, 0]
            try:
                images[place], masks[place] = self.inputs_of(image)[0], mask > 0.5
            except DataError as error:
                raise DataError(str(error), private=str(name)) from error
        return Cases(images, masks, [patient_of(str(name)) for name in names])


def tiles_of(site: str, folder: Path) -> tuple[str, np.ndarray]:
    """The site's set and the names of its tiles, sorted."""
    try:
        with (folder / INDEX).open(newline="", encoding="utf-8") as file:
            rows = [(row["set"], row["name"]) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f"the site's data folder has no readable {INDEX} with the columns set and name ({type(error).__name__})",
            private=str(folder),
        ) from error
    sets = sorted({chosen for chosen, _ in rows})
    chosen = sets[0] if len(sets) == 1 else site
    if chosen not in sets:
        listed = ", ".join(sets) or "none"
        raise DataError(f"no set of the site's data has its name; name the site after one of them: {listed}")
    return chosen, np.array(sorted(name for one, name in rows if one == chosen))


def read_tile(folder: Path, name: str) -> tuple[np.ndarray, Tensor]:
    """One tile [channels, H, W] as stored and its mask [H, W], 0 or 1, as float32."""
    paths = [folder / kind / f"{name}.png" for kind in ("images", "masks")]
    try:
        image, mask = (read_scan(path).values for path in paths)
    except DataError as error:
        raise DataError(
            "a tile or its mask is no readable PNG; see this site's log for its name", error.private
        ) from error
    if image.shape[1:] != mask.shape[1:]:
        shapes = f"{list(image.shape[1:])} and {list(mask.shape[1:])} pixels"
        raise DataError(f"a tile and its mask have {shapes}; export both from one image", str(paths[0]))
    return image, torch.from_numpy((mask[0] > 0).astype(np.float32))


def patient_of(name: str) -> str:
    """Who or what must not be in two parts: the patient of a TCGA name, else the source image of a tile."""
    return name[:BARCODE] if name.startswith("TCGA-") else name.rsplit("_", 1)[0]


def part_of(name: str) -> int:
    """0 train, 1 validation, 2 test: the patient's name decides, so that all sites agree without asking."""
    place = seed_for(SPLIT, "nuclei", patient_of(name)) / 2**63
    return int(place >= SHARES[0]) + int(place >= SHARES[0] + SHARES[1])


@cache
def soft_dice() -> nn.Module:
    """MONAI's Dice loss over both classes and the whole batch, as HarmoFL's released code has it."""
    from monai.losses import DiceLoss

    return DiceLoss(to_onehot_y=True, softmax=True, batch=True)
