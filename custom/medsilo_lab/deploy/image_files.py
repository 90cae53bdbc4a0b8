"""Predict a hospital's image files. Each mask has the grid and the file format of its image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.tasks.headers import is_dicom
from medsilo.tasks.image_formats import FORMATS, SUFFIXES
from medsilo.tasks.inference import Inference
from medsilo.tasks.scans import Scan
from medsilo_lab.deploy.predict import scan_of
from medsilo_lab.deploy.predictor import Predictor

MASKS = tuple(suffix for one in FORMATS for suffix in one.masks)
COMPANIONS = (".raw", ".zraw")  # suffixes of the files that store the values of an image with an .mhd header


class ImagePredictor(Predictor):
    """Predicts image files. The values in the predicted masks are the values that the hospital uses in its own
    masks.
    """

    cases = "images"

    def predict(self) -> int:
        use = self.source.plan.task.use
        channels = {image[0]: image for image in use.images_among(find_images(self.given, self.say))}
        named = masks_for(list(channels))
        if any(path.resolve().parent == self.out.resolve() for path, _ in named):
            raise MedsiloError(
                "the images are in the output folder; choose another folder with -o, so that no image is overwritten"
            )
        if there := [mask for _, mask in named if (self.out / mask).exists()]:
            told = f"the output folder has {len(there)} masks of these names, which stay as they are; choose another -o"
            raise MedsiloError(told, private=there[0])
        own_values = use.own_values(self.data) if self.data else {}
        alone = {path: mask == _mask_name(path) for path, mask in named}
        names = {path: path.name if alone[path] else f"{path.resolve().parent.name}/{path.name}" for path in alone}
        images = [ImageFile(names[path], channels[path], mask, own_values, use) for path, mask in named]
        return self.predict_images(images)


@dataclass
class ImageFile:
    """An image to predict: one file, a file for each channel, or the folder of a DICOM series.

    The file format of the predicted mask is the file format of the image.
    """

    name: str
    files: tuple[Path, ...]
    mask: str
    own_values: Mapping[int, int]
    use: Inference = field(repr=False)

    def read(self) -> Scan:
        return scan_of(self.use, self.files)

    def write(self, scan: Scan, prediction: Mapping[str, Any], labels: np.ndarray | None, out: Path) -> dict[str, str]:
        if labels is None:
            return {}
        write_mask(scan, _with_values(labels, self.own_values), out / self.mask)
        return {"mask": self.mask}


def _with_values(labels: np.ndarray, own_values: Mapping[int, int]) -> np.ndarray:
    """Replace each label in a mask by the hospital's value for this label. If the hospital has no value for a label,
    the label stays unchanged.
    """
    if all(label == value for label, value in own_values.items()):
        return labels
    table = np.arange(max(*own_values, int(labels.max())) + 1, dtype=np.uint16)
    table[list(own_values)] = list(own_values.values())
    return table[labels]


def write_mask(scan: Scan, labels: np.ndarray, path: Path) -> None:
    """Write a mask with the geometry of its image, and leave no incomplete file after an error."""
    import SimpleITK

    part, mask, whole = path.with_name(f".part-{path.name}"), scan.on_own_grid(labels), False
    try:
        with suppress(RuntimeError):  # writing NIfTI to a full disk raises no error, so the written file is read again
            SimpleITK.WriteImage(mask, str(part), useCompression=True)
            whole = SimpleITK.Hash(SimpleITK.ReadImage(str(part))) == SimpleITK.Hash(mask)
        if not whole:
            raise MedsiloError("a mask could not be written (is the disk full?); free space, then predict again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def find_images(paths: Sequence[Path], say: Callable[[str], None] = print) -> list[Path]:
    """Return the images among the given paths: image files, folders of a DICOM series, and all images in other folders.
    The number of files in the given folders that are no images is reported.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_file() and not path.is_dir():
            raise MedsiloError("an image does not exist, or is not a file; correct its path", private=str(path))
        if path.is_file() or _is_series(path):
            found.append(path)
        else:
            inside = [one for one in sorted(path.iterdir()) if one.name[0] != "." and one.suffix not in COMPANIONS]
            found += [one for one in inside if _is_series(one) or (one.is_file() and _is_image(one))]
            others = Counter(one.suffix or "no suffix" for one in inside if one.is_file() and not _is_image(one))
            if others:
                kinds = ", ".join(f"{suffix} {count}" for suffix, count in sorted(others.items()))
                say(f"left out: {others.total()} files that are no images ({kinds})")
    if not found:
        raise MedsiloError("no images; give image files, DICOM folders, or the folders that directly hold them")
    return found


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) or is_dicom(path)


def _is_series(folder: Path) -> bool:
    """Return True if a folder contains DICOM files, even if they are damaged; damage is reported when the series is
    read.
    """
    return folder.is_dir() and any(path.is_file() and is_dicom(path) for path in sorted(folder.iterdir()))


def masks_for(images: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return every image together with the file name of its mask. If several images have the same name, the names of
    their masks begin with the name of the image's folder.
    """
    names = Counter(_mask_name(path) for path in images)
    named = []
    for path in images:
        name = _mask_name(path)
        named.append((path, name if names[name] == 1 else f"{path.resolve().parent.name}_{name}"))
    doubled = [name for name, count in Counter(name for _, name in named).items() if count > 1]
    if doubled:
        raise MedsiloError("two images would get the same mask; predict them into two folders", private=doubled[0])
    return named


def _mask_name(path: Path) -> str:
    suffix = next((suffix for suffix in MASKS if not path.is_dir() and path.name.lower().endswith(suffix)), "")
    stem = path.name[: -len(suffix)] if suffix else path.name.removesuffix(".mhd").removesuffix(".dcm")
    return f"{stem}_mask{suffix or '.nii.gz'}"
