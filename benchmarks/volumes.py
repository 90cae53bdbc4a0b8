"""Compare medsilo's 3-D training and evaluation with a plain MONAI loop that does the same work in the same run.

    python benchmarks/volumes.py [--repeats N]

The program generates three hospitals' volumes with different spacings and writes them as NIfTI files. Medsilo and the
MONAI loop read the same files, and keep the volumes in memory. Medsilo and the MONAI loop sample random patches of
64 x 64 x 32; half of the patches contain a structure. Medsilo and the MONAI loop flip the patches, change the patches'
intensities and add noise. Medsilo and the MONAI loop train the same U-Net with the same loss, optimizer and batch size,
and score whole volumes with overlapping windows. The MONAI loop follows MONAI's tutorials: CacheDataset, DataLoader,
RandCropByPosNegLabeld with cached indices, sliding_window_inference, DiceMetric.

A round is all that a hospital does between receiving a model and sending its answer. The hospital loads and scores the
received model, trains an epoch, saves the state and copies the tensors. In a round, the MONAI loop only scores and
trains.

Each time is a processor time on one thread, and the median of several repetitions; repetitions of medsilo and of MONAI
alternate. The goal is that each ratio of medsilo to the MONAI loop is at most 1.05.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.transforms import (
    Compose,
    FgBgToIndicesd,
    LoadImaged,
    Orientationd,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandScaleIntensityd,
    RandStdShiftIntensityd,
    ScaleIntensityRangePercentilesd,
    Spacingd,
    ToTensord,
)
from timing import note, run
from torch import nn

from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite
from medsilo.federation.trainer import SHUFFLE
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import patients_of
from medsilo.tasks.sources import DataSource
from medsilo_lab.start.example import write_volume

SPACINGS = {"a": (1.5, 1.5, 3.0), "b": (1.4, 1.4, 3.2), "c": (1.6, 1.6, 2.8)}
KEYS = ("image", "label")
BATCH, MOST = 2, 1.05
Works = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Size:
    patients: int = 12
    grid: tuple[int, int, int] = (40, 96, 96)
    piece: tuple[int, int, int] = (32, 64, 64)


SIZE, REPEATS = Size(), 7


def write_hospital(folder: Path, seed: int, spacing: Sequence[float], size: Size) -> None:
    random = np.random.default_rng(seed)
    axes = np.ogrid[tuple(slice(0, places) for places in size.grid)]
    for number in range(size.patients):
        middle = [places / 2 + random.uniform(-places / 6, places / 6) for places in size.grid]
        radii = [places / random.uniform(4, 6) for places in size.grid]
        mask = sum(((axis - at) / r) ** 2 for axis, at, r in zip(axes, middle, radii, strict=True)) < 1
        values = (random.normal(0, 30, mask.shape) + 120 * mask).astype(np.float32)
        for kind, content in (("images", values), ("labels", mask.astype(np.uint8))):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            write_volume(folder / kind / f"{number:03}.nii.gz", content, spacing)


def plan_of(size: Size) -> Plan:
    task = {
        "name": "nifti-folder",
        "labels": ["ball"],
        "size": size.piece[::-1],
        "target_spacing": SPACINGS["a"],
        "augmentation": ["flip-x", "flip-y", "intensity", "noise"],
    }
    return study_of(task, BATCH)


def study_of(task: dict[str, Any], batch: int) -> Plan:
    training = {"batch_size": batch, "optimizer": "adam", "learning_rate": 0.001, "rounds": 1000}
    sites = {"sites": list(SPACINGS)}
    return parse_plan({"algorithm": {"name": "fedavg"}, "task": task, "participation": sites, "training": training})


# ---------------------------------------------------------------------------------------------------- medsilo
class Ours:
    def __init__(self, plan: Plan, site: str, folder: Path, place: Path, device: str = "cpu") -> None:
        settings = SiteSettings(data=DataSource(folder=folder), device=device, public_data=True)
        self.plan, self.site = (
            plan,
            TrainingSite(participant_of(SiteContext(plan, site, list(SPACINGS), settings, place))),
        )
        given = views(plan.course.phase_of(1).given, plan.build_networks())
        self.groups = {name: {key: tensor.clone() for key, tensor in own.items()} for name, own in given.items()}
        self.round = 0

    def works(self) -> Works:
        return {"training": self.train, "evaluation": self.evaluate, "round": self.answer}

    def train(self) -> float:
        context = self.site.participant.trainer.train_context(SHUFFLE, 1, lambda: None)
        return context.train()

    def evaluate(self) -> float:
        return self.site.participant.evaluation.evaluate(
            self.site.participant.data.validation, lambda: None, self.site.participant.state.model
        )[1]

    def answer(self) -> StudyMessage:
        self.round += 1
        asked = Request(
            task="round", round=self.round, study="s", plan=self.plan.hash, sites=tuple(SPACINGS), last=self.round - 1
        )
        return self.site.answer(asked.message(self.groups))


# ---------------------------------------------------------------------------------------------------- MONAI
class Plain:
    def __init__(
        self, plan: Plan, folder: Path, parts: Mapping[str, Sequence[str]], size: Size, device: str = "cpu"
    ) -> None:
        self.size, self.device, self.network = size, device, plan.build_networks()["model"].to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=plan.training.learning_rate)
        self.loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)
        self.dice = DiceMetric(include_background=False, ignore_empty=False)
        self.training = self._loader(folder, parts["train"], True)
        self.validation = self._loader(folder, parts["validation"], False)

    def works(self) -> Works:
        return {"training": self.train, "evaluation": self.evaluate, "round": self.both}

    def _loader(self, folder: Path, names: Sequence[str], trains: bool) -> DataLoader:
        files = [{key: folder / f"{key}s" / f"{name}.nii.gz" for key in KEYS} for name in names]
        kept = [
            LoadImaged(KEYS, ensure_channel_first=True),
            Orientationd(KEYS, axcodes="SPL", labels=None),
            Spacingd(KEYS, pixdim=SPACINGS["a"][::-1], mode=("bilinear", "nearest")),
            ScaleIntensityRangePercentilesd("image", 0.5, 99.5, 0.0, 1.0, clip=True),
            ToTensord(KEYS, track_meta=False),
        ]
        if trains:
            kept.append(FgBgToIndicesd("label"))
        indices = {"fg_indices_key": "label_fg_indices", "bg_indices_key": "label_bg_indices"}
        drawn = [
            RandCropByPosNegLabeld(KEYS, "label", self.size.piece, 1, 1, num_samples=1, allow_smaller=False, **indices),
            RandFlipd(KEYS, prob=0.5, spatial_axis=2),
            RandFlipd(KEYS, prob=0.5, spatial_axis=1),
            RandScaleIntensityd("image", factors=0.1, prob=1),
            RandStdShiftIntensityd("image", factors=0.1, prob=1),
            RandGaussianNoised("image", prob=0.5, std=0.05),
        ]
        cases = CacheDataset(files, Compose([*kept, *(drawn if trains else [])]), progress=False)
        # medsilo leaves out a case that would be the only case in the last batch
        alone = trains and len(names) % BATCH == 1
        return DataLoader(cases, batch_size=BATCH if trains else 1, shuffle=trains, drop_last=alone)

    def train(self) -> float:
        self.network.train()
        total = 0.0
        for batch in self.training:
            self.optimizer.zero_grad()
            images, labels = (batch[key].to(self.device) for key in KEYS)
            loss = self.loss(self.network(images), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.training)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.network.eval()
        total = 0.0
        for batch in self.validation:
            images, labels = (batch[key].to(self.device) for key in KEYS)
            output = sliding_window_inference(images, self.size.piece, 4, self.network, 0.25, mode="gaussian")
            total += self.loss(output, labels).item()
            found = nn.functional.one_hot(output.argmax(1), 2).movedim(-1, 1)
            self.dice(found, nn.functional.one_hot(labels[:, 0].long(), 2).movedim(-1, 1))
        score = float(self.dice.aggregate())
        self.dice.reset()
        return score

    def both(self) -> None:
        self.evaluate()
        self.train()


# ---------------------------------------------------------------------------------------------------- both
def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def hospitals(folder: Path, size: Size, device: str = "cpu") -> list[tuple[Works, Works]]:
    plan, pairs = plan_of(size), []
    for seed, (site, spacing) in enumerate(SPACINGS.items()):
        write_hospital(folder / site, seed, spacing, size)
        ours = Ours(plan, site, folder / site, folder / "run" / site, device)
        parts = {part: patients_of(getattr(ours.site.participant.data, part)) for part in ("train", "validation")}
        pairs.append((ours.works(), Plain(plan, folder / site, parts, size, device).works()))
    return pairs


def times(pairs: Sequence[tuple[Works, Works]], name: str, repeats: int) -> list[list[float]]:
    return [[sum(seconds(pair[side][name]) for pair in pairs) for side in (0, 1)] for _ in range(repeats + 1)][1:]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=REPEATS)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    print(f"three hospitals, one thread, processor seconds, median of {repeats}")
    print(f"{'':<12} {'MONAI':>8} {'medsilo':>8} {'ratio':>6}   ratio of each repetition")
    fine = True
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        pairs = hospitals(Path(place), SIZE)
        for name in pairs[0][0]:
            turns = times(pairs, name, repeats)
            ours, plain = (median(column) for column in zip(*turns, strict=True))
            fine &= ours / plain <= MOST
            note(f"volumes: {name}", ours / plain)
            single = " ".join(f"{one / other:.2f}" for one, other in turns)
            print(f"{name:<12} {plain:>8.2f} {ours:>8.2f} {ours / plain:>6.3f}   {single}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    run(main, globals(), SIZE=Size(patients=5, grid=(20, 24, 24), piece=(16, 16, 16)), REPEATS=1)
