"""Generate random federations with cases as arrays, and compute nnU-Net's own results for the pooled cases."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from medsilo_nnunet.fingerprint import DIGITS, PERCENTILES, CaseFacts
from medsilo_nnunet.question import SegmentationQuestion

KINDS = ("ct", "mr", "two modalities", "anisotropic", "any spacing", "tiny", "flat")
PROTOCOLS = {  # voxel spacing along each axis, for each scanner protocol
    "ct": [(5, 0.703125, 0.703125), (2.5, 0.8203125, 0.8203125), (1.25, 0.9765625, 0.9765625), (3, 0.75, 0.75)],
    "mr": [(1, 1, 1), (1.2, 0.9375, 0.9375), (0.9, 0.48828125, 0.48828125), (1.0999994, 0.5, 0.5)],
    "anisotropic": [(10, 1.5625, 1.5625), (5, 1.25, 1.25), (6.6, 0.68359375, 0.68359375), (8, 0.7, 0.7)],
    "flat": [(999 * 0.5, 0.5, 0.5), (999 * 0.3, 0.3, 0.3)],
}


@dataclass(frozen=True)
class Federation:
    question: SegmentationQuestion
    samples: int
    hospitals: dict[str, list[CaseFacts]]

    @property
    def cases(self) -> list[CaseFacts]:
        return [case for cases in self.hospitals.values() for case in cases]


def federation(number: int, least: int = 1) -> Federation:
    drawn = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    channels = {"ct": ("CT",), "two modalities": ("T1", "CT")}.get(kind, ("FLAIR",))
    labels = {"background": 0} | {f"structure {label}": label for label in range(1, int(drawn.integers(2, 6)))}
    most = 4 if kind == "tiny" else 40
    samples = int(drawn.integers(5, 200))
    hospitals = {
        f"hospital-{site}": [
            _case(drawn, kind, channels, samples, site) for _ in range(int(drawn.integers(least, max(most, 2 * least))))
        ]
        for site in range(int(drawn.integers(2, 9)))
    }
    return Federation(
        SegmentationQuestion(name="Dataset001_Drawn", channels=channels, labels=labels), samples, hospitals
    )


def _case(drawn: np.random.Generator, kind: str, channels: Sequence[str], samples: int, site: int) -> CaseFacts:
    spacings = PROTOCOLS.get(kind) or PROTOCOLS["mr"]
    spacing = np.array(spacings[(site + int(drawn.integers(2))) % len(spacings)], dtype=np.float64)
    if kind == "any spacing":
        spacing = drawn.uniform(0.3, 3, 3)
    extent = drawn.uniform((90, 120, 120), (240, 330, 330)) * (0.1 if kind == "tiny" else 1)
    size = np.maximum(np.rint(extent / spacing).astype(int), 1)
    if kind == "flat":
        size[0] = 1
    around = size + drawn.integers(0, 30, 3) * (size > 1)
    scale = float(drawn.choice([0.001, 1, 700]))
    empty = drawn.uniform() < 0.05
    intensities = [
        drawn.normal(40, 300, 0 if empty else samples).round().astype(np.float32)
        if channel == "CT"
        else (drawn.gamma(2, scale, 0 if empty else samples)).astype(np.float32)
        for channel in channels
    ]
    return CaseFacts(spacing.tolist(), size.tolist(), float(np.prod(size) / np.prod(around)), intensities)


def pooled_fingerprint(cases: Sequence[CaseFacts]) -> dict[str, Any]:
    channels = {}
    for number in range(len(cases[0].intensities)):
        numbers = np.concatenate([case.intensities[number] for case in cases]).astype(np.float64)
        low, median, high = np.percentile(numbers, (0.5, 50.0, 99.5))
        channels[str(number)] = {
            "mean": float(numbers.mean()),
            "median": float(median),
            "std": float(numbers.std()),
            "min": float(numbers.min()),
            "max": float(numbers.max()),
            "percentile_99_5": float(high),
            "percentile_00_5": float(low),
        }
    return {
        "spacings": [list(case.spacing) for case in cases],
        "shapes_after_crop": [list(case.size) for case in cases],
        "foreground_intensity_properties_per_channel": channels,
        "median_relative_size_after_cropping": float(np.median([case.share for case in cases])),
    }


def intensities_are_near(
    own: Mapping[str, Any], pooled: Mapping[str, Any], cases: Sequence[CaseFacts], rounding: float = 1e-12
) -> None:
    """Assert that the intensities in `own` differ from those in `pooled` by at most the bound in
    docs/research/nnunet.md; `rounding` is the precision of `pooled`.
    """
    key = "foreground_intensity_properties_per_channel"
    assert own[key].keys() == pooled[key].keys()
    for number, wanted in pooled[key].items():
        values = np.concatenate([case.intensities[int(number)] for case in cases]).astype(np.float64)
        ordered = np.sort(values)
        sizes = {"mean": np.abs(values).mean(), "std": np.sqrt((values**2).mean())}
        for name, percent in {"min": 0.0, "max": 100.0, **PERCENTILES}.items():
            place = (len(ordered) - 1) * percent / 100
            sizes[name] = np.abs(ordered[[int(place), int(np.ceil(place))]]).max()
        for name, size in sizes.items():
            assert abs(own[key][number][name] - wanted[name]) <= (2.0**-DIGITS + rounding) * size, name


def write_volumes(
    folder: Path,
    question: SegmentationQuestion,
    cases: Sequence[str],
    number: int,
    spacing: Sequence[float],
    most: int = 24,
) -> None:
    drawn = np.random.default_rng([number, len(cases), *map(ord, cases[0])])
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    affine = np.diag([*spacing, 1.0])
    for case in cases:
        size = drawn.integers(most // 3, most, 3)
        inside = tuple(slice(int(start), None) for start in drawn.integers(0, 4, 3))
        label = np.zeros(size, np.uint8)
        label[inside] = drawn.uniform(size=label[inside].shape) < 0.2
        nibabel.save(nibabel.Nifti1Image(label, affine), folder / "labelsTr" / f"{case}.nii.gz")
        for channel, kind in enumerate(question.channels):
            values = np.zeros(size, np.float32)
            values[inside] = (
                drawn.normal(30, 200, label[inside].shape)
                if kind == "CT"
                else drawn.gamma(2, 90.0, label[inside].shape)
            )
            values = values.round() if kind == "CT" else values
            nibabel.save(nibabel.Nifti1Image(values, affine), folder / "imagesTr" / f"{case}_{channel:04}.nii.gz")
    settings = question.in_nnunet() | {
        "numTraining": len(list((folder / "labelsTr").iterdir())),
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(settings))
