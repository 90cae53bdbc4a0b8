"""Compare three networks after equal work: the network that `medsilo init` chooses for volumes, nnU-Net in 3-D, and
Auto3DSeg.

    python -m benchmarks.networks [--data DIR] [--seeds N] [--share S] [--only NAME] [--steps]

The benchmark uses two data sets, each at a single site: real hippocampus volumes (two structures) and synthetic heads
from five scanners (benchmarks/brains.py). All three networks train on the same cases, and are scored on the same whole
test cases in the images' original grids:

- medsilo: the plan that `medsilo init` writes for the folder, and the model of the last round that medsilo's engine
  trains with this plan.
- nnU-Net: its 3d_fullres plan with its standard trainer, preprocessing, predictor (with mirroring) and metrics.
- MONAI: Auto3DSeg's training of SegResNet, written as a MONAI script, with nnU-Net's patch and spacing. The script uses
  deep supervision, AdamW with warm-up and a cosine schedule, crops by class, random affine transforms, noise, smoothing
  and flips.

Equal work means that each network trains with as many floating-point operations, as torch counts them, as medsilo needs
for 40 rounds. With --steps, all three networks make the same number of training steps, each on two patches, whatever a
step costs. So that nnU-Net and Auto3DSeg can train on a CPU, their first stage has 8 features instead of 32, and their
batches have two patches. No settings were tuned, for any of the three networks.
"""

import argparse
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, MetaTensor
from monai.inferers import sliding_window_inference
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.networks.nets import SegResNetDS
from monai.optimizers import WarmupCosineSchedule
from monai.transforms import (
    Compose,
    EnsureTyped,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandAffined,
    RandCropByLabelClassesd,
    RandFlipd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandShiftIntensityd,
    ResampleToMatch,
    Spacingd,
    SpatialPadd,
)
from scipy.stats import t as students_t
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.brains import HOSPITALS, QUESTION, narrow, plans_of, write_hospitals
from benchmarks.nnunet import PARTS, SITE, Ours, Theirs, nnunet_folders, preprocess
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, parse_plan
from medsilo.tasks.site_data import patients_of
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight, text_of
from medsilo_nnunet.question import SegmentationQuestion

KEYS = ("image", "label")
FEATURES, BATCH, CONFIGURATION = 8, 2, "3d_fullres"
EPOCHS = 40
HIPPOCAMPUS = SegmentationQuestion(
    name="Dataset004_Hippocampus", channels=("MR",), labels={"background": 0, "anterior": 1, "posterior": 2}
)


@dataclass(frozen=True)
class Size:
    seeds: int = 3
    share: float = 1.0  # fraction of the default number of rounds
    volumes: int = 260  # number of hippocampus volumes
    heads: int = 12  # number of heads of each scanner
    width: float = 108.0  # width of a head, in millimetres


SIZE = Size()
Dice = Mapping[str, float]


@dataclass(frozen=True)
class Set:
    folder: Path  # folder with SITE/images and SITE/labels
    question: SegmentationQuestion

    def file(self, part: str, case: str) -> Path:
        return self.folder / SITE / part / f"{case}.nii.gz"

    @property
    def labels(self) -> list[int]:
        return [value for value in self.question.labels.values() if value]


def sets(folder: Path, data: Path, size: Size) -> dict[str, Set]:
    found = {"hippocampus": Set(folder / "hippocampus", HIPPOCAMPUS), "heads": Set(folder / "heads", QUESTION)}
    for part in PARTS:
        for own in found.values():
            (own.folder / SITE / part).mkdir(parents=True)
        for file in sorted((data / "hippocampus" / part).glob("*.nii.gz"))[: size.volumes]:
            shutil.copy(file, found["hippocampus"].folder / SITE / part / file.name)
    write_hospitals(folder / "drawn", HOSPITALS, size.heads, size.width)
    for file in (folder / "drawn").glob("*/*/*.nii.gz"):
        shutil.move(file, found["heads"].folder / SITE / file.parent.name / file.name)
    return {name: own for name, own in found.items() if any((own.folder / SITE / "images").iterdir())}


def default_of(own: Set) -> Plan:
    folder = DatasetLayout(own.folder / SITE, SITE, "cpu")
    return parse_plan(load_yaml(text_of((), first_sight(folder).choices.plan)))


def operations(work: Callable[[], object]) -> int:
    """Return the number of floating-point operations of one call."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


# ---------------------------------------------------------------------------------------------------- medsilo
def train_ours(side: Ours, rounds: int) -> Dice:
    for _ in range(rounds):
        side.epoch()
    part, evaluation = side.site.participant.data.test, side.site.participant.evaluation
    model = side.site.participant.state.model
    _, _, found = evaluation.evaluate(part, lambda: None, model, side.plan.task.goal.measuring)
    return dict(zip(patients_of(part), found["dice"].tolist(), strict=True))


def work_of(plan: Plan, cases: int) -> tuple[int, int]:
    network = plan.build_networks()["model"]
    inputs = torch.zeros(plan.training.batch_size, *plan.task.shape)
    steps = plan.training.local_epochs * -(-cases // plan.training.batch_size)
    return steps, operations(lambda: network(inputs).sum().backward())


# ---------------------------------------------------------------------------------------------------- MONAI
def _prepared(keys: Sequence[str], spacing: Sequence[float]) -> Compose:
    modes = ("bilinear", "nearest")[: len(keys)]
    return Compose(
        [
            LoadImaged(keys, ensure_channel_first=True),
            Orientationd(keys, axcodes="RAS", labels=None),
            Spacingd(keys, pixdim=spacing, mode=modes),
            NormalizeIntensityd("image", nonzero=True),
        ]
    )


class Segmenter:
    def __init__(self, own: Set, trained: Sequence[str], configuration: Mapping[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        classes = len(own.labels) + 1
        self.own, self.patch, spacing = own, configuration["patch_size"][::-1], configuration["spacing"][::-1]
        self.network = SegResNetDS(
            init_filters=FEATURES,
            out_channels=classes,
            norm="instance",
            blocks_down=(1, 2, 2),
            dsdepth=2,
            resolution=spacing,
        )
        self.loss = DeepSupervisionLoss(DiceCELoss(include_background=True, softmax=True, to_onehot_y=True))
        self.prepare = _prepared(("image",), spacing)
        crop = RandCropByLabelClassesd(KEYS, "label", self.patch, num_classes=classes, num_samples=1)
        turned = {"rotate_range": (0.26, 0.26, 0.26), "scale_range": (0.2, 0.2, 0.2), "padding_mode": "border"}
        drawn = [
            crop,
            RandAffined(KEYS, prob=0.2, mode=("bilinear", "nearest"), **turned),
            RandGaussianSmoothd("image", prob=0.2, sigma_x=(0.5, 1), sigma_y=(0.5, 1), sigma_z=(0.5, 1)),
            RandScaleIntensityd("image", prob=0.5, factors=0.3),
            RandShiftIntensityd("image", prob=0.5, offsets=0.1),
            RandGaussianNoised("image", prob=0.2, std=0.1),
            *(RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)),
            EnsureTyped(KEYS, track_meta=False),
        ]
        files = [{key: str(own.file(f"{key}s", name)) for key in KEYS} for name in trained]
        transforms = Compose([_prepared(KEYS, spacing), SpatialPadd(KEYS, self.patch), *drawn])
        transforms.set_random_state(seed)
        cases = CacheDataset(files, transforms, progress=False)
        generator = torch.Generator().manual_seed(seed)
        self.loader = DataLoader(cases, BATCH, shuffle=True, drop_last=True, generator=generator)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-4, weight_decay=1e-5)

    def step(self, batch: Mapping[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        self.loss(self.network(batch["image"]), batch["label"]).backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        schedule = WarmupCosineSchedule(self.optimizer, warmup_steps=max(1, steps // 100), t_total=steps)
        self.network.train()
        done = 0
        while done < steps:
            for batch in self.loader:
                self.step(batch)
                schedule.step()
                done += 1
                if done == steps:
                    break

    @torch.no_grad()
    def dice(self, cases: Sequence[str]) -> Dice:
        self.network.eval()
        read, found, match = LoadImaged("label", ensure_channel_first=True), {}, ResampleToMatch(mode="bilinear")
        for case in cases:
            image = self.prepare({"image": str(self.own.file("images", case))})["image"]
            window = {"roi_size": self.patch, "sw_batch_size": 4, "overlap": 0.625, "mode": "gaussian"}
            output: Any = sliding_window_inference(image[None], predictor=self.network, **window)[0]
            truth = read({"label": str(self.own.file("labels", case))})["label"]
            back = match(MetaTensor(output.as_tensor().softmax(0), affine=image.affine), truth).argmax(0)
            found[case] = fmean(overlap(back == label, truth[0] == label) for label in self.own.labels)
        return found


def overlap(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float(2 * (found & truth).sum() / (found.sum() + truth.sum()))


# ---------------------------------------------------------------------------------------------------- all three
@dataclass(frozen=True)
class Outcome:
    steps: Mapping[str, int]
    dice: Mapping[str, Dice]


def compared(own: Set, plan: Plan, seed: int, share: float, by_steps: bool, place: Path) -> Outcome:
    plan = plan.with_changes([f"seed={seed}", f"model_selection.validate_every={EPOCHS}"])
    side = Ours(plan, own.folder, place / "study")
    trained, tested = side.cases("train"), side.cases("test")
    rounds = max(1, round(share * plan.training.rounds))
    each, work = work_of(plan, len(trained))
    ours = rounds * each
    plans = narrow(plans_of(own.folder, [SITE], question=own.question), FEATURES, CONFIGURATION)
    plans["configurations"][CONFIGURATION]["batch_size"] = BATCH
    configuration = plans["configurations"][CONFIGURATION]
    plain = Segmenter(own, trained, configuration, seed)
    batch = next(iter(plain.loader))
    with nnunet_folders(own.folder), redirect_stdout(StringIO()):
        preprocess(own.folder, plans, trained, tested, own.question, CONFIGURATION)
        alone = Theirs(plans, 1, 1, seed, None, own.question, CONFIGURATION)
        per_step = operations(lambda: alone.trainer.train_step(next(alone.trainer.dataloader_train)))
        steps = ours if by_steps else ours * work // per_step
        epochs = min(EPOCHS, steps)
        theirs = Theirs(plans, epochs, steps // epochs, seed, None, own.question, CONFIGURATION)
        for _ in range(epochs):
            theirs.epoch()
        found = {"nnU-Net": theirs.said(own.folder, tested, own.labels)}
    taken = {"medsilo": ours, "nnU-Net": epochs * theirs.steps}
    taken["MONAI"] = ours if by_steps else ours * work // operations(partial(plain.step, batch))
    found["medsilo"] = train_ours(side, rounds)
    plain.train(taken["MONAI"])
    found["MONAI"] = plain.dice(tested)
    return Outcome(taken, found)


def difference(found: Sequence[Outcome], other: str) -> tuple[float, float, float]:
    """Return the difference in points between the mean Dice of medsilo's network and of another network, with the 95 %
    t interval over patients.
    """
    own: dict[str, list[float]] = {}
    for one in found:
        for case, dice in one.dice["medsilo"].items():
            own.setdefault(case, []).append(100 * (dice - one.dice[other][case]))
    each = np.array([fmean(values) for values in own.values()])
    half = students_t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / len(each) ** 0.5
    return float(each.mean()), float(each.mean() - half), float(each.mean() + half)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code 0 if medsilo's default network is at most one point of Dice behind each other network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--seeds", type=int, default=SIZE.seeds)
    parser.add_argument("--share", type=float, default=SIZE.share, help="fraction of the default number of rounds")
    parser.add_argument("--only", help="measure only this set: hippocampus or heads")
    parser.add_argument("--steps", action="store_true", help="compare at equal steps instead of equal operations")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # hides the warnings of MONAI and nnU-Net
    behind = 0.0
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as folder:
        for name, own in sets(Path(folder), chosen.data, SIZE).items():
            if chosen.only not in (None, name):
                continue
            plan, found = default_of(own), []
            print(f"{name}: {plan.task.shape[1:]} voxels, batch {plan.training.batch_size}, {plan.network}", flush=True)
            for seed in range(chosen.seeds):
                one = compared(own, plan, seed, chosen.share, chosen.steps, Path(folder) / f"{name}-{seed}")
                found.append(one)
                told = (
                    f"{side} {100 * fmean(dice.values()):.1f} ({one.steps[side]} steps)"
                    for side, dice in one.dice.items()
                )
                print(f"  seed {seed}, {len(one.dice['MONAI'])} cases: {', '.join(told)}", flush=True)
            for other in ("nnU-Net", "MONAI"):
                mean, low, high = difference(found, other)
                behind = min(behind, mean)
                print(f"  medsilo {mean:+.1f} points of Dice ({low:+.1f} to {high:+.1f}) beside {other}", flush=True)
    return 0 if behind >= -1 else 1


if __name__ == "__main__":
    from benchmarks.timing import run

    run(main, globals(), SIZE=Size(seeds=1, share=0.02, volumes=9, heads=0))
