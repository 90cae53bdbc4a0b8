"""Images a second of training with augmentation, by medsilo against a plain MONAI loop, in one run.

    python benchmarks/augmentation.py [--repeats N]

A hospital's volumes are made here and written as NIfTI files. Both sides learn from the same cases, which medsilo has
read into memory: whole slices of 96 x 96, or pieces of 64 x 64 x 32 of volumes. They have the same network, loss,
optimizer and batches, and the same augmentation: flips, turns and scaling, intensities, noise. The MONAI side is what
its tutorials write: Dataset with a Compose of transforms for a case, DataLoader, a loop; `notes off` is the same
without its notes on where images lie in space (set_track_meta), which tutorials leave on.

Times are the processor's, on one thread: medians of repetitions that take turns.
Goal: at least 1.5 times the images a second of the MONAI side.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from monai.data import DataLoader, Dataset, set_track_meta
from monai.losses import DiceCELoss
from monai.transforms import (
    Compose,
    FgBgToIndicesd,
    RandAffined,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandScaleIntensityd,
    RandStdShiftIntensityd,
)
from timing import note, run
from volumes import SPACINGS, Ours, Size, seconds, study_of, write_hospital

from medsilo.plan import Plan

KEYS = ("image", "label")
AUGMENTATION = ("flip-x", "affine", "intensity", "noise")
LEAST, REPEATS = 1.5, 7
SIZE = Size(patients=24)
SITE = "a"
BATCHES = {"2-D slices": 16, "3-D pieces": 2}


def plan_of(name: str, size: Size) -> Plan:
    """The study whose site is measured."""
    grid = {"2-D slices": {"dimensions": 2, "size": size.grid[:0:-1]}, "3-D pieces": {"size": size.piece[::-1]}}[name]
    spacing = {} if "dimensions" in grid else {"target_spacing": SPACINGS[SITE]}
    task = {"name": "nifti-folder", "labels": ["ball"], "augmentation": AUGMENTATION, **grid, **spacing}
    return study_of(task, BATCHES[name])


class Plain:
    """The same training with MONAI alone."""

    def __init__(self, plan: Plan, cases: Any) -> None:
        self.network = plan.build_networks()["model"]
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=plan.training.learning_rate)
        self.loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)
        task: Any = plan.task
        axes = task.axes
        held = [{"image": image, "label": label[None]} for image, label in (cases[case] for case in range(len(cases)))]
        drawn: list[Any] = [
            RandFlipd(KEYS, prob=0.5, spatial_axis=axes - 1),
            RandAffined(
                KEYS,
                prob=0.5,
                rotate_range=[0.26] if axes == 2 else [0.26, 0.0, 0.0],
                scale_range=[0.1] * axes,
                mode=["bilinear", "nearest"],
                padding_mode="border",
            ),
            RandScaleIntensityd("image", factors=0.1, prob=1),
            RandStdShiftIntensityd("image", factors=0.1, prob=1),
            RandGaussianNoised("image", prob=0.5, std=0.05),
        ]
        if task.crops:
            held = [FgBgToIndicesd("label")(case) for case in held]
            indices = {"fg_indices_key": "label_fg_indices", "bg_indices_key": "label_bg_indices"}
            drawn.insert(0, RandCropByPosNegLabeld(KEYS, "label", task.shape[1:], num_samples=1, **indices))
        size = plan.training.batch_size
        self.loader = DataLoader(Dataset(held, Compose(drawn)), batch_size=size, shuffle=True, drop_last=True)

    def train(self) -> None:
        self.network.train()
        for batch in self.loader:
            self.step(batch["image"], batch["label"])

    def untracked(self) -> None:
        set_track_meta(False)
        try:
            self.train()
        finally:
            set_track_meta(True)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.network(images), labels)
        loss.backward()
        self.optimizer.step()
        loss.item()


def sides(name: str, folder: Path, size: Size) -> tuple[Mapping[str, Callable[[], object]], int]:
    """Every side's epoch, and its images. All of them leave out what fills no batch."""
    write_hospital(folder / SITE, 0, SPACINGS[SITE], size)
    plan = plan_of(name, size)
    ours = Ours(plan, SITE, folder / SITE, folder / "run")
    trainer = ours.site.participant.trainer
    batch = plan.training.batch_size
    whole = trainer.samples // batch * batch
    trainer.train = torch.utils.data.Subset(trainer.train, range(whole))
    plain = Plain(plan, trainer.train)
    return {"MONAI": plain.train, "notes off": plain.untracked, "medsilo": ours.train}, whole


def main() -> int:
    """Zero when the goals are met."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=REPEATS)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    print(f"images a second of training, one thread, processor time, median of {repeats}")
    print(f"{'':<12} {'MONAI':>8} {'notes off':>9} {'medsilo':>8} {'times':>6}   of each repetition")
    fine = True
    for name in BATCHES:
        with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
            works, images = sides(name, Path(place), SIZE)
            turns = [[seconds(work) for work in works.values()] for _ in range(repeats + 1)][1:]
        plain, untracked, ours = (median(column) for column in zip(*turns, strict=True))
        fine &= plain / ours >= LEAST
        note(f"augmentation: {name}", ours / plain)
        single = " ".join(f"{one / other:.2f}" for one, _, other in turns)
        rates = " ".join(f"{images / taken:>8.1f}" for taken in (plain, untracked, ours))
        print(f"{name:<12} {rates} {plain / ours:>6.2f}   {single}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    run(main, globals(), SIZE=Size(patients=6, grid=(20, 24, 24), piece=(16, 16, 16)), REPEATS=1)
