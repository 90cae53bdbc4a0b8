"""Find a site's folder in a public data set, and read the images in it."""

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
LARGEST_VALUE = 8  # number of bytes of each value in an array of the type int64


class PictureTask(Task):
    """Images or slices that are resized to `size` x `size` pixels. With `split: paper`, the images of a patient may be
    in both training and test data, as in the split of the method's paper.
    """

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
        image, size = scaled(values, self.channels)[None], (self.size, self.size)
        same = image.shape[2:] == size
        return image if same else functional.interpolate(image, size, mode="bilinear", antialias=True)

    def labels_of(self, labels: np.ndarray) -> Tensor:
        """Resize a mask [H, W] to the height and width of a case. Each pixel gets the label that covers most of the
        pixel's area.
        """
        here, size = torch.from_numpy(np.ascontiguousarray(labels)), (self.size, self.size)
        if labels.shape == size:
            return here.long()
        known = np.unique(labels)
        masks = torch.stack([(here == int(label)).float() for label in known])
        most = functional.interpolate(masks[None], size, mode="area")[0].argmax(0)
        return torch.from_numpy(known)[most].long()

    def case_of(self, item: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def parts_of(self, patients: Sequence[str], site: str, seed: int) -> np.ndarray:
        """Return the purpose of each case: 0 for training, 1 for validation, 2 for test. All cases of a patient have
        the same purpose, unless the task follows a paper that splits cases instead of patients.
        """
        groups = [f"{case:06}" for case in range(len(patients))] if self.mixes_patients else patients
        return SiteData.parts_by_draw(groups, self.shares, self.seed_for(seed, site, "split"))

    def read_once(self, items: Sequence[Any], patients: Sequence[str], parts: np.ndarray) -> SiteData:
        def cases_of(own: np.ndarray) -> tuple[Tensor, Tensor, list[str]]:
            pairs = zip(*(self.case_of(items[place]) for place in own), strict=True)
            inputs, targets = map(torch.stack, pairs)
            return inputs, targets, [patients[place] for place in own]

        return SiteData.in_memory(cases_of(np.flatnonzero(parts == part)) for part in range(3))


@cache
def monai_loss(kind: str, **options: Any) -> nn.Module:
    from monai import losses

    return getattr(losses, kind)(**options)


# ---------------------------------------------------------------------- folders
def bare_name(name: str) -> str:
    """Normalise a name to lower case without punctuation, so that "ISBI_1.5" matches "isbi-15"."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def site_folder(
    task: str, site: str, sites: Sequence[str], folder: Path | None, holds: Callable[[Path], bool], layout: str
) -> Path:
    """Find a site's folder. If no subfolder has the site's name, return the data folder, or the data folder's only
    subfolder.

    If the data folder only has subfolders for other sites, raise DataError.

    Args:
        holds: Returns True if a folder contains the data set.
        layout: A description of the data set's layout, for the error message.
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
        f"task {task}: expected {layout} in the data folder, or in its subfolder with the site's name",
        private=str(folder),
    )


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the sorted files in a folder that match a pattern, without the hidden files that macOS adds to
    archives.
    """
    return sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith("."))


def arrays_of(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Read arrays from a NumPy file without running code from the file; raise DataError if the file lacks an array."""
    try:
        with np.load(path, allow_pickle=False) as file:  # noqa: TID251
            missing = [name for name in names if name not in file.files]
            found = [] if missing else [file[name] for name in names]
    except Exception as error:  # NumPy can raise any error for damaged headers
        told = f"{path.name} can't be read ({type(error).__name__}); get it again, or write it with numpy.savez"
        raise DataError(told, private=f"{path}: {error}") from error
    if missing:
        raise DataError(f"{path.name} has no {', '.join(missing)}; add it", private=str(path))
    return found


# ---------------------------------------------------------------------- images
def read_picture(path: Path) -> np.ndarray:
    """Read an image with 8 bits per value as an RGB array [3, H, W]."""
    return _values(path, "picture", "RGB").transpose(2, 0, 1)


def read_labels(path: Path) -> np.ndarray:
    """Read the stored values of a mask as [H, W]: the values of the first channel, or the palette indices."""
    values = _values(path, "mask").astype(np.int64)
    return values[..., 0] if values.ndim == 3 else values


def _values(path: Path, subject: str, mode: str | None = None) -> np.ndarray:
    """Read the values of an image, or the palette indices of an image with a palette. Pillow is used because SimpleITK
    cannot read some formats, such as compressed TIFF.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if mode and image.mode[0] in "IF":
                raise DataError(f"a {subject} has more than 8 bits per value; save it with 8 bits", private=str(path))
            Scan.check_size((*image.size, len(image.getbands())), LARGEST_VALUE, path)
            return np.asarray(image.convert(mode) if mode else image)
    except DataError:
        raise
    except Exception as error:  # Pillow can raise any error for damaged files
        message = f"a {subject} is absent or damaged; see this site's log for its name"
        raise DataError(message, f"{path}: {error}") from error


def scaled(values: np.ndarray, channels: int) -> Tensor:
    """Convert a 2D image of integers [C, H, W] to values from 0 to 1, with 3 channels or 1 channel."""
    if values.ndim != 3 or values.dtype.kind != "u":
        raise DataError("the file is a volume or not an 8-bit image; the task reads 2D images with 8 bits per value")
    if channels > len(values):
        raise DataError(f"an image is grey, but the task needs {channels} channels (RGB)")
    image = torch.from_numpy(np.ascontiguousarray(values[:3], np.float32)) / float(np.iinfo(values.dtype).max)
    return image if channels == len(image) else image.mean(0, keepdim=True)
