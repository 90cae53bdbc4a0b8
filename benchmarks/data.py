"""Measure how fast training reads through a folder task's cache, relative to tensors in memory, and how much memory the
cache needs.

    python benchmarks/data.py

The program generates volumes and photographs and writes them as a hospital's files. An epoch of the training loop
(MONAI's U-Net, Adam) takes a new patch of each volume, or each photograph, through the task's cache. As the reference,
the same network trains on patches of the same size that are already tensors in memory. The table lists the first epoch
separately, because the cache is empty in the first epoch. Times are processor times on one thread, so that other
processes of the machine hardly change the measured times. From the second epoch on, the goal is to read at least 0.8
times as many samples per second as with tensors in memory.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import SimpleITK
import torch
from timing import note, run
from torch.utils.data import Dataset, TensorDataset

from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, batches, train_epoch, train_step
from medsilo.learning.sampling import DrawnCases
from medsilo.models.architectures import UNet
from medsilo.tasks.own.folder import FolderTask
from medsilo.tasks.own.image_folder import ImageFolder
from medsilo.tasks.own.volume_folder import NiftiFolder
from medsilo.tasks.sources import DataSource
from medsilo_lab.start.example import write_volume

PATIENTS, EPOCHS, LEAST = 14, 5, 0.8


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def volumes(folder: Path) -> tuple[FolderTask, DataSource]:
    """Return CT-like volumes of 96 x 96 x 40 voxels, each with a ball."""
    random = np.random.default_rng(0)
    z, y, x = np.ogrid[:40, :96, :96]
    for number in range(PATIENTS):
        centre = random.uniform(30, 60, 2)
        mask = (z - 20) ** 2 * 4 + (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 400
        values = (random.normal(0, 30, mask.shape) + 120 * mask).astype(np.float32)
        for kind, content in (("images", values), ("labels", mask.astype(np.uint8))):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            write_volume(folder / kind / f"{number}.nii.gz", content, (1.5, 1.5, 3.0))
    task = NiftiFolder(labels=("ball",), size=(64, 64, 32), target_spacing=(1.5, 1.5, 3.0))
    return task, DataSource(folder=folder)


def photographs(folder: Path) -> tuple[FolderTask, DataSource]:
    """Return RGB images of 320 x 240 pixels, each with a square."""
    random = np.random.default_rng(0)
    for number in range(4 * PATIENTS):
        mask = np.zeros((240, 320), np.uint8)
        down, across = random.integers(10, 150, 2)
        mask[down : down + 60, across : across + 60] = 255
        pixels = (random.integers(0, 80, (240, 320, 3)) + mask[..., None] // 2).astype(np.uint8)
        for kind, content in (("images", pixels), ("labels", mask)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            image = SimpleITK.GetImageFromArray(content, isVector=content.ndim == 3)
            SimpleITK.WriteImage(image, str(folder / kind / f"{number}.png"))
    return ImageFolder(labels=("square",), size=(128, 128)), DataSource(folder=folder)


def epoch_of(task: FolderTask, cases: Dataset, axes: int) -> Callable[[], object]:
    """Return a function that trains for one pass over the given cases."""
    torch.manual_seed(0)
    compute = Compute()
    network = UNet(dimensions=3 if axes == 3 else 2, features=(16, 32, 64)).build(task.channels, task.goal.classes)
    learn = train_step(network, OutputLoss(task.goal.loss), torch.optim.Adam(network.parameters(), 1e-3), compute)
    return lambda: train_epoch(batches(cases, 4, compute, torch.Generator().manual_seed(0)), [learn], compute)


def compare(name: str, task: FolderTask, source: DataSource) -> bool:
    fine = True
    for cache in ("memory", "disk", "none"):
        memory = {} if cache == "memory" else {"cache_memory": 0}
        folder = {"cache_folder": source.folder / "cache"} if cache == "disk" else {}
        own = source.model_copy(update={**memory, **folder})
        found: list = []
        first = seconds(lambda own=own, found=found: found.append(task.read("a", ["a"], 0, own)))
        train = found[0].train
        drawn = DrawnCases(train, task.variation, 1)
        pieces = [drawn[number] for number in range(len(drawn))]
        ready = TensorDataset(*(torch.stack(column) for column in zip(*pieces, strict=True)))
        works = epoch_of(task, drawn, task.axes), epoch_of(task, ready, task.axes)
        times = [[seconds(work) for work in works] for _ in range(EPOCHS + 1)][1:]
        through, plain = map(min, zip(*times, strict=True))
        held = sum(one.made.inputs.nbytes + one.made.targets.nbytes for one in train.held if one.made) / 2**20
        ratio = plain / through
        fine &= ratio >= LEAST or cache == "none"
        note(f"data: {name}, cache {cache}", through / plain)
        rates = (len(train) / taken for taken in (first + through, through, plain))
        print(f"{name:<12} {cache:<7}", *(f"{rate:>9.1f}" for rate in rates), f"{ratio:>6.2f} {held:>8.1f}")
    return fine


KINDS = {"volumes": volumes, "photographs": photographs}


def main() -> int:
    torch.set_num_threads(1)
    print(f"samples per second of training, one thread, processor time, fastest of {EPOCHS} epochs")
    print(f"{'':<12} {'cache':<7} {'1st epoch':>9} {'later':>9} {'tensors':>9} {'ratio':>6} {'MiB held':>8}")
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        results = [compare(name, *make(Path(place, name))) for name, make in KINDS.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    run(main, globals(), PATIENTS=5, EPOCHS=1, KINDS={"photographs": photographs})
