"""Write small hospitals for tests: volumes with a bright ball, photographs with a bright square."""

import csv
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import SimpleITK
from nibabel import orientations

KEY = "5e" * 32
NAMES = [f"p{number}" for number in range(60)]
RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def split_of(key: str) -> int:
    """From a hospital's key, return the random number that determines how the hospital's patients are split."""
    return int.from_bytes(hmac.digest(bytes.fromhex(key), b"split", "sha256")[:8], "big") >> 1


@dataclass(frozen=True)
class Volume:
    """A volume: `values` [D, H, W] with slices from foot to head, and `affine` [4, 4] that maps a voxel (x, y, z) to
    millimetres in LPS.
    """

    values: np.ndarray
    affine: np.ndarray


def write_volume(path: Path, volume: Volume, stored_as: str = "LPS") -> None:
    """Write a NIfTI file whose voxel axes have the order and directions of `stored_as`, for example "RAS" or "PIR"."""
    affine = RAS_TO_LPS @ volume.affine
    image = nibabel.Nifti1Image(volume.values.transpose(2, 1, 0), affine)
    turn = orientations.ornt_transform(orientations.axcodes2ornt("LPS"), orientations.axcodes2ornt(tuple(stored_as)))
    image = image.as_reoriented(turn)
    image.set_sform(image.affine, code=1)
    image.set_qform(image.affine, code=1)
    nibabel.save(image, path)


def ball(shape: tuple[int, int, int], spacing: tuple[float, float, float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a noise volume [D, H, W] with a ball of 7 mm radius at a random position, and the ball's mask."""
    random = np.random.default_rng(seed)
    lengths = np.array(spacing[::-1])
    extent = np.array(shape) * lengths
    centre = random.uniform(0.35, 0.65, 3) * extent
    places = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1) * lengths
    mask = ((places - centre) ** 2).sum(-1) < 7.0**2
    return (random.normal(0, 0.2, shape) + 2.0 * mask).astype(np.float32), mask.astype(np.uint8)


def affine_of(spacing: tuple[float, float, float], tilt: float = 5.0) -> np.ndarray:
    """Return an affine [4, 4] in LPS that is tilted, and shifted from the scanner's centre."""
    angle = np.deg2rad(tilt)
    affine = np.eye(4)
    affine[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine[:3, :3] *= np.array(spacing)
    affine[:3, 3] = (-15.0, 12.0, 30.0)
    return affine


def write_balls(
    folder: Path,
    patients: Iterable[str],
    shape: tuple[int, int, int] = (12, 24, 20),
    spacing: tuple[float, float, float] = (1.5, 1.5, 2.5),
    stored_as: str = "RAS",
) -> Path:
    """Write volumes with balls as images/<patient>.nii.gz and labels/<patient>.nii.gz."""
    for number, patient in enumerate(patients):
        image, mask = ball(shape, spacing, number + 100 * sum(shape))
        for kind, values in (("images", image), ("labels", mask)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            write_volume(folder / kind / f"{patient}.nii.gz", Volume(values, affine_of(spacing)), stored_as)
    return folder


def write_pixels(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(pixels, isVector=pixels.ndim == 3), str(path))


def photograph(seed: int, size: tuple[int, int] = (30, 40)) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    mask = np.zeros(size, np.uint8)
    down, across = (random.integers(2, length - 12) for length in size)
    mask[down : down + 10, across : across + 10] = 255
    return (random.integers(0, 80, (*size, 3)) + mask[..., None] // 2).astype(np.uint8), mask


def write_table(path: Path, rows: Iterable[Mapping[str, object]], separator: str = ",") -> None:
    """Write a CSV file whose columns are the first row's keys."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


def write_photos(folder: Path, names: list[str], parts: dict[str, str] | None = None) -> Path:
    rows = []
    for number, name in enumerate(names):
        if not (folder / f"images/{name}.png").exists():
            write_pixels(folder / f"images/{name}.png", photograph(number)[0])
        row = {"image": f"images/{name}.png", "label": number % 2, "patient": name}
        rows.append({**row, "part": parts[name]} if parts else row)
    write_table(folder / "cases.csv", rows)
    return folder
