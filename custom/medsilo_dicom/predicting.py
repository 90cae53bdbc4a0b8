"""Series of a DICOM tree to predict; each gets a segmentation and a structured report in its own study."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.extend import (
    MedsiloError,
    Prediction,
    PredictionRequest,
    Predictor,
    Scan,
    Segmentation,
    __version__,
    files_below,
    predict_all,
    write_bytes,
)
from medsilo_dicom.header import NOT_SLICES, SECONDARY, Header, library, network, read_tree, words_of
from medsilo_dicom.objects import MadeBy, StructureCode, class_report, code_of, parsed, report, segmentation, sources_of
from medsilo_dicom.sending import address_of, send
from medsilo_dicom.series import make_series, scan_of_series

VOLUME = "volume_ml_"  # before a structure's name
PROMISED = ("promised_set", "promised_found")  # what layers say of a class


@dataclass
class DicomSeries:
    """A series of a DICOM tree; its results are a segmentation and a report of the same study."""

    name: str
    number: int
    headers: Sequence[Header] = field(repr=False)
    codes: Mapping[str, StructureCode]
    maker: MadeBy

    def read(self) -> Scan:
        made = make_series(self.headers)
        told = words_of(made.files[0], ("Manufacturer", "ManufacturerModelName"))
        return replace(scan_of_series(made), machine=" ".join(" ".join(told.values()).split()))

    def write(self, scan: Scan, prediction: Prediction, out: Path) -> dict[str, str]:
        import SimpleITK

        sources = sources_of(scan.source)
        names = {"report": f"{self.number:04d}_report.dcm"}
        if prediction.labels is None:
            found = prediction.found
            made = class_report(sources, found["class"], found["probability"], self.maker, promise_of(found))
            _save(made, out / names["report"])
            return names
        names["mask"] = f"{self.number:04d}_segmentation.dcm"
        labels = SimpleITK.GetArrayFromImage(scan.on_own_grid(prediction.labels))
        if len(sources) == 1:  # its frames may lie in any order
            labels = labels[np.argsort([header.frame for header in scan.source.slices])]
        made = segmentation(sources, labels, self.codes, self.maker)
        _save(made, out / names["mask"])
        promised = None
        if prediction.marked is not None:
            names["promised_mask"] = f"{self.number:04d}_promised.dcm"
            marked = SimpleITK.GetArrayFromImage(scan.on_own_grid(prediction.marked))
            says = promise_of(prediction.found)
            held = segmentation(sources, marked, self.codes, self.maker, says)
            _save(held, out / names["promised_mask"])
            promised = (held, prediction.found[f"promised_{VOLUME}{next(iter(self.codes))}"], says)
        volumes = {name: prediction.found[f"{VOLUME}{name}"] for name in self.codes}
        _save(report(sources, made, self.codes, volumes, self.maker, promised), out / names["report"])
        return names


def promise_of(found: Mapping[str, Any]) -> str:
    """Return what layers promised of an image, for a report; nothing where none does."""
    if not isinstance(level := found.get("promised"), float):
        return str(level or "")
    return ": ".join([f"level {level:g}", *(str(found[name]) for name in PROMISED if name in found)])


def _save(elements: Any, path: Path) -> None:
    written = BytesIO()
    elements.save_as(written)
    write_bytes(path, written.getvalue())


def predict_series(asked: PredictionRequest) -> int:
    """Predict the series below folders (or among files) that are volumes, or should be; return how many failed."""
    library()
    plan, data = asked.source.plan, asked.data
    found = [file for path in asked.given for file in (files_below(path)[0].values() if path.is_dir() else [path])]
    own = {name: parsed(code) for name, code in (data.codes if data else {}).items()}
    structures = plan.task.goal.label_names[1:] if isinstance(plan.task.goal, Segmentation) else ()
    codes = {name: own.get(name) or code_of(name) for name in structures}
    maker = MadeBy(f"{asked.source.facts['kind']} {plan.algorithm.name} {plan.task.name}"[:64], __version__, plan.hash)
    series = {
        uid: headers
        for uid, headers in read_tree(found).images.items()
        if any(header.wrong not in (NOT_SLICES, SECONDARY) for header in headers)
    }
    if not series:
        raise MedsiloError("there are no DICOM series of original CT, MR or PET slices; give their files or folders")
    images = [
        DicomSeries(uid, number, headers, codes, maker) for number, (uid, headers) in enumerate(series.items(), 1)
    ]
    return predict_all(asked, images)


def connect(node: str) -> Callable[[Sequence[Path]], int]:
    """Check a node's address, and return what sends files to it."""
    address_of(node)
    network()
    return lambda results: send(results, node)


PREDICTOR = Predictor("images", predict_series, connect)
