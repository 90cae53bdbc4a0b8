"""Generate SYNTHETIC hospitals whose patients wear sensors, and whose task is to classify activities in short windows
of sensor data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from medsilo.learning.seeds import seed_for
from medsilo.models.architectures import ActivityCnn
from medsilo.models.network import Network
from medsilo.tasks.classification import Classification
from medsilo.tasks.scored_together import Classifying, classification
from medsilo.tasks.shares import Alpha
from medsilo.tasks.synthetic.hospitals import numbers_for, position_of

if TYPE_CHECKING:  # this import is only for type checking, because only sites generate cases
    from medsilo.tasks.site_data import SiteData

CHANNELS = 9
CLASSES = 6
HARMONICS = 3
# fraction of a person's windows with the main activity; the other windows have random activities
HABIT = 0.8
EVEN = 1000.0  # parameter of a Dirichlet distribution whose samples are almost equal fractions


@dataclass(frozen=True)
class Sensor:
    """A type of sensor. Each channel has a gain and an offset; a negative gain inverts the channel."""

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
    """The motion in each activity: tempo [classes], posture [classes, C], strength and phase of harmonics [classes, C,
    H].
    """

    tempo: np.ndarray
    posture: np.ndarray
    strength: np.ndarray
    phase: np.ndarray


class SyntheticActivity(Classifying):
    """SYNTHETIC sensor data: windows [9, steps] of nine channels, with six activities, at any number of sites.

    Each person has one main activity in most windows, and moves with an individual tempo and strength. Each site has at
    least three persons.

    For each main activity, the sites' fractions of persons are sampled from Dirichlet(alpha).

    Sites 1, 3, 5, ... use the first type of sensor, and sites 2, 4, 6, ... use the second type of sensor. The two types
    of sensors differ in gains, offsets, inverted channels, noise and clock rate.

    The plan's key `shift` determines how sites differ, as in design C of the benchmarks.

    With the shift "label" (C2), sites differ in the frequency of activities. With the shift "feature" (C4), sites
    differ in sensors, and alpha is ignored. With the shift "both" (C1), sites differ in activities and, independently,
    in sensors. With the shift "none", sites differ neither in activities nor in sensors.

    Unlike this task, design C has images, eight classes and three types of devices.
    """

    title: ClassVar[str] = "SYNTHETIC activity recognition from wearable sensors"
    synthetic: ClassVar[bool] = True
    channels: ClassVar[int] = CHANNELS
    largest_input: ClassVar[float] = 100.0

    name: Literal["synthetic-activity"] = "synthetic-activity"
    shift: Literal["label", "feature", "both", "none"] = Field(
        "both",
        description="how sites differ: in activities (`label`), in sensors (`feature`), in both (`both`) or not at "
        "all (`none`)",
    )
    alpha: Alpha = Field(
        default=0.1,
        description="for `label` and `both`: the smaller this number, the more the sites differ in activities",
    )
    persons: int = Field(default=40, ge=3, le=10_000, description="number of persons per site, on average")
    windows: int = Field(default=80, ge=1, le=10_000, description="number of windows per person")
    steps: int = Field(default=64, ge=32, le=2048, description="number of time steps in a window")

    @property
    def goal(self) -> Classification:
        return classification(tuple(map(str, range(CLASSES))), self.score)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.steps)

    def default_network(self) -> Network:
        return ActivityCnn()

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        from medsilo.tasks.site_data import SiteData
        from medsilo.tasks.splits import dirichlet

        position = position_of(site, sites)
        habits = numbers_for(seed, self.name, "habits").permutation(np.arange(self.persons * len(sites)) % CLASSES)
        alpha = self.alpha if self.shift in ("label", "both") else EVEN
        own = dirichlet(habits, len(sites), alpha, seed_for(seed, self.name), minimum=3)[position]
        # sorted by main activity, so that training, validation and test contain each activity
        own = own[np.argsort(habits[own], kind="stable")]
        sensor = FAMILIES[position % len(FAMILIES)] if self.shift in ("feature", "both") else COMMON
        motions = draw_motions(seed)
        records = [self.record(seed, person, habits[person], motions, sensor) for person in own]
        inputs, labels = (np.concatenate(arrays) for arrays in zip(*records, strict=True))
        persons = np.repeat(np.arange(len(own)), self.windows)
        names = [f"synthetic-person-{person + 1:04d}" for person in own]
        return SiteData.by_patient(inputs, labels, persons, names)

    def record(
        self, seed: int, person: int, habit: int, motions: Motions, sensor: Sensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Generate one person's windows, [windows, 9, steps], and the activity in each, [windows].

        The person moves in the same way at every site.
        """
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
    random = numbers_for(seed, "synthetic-activity", "motions")
    waves = (CLASSES, CHANNELS, HARMONICS)
    return Motions(
        tempo=random.permutation(np.linspace(1 / 24, 1 / 10, CLASSES)),
        posture=random.normal(0, 0.2, (CLASSES, CHANNELS)),
        strength=random.uniform(0.1, 0.8, waves) / np.arange(1, HARMONICS + 1),
        phase=random.uniform(0, 1, waves),
    )
