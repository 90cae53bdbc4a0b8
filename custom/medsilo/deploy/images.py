"""Images to predict, files or the series of a DICOM tree; each writes its own result."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from medsilo import __version__
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes
from medsilo.deploy.predict import VOLUME, PredictedImage, Prediction
from medsilo.deploy.source import Source
from medsilo.dicom.codes import StructureCode, code_of, parsed
from medsilo.dicom.header import NOT_SLICES, SECONDARY, Header, library
from medsilo.dicom.objects import MadeBy, class_report, report, segmentation, sources_of
from medsilo.dicom.series import make_series
from medsilo.dicom.tree import read_tree
from medsilo.dicom.walk import is_dicom
from medsilo.tasks.dicom_scans import scan_of_series
from medsilo.tasks.listing import files_below
from medsilo.tasks.scans import Scan
from medsilo.tasks.sources import DataSource
from medsilo.tasks.task import Task

SUFFIXES = (".nii.gz", ".nii", ".mha", ".nrrd", ".png", ".tif", ".tiff")  # masks are written as their images are
COMPANIONS = (".raw", ".zraw")  # values of an .mhd file, which is the image


def to_predict(source: Source, images: Sequence[Path], out: Path, data: DataSource | None) -> list[PredictedImage]:
    """Return the images to predict.

    data: the hospital's own description of its data; masks have the values of its own masks then.
    """
    task = source.plan.task
    if not task.reads_images:
        raise MedsiloError(
            f"task {task.name} reads no image files; give a model of image-folder, dicom-folder "
            "or nifti-folder (docs/your-data.md), or of synthetic-prostate to try it"
        )
    if task.reads_dicom:
        return _series_to_predict(source, images, data)
    channels = {image[0]: image for image in task.images_among(find_images(images))}
    named = masks_for(list(channels))
    if any(path.resolve().parent == out.resolve() for path, _ in named):
        raise MedsiloError("the images lie in the output folder; give -o another one, so that none is written over")
    own_values = task.own_values(data)
    return [ImageFile(path.name, channels[path], mask, own_values, task) for path, mask in named]


# ------------------------------------------------------------------------------------------------ image files
@dataclass
class ImageFile:
    """An image in a file for all channels or for each, or in a folder with one DICOM series; its mask is a file of
    the same kind."""

    name: str
    files: tuple[Path, ...]
    mask: str
    own_values: Mapping[int, int]
    task: Task = field(repr=False)

    def read(self) -> Scan:
        return self.task.scan_of(self.files)

    def write(self, scan: Scan, prediction: Prediction, out: Path) -> dict[str, str]:
        if prediction.labels is None:
            return {}
        write_mask(scan, _with_values(prediction.labels, self.own_values), out / self.mask)
        return {"mask": self.mask}


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


# ------------------------------------------------------------------------------------------------ DICOM
@dataclass
class DicomSeries:
    """A series of a DICOM tree; its results are a segmentation and a report of the same study."""

    name: str
    number: int
    headers: Sequence[Header] = field(repr=False)
    codes: Mapping[str, StructureCode]
    maker: MadeBy

    def read(self) -> Scan:
        return scan_of_series(make_series(self.headers))

    def write(self, scan: Scan, prediction: Prediction, out: Path) -> dict[str, str]:
        import SimpleITK

        sources = sources_of(scan.source)
        names = {"report": f"{self.number:04d}_report.dcm"}
        if prediction.labels is None:
            found = prediction.found
            _save(class_report(sources, found["class"], found["probability"], self.maker), out / names["report"])
            return names
        names["mask"] = f"{self.number:04d}_segmentation.dcm"
        labels = SimpleITK.GetArrayFromImage(scan.on_own_grid(prediction.labels))
        made = segmentation(sources, labels, self.codes, self.maker)
        _save(made, out / names["mask"])
        volumes = {name: prediction.found[f"{VOLUME}{name}"] for name in self.codes}
        _save(report(sources, made, self.codes, volumes, self.maker), out / names["report"])
        return names


def _save(elements: Any, path: Path) -> None:
    written = BytesIO()
    elements.save_as(written)
    write_bytes(path, written.getvalue())


def _series_to_predict(source: Source, images: Sequence[Path], data: DataSource | None) -> list[PredictedImage]:
    """Return the series below folders (or among files) that are volumes, or should be."""
    library()
    plan = source.plan
    files = [file for path in images for file in (files_below(path)[0].values() if path.is_dir() else [path])]
    own = {name: parsed(code) for name, code in (data.codes if data else {}).items()}
    structures = plan.task.label_names[1:] if plan.task.segments else ()
    codes = {name: own.get(name) or code_of(name) for name in structures}
    maker = MadeBy(f"{source.facts['kind']} {plan.algorithm.name} {plan.task.name}"[:64], __version__, plan.hash)
    series = {
        uid: headers
        for uid, headers in read_tree(files).images.items()
        if any(header.wrong not in (NOT_SLICES, SECONDARY) for header in headers)
    }
    if not series:
        raise MedsiloError("there are no DICOM series of original CT, MR or PET slices; give their files or folders")
    return [DicomSeries(uid, number, headers, codes, maker) for number, (uid, headers) in enumerate(series.items(), 1)]
