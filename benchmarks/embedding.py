"""Measure the training of heads on a frozen ViT-S whose embeddings are stored, relative to running the frozen ViT-S in
every pass.

    python benchmarks/embedding.py [--images N] [--rounds N] [--device cuda] [--whole]

The program generates one hospital's PNG files of 224 x 224 pixels, and random weights for a network of ViT-S/16's size.
The plan runs with `network.once` on and, as the reference, with `network.once` off; each run has a separate process.
The reference also reads each image only once, and keeps the image in memory. `in batches` is a loop that runs the
frozen ViT-S over batches of 16 images as often as the study does. The row `in batches` is the time of a loop that
embeds images in batches, where an image's embedding may depend on the other images. The reference runs for 1 and 4
rounds, and its time is extrapolated to all rounds. With --whole, the reference runs all rounds.

Times are processor times on one thread, or wall-clock times on a GPU. Memory is a process's peak minus the memory that
the imports already use. The goal is that 30 rounds take at most a twentieth of the reference's time.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timing import note

from medsilo.core import model_folders, weight_cache
from medsilo.core.files import save_tensors
from medsilo.learning.compute import Compute
from medsilo.plan import Plan, parse_plan
from medsilo.registry import NETWORKS
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess

LEAST, SIZE, BATCH = 20.0, 224, 16
FEW = (1, 4)
SHARES = (0.8, 0.1, 0.1)  # fractions of training, validation and test cases


def write_study(folder: Path, images: int) -> None:
    torch.manual_seed(0)
    write_images(folder / "data", images)
    write_images(folder / "warm-up", BATCH)
    save_tensors(folder / "vit.safetensors", NETWORKS.read({"name": "timm-vit"}).build(3, 2).state_dict())


def write_images(folder: Path, images: int) -> None:
    rows = ["image,label,patient"]
    folder.mkdir()
    for number in range(images):
        pixels = torch.randint(0, 256, (SIZE, SIZE, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
        rows.append(f"{number}.png,{number % 2},p{number}")
    (folder / "cases.csv").write_text("\n".join(rows))


def plan_of(folder: Path, rounds: int, once: bool) -> Plan:
    file = folder / "vit.safetensors"
    model_folders.look_in(folder)
    begun = {"file": file.name, "sha256": weight_cache.hash_of_file(file), "bytes": file.stat().st_size}
    task = {"name": "image-folder", "kind": "classification", "labels": ["0", "1"], "size": [SIZE, SIZE]}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": task | {"shares": SHARES},
            "network": {"name": "frozen", "of": {"name": "timm-vit"}, "from": begun, "once": once},
            "training": {"rounds": rounds, "batch_size": BATCH},
            "participation": {"sites": ["a"]},
        }
    )


def measured(folder: Path, rounds: Sequence[int], once: bool, device: str) -> dict[str, Any]:
    def settings(images: str) -> SiteSettings:
        return SiteSettings.model_validate({"device": device, "data": {"folder": str(folder / images)}})

    warm = plan_of(folder, 1, True).model_dump(mode="json") | {"network": {"name": "small-cnn"}}
    # a warm-up run on other images, because the first run in a process also imports what reads images, such as MONAI
    inprocess.run(parse_plan(warm), folder=folder / f"warm-{once}", settings=settings("warm-up"))
    before, found = held(), []
    for number in rounds:
        started = now(device)
        inprocess.run(plan_of(folder, number, once), folder=folder / f"run-{once}-{number}", settings=settings("data"))
        found.append(now(device) - started)
    return {"seconds": found, "memory": held() - before}


def extended(seconds: Sequence[float], rounds: int) -> float:
    first, last = seconds
    return first + (rounds - FEW[0]) * (last - first) / (FEW[1] - FEW[0])


def in_batches(folder: Path, rounds: int, images: int, device: str) -> float:
    body = plan_of(folder, 1, True).network.build(3, 2).body.to(device).eval()
    passes = rounds * SHARES[0] + (rounds + 1) * SHARES[1] + SHARES[2]
    batch = torch.rand(BATCH, 3, SIZE, SIZE, device=device)
    with torch.no_grad():
        body(batch)
        started = now(device)
        for _ in range(tries := 3):
            body(batch)
        return (now(device) - started) / tries / BATCH * images * passes


def now(device: str) -> float:
    """Return the processor time in seconds, or on a GPU the wall-clock time until the GPU has finished."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def held() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--images", type=int, default=150)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--whole", action="store_true", help="run the reference for all rounds")
    arguments.add_argument("--once", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    if asked.folder:
        rounds = (asked.rounds,) if asked.once == "True" or asked.whole else FEW
        print(json.dumps(measured(asked.folder, rounds, asked.once == "True", asked.device)))
        return 0
    print(f"{asked.images} images, {asked.rounds} rounds, {Compute.choose(asked.device).description}")
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        write_study(Path(place), asked.images)
        found = {}
        for once in (True, False):
            own = [sys.executable, __file__, "--folder", place, "--once", str(once), "--device", asked.device]
            own += ["--rounds", str(asked.rounds), *(["--whole"] if asked.whole else [])]
            done = subprocess.run(own, check=True, capture_output=True, text=True)
            told = json.loads(done.stdout.splitlines()[-1])
            seconds = told["seconds"]
            found[once] = seconds[0] if len(seconds) == 1 else extended(seconds, asked.rounds)
            name = "embeddings kept" if once else "in every pass"
            print(f"{name}: {found[once]:8.2f} s  {told['memory'] / 2**20:6.0f} MiB", flush=True)
        batches = in_batches(Path(place), asked.rounds, asked.images, asked.device)
    print(f"in batches:      {batches:8.2f} s")
    ratio = min(found[False], batches) / found[True]
    print(f"{ratio:.1f} times less time; goal: {LEAST:g}")
    note("embedding: 30 rounds behind a frozen ViT-S" + " on a card" * (asked.device != "cpu"), 1 / ratio)
    return int(ratio < LEAST)


if __name__ == "__main__":
    sys.exit(main())
