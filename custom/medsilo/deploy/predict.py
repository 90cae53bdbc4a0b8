"""Prediction on a hospital's own images: masks on the images' own grids, and a table with one line per image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import make_folder, write_json
from medsilo.core.text import plain
from medsilo.deploy.predicted_rows import write_rows
from medsilo.deploy.predictor import PredictionRequest, Predictor
from medsilo.deploy.source import Source
from medsilo.deploy.watch import MACHINE, SEEN, Seen, mean_of
from medsilo.learning.layers import judges_by_batch
from medsilo.tasks import listing
from medsilo.tasks.headers import is_dicom
from medsilo.tasks.overlays import tile, write_montage
from medsilo.tasks.scans import Scan
from medsilo.tasks.use import Use

BATCH = 16  # cases (slices of a volume) that go through the network together
VOLUME, PIXELS = "volume_ml_", "pixels_"  # before a structure's name
MONTAGE, MOST = "overview.png", 24  # images of it
COLUMNS = ("image", "mask", "error", "detail", "expert", "experts", "confidence")  # whatever was found


@dataclass
class Prediction:
    """One image's answer. `found` goes into the tables.

    >>> import numpy as np
    >>> Prediction(np.zeros((2, 4, 4)), {"volume_ml": 0.0}).found
    {'volume_ml': 0.0}
    """

    labels: np.ndarray | None  # the mask, on the grid of the scan's values; None for a classification
    found: dict[str, Any]
    marked: np.ndarray | None = None  # a second mask: what layers of the plan mark
    seen: Seen = field(default_factory=dict)  # by what watches


class PredictedImage(Protocol):
    """One image to predict, wherever it comes from."""

    name: str  # for the hospital's own table

    def read(self) -> Scan:
        """Return its values."""

    def write(self, scan: Scan, prediction: Prediction, out: Path) -> dict[str, str]:
        """Write what was found into a folder; return the names of the files, for the table."""


@torch.inference_mode()
def predict(source: Source, scan: Scan, device: torch.device) -> Prediction:
    """One image through the task's own preprocessing, the network, and back to the image's grid."""
    task = source.plan.task
    use, called = task.use, task.goal.label_names
    if not np.isfinite(scan.values).all():
        raise DataError("an image has values that are NaN or infinite")
    answers: list[tuple[list[str], Tensor | None]] = []

    def answer(cases: Tensor) -> Tensor:
        output, names, confidence = source.answer(cases)
        answers.append((names, confidence))
        return output

    inputs = use.inputs_of(scan)
    parts = inputs.split(BATCH)
    output = torch.cat([task.infer(answer, cases.to(device)).float().cpu() for cases in parts])
    if not output.isfinite().all():
        raise MedsiloError("the network's output is NaN or infinite; check the image's intensities")
    counts = Counter(name for names, _ in answers for name in names)
    found: dict[str, Any] = {"expert": min(counts, key=lambda name: (-counts[name], name)), "experts": dict(counts)}
    sure = [confidence for _, confidence in answers if confidence is not None]
    found["confidence"] = round(float(torch.cat(sure).mean()), 6) if sure else None
    labels, marks = None, None
    if output.dim() == 2:
        found |= _class(output, called) | source.said(output.softmax(1).mean(0, keepdim=True).log(), parts[0][:1])[0]
    else:
        labels = use.labels_on(scan, output).numpy().astype(np.uint8)
        found |= _sizes(labels, scan.spacing, called) | source.said(output[:1], parts[0][:1])[0]
        if (marked := source.marked(output)) is not None:
            marks = use.labels_on(scan, marked).numpy().astype(np.uint8)
            found |= {f"promised_{name}": size for name, size in _sizes(marks, scan.spacing, called).items()}
    return Prediction(labels, found, marks, _seen(source, scan, inputs, output, found))


def _seen(source: Source, scan: Scan, inputs: Tensor, output: Tensor, found: dict[str, Any]) -> Seen:
    """Return what is watched of an image: the mean over its cases, and its own values before all preparation."""
    if source.watch is None:
        return {}
    raw = {"raw intensity": float(scan.values.mean()), "raw deviation": float(scan.values.std())}
    spacing = {f"spacing {axis}": float(own) for axis, own in zip("xyz", scan.spacing, strict=False)}
    machine = {f"{MACHINE}{plain(scan.machine, 100)}": 1.0} if scan.machine else {}
    return {**mean_of(source.watch.measure(inputs, output, [found] * len(inputs))), **raw, **spacing, **machine}


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


def predict_all(asked: PredictionRequest, images: Sequence[PredictedImage]) -> int:
    """Predict every image of a request; return how many failed."""
    import SimpleITK

    source, out, say = asked.source, asked.out, asked.say
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)  # its warnings name files
    if judges_by_batch(source.network):
        say("note: this network's norms look at the whole batch, so a slice's result depends on its volume")
    source.network.to(asked.device)
    make_folder(out)
    rows: list[dict[str, Any]] = []
    tiles: dict[int, np.ndarray] = {}
    try:
        for number, image in enumerate(images, 1):
            row, picture = _case(source, image, out, asked.device)
            rows.append(row)
            if picture is not None and len(tiles) < MOST:
                tiles[number] = picture
            say(f"{number:>{len(str(len(images)))}}/{len(images)}  {_line(row)}")
    finally:
        seen = [own for row in rows if (own := row.pop(SEEN, None))]
        write_tables(out, source.facts, rows)
    if source.watch:
        source.watch.keep(seen)
    if tiles:
        write_montage(out / MONTAGE, tiles, tuple(map(_shown, source.plan.task.goal.label_names[1:])))
    return sum(row["error"] is not None for row in rows)


def _case(
    source: Source, image: PredictedImage, out: Path, device: torch.device
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return one image's row, and its picture; what is wrong with it is in the row and stops no other."""
    row: dict[str, Any] = {"image": image.name, "mask": None, "error": None, "detail": None}
    picture = None
    try:
        scan = image.read()
        prediction = predict(source, scan, device)
        row |= image.write(scan, prediction, out)
        if prediction.labels is not None:
            picture = tile(scan.values, prediction.labels, scan.spacing)
    except MedsiloError as error:
        return row | {"error": str(error), "detail": error.private or None}, None
    except Exception as error:  # too large for the device, no place on the disk, a library's own: the next may do
        return row | {"error": f"{type(error).__name__}; see predictions.json", "detail": str(error)}, None
    seen = {SEEN: prediction.seen} if prediction.seen else {}
    return row | prediction.found | seen, picture


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
    """Write predictions.json and predictions.csv."""
    write_json(out / "predictions.json", {"model": model, "cases": list(rows)})
    flat = []
    for row in rows:
        told = {"detail": " ".join((row["detail"] or "").split())}
        if "experts" in row:  # an image that failed has none
            told["experts"] = ";".join(f"{name}:{count}" for name, count in sorted(row["experts"].items()))
        flat.append(row | told)
    write_rows(out / "predictions.csv", flat, COLUMNS)


SUFFIXES = (".nii.gz", ".nii", ".mha", ".nrrd", ".png", ".tif", ".tiff")  # masks are written as their images are
MARKED = "promised_"  # before the name of a mask that a layer of the plan marks
COMPANIONS = (".raw", ".zraw")  # values of an .mhd file, which is the image


def predict_images(asked: PredictionRequest) -> int:
    """Predict image files, whose masks have the values of the hospital's own masks; returns how many failed."""
    use = asked.source.plan.task.use
    channels = {image[0]: image for image in use.images_among(find_images(asked.given, asked.say))}
    named = masks_for(list(channels))
    if any(path.resolve().parent == asked.out.resolve() for path, _ in named):
        raise MedsiloError("the images lie in the output folder; give -o another one, so that none is written over")
    own_values, lacks = (use.own_values(asked.data), use.lacking_of(asked.data)) if asked.data else ({}, ())
    images = [ImageFile(path.name, channels[path], mask, own_values, use, lacks) for path, mask in named]
    return predict_all(asked, images)


PREDICTOR = Predictor("images", predict_images)


@dataclass
class ImageFile:
    """An image in a file for all channels or for each, or in a folder with one DICOM series; its mask is a file of
    the same kind."""

    name: str
    files: tuple[Path, ...]
    mask: str
    own_values: Mapping[int, int]
    use: Use = field(repr=False)
    lacks: tuple[int, ...] = ()  # places of channels that are not in the files

    def read(self) -> Scan:
        return replace(self.use.scan_of(self.files), lacks=self.lacks)

    def write(self, scan: Scan, prediction: Prediction, out: Path) -> dict[str, str]:
        if prediction.labels is None:
            return {}
        write_mask(scan, _with_values(prediction.labels, self.own_values), out / self.mask)
        if prediction.marked is None:
            return {"mask": self.mask}
        marked = f"{MARKED}{self.mask}"
        write_mask(scan, _with_values(prediction.marked, self.own_values), out / marked)
        return {"mask": self.mask, "promised_mask": marked}


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

    part, mask, whole = path.with_name(f".part-{path.name}"), scan.on_own_grid(labels), False
    try:
        with suppress(RuntimeError):  # NIfTI is written to a full disk without an error, so it is read again
            SimpleITK.WriteImage(mask, str(part), useCompression=True)
            whole = SimpleITK.Hash(SimpleITK.ReadImage(str(part))) == SimpleITK.Hash(mask)
        if not whole:
            raise MedsiloError("a mask could not be written (is the disk full?); free space, then predict again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def find_images(given: Sequence[Path], say: Callable[[str], None] = print) -> list[Path]:
    """The images that were given: files, folders of one DICOM series, and those in other folders; say how many of
    their files are no images."""
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise MedsiloError("an image that was given is not there; correct its path", private=str(path))
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
        raise MedsiloError("there are no images; give image files, DICOM folders or folders with such")
    return found


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith(listing.SUFFIXES) or is_dicom(path)


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
