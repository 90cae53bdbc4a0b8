"""Measure how many images per second medsilo and a plain MONAI loop train on, with augmentation, in one run.

    python benchmarks/augmentation.py [--repeats N] [--device cuda]

The program generates a hospital's volumes and writes them as NIfTI files. Medsilo and MONAI learn from the same cases,
which medsilo has read into memory: whole slices of 96 x 96, or patches of 64 x 64 x 32 from volumes. Medsilo and MONAI
use the same network, loss, optimizer, batches and augmentation (flips, turns, scaling, changes of intensities, and
noise). The MONAI loop follows MONAI's tutorials, which use a Dataset with a Compose of transforms, a DataLoader and a
training loop. The row `notes off` measures the MONAI loop without the images' metadata (set_track_meta off); MONAI's
tutorials keep the metadata. Each time is a processor time on one thread, and the median of several repetitions;
repetitions of medsilo and of MONAI alternate. On a GPU, times are wall-clock times, and there is another MONAI loop,
for which four additional processes read images. Medsilo uses no additional process. The goal is that medsilo trains on
at least 1.5 times as many images per second as the MONAI loop.
"""

import argparse
import tempfile
import time
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

from medsilo.learning.compute import Compute
from medsilo.plan import Plan

KEYS = ("image", "label")
AUGMENTATION = ("flip-x", "affine", "intensity", "noise")
LEAST, REPEATS, WORKERS = 1.5, 7, 4
SIZE, ON_CARD = Size(patients=24), Size(patients=8, grid=(48, 256, 256), piece=(32, 128, 128))
SITE = "a"
BATCHES = {"2-D slices": 16, "3-D pieces": 2}


def plan_of(name: str, size: Size) -> Plan:
    grid = {"2-D slices": {"dimensions": 2, "size": size.grid[:0:-1]}, "3-D pieces": {"size": size.piece[::-1]}}[name]
    spacing = {} if "dimensions" in grid else {"target_spacing": SPACINGS[SITE]}
    task = {"name": "nifti-folder", "labels": ["ball"], "augmentation": AUGMENTATION, **grid, **spacing}
    return study_of(task, BATCHES[name])


class Plain:
    def __init__(self, plan: Plan, cases: Any, device: str) -> None:
        self.device, self.network = device, plan.build_networks()["model"].to(device)
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
        whole: Any = {"dataset": Dataset(held, Compose(drawn)), "batch_size": plan.training.batch_size}
        whole |= {"shuffle": True, "drop_last": True, "pin_memory": device != "cpu"}
        self.loader = DataLoader(**whole)
        self.parallel = DataLoader(**whole, num_workers=WORKERS, persistent_workers=True)

    def train(self, loader: DataLoader | None = None) -> None:
        self.network.train()
        for batch in loader or self.loader:
            self.step(batch["image"].to(self.device), batch["label"].to(self.device))

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


def sides(name: str, folder: Path, size: Size, device: str) -> tuple[Mapping[str, Callable[[], object]], int]:
    """Medsilo and the MONAI loop leave out the last images of an epoch if these images do not fill a batch."""
    write_hospital(folder / SITE, 0, SPACINGS[SITE], size)
    plan = plan_of(name, size)
    ours = Ours(plan, SITE, folder / SITE, folder / "run", device)
    trainer = ours.site.participant.trainer
    batch = plan.training.batch_size
    whole = trainer.samples // batch * batch
    trainer.train = torch.utils.data.Subset(trainer.train, range(whole))
    plain = Plain(plan, trainer.train, device)
    works: dict[str, Callable[[], object]] = {"MONAI": plain.train, "notes off": plain.untracked}
    if device != "cpu":
        works["workers"] = lambda: plain.train(plain.parallel)
    return works | {"medsilo": ours.train}, whole


def taken(work: Callable[[], object], device: str) -> float:
    """Return the processor time in seconds, or on a GPU the wall-clock time until the GPU has finished."""
    if device == "cpu":
        return seconds(work)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=REPEATS)
    arguments.add_argument("--device", default="cpu")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    print(f"images a second of training on {Compute.choose(asked.device).description}, median of {asked.repeats}")
    fine, size = True, SIZE if asked.device == "cpu" else ON_CARD
    for name in BATCHES:
        with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
            works, images = sides(name, Path(place), size, asked.device)
            turns = [[taken(work, asked.device) for work in works.values()] for _ in range(asked.repeats + 1)][1:]
        middle = dict(zip(works, (median(column) for column in zip(*turns, strict=True)), strict=True))
        ratio = middle["MONAI"] / middle["medsilo"]
        fine &= ratio >= LEAST
        note(f"augmentation: {name}" + " on a card" * (asked.device != "cpu"), 1 / ratio)
        rates = ", ".join(f"{side} {images / own:.1f}" for side, own in middle.items())
        single = " ".join(f"{turn[0] / turn[-1]:.2f}" for turn in turns)
        print(f"{name}: {rates}; medsilo / MONAI {ratio:.2f}, of each repetition {single}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    SMALL = Size(patients=6, grid=(20, 24, 24), piece=(16, 16, 16))
    run(main, globals(), SIZE=SMALL, ON_CARD=SMALL, REPEATS=1)
