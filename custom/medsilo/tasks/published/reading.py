"""What the tasks of public data sets share: finding the site's folder, reading pictures, splitting by patient."""

import csv
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from medsilo.core.errors import DataError
from medsilo.learning.loop import Case
from medsilo.learning.seeds import seed_for
from medsilo.tasks.base import Cases, SiteData
from medsilo.tasks.headers import check_size
from medsilo.tasks.sources import Shares

Split = Literal["patient", "paper"]


LARGEST_VALUE = 8  # bytes, as int64


def read_all(items: Sequence[Hashable], patients: Sequence[str], read: Callable[..., Case]) -> Cases:
    """The same cases in memory."""
    pairs = [read(item) for item in items]
    return Cases(torch.stack([inputs for inputs, _ in pairs]), torch.stack([target for _, target in pairs]), patients)


# ---------------------------------------------------------------------- where the data lie
def plain(name: str) -> str:
    """A name without case and punctuation: "ISBI_1.5" and "isbi-15" are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def site_folder(
    task: str, site: str, sites: Sequence[str], folder: Path | None, holds: Callable[[Path], bool], layout: str
) -> Path:
    """The folder with the site's part: that of its name in the data folder, else the data folder or its only folder.

    A data folder with folders of other sites, and none of this one's, holds nothing for it.
    """
    if folder is None:
        raise DataError(f"task {task} needs data: set 'data' in the site's medsilo.yaml, or give --data")
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    inner = {plain(path.name): path for path in found if path.is_dir() and path.name != "__MACOSX"}
    places = [folder, *(inner.values() if len(inner) == 1 else [])]
    if not inner.keys().isdisjoint(map(plain, sites)):
        places = [path for name, path in inner.items() if name == plain(site)]
    for place in places:
        if holds(place):
            return place
    raise DataError(
        f"task {task}: expected {layout} in the data folder, or in a folder of it with the site's name",
        private=str(folder),
    )


def files_in(place: Path, pattern: str = "*") -> list[Path]:
    """The files that fit, sorted, without the hidden ones that archives made on a Mac have beside each."""
    return sorted(path for path in place.glob(pattern) if path.is_file() and not path.name.startswith("."))


def rows_of(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file that has these columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or [])]
            rows = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path.name} can't be read ({type(error).__name__})", private=str(path)) from error
    if missing:
        raise DataError(
            f"{path.name} lacks the columns {', '.join(missing)}; expected {', '.join(columns)}", private=str(path)
        )
    if not rows or any(row[column] is None for row in rows for column in columns):
        raise DataError(f"{path.name} has no rows, or rows that are too short", private=str(path))
    return rows


# ---------------------------------------------------------------------- pictures
def read_picture(path: Path) -> np.ndarray:
    """A picture of 8 bits per value as RGB, [3, H, W], whatever its file has instead or beside."""
    return _values(path, "picture", "RGB").transpose(2, 0, 1)


def read_labels(path: Path) -> np.ndarray:
    """The values of a mask as they are stored, [H, W]: of its first channel, or of a palette's numbers."""
    values = _values(path, "mask").astype(np.int64)
    return values[..., 0] if values.ndim == 3 else values


def _values(path: Path, what: str, mode: str | None = None) -> np.ndarray:
    """What SimpleITK can't: TIFF of any name and compression, palettes as they are."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if mode and image.mode[0] in "IF":
                raise DataError(f"a {what} has more than 8 bits per value; save it with 8", private=str(path))
            check_size((*image.size, len(image.getbands())), LARGEST_VALUE, path)
            return np.asarray(image.convert(mode) if mode else image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises anything over damaged files
        message = f"a {what} is absent or damaged; see this site's log for its name"
        raise DataError(message, f"{path}: {error}") from error


def scaled(values: np.ndarray, channels: int) -> Tensor:
    """A flat image of whole numbers, [C, H, W], in 0 to 1 with 3 channels or 1: [channels, H, W]."""
    if values.ndim != 3 or values.dtype.kind != "u":
        raise DataError("a volume or an image of numbers beside 0 to 255, where the task reads flat images")
    if channels > len(values):
        raise DataError(f"an image is grey where the task's images have {channels} channels (RGB)")
    image = torch.from_numpy(np.ascontiguousarray(values[:3], np.float32)) / float(np.iinfo(values.dtype).max)
    return image if channels == len(image) else image.mean(0, keepdim=True)


def fitted(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image [C, H, W] at this height and width, smoothed when it becomes smaller."""
    if tuple(image.shape[1:]) == size:
        return image
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def fitted_labels(labels: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Labels [H, W] at this height and width, int64: each takes the places where it covers most."""
    same = torch.from_numpy(np.ascontiguousarray(labels))
    if labels.shape == size:
        return same.long()
    known = np.unique(labels)
    masks = torch.stack([(same == int(label)).float() for label in known])
    most = functional.interpolate(masks[None], size, mode="area")[0].argmax(0)
    return torch.from_numpy(known)[most].long()


# ---------------------------------------------------------------------- who is trained on and who is tested
def parts_of(groups: Sequence[str], shares: Shares, seed: int) -> np.ndarray:
    """0 train, 1 validation, 2 test of every case, [cases]: groups go whole and no part is empty, near the shares.

    groups: [cases] who or what must not be in two parts. The order in which they are dealt is drawn from the seed.
    """
    names, places, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    if len(names) < 3:
        raise DataError(
            f"the site's data are of {len(names)} patients (or images); train, validation and test need one each"
        )
    part, held = np.zeros(len(names), np.int64), np.zeros(3)
    for done, group in enumerate(np.random.default_rng(seed).permutation(len(names))):
        wanted = np.asarray(shares) * len(groups) - held
        if np.count_nonzero(held == 0) >= len(names) - done:
            wanted[held > 0] = -np.inf
        part[group] = wanted.argmax()
        held[part[group]] += sizes[group]
    return part[places.reshape(-1)]


def split_seed(seed: int, *site: str) -> int:
    """What a split is drawn from."""
    return seed_for(seed, *site, "split")


def divided(
    items: Sequence[Hashable],
    patients: Sequence[str],
    parts: np.ndarray,
    read: Callable[..., Case],
    held: Callable[..., Dataset] = read_all,
) -> SiteData:
    """The cases of each part; `held` says whether in memory or not."""
    chosen = [np.flatnonzero(parts == part).tolist() for part in range(3)]
    return SiteData(*(held([items[i] for i in part], [patients[i] for i in part], read) for part in chosen))
