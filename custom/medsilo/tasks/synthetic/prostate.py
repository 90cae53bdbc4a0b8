"""Generate SYNTHETIC hospitals with small volumes, whose task is to segment one of two ellipsoids with opposite
contrast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from medsilo.models.architectures import UNet
from medsilo.models.network import Network
from medsilo.tasks.inference import Inference, InMonai, whole_images
from medsilo.tasks.segmentation import Segmentation, dice_and_entropy
from medsilo.tasks.synthetic.hospitals import (
    numbers_for,
    patient_names,
    per_case,
    position_of,
    smooth_noise,
)
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # this import is only for type checking, because only sites generate cases
    from medsilo.tasks.site_data import SiteData

DARK_ORGANS = (0, 4)  # with similarity "low", indices of the sites at which the dark ellipsoid is the organ


@dataclass(frozen=True)
class Scanner:
    """The appearance of a site's images; `patients` is the site's number of patients as a multiple of the smallest
    site's.
    """

    patients: float
    brightness: float
    contrast: float
    stripes: float  # number of periods of the stripes over the width of the image
    stripe_angle: float
    field: float  # strength of the bias field
    field_angle: float
    noise: float
    spacing: tuple[float, float, float]


SITES = (
    Scanner(1.00, -0.6, 0.9, 3.0, 0.0, 0.3, 0.0, 0.15, (0.6, 0.6, 3.0)),
    Scanner(2.00, 0.5, 1.1, 5.0, 0.8, 0.5, 1.6, 0.20, (0.5, 0.5, 3.6)),
    Scanner(1.00, 0.0, 0.8, 7.0, 1.6, 0.2, 3.1, 0.10, (0.7, 0.7, 3.3)),
    Scanner(3.00, 0.9, 1.2, 4.0, 2.4, 0.6, 4.7, 0.25, (0.4, 0.4, 2.5)),
    Scanner(1.25, -0.9, 1.0, 6.0, 0.4, 0.4, 0.8, 0.15, (0.6, 0.5, 3.0)),
    Scanner(4.00, 0.3, 0.9, 2.0, 1.2, 0.7, 2.4, 0.12, (0.8, 0.8, 4.0)),
    Scanner(1.50, -0.3, 1.1, 8.0, 2.0, 0.1, 3.9, 0.22, (0.5, 0.6, 2.0)),
    Scanner(2.50, 0.7, 1.0, 3.5, 2.8, 0.5, 5.5, 0.18, (0.7, 0.6, 3.5)),
)


class SyntheticProstate(Task):
    """SYNTHETIC prostate: slices [1, size, size] of volumes and masks [size, size] of the organ, at up to eight sites.

    Each volume contains two ellipsoids with opposite contrast, and a background with stripes and a bias field; one
    ellipsoid is the organ. The task follows design B of the benchmarks.

    With the similarity "high" (`bright` in the benchmarks), the bright ellipsoid is the organ at every site. With the
    similarity "low" (`minority` in the benchmarks), the dark ellipsoid is the organ at the first and the fifth site.
    Then, a single model can be correct at all sites only if it recognises the site by background and brightness.

    With either similarity, sites differ in brightness, contrast, stripes, bias field, noise and number of patients (1
    to 4 times the smallest site's number). Each patient's volume is multiplied by a random factor. Each case is a slice
    that shows the organ, and the network returns two logits for each pixel.

    Unlike here, each patient has only one slice in design B.
    """

    title: ClassVar[str] = "SYNTHETIC prostate: which of two ellipsoids is the organ, and where"
    synthetic: ClassVar[bool] = True
    most_sites: ClassVar[int] = len(SITES)
    channels: ClassVar[int] = 1
    sliced: ClassVar[bool] = True
    largest_input: ClassVar[float] = 10.0

    name: Literal["synthetic-prostate"] = "synthetic-prostate"
    similarity: Literal["low", "high"] = Field(
        "low",
        description="`high`: all sites label the same structure. `low`: the first and the fifth site label the other "
        "structure",
    )
    patients: int = Field(
        default=40,
        ge=3,
        le=1000,
        description="number of patients at the smallest site; other sites have up to 4 times as many",
    )
    slices: int = Field(
        default=6, ge=3, le=64, description="number of slices per volume; only slices with the organ are cases"
    )
    size: int = Field(default=48, ge=32, le=512, multiple_of=16, description="height and width of a slice in pixels")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.size, self.size)

    def default_network(self) -> Network:
        return UNet()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        from medsilo.tasks.site_data import SiteData

        position = position_of(site, sites, self.most_sites)
        scanner = SITES[position]
        count = round(self.patients * scanner.patients)
        random = numbers_for(seed, self.name, position)
        bright = self.similarity == "high" or position not in DARK_ORGANS
        images, masks = self.draw(count, scanner, bright, random)
        patients, slices = np.nonzero(masks.any((2, 3)))
        inputs = np.stack([self.inputs_of(image[None]).numpy() for image in images])[patients, slices]
        targets = masks[patients, slices].astype(np.int64)
        return SiteData.by_patient(inputs, targets, patients, patient_names(position, count))

    def inputs_of(self, values: np.ndarray) -> Tensor:
        from medsilo.tasks.scans import Scan

        return Scan.slices_of(values, self.shape)

    @property
    def goal(self) -> Segmentation:
        return Segmentation(2, dice_and_entropy, cross_entropy=1.0)

    @property
    def use(self) -> Inference:
        square = [self.size, self.size]
        transforms: list[dict[str, Any]] = [
            # image rows run towards the patient's back
            {"_target_": "Orientationd", "keys": "image", "axcodes": "PLS", "labels": None},
            {"_target_": "Resized", "keys": "image", "spatial_size": [*square, -1], "mode": "trilinear"},
        ]
        words = InMonai(transforms, whole_images(square, sliced=True))
        return Inference("images", lambda scan: self.inputs_of(scan.values), words)

    def draw(
        self, count: int, scanner: Scanner, bright: bool, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        middle, unit = np.array([self.slices / 2 - 0.5, *(self.size / 2 - 0.5,) * 2]), self.size / 48
        angles = random.uniform(0, 2 * np.pi, count)
        away = unit * random.uniform(9, 12, count)[:, None] * np.stack([0 * angles, np.sin(angles), np.cos(angles)], 1)
        objects = []
        # the two ellipsoids, on opposite sides of the centre with radii up to 8 pixels, never touch
        for side in (1, -1):
            centres = middle + side * away + random.uniform(-0.5, 0.5, (count, 3))
            deep, wide = self.slices * random.uniform(0.3, 0.42, (count, 1)), unit * random.uniform(5, 8, (count, 2))
            objects.append(ellipsoids(centres, np.concatenate([deep, wide], 1), (self.slices, self.size, self.size)))
        organ, other = objects
        sign = 1.0 if bright else -1.0
        volumes = background(organ.shape, scanner, random) + sign * scanner.contrast * (organ * 1.0 - other)
        volumes *= per_case(random.uniform(0.85, 1.15, count), 3)
        volumes += scanner.noise * random.standard_normal(volumes.shape, np.float32)
        return volumes.astype(np.float32), organ


def ellipsoids(centres: np.ndarray, radii: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return masks of ellipsoids, [patients, *shape], from centres and radii [patients, 3] in the order z, y, x."""
    z, y, x = (
        ((np.arange(length) - centres[:, axis, None]) / radii[:, axis, None]) ** 2 for axis, length in enumerate(shape)
    )
    return z[:, :, None, None] + y[:, None, :, None] + x[:, None, None, :] < 1


def background(shape: tuple[int, ...], scanner: Scanner, random: np.random.Generator) -> np.ndarray:
    """Generate the background of a site's volumes, [patients, slices, size, size]."""
    line = np.linspace(-1, 1, shape[-1], dtype=np.float32)

    def along(angle: float) -> np.ndarray:
        return np.cos(angle) * line + np.sin(angle) * line[:, None]

    phases = per_case(random.uniform(0, 2 * np.pi, shape[0]), 3)
    stripes = 0.3 * np.sin(np.pi * scanner.stripes * along(scanner.stripe_angle) + phases)
    bias = scanner.field * along(scanner.field_angle)
    return scanner.brightness + stripes + bias + 0.1 * smooth_noise(shape, 2.0, random)
