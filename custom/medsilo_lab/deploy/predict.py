"""Predict images, and write a table with one line per image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import make_folder, write_csv, write_json
from medsilo.learning.layers import judges_by_batch
from medsilo.tasks.inference import Inference
from medsilo.tasks.scans import Scan, resized
from medsilo.tasks.segmentation import likeliest
from medsilo_lab.deploy.montage import tile, write_montage
from medsilo_lab.deploy.source import Source

BATCH = 16
VOLUME, PIXELS = "volume_ml_", "pixels_"  # prefixes of the table columns that contain the sizes of structures
MONTAGE, MOST = "overview.png", 24
COLUMNS = ("image", "mask", "error", "detail", "expert", "experts", "confidence")


@dataclass
class Prediction:
    """The prediction for one image. The fields of `result` become columns of the tables.

    >>> import numpy as np
    >>> Prediction(np.zeros((2, 4, 4)), {"volume_ml": 0.0}).result
    {'volume_ml': 0.0}
    """

    labels: np.ndarray | None  # the mask on the voxel grid of the scan; None for a classification
    result: dict[str, Any]


class PredictedImage(Protocol):
    """An image to predict: an image file or a DICOM series."""

    name: str

    def read(self) -> Scan:
        """Read the image."""

    def write(self, scan: Scan, prediction: Mapping[str, Any], labels: np.ndarray | None, out: Path) -> dict[str, str]:
        """Write the findings and the mask of an image into a folder. Return the names of the written files for the
        table.

        labels: The mask on the voxel grid of the scan; None for a classification.
        """


@torch.inference_mode()
def predict(source: Source, scan: Scan, device: torch.device) -> Prediction:
    """Preprocess one image as in training, apply the network, and map the network's output back to the voxel grid of
    the image.
    """
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
    result: dict[str, Any] = {"expert": min(counts, key=lambda name: (-counts[name], name)), "experts": dict(counts)}
    sure = [confidence for _, confidence in answers if confidence is not None]
    result["confidence"] = round(float(torch.cat(sure).mean()), 6) if sure else None
    if output.dim() == 2:
        return Prediction(None, result | _class(output, called))
    labels = labels_on(use, scan, output).numpy().astype(np.uint8)
    return Prediction(labels, result | _sizes(labels, scan.spacing, called))


def scan_of(use: Inference, image: tuple[Path, ...]) -> Scan:
    return use.scan_of(image) or Scan.read(image[0])


def labels_on(use: Inference, scan: Scan, output: Tensor) -> Tensor:
    """Return the label of each voxel of an image. `output` is the network's output for the cases into which the image
    was cut.
    """
    own, grid = use.labels_on(scan, output), scan.values.shape[1:]
    if own is not None:
        return own
    labels = likeliest(resized(output, grid[len(grid) - output.ndim + 2 :]))
    return labels if labels.ndim == len(grid) else labels[0]


def _class(output: Tensor, names: Sequence[str]) -> dict[str, Any]:
    probability, label = output.double().softmax(1).mean(0).max(0)
    return {"label": int(label), "class": names[int(label)], "probability": round(float(probability), 6)}


def _sizes(labels: np.ndarray, spacing: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    voxels = np.bincount(labels.ravel(), minlength=len(names))
    structures = list(enumerate(names))[1:]
    if labels.ndim == 2:
        return {f"{PIXELS}{name}": int(voxels[label]) for label, name in structures}
    millilitres = float(np.prod(spacing)) / 1000
    return {f"{VOLUME}{name}": round(voxels[label] * millilitres, 6) for label, name in structures}


def predict_all(
    source: Source, images: Sequence[PredictedImage], out: Path, device: torch.device, say: Callable[[str], None]
) -> int:
    import SimpleITK

    # hides the warnings of SimpleITK, which contain file names
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    if judges_by_batch(source.network):
        say("note: this network's norms look at the whole batch, so a slice's result depends on its volume")
    source.network.to(device)
    make_folder(out)
    rows: list[dict[str, Any]] = []
    tiles: dict[int, np.ndarray] = {}
    try:
        for number, image in enumerate(images, 1):
            row, picture = _case(source, image, out, device)
            rows.append(row)
            if picture is not None and len(tiles) < MOST:
                tiles[number] = picture
            say(f"{number:>{len(str(len(images)))}}/{len(images)}  {_line(row)}")
    finally:
        write_tables(out, source.facts, rows)
    if tiles:
        write_montage(out / MONTAGE, tiles, tuple(map(_shown, source.plan.task.goal.label_names[1:])))
    return sum(row["error"] is not None for row in rows)


def _case(
    source: Source, image: PredictedImage, out: Path, device: torch.device
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Predict one image. Return a row for the tables, and a picture for the overview. If an image causes an error, its
    row contains the error, and all other images are still predicted.
    """
    row: dict[str, Any] = {"image": image.name, "mask": None, "error": None, "detail": None}
    picture = None
    try:
        scan = image.read()
        prediction = predict(source, scan, device)
        row |= image.write(scan, prediction.result, prediction.labels, out)
        if prediction.labels is not None:
            picture = tile(scan.values, prediction.labels, scan.spacing)
    except MedsiloError as error:
        return row | {"error": str(error), "detail": error.private or None}, None
    # after an error such as a full disk or full device memory, other images may still succeed
    except Exception as error:
        return row | {"error": f"{type(error).__name__}; see predictions.json", "detail": str(error)}, None
    return row | prediction.result, picture


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
    return f"label {name}" if name.isdecimal() else name


def write_tables(out: Path, model: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    write_json(out / "predictions.json", {"model": model, "cases": list(rows)})
    flat = []
    for row in rows:
        told = {"detail": " ".join((row["detail"] or "").split())}
        if "experts" in row:  # the row of a failed image has no key "experts"
            told["experts"] = ";".join(f"{name}:{count}" for name, count in sorted(row["experts"].items()))
        flat.append(row | told)
    write_csv(out / "predictions.csv", flat, COLUMNS)
