"""Find the site's folder of a public data set; read pictures."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.extend import DataError, Inference, Scan, SiteData, Task

Split = Literal["patient", "paper"]
LARGEST_VALUE = 8  # bytes, as int64


class PictureTask(Task):
    """Pictures, or slices, that become squares of `size` pixels; a task with a key `split` may mix patients as a paper
    did."""

    needs_data: ClassVar[bool] = True

    if TYPE_CHECKING:
        size: int
        shares: SiteData.Shares

    @property
    def channels(self) -> int:
        return 3

    @property
    def largest_input(self) -> float:
        return 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.size, self.size)

    @property
    def mixes_patients(self) -> bool:
        return getattr(self, "split", None) == "paper"

    @property
    def use(self) -> Inference:
        return Inference("images", lambda scan: self.inputs_of(scan.values))

    def inputs_of(self, values: np.ndarray) -> Tensor:
        """Return what the network reads of a picture, one case."""
        image, size = scaled(values, self.channels)[None], (self.size, self.size)
        same = image.shape[2:] == size
        return image if same else functional.interpolate(image, size, mode="bilinear", antialias=True)

    def labels_of(self, labels: np.ndarray) -> Tensor:
        """Return the labels of a mask [H, W] on a case's grid: each place takes the one that covers most of it."""
        here, size = torch.from_numpy(np.ascontiguousarray(labels)), (self.size, self.size)
        if labels.shape == size:
            return here.long()
        known = np.unique(labels)
        masks = torch.stack([(here == int(label)).float() for label in known])
        most = functional.interpolate(masks[None], size, mode="area")[0].argmax(0)
        return torch.from_numpy(known)[most].long()

    def case_of(self, item: Any) -> tuple[Tensor, Tensor]:
        """Read a picture and its mask."""
        raise NotImplementedError

    def parts_of(self, patients: Sequence[str], site: str, seed: int) -> np.ndarray:
        """The part of each case, by its patient, or by itself where the task's split is a paper's."""
        groups = [f"{case:06}" for case in range(len(patients))] if self.mixes_patients else patients
        return SiteData.parts_by_draw(groups, self.shares, self.seed_for(seed, site, "split"))

    def read_once(self, items: Sequence[Any], patients: Sequence[str], parts: np.ndarray) -> SiteData:
        """Return the cases of each part, read at once into memory."""

        def cases_of(own: np.ndarray) -> tuple[Tensor, Tensor, list[str]]:
            pairs = zip(*(self.case_of(items[place]) for place in own), strict=True)
            inputs, targets = map(torch.stack, pairs)
            return inputs, targets, [patients[place] for place in own]

        return SiteData.in_memory(cases_of(np.flatnonzero(parts == part)) for part in range(3))


@cache
def monai_loss(kind: str, **options: Any) -> nn.Module:
    """Return one of MONAI's losses, by the name of its class."""
    from monai import losses

    return getattr(losses, kind)(**options)


# ---------------------------------------------------------------------- where the data lie
def bare_name(name: str) -> str:
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
    inner = {bare_name(path.name): path for path in found if path.is_dir() and path.name != "__MACOSX"}
    places = [folder, *(inner.values() if len(inner) == 1 else [])]
    if not inner.keys().isdisjoint(map(bare_name, sites)):
        places = [path for name, path in inner.items() if name == bare_name(site)]
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


def arrays_of(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """The arrays of these names in a file of numpy; nothing in it is run."""
    try:
        with np.load(path, allow_pickle=False) as file:  # noqa: TID251
            missing = [name for name in names if name not in file.files]
            found = [] if missing else [file[name] for name in names]
    except Exception as error:  # numpy raises anything over damaged headers
        told = f"{path.name} can't be read ({type(error).__name__}); get it again, or write it with numpy.savez"
        raise DataError(told, private=f"{path}: {error}") from error
    if missing:
        raise DataError(f"{path.name} has no {', '.join(missing)}; add it", private=str(path))
    return found


# ---------------------------------------------------------------------- pictures
def read_picture(path: Path) -> np.ndarray:
    """A picture of 8 bits per value as RGB, [3, H, W], whatever its file has instead or beside."""
    return _values(path, "picture", "RGB").transpose(2, 0, 1)


def read_labels(path: Path) -> np.ndarray:
    """The values of a mask as they are stored, [H, W]: of its first channel, or of a palette's numbers."""
    values = _values(path, "mask").astype(np.int64)
    return values[..., 0] if values.ndim == 3 else values


def _values(path: Path, what: str, mode: str | None = None) -> np.ndarray:
    """Return what SimpleITK can't: TIFF of any name and compression, palettes as they are."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if mode and image.mode[0] in "IF":
                raise DataError(f"a {what} has more than 8 bits per value; save it with 8", private=str(path))
            Scan.check_size((*image.size, len(image.getbands())), LARGEST_VALUE, path)
            return np.asarray(image.convert(mode) if mode else image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises anything over damaged files
        message = f"a {what} is absent or damaged; see this site's log for its name"
        raise DataError(message, f"{path}: {error}") from error


def scaled(values: np.ndarray, channels: int) -> Tensor:
    """A flat image of whole numbers, [C, H, W], in 0 to 1 with 3 channels or 1: [channels, H, W]."""
    if values.ndim != 3 or values.dtype.kind != "u":
        raise DataError("a volume, or an image with values outside 0 to 255; the task reads flat 8-bit images")
    if channels > len(values):
        raise DataError(f"an image is grey where the task's images have {channels} channels (RGB)")
    image = torch.from_numpy(np.ascontiguousarray(values[:3], np.float32)) / float(np.iinfo(values.dtype).max)
    return image if channels == len(image) else image.mean(0, keepdim=True)
