"""Chest X-rays with COVID-19, other pneumonia or neither: the curated set of Sait et al., dealt to simulated sites."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from medsilo.extend import Classification, DataError, Network, SiteData
from medsilo_papers.networks import AlexNet
from medsilo_papers.public_files import PictureTask, PooledTask, bare_name, files_in, site_folder

CLASSES = ("COVID-19", "Normal", "Pneumonia-Viral", "Pneumonia-Bacterial")
ENDINGS = (".png", ".jpg", ".jpeg")
PERSON = re.compile(r"person\d+", re.IGNORECASE)  # in the file names of one of the set's sources


class CovidXray(PooledTask, PictureTask):
    """Grey images in 0 to 1, [1, size, size], of four classes, in folders named after them. Read when
    asked for, but for those that the site's cache keeps.

    The set keeps no patients: images whose names say person<number> go together, each other image counts as one.
    """

    title: ClassVar[str] = "COVID-19 chest X-rays of four classes, dealt to sites"
    channels: ClassVar[int] = 1
    goal: ClassVar[Classification] = Classification(len(CLASSES))

    name: Literal["covid-xray"] = "covid-xray"
    size: int = Field(default=224, ge=63, le=1024, description="images are resized to this many pixels")

    def default_network(self) -> Network:
        return AlexNet(size=self.size)

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        layout = f"the folders {', '.join(CLASSES)} with pictures ({', '.join(ENDINGS)})"
        place = site_folder(self.name, site, sites, folder, lambda path: len(_folders(path)) == len(CLASSES), layout)
        items = [
            (path, label)
            for label, inner in enumerate(_folders(place))
            for path in files_in(inner)
            if path.suffix.lower() in ENDINGS
        ]
        labels = np.array([label for _, label in items])
        if len(np.unique(labels)) < len(CLASSES):
            raise DataError(f"a class has no picture; expected {layout}", private=str(place))
        patients = tuple(_patient(path, label) for path, label in items)
        parts = self.dealt(labels, patients, site, sites, seed)
        return SiteData.read_later(items, patients, parts, self.case_of)


def _folders(place: Path) -> list[Path]:
    """The classes' folders, in the classes' order."""
    inner = {bare_name(path.name): path for path in sorted(place.iterdir()) if path.is_dir()}
    return [inner[bare_name(name)] for name in CLASSES if bare_name(name) in inner]


def _patient(path: Path, label: int) -> str:
    person = PERSON.search(path.stem)
    return person.group().lower() if person else f"{label}-{path.stem}"
