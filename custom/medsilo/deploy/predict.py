"""Prediction on a hospital's own images: masks on the images' own grids, and a table with one line per image."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import make_folder, write_json, write_text
from medsilo.deploy.source import Source
from medsilo.dicom.walk import is_dicom
from medsilo.learning.layers import judges_by_batch
from medsilo.tasks.overlays import tile, write_montage
from medsilo.tasks.scans import Scan, read_scan
from medsilo.tasks.sources import DataSource

BATCH = 16  # cases (slices of a volume) that go through the network together
FAR = 1.5  # a spacing this many times beyond the training images' is warned of
SUFFIXES = (".nii.gz", ".nii", ".mha", ".nrrd", ".png", ".tif", ".tiff")  # masks are written as their images are
COMPANIONS = (".raw", ".zraw")  # values of an .mhd file, which is the image
VOLUME, PIXELS = "volume_ml_", "pixels_"  # before a structure's name
MONTAGE, MOST = "overview.png", 24  # images of it
COLUMNS = ("image", "mask", "error", "detail", "warnings", "expert", "experts", "confidence")  # whatever was found
Say = Callable[[str], None]


@dataclass
class Prediction:
    """One image's answer. `found` goes into the tables."""

    labels: np.ndarray | None  # the mask, on the grid of the scan's values; None for a classification
    found: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


@torch.inference_mode()
def predict(source: Source, scan: Scan, device: torch.device) -> Prediction:
    """One image through the task's own preprocessing, the network, and back to the image's grid."""
    task = source.plan.task
    if not np.isfinite(scan.values).all():
        raise DataError("an image has values that are NaN or infinite")
    answers: list[tuple[list[str], Tensor | None]] = []

    def answer(cases: Tensor) -> Tensor:
        output, names, confidence = source.answer(cases)
        answers.append((names, confidence))
        return output

    parts = task.inputs_of_scan(scan).split(BATCH)
    output = torch.cat([task.infer(answer, cases.to(device)).float().cpu() for cases in parts])
    if not output.isfinite().all():
        raise MedsiloError("the network's output is NaN or infinite; check the image's intensities")
    counts = Counter(name for names, _ in answers for name in names)
    found: dict[str, Any] = {"expert": min(counts, key=lambda name: (-counts[name], name)), "experts": dict(counts)}
    sure = [confidence for _, confidence in answers if confidence is not None]
    found["confidence"] = round(float(torch.cat(sure).mean()), 6) if sure else None
    labels = None
    if output.dim() == 2:
        found |= _class(output, task.label_names)
    else:
        labels = task.labels_of(output, scan.values.shape[1:]).numpy().astype(np.uint8)
        found |= _sizes(labels, scan.spacing, task.label_names)
    return Prediction(labels, found, _far(source, scan))


def _class(output: Tensor, names: Sequence[str]) -> dict[str, Any]:
    probability, label = output.double().softmax(1).mean(0).max(0)
    return {"label": int(label), "class": names[int(label)], "probability": round(float(probability), 6)}


def _sizes(labels: np.ndarray, spacing: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    """Return millilitres of a volume's structures, pixels of a flat image's."""
    voxels = np.bincount(labels.ravel(), minlength=len(names))
    structures = list(enumerate(names))[1:]
    if labels.ndim == 2:
        return {f"{PIXELS}{name}": int(voxels[label]) for label, name in structures}
    millilitres = float(np.prod(spacing)) / 1000
    return {f"{VOLUME}{name}": round(voxels[label] * millilitres, 6) for label, name in structures}


def _far(source: Source, scan: Scan) -> list[str]:
    """Return what is unlike the training images, one line each."""
    return [
        f"spacing along {axis} is {own:.3g} mm, far from training ({low:g} to {high:g} mm)"
        for axis, own, (low, high) in zip("xyz", scan.spacing, source.spacing or (), strict=False)
        if not low / FAR <= own <= high * FAR
    ]


def predict_all(
    source: Source, images: Sequence[Path], out: Path, device: torch.device, say: Say, data: DataSource | None = None
) -> int:
    """Predict every image into `out`; returns how many failed. No file is named to `say`: names are in the tables.

    data: the hospital's own description of its data; masks have the values of its own masks then.
    """
    import SimpleITK

    if not source.plan.task.reads_images:
        raise MedsiloError(
            f"task {source.plan.task.name} reads no image files; give a model of image-folder "
            "or nifti-folder (docs/your-data.md), or of synthetic-prostate to try it"
        )
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)  # its warnings name files
    named = masks_for(find_images(images))
    if any(path.resolve().parent == out.resolve() for path, _ in named):
        raise MedsiloError("the images lie in the output folder; give -o another one, so that none is written over")
    if judges_by_batch(source.network):
        say("note: this network's norms look at the whole batch, so a slice's result depends on its volume")
    source.network.to(device)
    make_folder(out)
    own_values = source.plan.task.own_values(data)
    rows: list[dict[str, Any]] = []
    tiles: dict[int, np.ndarray] = {}
    try:
        for number, (path, mask) in enumerate(named, 1):
            row, picture = _case(source, path, out / mask, device, own_values)
            rows.append(row)
            if picture is not None and len(tiles) < MOST:
                tiles[number] = picture
            say(f"{number:>{len(str(len(named)))}}/{len(named)}  {_line(row)}")
            for warning in row["warnings"]:
                say(f"    warning: {warning}")
    finally:
        write_tables(out, source.facts, rows)
    if tiles:
        write_montage(out / MONTAGE, tiles, tuple(map(_shown, source.plan.task.label_names[1:])))
    return sum(row["error"] is not None for row in rows)


def _case(
    source: Source, path: Path, mask: Path, device: torch.device, own_values: Mapping[int, int]
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return one image's row, and its picture; what is wrong with it stands in the row and stops no other."""
    row: dict[str, Any] = {"image": path.name, "mask": None, "error": None, "detail": None, "warnings": []}
    picture = None
    try:
        scan = read_scan(path)
        prediction = predict(source, scan, device)
        if prediction.labels is not None:
            write_mask(scan, _with_values(prediction.labels, own_values), mask)
            row["mask"] = mask.name
            picture = tile(scan.values, prediction.labels, scan.spacing)
    except MedsiloError as error:
        return row | {"error": str(error), "detail": error.private or None}, None
    except Exception as error:  # too large for the device, no place on the disk, a library's own: the next may do
        return row | {"error": f"{type(error).__name__}; see predictions.json", "detail": str(error)}, None
    return row | {"warnings": prediction.warnings} | prediction.found, picture


def _with_values(labels: np.ndarray, own_values: Mapping[int, int]) -> np.ndarray:
    """Return a mask in which labels have a hospital's own values; those without one keep their number."""
    if all(label == value for label, value in own_values.items()):
        return labels
    table = np.arange(max(*own_values, int(labels.max())) + 1, dtype=np.uint16)
    table[list(own_values)] = list(own_values.values())
    return table[labels]


def write_mask(scan: Scan, labels: np.ndarray, path: Path) -> None:
    """A mask with exactly the geometry of its image; whole or not there."""
    import SimpleITK

    part = path.with_name(f".part-{path.name}")
    try:
        SimpleITK.WriteImage(scan.on_own_grid(labels), str(part), useCompression=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def find_images(given: Sequence[Path]) -> list[Path]:
    """The images that were given: files, folders of one DICOM series, and what lies in other folders."""
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise MedsiloError("an image that was given is not there; correct its path", private=str(path))
        found += [path] if path.is_file() or _is_series(path) else _within(path)
    if not found:
        raise MedsiloError("there are no images; give image files, DICOM folders or folders with such")
    return found


def _within(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix in COMPANIONS:
            continue
        if path.is_file() or _is_series(path):
            yield path


def _is_series(folder: Path) -> bool:
    """Return whether files of a folder say that they are DICOM; a damaged one is found when the series is read."""
    return folder.is_dir() and any(path.is_file() and is_dicom(path) for path in sorted(folder.iterdir()))


def masks_for(images: Sequence[Path]) -> list[tuple[Path, str]]:
    """Every image with the name of its mask; images of the same name get their folder's before it."""
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
    suffix = next((suffix for suffix in SUFFIXES if not path.is_dir() and path.name.lower().endswith(suffix)), "")
    stem = path.name[: -len(suffix)] if suffix else path.name.removesuffix(".mhd").removesuffix(".dcm")
    return f"{stem}_mask{suffix or '.nii.gz'}"


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    experts = ", ".join(f"{name} ({count})" for name, count in sorted(row["experts"].items()))
    parts = [experts if len(row["experts"]) > 1 else row["expert"]]
    if row["confidence"] is not None:
        parts.append(f"confidence {row['confidence']:.2f}")
    for key, value in row.items():
        for begin, unit in ((VOLUME, "ml"), (PIXELS, "pixels")):
            if key.startswith(begin):
                parts.append(f"{_shown(key.removeprefix(begin))}: {value:g} {unit}")
    if "label" in row:
        parts.append(f"{_shown(row['class'])} with probability {row['probability']:.2f}")
    return "  ".join(parts)


def _shown(name: str) -> str:
    """Return a label's name for people; where it has none, its number."""
    return f"label {name}" if name.isdecimal() else name


def write_tables(out: Path, model: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """predictions.json and predictions.csv."""
    write_json(out / "predictions.json", {"model": model, "cases": list(rows)})
    columns = list(dict.fromkeys((*COLUMNS, *(key for row in rows for key in row))))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        told = {"warnings": "; ".join(row["warnings"]), "detail": " ".join((row["detail"] or "").split())}
        if "experts" in row:  # an image that failed has none
            told["experts"] = ";".join(f"{name}:{count}" for name, count in sorted(row["experts"].items()))
        writer.writerow(row | told)
    write_text(out / "predictions.csv", text.getvalue())
