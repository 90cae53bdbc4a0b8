"""Fed-IXI of FLamby: brains of three hospitals in London, on the grid and with the score of its protocol."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from medsilo.core.errors import MedsiloError

SUBJECTS, METADATA = "IXI_sample", "metadata_tiny.csv"
GRID = (48, 60, 48)  # along the axes as the files have them
SITES = ("Guys", "HH", "IOP")
NAME = re.compile(r"IXI(\d{3})-(Guys|HH|IOP)-\d+")
WHOLE = 1 - 1e-6  # a place of the mask is brain where all of it is
TOGETHER = 4  # cases that are scored at once
TINY = 1e-7  # of the protocol's score, against division by 0
COLUMNS = ("image", "label", "patient", "part")


def read_ixi(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return each hospital's subjects: where image and mask lie, and the part that the published table gives them."""
    with (folder / METADATA).open(encoding="utf-8-sig", newline="") as file:
        parts = {int(row["Patient ID"]): row["Split"] for row in csv.DictReader(file)}
    named = {place: NAME.fullmatch(place.name) for place in sorted((folder / SUBJECTS).iterdir()) if place.is_dir()}
    known = {place: (int(match[1]), match[2]) for place, match in named.items() if match}
    numbers = [number for number, _ in known.values()]
    if strange := set(numbers) ^ set(parts):
        raise MedsiloError(f"{SUBJECTS} and {METADATA} differ in {len(strange)} subjects; unpack the whole archive")
    if len(numbers) > len(set(numbers)):
        raise MedsiloError(f"{SUBJECTS} has subjects twice; unpack the archive into an empty folder")
    found: dict[str, list[dict[str, Any]]] = {site.lower(): [] for site in SITES}
    for place, (number, site) in known.items():
        files = {"image": _only(place / "T1"), "label": _only(place / "label")}
        found[site.lower()].append({"patient": place.name, "part": parts[number], **files})
    if without := [site for site, own in found.items() if {row["part"] for row in own} != {"train", "test"}]:
        raise MedsiloError(f"{', '.join(without)}: needs subjects in train and in test; correct {METADATA}")
    return found


def _only(folder: Path) -> Path:
    """Return the one volume in a folder."""
    files = sorted(folder.glob("*.nii.gz"))
    if len(files) != 1:
        raise MedsiloError(f"{SUBJECTS}/{folder.parent.name}/{folder.name}: {len(files)} volumes where there is one")
    return files[0]


def write_volumes(lines: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, together: str) -> None:
    """Write every volume on the protocol's grid, and a table for each hospital and one of all.

    The protocol has no validation cases: one training case stands there once more, and nothing is chosen by it.
    """
    volumes = folder / "volumes"
    volumes.mkdir()
    tables = {site: [_written(row, volumes, row["patient"]) for row in own] for site, own in lines.items()}
    for site, own in lines.items():
        first = next(row for row in own if row["part"] == "train")
        tables[site].append(_written(first, volumes, f"{site}-again") | {"part": "validation"})
    tables[together] = [row for own in tables.values() for row in own]
    for site, rows in tables.items():
        (folder / site).mkdir()
        with (folder / site / "cases.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def _written(row: Mapping[str, Any], volumes: Path, name: str) -> dict[str, str]:
    """Write a subject's image and mask; return its line."""
    files = {}
    for what in ("image", "label"):
        values = on_the_grid(row[what], what == "label")
        files[what] = f"../{volumes.name}/{name}_{what}.nii"
        _save(values, volumes / f"{name}_{what}.nii")
    return {**files, "patient": name, "part": row["part"]}


def on_the_grid(path: Path, mask: bool) -> np.ndarray:
    """Return a volume's means over the places of the protocol's grid; of a mask, where such a mean is whole."""
    import nibabel

    try:
        image: Any = nibabel.load(path)
        values = torch.from_numpy(np.asarray(image.dataobj, np.float32))
    except Exception as error:  # nibabel raises anything over damaged files
        raise MedsiloError(f"{path.name} is no readable NIfTI file; unpack the archive again", str(error)) from error
    if values.ndim != 3:
        raise MedsiloError(f"{path.name} has {values.ndim} axes where a volume has 3; unpack the archive again")
    means = functional.interpolate(values[None, None], GRID, mode="area")[0, 0]
    return (means >= WHOLE).to(torch.uint8).numpy() if mask else means.numpy()


def _save(values: np.ndarray, path: Path) -> None:
    """Write a volume whose axes stay as they are when it is read again."""
    import nibabel

    nibabel.save(nibabel.Nifti1Image(values, np.diag([-1.0, -1.0, 1.0, 1.0])), path)


def soft_dice(output: Tensor, target: Tensor) -> Tensor:
    """Return each case's overlap of probabilities with what is right, the mean of background and brain, [batch]."""
    shares = output.softmax(1)
    right = functional.one_hot(target, shares.shape[1]).movedim(-1, 1).to(shares.dtype)
    axes = tuple(range(2, shares.ndim))
    return ((shares * right).sum(axes) / ((shares + right).sum(axes) / 2 + TINY)).mean(1)


@torch.no_grad()
def score_of_volumes(model: nn.Module, cases: Dataset, device: torch.device) -> float:
    """Return the mean `soft_dice` of cases."""
    model.eval().to(device)
    several = (default_collate(own) for own in _some(cases))
    scores = [soft_dice(model(inputs.to(device)), targets.to(device)).cpu() for inputs, targets in several]
    return float(torch.cat(scores).double().mean())


def _some(cases: Dataset) -> Iterator[list[Any]]:
    count = len(cases)  # type: ignore[arg-type]
    for first in range(0, count, TOGETHER):
        yield [cases[place] for place in range(first, min(first + TOGETHER, count))]
