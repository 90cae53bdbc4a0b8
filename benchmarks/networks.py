"""The network that `medsilo init` drafts for volumes, against nnU-Net's 3-D network and MONAI's as Auto3DSeg trains it.

    python -m benchmarks.networks [--seconds N] [--seeds N] [--data DIR] [--quick]

All volumes lie in one place, so that networks alone are compared. Each row trains for the same seconds of one
processor, with its own patches, batches and optimizer: what `init` writes; the 3d_fullres plans of nnU-Net's own
planner, in task `nnunet`; MONAI's SegResNet with the numbers of Auto3DSeg's recipe, on the patches of `init`. A few
steps are timed first. Scores are Dice over the same test patients. DATA holds the set `hippocampus`; without it that
part is left out.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

from benchmarks.brains import HOSPITALS, QUESTION, plans_of, write_brain
from benchmarks.nnunet import AS_NNUNET
from medsilo import given
from medsilo.federation.inprocess import run
from medsilo.plan import parse_plan
from medsilo.site.settings import SiteSettings
from medsilo.start.choices import choose, nested
from medsilo.start.fitting import Machine
from medsilo.start.folder_layout import layout_of_folder
from medsilo.start.looks import look_at
from medsilo.tasks.sources import DataSource
from medsilo_nnunet.question import SegmentationQuestion

ROOT = Path(__file__).resolve().parents[1]
SITE, ROUNDS, FREE = "all", 4, 8 << 30
TRIED = (1, 3)  # local steps of the two short runs whose difference is the price of a step
HIPPOCAMPUS = SegmentationQuestion(
    name="Dataset004_Hippocampus", channels=("MR",), labels={"background": 0, "structure-1": 1, "structure-2": 2}
)
AUTO3DSEG = {"optimizer": "adam", "learning_rate": 2e-4, "weight_decay": 1e-5, "batch_size": 2}


def segresnet(channels: int, classes: int) -> nn.Module:
    """MONAI's SegResNet with the depth and width of Auto3DSeg's recipe."""
    from monai.networks.nets import SegResNet

    return SegResNet(3, 32, channels, classes, norm="INSTANCE", blocks_down=(1, 2, 2, 4, 4), blocks_up=(1, 1, 1, 1))


@dataclass(frozen=True)
class Row:
    """One way to train."""

    title: str
    task: Mapping[str, Any]
    training: Mapping[str, Any]
    network: Mapping[str, Any] | None = None

    def trained(self, folder: Path, seed: int, rounds: int, steps: int) -> tuple[float, float]:
        """Return the mean Dice over test patients after so many steps, and the processor's seconds."""
        plan = parse_plan(
            {
                "algorithm": {"name": "fedavg"},
                "task": dict(self.task),
                **({"network": dict(self.network)} if self.network else {}),
                "participation": {"sites": [SITE]},
                "training": {**self.training, "rounds": rounds, "local_steps": steps},
                "tracking": {"validate_every": rounds},
                "seed": seed,
            }
        )
        settings = SiteSettings(data=DataSource(folder=folder), device="cpu", public_data=True)
        began = time.process_time()
        summary = run(plan, settings=settings).summary
        return 100 * (summary.mean_test or 0.0), time.process_time() - began


def rows(folder: Path, question: SegmentationQuestion) -> Iterator[Row]:
    """Yield the ways to train on a folder's volumes."""
    looks = look_at(folder, layout_of_folder(folder))
    drafted = nested(choose(looks, [SITE], Machine(FREE, gpu=False)).plan)
    training = {key: drafted["training"][key] for key in ("batch_size", "optimizer", "learning_rate")}
    yield Row("as init drafts it", drafted["task"], training, drafted["network"])
    plans = plans_of(folder.parent, [folder.name], question=question)
    batch = plans["configurations"]["3d_fullres"]["batch_size"]
    task = {"name": "nnunet", "question": question.model_dump(mode="json"), "plans": plans}
    task |= {"configuration": "3d_fullres", "shares": drafted["task"]["shares"]}
    nnunet = {**AS_NNUNET, "schedule": "poly", "batch_size": batch}
    yield Row(
        "nnU-Net's 3d_fullres", {**task, "configuration": "3d_fullres", "shares": drafted["task"]["shares"]}, nnunet
    )
    size = [16 * max(1, round(length / 16)) for length in drafted["task"]["size"]]
    yield Row("MONAI's SegResNet", {**drafted["task"], "size": size}, AUTO3DSEG, given.model(segresnet))


def compare(title: str, folder: Path, question: SegmentationQuestion, seconds: float, seeds: int) -> None:
    """Print what each row reaches, and what `init`'s draft is away from the highest."""
    reached: dict[str, float] = {}
    print(f"\n{title}\n\n| row | processor per step | steps | Dice by seed | mean |\n|---|---|---|---|---|")
    for row in rows(folder, question):
        short, longer = (row.trained(folder, 0, 1, steps)[1] for steps in TRIED)
        each = max((longer - short) / (TRIED[1] - TRIED[0]), 1e-3)
        steps = max(1, round(seconds / each / ROUNDS))
        found = [row.trained(folder, seed, ROUNDS, steps)[0] for seed in range(seeds)]
        reached[row.title] = mean(found)
        by_seed = ", ".join(f"{dice:.1f}" for dice in found)
        print(f"| {row.title} | {each:.2f} s | {ROUNDS * steps} | {by_seed} | {mean(found):.1f} |", flush=True)
    first, *others = reached.values()
    print(f"\nWhat `init` drafts is {first - max(others):+.1f} points from the highest other row.", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of a processor that each row trains")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--quick", action="store_true", help="a few volumes and steps: whether it runs")
    args = parser.parse_args(arguments)
    seconds = 1.0 if args.quick else args.seconds
    with tempfile.TemporaryDirectory() as place:
        brains = Path(place) / "brains"
        for number, (site, scanner) in enumerate(HOSPITALS.items()):
            thin = replace(scanner, spacing=scanner.spacing[:1] * 3)  # slices as thick as voxels are wide
            for case in range(2 if args.quick else 8):
                write_brain(brains, f"{site}-{case}", thin, 100 * number + case)
        compare("Generated brains", brains, QUESTION, seconds, args.seeds)
        if not args.quick and (args.data / "hippocampus").is_dir():
            compare("Hippocampus", args.data / "hippocampus", HIPPOCAMPUS, seconds, args.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
