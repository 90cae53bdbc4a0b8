"""SYNTHETIC hospitals whose patients wear sensors: recognise activities from short windows of several channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from medsilo.core import optional
from medsilo.learning.seeds import seed_for
from medsilo.models.architectures import ActivityCnn
from medsilo.models.network import Network
from medsilo.tasks.classification import Classification
from medsilo.tasks.shares import Alpha
from medsilo.tasks.synthetic.hospitals import numbers_for, position_of
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # only a site draws cases
    from medsilo.tasks.site_data import SiteData

CHANNELS = 9
CLASSES = 6
HARMONICS = 3
HABIT = 0.8  # the share of a person's windows that shows the person's own activity; the rest shows any
EVEN = 1000.0  # the alpha with which labels hardly differ between sites


@dataclass(frozen=True)
class Sensor:
    """A family of devices: gain and offset per channel (a negative gain: worn inverted), noise, relative clock rate."""

    gains: tuple[float, ...]
    offsets: tuple[float, ...]
    noise: float
    rate: float


COMMON = Sensor((1.0,) * CHANNELS, (0.0,) * CHANNELS, noise=0.8, rate=1.0)
FAMILIES = (
    Sensor((1.2, 0.8, 1.0) * 3, (0.3, -0.2, 0.0) * 3, noise=0.7, rate=1.0),
    Sensor((-0.7, 1.4, -1.0) * 3, (-0.5, 0.4, 0.6) * 3, noise=0.9, rate=1.3),
)


@dataclass(frozen=True)
class Motions:
    """The activities, the same for all sites: tempo [classes], posture [classes, C], waves [classes, C, H]."""

    tempo: np.ndarray
    posture: np.ndarray
    strength: np.ndarray
    phase: np.ndarray


class SyntheticActivity(Task):
    """SYNTHETIC windows of nine sensor channels, [9, steps], six activities, any number of sites.

    A patient is a person, who shows one activity in most windows and has a tempo and a strength of their own. `persons`
    times the number of sites are dealt to the sites by Dirichlet(alpha) over the persons' activities, at least three to
    each. Sites 1, 3, 5, ... wear one family of sensors and sites 2, 4, 6, ... another, with other gains and offsets,
    inverted channels, more noise and another clock. shift says which of the two differs, after design C of the
    benchmarks: "label" its C2 (Dirichlet only), "feature" its C4 (devices only; alpha is not used), "both" its C1
    (both, independently), "none" neither. The designs had images of eight classes and three families of devices.
    """

    title: ClassVar[str] = "SYNTHETIC activity recognition from wearable sensors"
    synthetic: ClassVar[bool] = True
    channels: ClassVar[int] = CHANNELS
    goal: ClassVar[Classification] = Classification(CLASSES)
    largest_input: ClassVar[float] = 100.0

    name: Literal["synthetic-activity"] = "synthetic-activity"
    shift: Literal["label", "feature", "both", "none"] = Field(
        "both", description="what differs between sites: labels, devices, both or nothing"
    )
    alpha: Alpha = Field(default=0.1, description="the smaller, the more the sites' labels differ")
    persons: int = Field(default=40, ge=3, le=10_000, description="persons per site on average")
    windows: int = Field(default=80, ge=1, le=10_000, description="windows per person")
    steps: int = Field(default=64, ge=32, le=2048, description="time steps of a window")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.steps)

    def default_network(self) -> Network:
        return ActivityCnn()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        position = position_of(site, sites)
        habits = numbers_for(seed, self.name, "habits").permutation(np.arange(self.persons * len(sites)) % CLASSES)
        alpha = self.alpha if self.shift in ("label", "both") else EVEN
        own = optional.dirichlet(habits, len(sites), alpha, seed_for(seed, self.name), minimum=3)[position]
        own = own[np.argsort(habits[own], kind="stable")]  # so that each activity is dealt to all parts in turn
        sensor = FAMILIES[position % len(FAMILIES)] if self.shift in ("feature", "both") else COMMON
        motions = draw_motions(seed)
        records = [self.record(seed, person, habits[person], motions, sensor) for person in own]
        inputs, labels = (np.concatenate(arrays) for arrays in zip(*records, strict=True))
        persons = np.repeat(np.arange(len(own)), self.windows)
        names = [f"synthetic-person-{person + 1:04d}" for person in own]
        return optional.SiteData.by_patient(inputs, labels, persons, names)

    def record(
        self, seed: int, person: int, habit: int, motions: Motions, sensor: Sensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """One person's windows, [windows, 9, steps], and activities, [windows]; the same person wherever treated."""
        random = numbers_for(seed, self.name, "person", int(person))
        labels = np.where(random.random(self.windows) < HABIT, habit, random.integers(CLASSES, size=self.windows))
        strength = random.uniform(0.75, 1.25) * random.uniform(0.8, 1.2, (self.windows, 1, 1))
        tempo = random.uniform(0.9, 1.1) * motions.tempo[labels]
        starts = random.uniform(0, 1, (self.windows, 1))
        turns = starts + np.arange(self.steps) * (tempo / sensor.rate)[:, None]
        signal = motions.posture[labels][:, :, None] + random.normal(0, 0.3, (1, CHANNELS, 1))
        for harmonic in range(HARMONICS):
            angle = 2 * np.pi * ((harmonic + 1) * turns[:, None] + motions.phase[labels, :, harmonic, None])
            signal = signal + strength * motions.strength[labels, :, harmonic, None] * np.sin(angle)
        signal = signal + sensor.noise * random.standard_normal(signal.shape)
        gains, offsets = np.array(sensor.gains)[:, None], np.array(sensor.offsets)[:, None]
        return (gains * signal + offsets).astype(np.float32), labels


def draw_motions(seed: int) -> Motions:
    """The activities of a study: they depend on its seed alone."""
    random = numbers_for(seed, "synthetic-activity", "motions")
    waves = (CLASSES, CHANNELS, HARMONICS)
    return Motions(
        tempo=random.permutation(np.linspace(1 / 24, 1 / 10, CLASSES)),
        posture=random.normal(0, 0.2, (CLASSES, CHANNELS)),
        strength=random.uniform(0.1, 0.8, waves) / np.arange(1, HARMONICS + 1),
        phase=random.uniform(0, 1, waves),
    )
