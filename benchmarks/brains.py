"""Generate FLAIR volumes with lesions at five hospitals with different scanners, for federations without real data.

The files have the layout of `nifti-folder`: <site>/images/*.nii.gz and <site>/labels/*.nii.gz.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel
import numpy as np

from medsilo_lab.nnunet_planning import make_plans
from medsilo_nnunet.fingerprint import Fingerprint, MeasuredSite, facts_of, samples_of
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.question import SegmentationQuestion

QUESTION = SegmentationQuestion(name="Dataset011_Brains", channels=("FLAIR",), labels={"background": 0, "lesion": 1})
HEADS, WIDTH = 15, 64.0  # number of heads at each hospital, and width of a head in millimetres, in results/nnunet.csv


@dataclass(frozen=True)
class Scanner:
    spacing: tuple[float, float, float]  # voxel size along x, y, z in mm
    gain: float  # factor of the intensities
    bright: float  # brightness of a lesion relative to the tissue around it
    noise: float


HOSPITALS = {
    "brno": Scanner((1.0, 1.0, 3.0), 400.0, 1.5, 0.06),
    "graz": Scanner((0.9, 0.9, 5.0), 90.0, 1.7, 0.09),
    "lyon": Scanner((1.1, 1.1, 3.0), 700.0, 1.4, 0.05),
    "oslo": Scanner((1.0, 1.0, 4.0), 250.0, 1.6, 0.12),
    "turin": Scanner((1.2, 1.2, 3.0), 1500.0, 1.45, 0.08),
}


def write_brain(folder: Path, name: str, scanner: Scanner, seed: int, width: float = 56.0) -> None:
    """Write the image of a head of about `width` millimetres with a few lesions, and the mask of the lesions."""
    drawn = np.random.default_rng(seed)
    spacing = np.array(scanner.spacing)
    size = np.ceil(np.array([width, width * 1.1, width / 2]) * drawn.uniform(0.95, 1.05, 3) / spacing).astype(int)
    places = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1) * spacing
    middle, reach = size * spacing / 2, size * spacing / 2 * 0.85
    far = np.sqrt((((places - middle) / reach) ** 2).sum(-1))
    lesions = np.zeros(tuple(size), bool)
    for _ in range(int(drawn.integers(2, 5))):
        place = middle + reach * drawn.uniform(-0.5, 0.5, 3)
        radius = width * drawn.uniform(0.06, 0.12)
        lesions |= ((places - place) ** 2).sum(-1) < radius**2
    lesions &= far < 1
    tissue = 0.7 + 0.2 * np.cos(4 * np.pi * far) + 0.1 * places[..., 0] / width
    image = np.where(lesions, scanner.bright * 0.8, tissue) + scanner.noise * drawn.normal(size=tuple(size))
    image = np.where(far < 1, image * scanner.gain, 0.0)
    for part, values in (("images", image.astype(np.float32)), ("labels", lesions.astype(np.uint8))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values, np.diag([*spacing, 1.0])), folder / part / f"{name}.nii.gz")


def write_hospitals(folder: Path, sites: Iterable[str], cases: int, width: float = 56.0) -> None:
    for site in sites:
        for case in range(cases):
            seed = 1000 * list(HOSPITALS).index(site) + case
            write_brain(folder / site, f"{site}-{case:03}", HOSPITALS[site], seed, width)


def write_heads(folder: Path) -> Path:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as unfinished:
            write_hospitals(Path(unfinished) / "heads", HOSPITALS, HEADS, WIDTH)
            (Path(unfinished) / "heads").rename(folder)
    return folder


def plans_of(
    folder: Path, sites: Iterable[str], samples: int | None = None, question: SegmentationQuestion = QUESTION
) -> dict[str, Any]:
    """Return nnU-Net's plans for the data of all hospitals; `samples` is the number of intensities that are sampled
    from each case.
    """
    held = {site: RawData.of(folder / site, question) for site in sites}
    samples = samples or samples_of(sum(len(data.listing.usable) for data in held.values()))
    told = [Fingerprint.of(facts_of(data, samples), samples) for data in held.values()]
    holdings = {site: MeasuredSite.model_construct(**{"reader": data.reader}) for site, data in held.items()}
    return make_plans(question, Fingerprint.merged(told), holdings).plans


def narrow(plans: dict[str, Any], first: int = 4, configuration: str = "2d") -> dict[str, Any]:
    """Return plans whose network has only `first` features in the finest stage, so that a training step takes
    milliseconds.
    """
    plans = json.loads(json.dumps(plans))
    numbers = plans["configurations"][configuration]["architecture"]["arch_kwargs"]
    numbers["features_per_stage"] = [first * min(4, 2**stage) for stage in range(numbers["n_stages"])]
    return plans
