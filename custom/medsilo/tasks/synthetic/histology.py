"""Generate SYNTHETIC hospitals whose microscopes and stains differ, and whose task is to classify RGB patches of
synthetic cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from medsilo.learning.seeds import seed_for
from medsilo.models.architectures import SmallCnn
from medsilo.models.network import Network
from medsilo.tasks.classification import Classification
from medsilo.tasks.scored_together import Classifying, classification
from medsilo.tasks.shares import Shares
from medsilo.tasks.synthetic.hospitals import (
    blur,
    numbers_for,
    patient_names,
    per_case,
    position_of,
    smooth_noise,
)

if TYPE_CHECKING:  # this import is only for type checking, because only sites generate cases
    from medsilo.tasks.site_data import SiteData

CLASSES = {"phase": ("nucleus above", "nucleus below"), "amplitude": ("small nucleus", "large nucleus")}
DEBRIS = 4  # nuclei without a cell in each patch, whose positions do not depend on the class
SPACING = 16  # number of pixels between neighbouring positions of cells


@dataclass(frozen=True)
class Appearance:
    """The appearance of a site's slides: stains, illumination, blur, noise and texture."""

    nucleus_stain: tuple[float, float, float]
    tissue_stain: tuple[float, float, float]
    brightness: float
    contrast: float
    light: float
    light_angle: float
    blur: float
    noise: float
    texture: float

    def numbers(self) -> np.ndarray:
        rest = (self.brightness, self.contrast, self.light, self.light_angle, self.blur, self.noise, self.texture)
        return np.array([*self.nucleus_stain, *self.tissue_stain, *rest], np.float64)

    @classmethod
    def between(cls, start: "Appearance", end: "Appearance", share: float) -> "Appearance":
        """Interpolate between two appearances, or extrapolate if `share` is above 1."""
        numbers = np.maximum(start.numbers() + share * (end.numbers() - start.numbers()), 0).tolist()
        return cls(tuple(numbers[:3]), tuple(numbers[3:6]), *numbers[6:])


COMMON = Appearance((0.90, 1.10, 0.60), (0.15, 0.55, 0.30), 0.90, 1.00, 0.10, 0.0, 0.5, 0.06, 0.10)
SITES = (
    Appearance((1.20, 1.00, 0.45), (0.08, 0.60, 0.25), 0.95, 1.10, 0.05, 0.0, 0.3, 0.04, 0.06),
    Appearance((0.65, 1.15, 0.75), (0.30, 0.75, 0.20), 0.75, 0.85, 0.30, 1.6, 0.8, 0.10, 0.16),
    Appearance((0.95, 0.75, 0.35), (0.05, 0.35, 0.55), 1.05, 0.70, 0.15, 3.1, 0.5, 0.14, 0.04),
    Appearance((0.55, 0.70, 0.95), (0.20, 0.30, 0.15), 0.85, 1.25, 0.35, 4.7, 1.0, 0.02, 0.22),
    Appearance((1.10, 1.35, 1.00), (0.40, 0.45, 0.35), 0.65, 1.00, 0.20, 0.8, 0.2, 0.08, 0.12),
    Appearance((0.80, 1.40, 0.40), (0.10, 0.90, 0.45), 0.90, 0.75, 0.25, 2.4, 0.7, 0.06, 0.08),
    Appearance((1.30, 0.85, 0.70), (0.25, 0.25, 0.05), 0.80, 0.90, 0.40, 3.9, 0.4, 0.12, 0.18),
    Appearance((0.60, 0.95, 0.50), (0.02, 0.70, 0.65), 1.00, 1.15, 0.10, 5.5, 0.9, 0.04, 0.14),
)


class SyntheticHistology(Classifying):
    """SYNTHETIC histology: RGB patches [3, size, size] of cells, with values from 0 to 1. The task has two classes and
    up to eight sites.

    With the coding "phase" (design `polarH` of the benchmarks), the nucleus is above or below the centre of its cell.
    The classes differ by a rotation of 180 degrees, so both classes have equal amplitude spectra, and only the phase
    spectrum reveals the class.

    With the coding "amplitude" (design `histo` of the benchmarks), the label is the size of the nuclei. This coding is
    a negative control, because amplitude normalisation lowers the accuracy.

    Sites differ only in appearance (feature shift): stains, brightness, contrast, illumination, blur, noise and
    texture. The plan's shift scales the differences in appearance between sites; with a shift of 0, all sites have the
    same appearance.

    Patients differ in the strength of staining, the size of cells and the number of cells.
    """

    title: ClassVar[str] = "SYNTHETIC histology: where or how large the nuclei of drawn cells are"
    synthetic: ClassVar[bool] = True
    most_sites: ClassVar[int] = len(SITES)
    channels: ClassVar[int] = 3
    largest_input: ClassVar[float] = 1.0

    name: Literal["synthetic-histology"] = "synthetic-histology"
    coding: Literal["phase", "amplitude"] = Field(
        "phase",
        description="difference between the classes: the nucleus's position in its cell (`phase`), or its size "
        "(`amplitude`)",
    )
    shift: float = Field(
        default=1.0, ge=0, le=2, description="factor on the differences in appearance between sites; 0: no differences"
    )
    patients: int = Field(default=64, ge=3, le=10_000, description="patients per site")
    patches: int = Field(
        default=8,
        ge=2,
        le=1000,
        description="number of patches per patient, half of them in each class",
    )
    shares: Shares | None = Field(
        default=None,
        description="shares of patients in training, validation and test; `null`: 0.5, 0.2 and 0.3",
    )
    size: int = Field(default=48, ge=32, le=512, multiple_of=16, description="height and width of a patch in pixels")

    @property
    def goal(self) -> Classification:
        return classification(CLASSES[self.coding], self.score)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.size, self.size)

    def default_network(self) -> Network:
        return SmallCnn()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        from medsilo.tasks.site_data import SiteData

        position = position_of(site, sites, self.most_sites)
        random = numbers_for(seed, self.name, position)
        patients = np.repeat(np.arange(self.patients), self.patches)
        labels = np.tile(np.arange(self.patches) % 2, self.patients)
        tissue, nuclei = self.draw(labels, patients, random)
        appearance = Appearance.between(COMMON, SITES[position], self.shift)
        staining = random.uniform(0.85, 1.15, self.patients)[patients]
        images = develop(tissue, nuclei, staining, appearance, random)
        names = patient_names(position, self.patients)
        drawn = seed_for(seed, self.name, "parts", position)
        parts = SiteData.parts_by_draw(names, self.shares, drawn) if self.shares else None
        return SiteData.by_patient(images, labels, patients, names, parts)

    def draw(self, labels: np.ndarray, patients: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Generate the densities of tissue and of nuclei, each [cases, size, size]; the densities do not depend on the
        site's appearance.
        """
        cases, per_side = len(labels), self.size // SPACING
        shape = (cases, per_side**2)
        grid = SPACING * (np.arange(per_side) + 0.5) - 0.5
        rows = np.repeat(grid, per_side) + random.uniform(-2.5, 2.5, shape)
        columns = np.tile(grid, per_side) + random.uniform(-2.5, 2.5, shape)
        present = random.random(shape) < random.uniform(0.3, 0.6, patients.max() + 1)[patients, None]
        radii = random.uniform(5.5, 7.5, shape) * random.uniform(0.9, 1.1, patients.max() + 1)[patients, None]
        if self.coding == "phase":
            # above the centre of the cell in both classes, because patches with label 1 are rotated later
            angles = random.normal(np.pi / 2, 0.7, shape)
            nuclei = 0.4 * radii
        else:
            angles = random.uniform(0, 2 * np.pi, shape)
            nuclei = (0.28 + 0.24 * labels[:, None]) * radii
        distance = 0.45 * radii
        present[np.arange(cases), random.integers(per_side**2, size=cases)] = True  # every patch has at least one cell
        cells = disks(rows, columns, radii, present, self.size)
        cores = disks(rows - distance * np.sin(angles), columns + distance * np.cos(angles), nuclei, present, self.size)
        down, across = random.uniform(0, self.size - 1, (2, cases, DEBRIS))
        small = random.uniform(1.5, 3.5, (cases, DEBRIS))
        cores = np.maximum(cores, disks(down, across, small, small > 0, self.size))
        if self.coding == "phase":
            turned = labels == 1
            cells[turned], cores[turned] = cells[turned, ::-1, ::-1], cores[turned, ::-1, ::-1]
        return cells, cores


def disks(rows: np.ndarray, columns: np.ndarray, radii: np.ndarray, present: np.ndarray, size: int) -> np.ndarray:
    """Draw disks with soft edges, [cases, size, size]. Positions, radii and presence have the shape [cases, disks]."""
    pixels = np.arange(size, dtype=np.float32)
    canvas = np.zeros((len(rows), size, size), np.float32)
    for disk in range(rows.shape[1]):
        down = per_case(rows[:, disk], 2) - pixels[:, None]
        across = per_case(columns[:, disk], 2) - pixels
        radius = per_case(np.where(present[:, disk], radii[:, disk], -1), 2)  # radius -1: no pixels
        np.maximum(canvas, np.clip(radius + 0.5 - np.sqrt(down**2 + across**2), 0, 1), out=canvas)
    return canvas


def develop(
    tissue: np.ndarray, nuclei: np.ndarray, staining: np.ndarray, look: Appearance, random: np.random.Generator
) -> np.ndarray:
    """Apply a site's appearance, and return RGB patches [cases, 3, size, size] with values from 0 to 1.

    The staining of a patch follows the Beer-Lambert law. Contrast, illumination, blur and noise of the camera are
    applied after the staining.
    """
    size = tissue.shape[-1]
    strength = per_case(staining, 2)
    texture = look.texture * smooth_noise(tissue.shape, 1.0, random)
    density = [
        nuclear * nuclei * strength + tissular * (0.35 + 0.65 * tissue + texture) * strength
        for nuclear, tissular in zip(look.nucleus_stain, look.tissue_stain, strict=True)
    ]
    images = np.exp(-np.stack(density, 1, dtype=np.float32))
    images = 0.5 + look.contrast * (images - 0.5)
    line = np.linspace(-1, 1, size, dtype=np.float32)
    light = np.cos(look.light_angle) * line + np.sin(look.light_angle) * line[:, None]
    images *= look.brightness * (1 + look.light * light)
    images = blur(images, look.blur)
    images = images + look.noise * random.standard_normal(images.shape, np.float32)
    return np.clip(images, 0, 1).astype(np.float32)
