"""Predict DICOM series. For each series, write a segmentation and a report, which belong to the same DICOM study as the
series.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.core import files
from medsilo.core.errors import MedsiloError
from medsilo.core.version import __version__
from medsilo.tasks.scans import Scan
from medsilo.tasks.segmentation import Segmentation
from medsilo_dicom.header import NOT_SLICES, SECONDARY, Header, library, read_tree
from medsilo_dicom.series import make_series, scan_of_series
from medsilo_lab.deploy.dicom_objects import (
    MadeBy,
    StructureCode,
    class_report,
    code_of,
    report,
    segmentation,
    sources_of,
)
from medsilo_lab.deploy.predictor import Predictor

VOLUME = "volume_ml_"


@dataclass
class DicomSeries:
    """A DICOM series to predict."""

    name: str
    number: int
    headers: Sequence[Header] = field(repr=False)
    codes: Mapping[str, StructureCode]
    maker: MadeBy

    def read(self) -> Scan:
        return scan_of_series(make_series(self.headers))

    def write(self, scan: Scan, prediction: Mapping[str, Any], labels: np.ndarray | None, out: Path) -> dict[str, str]:
        sources = sources_of(scan.source)
        if labels is None:
            told = class_report(sources, prediction["class"], prediction["probability"], self.maker)
            return {"report": self._save(told, out, "report")}
        mask = segmentation(sources, _as_stored(scan, labels, sources), self.codes, self.maker)
        volumes = {name: prediction[f"{VOLUME}{name}"] for name in self.codes}
        told = report(sources, mask, self.codes, volumes, self.maker)
        return {"report": self._save(told, out, "report"), "mask": self._save(mask, out, "segmentation")}

    def _save(self, elements: Any, out: Path, subject: str) -> str:
        written, name = BytesIO(), f"{self.number:04d}_{subject}.dcm"
        elements.save_as(written)
        files.write_bytes(out / name, written.getvalue())
        return name


def _as_stored(scan: Scan, labels: np.ndarray, sources: Sequence[Any]) -> np.ndarray:
    """Return the predicted labels on the voxel grid of a series. If a single file contains the whole series, the slices
    of the labels have the order of the file's frames.
    """
    import SimpleITK

    found: np.ndarray = SimpleITK.GetArrayFromImage(scan.on_own_grid(labels))
    frames = [header.frame for header in scan.source.slices]
    return found[np.argsort(frames)] if len(sources) == 1 else found


class DicomPredictor(Predictor):
    """Predicts all DICOM series in the given files and folders. If a series cannot be read as a volume, the result for
    the series is an error.
    """

    cases = "images"

    def predict(self) -> int:
        library()
        plan = self.source.plan
        structures = plan.task.goal.label_names[1:] if isinstance(plan.task.goal, Segmentation) else ()
        codes = {name: code_of(name) for name in structures}
        made_by = f"{self.source.facts['kind']} {plan.algorithm.name} {plan.task.name}"[:64]
        maker = MadeBy(made_by, __version__, plan.hash)
        series = {
            uid: headers
            for uid, headers in read_tree(self.files()).images.items()
            if any(header.wrong not in (NOT_SLICES, SECONDARY) for header in headers)
        }
        if not series:
            why = "there are no DICOM series of original CT, MR or PET slices; give their files or folders"
            raise MedsiloError(why)
        images = [
            DicomSeries(uid, number, headers, codes, maker) for number, (uid, headers) in enumerate(series.items(), 1)
        ]
        return self.predict_images(images)
