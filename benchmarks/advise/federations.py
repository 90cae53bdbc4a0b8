"""Generated federations: hospitals that differ by known amounts in looks, labels, what is asked for, and size.

Two kinds: tables (class prototypes seen through a bent mixture of columns) and images (find one of two blobs). Each
hospital's data lie in files as a hospital's own do, so that the plans and readers are those that users have.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from medsilo.learning.seeds import seed_for
from medsilo.plan import Plan, parse_plan

Kind = Literal["table", "image"]
# Numbers of federations: rules are made on the first, and tried on the last. Those from 101 on tried older rules.
MADE, HELD_OUT = (*range(1, 25), *range(101, 113), *range(201, 213)), range(301, 313)
COLUMNS, LATENT, CLASSES, SIDE = 12, 6, 4, 32
SEPARATION, NOISE = 1.6, 0.5  # of class prototypes; of columns
PARTS = ("train", "validation", "test")
TESTED: Mapping[Kind, int] = {"table": 500, "image": 100}  # cases of each hospital, so that chance decides little
USUAL: Mapping[Kind, tuple[int, int]] = {"table": (30, 200), "image": (16, 60)}  # training cases of a hospital
MOST: Mapping[Kind, int] = {"table": 600, "image": 64}  # however large a hospital is
# What differs, in turn: names of shifts, each with its own strength.
MIXTURES: Sequence[tuple[str, ...]] = (
    (),
    ("looks",),
    ("labels",),
    ("question",),
    ("looks", "sizes"),
    ("labels", "sizes"),
    ("question", "sizes"),
    ("looks", "labels"),
    ("looks", "question"),
    ("sizes",),
    ("labels", "question"),
    ("looks", "labels", "question", "sizes"),
)
STRENGTHS: Mapping[str, tuple[float, float]] = {
    "looks": (0.3, 1.2),  # standard deviation of offsets and of the logarithm of gains, in a column's own
    "labels": (0.1, 1.0),  # alpha of the Dirichlet from which a hospital's shares of classes come: small is strong
    "question": (0.2, 0.9),  # how far a hospital's prototypes are its own; of images the share with the other blob
    "sizes": (0.5, 1.2),  # standard deviation of the logarithm of a hospital's cases
}


@dataclass(frozen=True)
class Federation:
    """One consortium: its number, kind, hospitals with their training cases, and the shifts with their strengths."""

    number: int
    kind: Kind
    cases: tuple[int, ...]
    shifts: Mapping[str, float]

    @property
    def sites(self) -> tuple[str, ...]:
        """The hospitals' names."""
        return tuple(f"hospital-{letter}" for letter in "abcdefgh"[: len(self.cases)])

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind}-{self.number:03d}"

    @property
    def words(self) -> str:
        """Words for the shifts: which ones, and how strong."""
        return ", ".join(f"{name} {strength:.2f}" for name, strength in self.shifts.items()) or "nothing"


def drawn(number: int) -> Federation:
    """Return a federation, which follows from its number alone."""
    random = np.random.default_rng(seed_for(number, "federation"))
    kind: Kind = "image" if number % 5 in (0, 2) else "table"
    shifts = {
        name: float(random.uniform(*STRENGTHS[name]))
        for name in MIXTURES[number % len(MIXTURES)]
        if (name, kind) != ("labels", "image")  # a segmentation has no shares of classes
    }
    least, most = USUAL[kind]
    usual = float(np.exp(random.uniform(np.log(least), np.log(most))))
    spread = np.exp(shifts.get("sizes", 0.0) * random.standard_normal(int(random.integers(3, 7))))
    cases = np.clip(np.round(usual * spread), least // 2, MOST[kind])
    return Federation(number, kind, tuple(int(count) for count in cases), shifts)


def write(federation: Federation, folder: Path) -> None:
    """Write every hospital's files below this folder."""
    makers: Mapping[Kind, Callable[[Federation, Path], None]] = {"table": _write_tables, "image": _write_images}
    makers[federation.kind](federation, folder)


def _parts(federation: Federation, site: int) -> list[str]:
    """The part of each of a hospital's cases: a third as many validate as train."""
    train = federation.cases[site]
    counts = (train, max(8, train // 3), TESTED[federation.kind])
    return [part for part, count in zip(PARTS, counts, strict=True) for _ in range(count)]


def _write_lines(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cases.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


# ------------------------------------------------------------------------------------------------------ tables
def _write_tables(federation: Federation, folder: Path) -> None:
    random = np.random.default_rng(seed_for(federation.number, "table"))
    common = SEPARATION * random.standard_normal((CLASSES, LATENT))
    first, second = random.standard_normal((2, LATENT, COLUMNS)) / np.sqrt(LATENT)
    question = federation.shifts.get("question", 0.0)
    for place, site in enumerate(federation.sites):
        own = SEPARATION * random.standard_normal((CLASSES, LATENT))
        prototypes = np.sqrt(1 - question**2) * common + question * own
        shares = np.full(CLASSES, 1 / CLASSES)
        if alpha := federation.shifts.get("labels"):
            shares = random.dirichlet(np.full(CLASSES, alpha))
        parts = _parts(federation, place)
        labels = random.choice(CLASSES, len(parts), p=shares)
        latent = prototypes[labels] + random.standard_normal((len(parts), LATENT))
        values = (
            np.tanh(latent @ first) + 0.5 * (latent @ second) + NOISE * random.standard_normal((len(parts), COLUMNS))
        )
        looks = federation.shifts.get("looks", 0.0)
        values = values * np.exp(looks * random.standard_normal(COLUMNS)) + 2 * looks * random.standard_normal(COLUMNS)
        lines = [
            {"patient": case, "part": part, "outcome": int(label), **{f"x{n}": f"{x:.5g}" for n, x in enumerate(row)}}
            for case, (part, label, row) in enumerate(zip(parts, labels, values, strict=True))
        ]
        _write_lines(folder / site, lines)


# ------------------------------------------------------------------------------------------------------ images
def _write_images(federation: Federation, folder: Path) -> None:
    random = np.random.default_rng(seed_for(federation.number, "image"))
    question = federation.shifts.get("question", 0.0)
    others = round(question * len(federation.cases) / 2)  # hospitals that ask for the dark blob
    asks_dark = np.isin(np.arange(len(federation.cases)), random.permutation(len(federation.cases))[:others])
    for place, site in enumerate(federation.sites):
        looks = federation.shifts.get("looks", 0.0)
        brightness, contrast, tilt, angle, stripes = random.standard_normal(5)
        parts, lines = _parts(federation, place), []
        (folder / site).mkdir(parents=True)
        for case, part in enumerate(parts):
            bright, dark = _blobs(random)
            image = 0.25 * (bright * 1.0 - dark) + 0.06 * random.standard_normal((SIDE, SIDE))
            line = np.linspace(-1, 1, SIDE)
            along = np.cos(2 * np.pi * angle) * line + np.sin(2 * np.pi * angle) * line[:, None]
            image = image + looks * (0.08 * tilt * along + 0.08 * np.sin(np.pi * (3 + abs(stripes)) * along))
            image = 0.5 + 0.18 * looks * brightness + np.exp(0.4 * looks * contrast) * image
            grey = np.uint8(255 * np.clip(image, 0, 1))
            mask = np.uint8(dark if asks_dark[place] else bright)
            names = f"image-{case:04d}.png", f"mask-{case:04d}.png"
            for name, values in zip(names, (grey, mask), strict=True):
                Image.fromarray(values).save(folder / site / name)
            lines.append({"image": names[0], "label": names[1], "patient": f"p{case:04d}", "part": part})
        _write_lines(folder / site, lines)


def _blobs(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return where the bright and the dark blob are: on opposite sides of the middle, [SIDE, SIDE] each."""
    angle, away = random.uniform(0, 2 * np.pi), random.uniform(6.5, 8.5)
    rows, columns = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    found = []
    for side in (1, -1):
        down, across = side * away * np.sin(angle), side * away * np.cos(angle)
        high, wide = random.uniform(3.0, 5.5, 2)
        found.append(((rows - down) / high) ** 2 + ((columns - across) / wide) ** 2 < 1)
    return found[0], found[1]


# ------------------------------------------------------------------------------------------------------ plans
TASKS: Mapping[Kind, Mapping[str, Any]] = {
    "table": {
        "name": "table",
        "columns": [f"x{number}" for number in range(COLUMNS)],
        "labels": [str(label) for label in range(CLASSES)],
        "standardise": "none",
    },
    "image": {"name": "image-folder", "size": [SIDE, SIDE], "colours": "grey"},
}
NETWORKS: Mapping[Kind, Mapping[str, Any]] = {
    "table": {"name": "mlp", "hidden": [32, 32], "norm": "batch"},
    "image": {"name": "unet", "features": [8, 16, 32], "norm": "batch"},
}
TRAINING: Mapping[Kind, Mapping[str, Any]] = {
    "table": {"rounds": 15, "local_epochs": 2, "batch_size": 16, "learning_rate": 0.03, "momentum": 0.9},
    "image": {"rounds": 12, "local_epochs": 2, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.9},
}


def plan_of(federation: Federation) -> Plan:
    """Return the plan that the methods change."""
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": dict(TASKS[federation.kind]),
            "network": dict(NETWORKS[federation.kind]),
            "training": dict(TRAINING[federation.kind]),
            "participation": {"sites": list(federation.sites)},
        }
    )
