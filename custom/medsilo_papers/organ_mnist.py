"""Abdominal organs in slices of CT: OrganA-, OrganC- and OrganSMNIST of MedMNIST, dealt to simulated sites."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import Classification, DataError, Network, SiteData
from medsilo_papers.networks import LeNet5
from medsilo_papers.public_files import PictureTask, PooledTask, arrays_of, site_folder

FILE_PARTS = ("train", "val", "test")
VIEWS = {"axial": "a", "coronal": "c", "sagittal": "s"}


class OrganMnist(PooledTask, PictureTask):
    """Grey images in 0 to 1, [1, size, size], of 11 organs.

    The file is organamnist.npz, organcmnist.npz or organsmnist.npz (with _64, _128 or _224 for those sizes). It doesn't
    say whose slices are whose, but its own three parts share no CT: they are the split by patient.
    """

    title: ClassVar[str] = "OrganA/C/SMNIST: eleven organs in CT slices, dealt to sites"
    sliced: ClassVar[bool] = True
    channels: ClassVar[int] = 1
    goal: ClassVar[Classification] = Classification(11)

    name: Literal["organ-mnist"] = "organ-mnist"
    view: Literal["axial", "coronal", "sagittal"] = Field("axial", description="the direction of the slices")
    size: Literal[28, 64, 128, 224] = Field(28, description="height and width of the images in the file")

    def default_network(self) -> Network:
        return LeNet5(size=self.size)

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        name = f"organ{VIEWS[self.view]}mnist{'' if self.size == 28 else f'_{self.size}'}.npz"
        place = site_folder(self.name, site, sites, folder, lambda path: (path / name).is_file(), f"{name} of MedMNIST")
        images, labels, published = self._read(place / name)
        parts = self.dealt(labels, published, site, sites, seed)
        places = [np.flatnonzero(parts == part) for part in range(3)]
        return SiteData.in_memory(
            (_scaled(images[own]), torch.from_numpy(labels[own]), [f"{case:06}" for case in own]) for own in places
        )

    def _read(self, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All images [n, size, size], their labels [n] and the published part of each [n]."""
        arrays = [f"{part}_{kind}" for kind in ("images", "labels") for part in FILE_PARTS]
        values = arrays_of(path, arrays)
        images, labels = values[:3], [part.reshape(-1).astype(np.int64) for part in values[3:]]
        for pictures, organs in zip(images, labels, strict=True):
            if pictures.dtype != np.uint8 or pictures.shape != (len(organs), self.size, self.size):
                expected = f"uint8 [{len(organs)}, {self.size}, {self.size}]"
                raise DataError(f"{path.name} has images of {pictures.dtype} {list(pictures.shape)}, not {expected}")
            if len(organs) and not 0 <= organs.min() <= organs.max() < self.goal.classes:
                raise DataError(f"{path.name} has labels outside 0 to {self.goal.classes - 1}; is it an OrganMNIST?")
        return np.concatenate(images), np.concatenate(labels), np.repeat(np.arange(3), list(map(len, labels)))


def _scaled(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images[:, None].astype(np.float32)) / 255
