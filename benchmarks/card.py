"""Measure training on a GPU relative to plain PyTorch and MONAI on the same GPU, in one run.

    python benchmarks/card.py [--device cuda] [--only NAME ...]

Each measurement alternates between medsilo and the reference. The program waits for the GPU before it reads the clock,
and uses the fastest repetition.

- loop: images per second at which the engine's loop and MONAI's tutorial loop train a U-Net on images in memory.
  MONAI's tutorial loop reads the loss after every batch, and therefore waits for the GPU. With the same order of
  summation, the engine's loop must be as fast as the tutorial loop.
- busy: the fraction of an epoch in which the GPU computes, and the GPU's slowest operations.
- harmofl: AmplitudeNorm's milliseconds per batch, AmplitudeNorm's time relative to a training step, and a perturbed
  step's time relative to a plain step.
- fedsm: the training time of a site in a FedSM round, relative to three separate passes.
- volumes: an epoch with augmentation on patches of volumes that are read from files, as in benchmarks/volumes.py.
- memory: the memory of a process after CUDA has started, and whether CUDA starts under a memory limit.

`python -m benchmarks.nnunet --device cuda` measures nnU-Net's epoch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from monai.losses import DiceCELoss
from timing import fastest, fastest_in_turn, run, seconds
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, batches, train_epoch, train_step
from medsilo.learning.perturbation import PerturbedOptimizer
from medsilo.models.architectures import UNet
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.objective import Objective

# number of cases, batch size and image shape
SHAPES = {"2-D": (256, 16, (3, 256, 256)), "3-D": (24, 2, (1, 96, 96, 96))}
FEATURES = (32, 64, 128, 256)
TURNS = 3
SITES = ["hospital-a", "hospital-b", "hospital-c"]
LIMITS = (1024, 2048, 4096, 8192)  # MiB
PIECES = {"patients": 12, "grid": (48, 144, 144), "piece": (32, 96, 96)}
Figures = dict[str, Any]


def waited(work: Callable[[], object], device: str) -> Callable[[], None]:
    def whole() -> None:
        work()
        if device != "cpu":
            torch.cuda.synchronize()

    return whole


def plan_of(method: str, task: dict[str, Any], **sections: Any) -> Plan:
    values = {"algorithm": {"name": method}, "task": task, "participation": {"sites": SITES}, **sections}
    return parse_plan(values)


def goal_of_masks() -> Objective:
    return plan_of("fedavg", {"name": "synthetic-prostate"}).task.goal


def network_of(shape: tuple[int, ...], norm: str = "instance") -> nn.Module:
    """Return a U-Net with the same weights at every call."""
    torch.manual_seed(0)
    return UNet(features=FEATURES, dimensions=len(shape) - 1, norm=norm).build(shape[0], 2)  # type: ignore[arg-type]


def data_of(cases: int, shape: tuple[int, ...]) -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.rand(cases, *shape, generator=drawn)
    return TensorDataset(inputs, (inputs[:, 0] > 0.5).long())


# ---------------------------------------------------------------------------------------------------- the loop
@contextmanager
def sums(order: str) -> Iterator[None]:
    """Choose how deterministic sums are: not at all, in cuDNN only, or in both cuDNN and torch."""
    before = torch.backends.cudnn.deterministic, torch.get_deterministic_debug_mode()
    torch.backends.cudnn.deterministic = order != "any order"
    torch.set_deterministic_debug_mode("warn" if order == "one order" else "default")
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before[0]
        torch.set_deterministic_debug_mode(before[1])
        memory.fill_uninitialized_memory = True


def loop(device: str) -> Figures:
    goal, found = goal_of_masks(), {}
    for name, (cases, batch, shape) in SHAPES.items():
        data = data_of(cases, shape)
        for precision in ("float32", "bfloat16"):
            compute = Compute.choose(device, precision=precision)
            ours, plain = engine(data, batch, shape, compute, goal), tutorial(data, batch, shape, compute)
            own: Figures = {}
            for order in ("any order", "cuDNN in one order", "one order"):
                with sums(order):
                    taken = fastest_in_turn(waited(ours, device), waited(plain, device), TURNS)
                own[order] = dict(zip(("medsilo", "monai"), (round(cases / one, 1) for one in taken), strict=True))
                own[order]["ratio"] = round(taken[1] / taken[0], 3)

            def answer(ours: Callable[[], object] = ours, compute: Compute = compute) -> None:
                with compute.reproducible(0):
                    ours()

            own["a site's answer"] = round(cases / fastest(waited(answer, device), TURNS), 1)
            last = engine(data, batch, shape, compute, goal, channels_last=True)
            with sums("one order"):
                own["channels last, one order"] = round(cases / fastest(waited(last, device), TURNS), 1)
            own["reading alone"] = round(cases / fastest(waited(reading(data, batch, compute), device), TURNS), 1)
            found[f"{name} {precision}"] = own
    return found


def reading(data: TensorDataset, batch: int, compute: Compute) -> Callable[[], object]:
    return lambda: [len(inputs) for inputs, _ in batches(data, batch, compute, torch.Generator().manual_seed(0))]


def busy(device: str) -> Figures:
    """Return the seconds of a float32 epoch, the seconds in which the GPU computes, and the milliseconds of the GPU's
    slowest operations.
    """
    from torch.autograd import DeviceType
    from torch.profiler import profile

    goal, found = goal_of_masks(), {}
    for name, (cases, batch, shape) in SHAPES.items():
        data, compute = data_of(cases, shape), Compute.choose(device)
        sides = {"medsilo": engine(data, batch, shape, compute, goal), "monai": tutorial(data, batch, shape, compute)}
        for order in ("any order", "one order"):
            for side, work in sides.items():
                with sums(order):
                    whole = fastest(waited(work, device), 1)
                    with profile() as seen:
                        waited(work, device)()
                own = {each.key[:60]: each for each in seen.key_averages() if each.device_type == DeviceType.CUDA}
                longest = sorted(own, key=lambda key: -own[key].self_device_time_total)[:6]
                found[f"{name}, {side}, {order}"] = {
                    "epoch s": round(whole, 3),
                    "card s": round(sum(each.self_device_time_total for each in own.values()) / 1e6, 3),
                    "longest, ms": {key: round(own[key].self_device_time_total / 1e3, 1) for key in longest},
                }
    return found


def engine(
    data: TensorDataset,
    batch: int,
    shape: tuple[int, ...],
    compute: Compute,
    objective: Objective,
    channels_last: bool = False,
) -> Callable[[], object]:
    memory: Any = {3: torch.channels_last, 4: torch.channels_last_3d}[len(shape)]
    network: Any = network_of(shape).to(compute.device)
    network = network.to(memory_format=memory) if channels_last else network
    learn = train_step(network, OutputLoss(objective.loss), torch.optim.Adam(network.parameters(), 1e-4), compute)

    def epoch() -> None:
        cases = batches(data, batch, compute, torch.Generator().manual_seed(0))
        if channels_last:
            cases = ((inputs.to(memory_format=memory), labels) for inputs, labels in cases)
        train_epoch(cases, [learn], compute)

    return epoch


def tutorial(data: TensorDataset, batch: int, shape: tuple[int, ...], compute: Compute) -> Callable[[], object]:
    network = network_of(shape).to(compute.device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-4)
    criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)
    loader = DataLoader(data, batch_size=batch, shuffle=True, pin_memory=compute.device.type == "cuda")

    def epoch() -> None:
        network.train()
        for inputs, labels in loader:
            inputs, labels = inputs.to(compute.device), labels.to(compute.device)
            optimizer.zero_grad()
            with compute.cast():
                loss = criterion(network(inputs), labels[:, None])
            loss.backward()
            optimizer.step()
            loss.item()

    return epoch


# ---------------------------------------------------------------------------------------------------- HarmoFL
def harmofl(device: str) -> Figures:
    found: Figures = {}
    for name, (_, batch, shape) in SHAPES.items():
        images = torch.rand(batch, *shape, device=device)
        network = network_of(shape, "batch").to(device).train()
        base = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
        perturbed = PerturbedOptimizer(base, 0.05, module=network)

        def closure(network: nn.Module = network, base: Any = base, images: torch.Tensor = images) -> torch.Tensor:
            base.zero_grad()
            loss = network(images).square().mean()
            loss.backward()
            return loss.detach()

        def plain(closure: Any = closure, base: Any = base) -> None:
            for _ in range(10):
                closure()
                base.step()

        def double(closure: Any = closure, perturbed: PerturbedOptimizer = perturbed) -> None:
            for _ in range(10):
                perturbed.step(closure)

        one, two = fastest_in_turn(waited(plain, device), waited(double, device), TURNS)
        own: Figures = {"step ms": one * 100, "perturbed step ms": two * 100, "perturbed / plain": two / one}
        for band in (None, 0.0):
            norm = AmplitudeNorm(shape, band=band).to(device).train()

            def normed(norm: AmplitudeNorm = norm, images: torch.Tensor = images) -> None:
                for _ in range(10):
                    norm(images)

            work = waited(normed, device)
            work()
            taken = min(seconds(work) for _ in range(TURNS))
            which = "all" if band is None else "mean"
            own |= {f"amplitude {which} ms": taken * 100, f"amplitude {which} / step": taken / one}
        found[name] = {key: round(value, 3) for key, value in own.items()}
    return found


# ---------------------------------------------------------------------------------------------------- FedSM, volumes
def fedsm(device: str) -> Figures:
    """Return the seconds of a FedSM round with one pass over the data, and of a round with three separate passes."""
    import fedsm as context

    if device == "cpu":
        return {"skipped": "python benchmarks/fedsm.py time"}
    apart, together, _ = context.training_time("slices", False, device)
    return {"three passes s": round(apart, 3), "round s": round(together, 3), "ratio": round(together / apart, 3)}


def volumes(device: str) -> Figures:
    import volumes as context

    size, found = context.Size(**PIECES), {}
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        pairs = context.hospitals(Path(place), size, device)
        for name in ("training", "round"):
            taken = [[0.0, 0.0] for _ in range(TURNS + 1)]
            for turn in taken:
                for pair in pairs:
                    for side in (0, 1):
                        turn[side] += seconds(waited(pair[side][name], device))
            ours, plain = (min(side) for side in zip(*taken[1:], strict=True))
            found[name] = {"medsilo s": round(ours, 3), "monai s": round(plain, 3), "ratio": round(plain / ours, 3)}
    return found


def whole_round(device: str) -> Figures:
    from tests.sites import site_of

    task = {"name": "synthetic-prostate", "patients": 24, "slices": 10, "size": 128}
    network = {"name": "unet", "features": list(FEATURES)}
    training = {"rounds": 100, "batch_size": 16, "optimizer": "adam", "learning_rate": 0.0001}
    found = {}
    for method in ("fedavg", "harmofl", "fedsm"):
        plan, sites = plan_of(method, task, network=network, training=training), SITES
        with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
            settings = SiteSettings(device=device, public_data=True)
            site = site_of(plan, sites[0], sites, settings, Path(place, "run", "sites", sites[0]))
            trainer, phase = site.participant.trainer, plan.course.phase_of(1)

            def train(trainer: Any = trainer, phase: Any = phase, site: Any = site) -> None:
                with site.participant.state.compute.reproducible(0):
                    trainer.work(1, phase, lambda: None)

            work = waited(train, device)
            work()
            taken = min(seconds(work) for _ in range(TURNS))
            found[method] = {"cases": trainer.samples, "train s": round(taken, 3)}
            found[method]["cases/s"] = round(trainer.samples / taken, 1)
    return found


# ---------------------------------------------------------------------------------------------------- memory
BEGINS = """
import resource, sys
import torch
limit = int(sys.argv[1]) << 20
def held(): return {line.split(":")[0]: int(line.split()[1]) >> 10 for line in open("/proc/self/status")
                    if line.startswith(("VmData", "VmSize", "VmRSS"))}
before = held()
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
device = sys.argv[2]
x = torch.rand(8, 3, 64, 64, device=device)
layer = torch.nn.Conv2d(3, 8, 3).to(device)
layer(x).sum().backward()
torch.linalg.vector_norm(x.flatten(1) @ x.flatten(1).T).item()
if device != "cpu": torch.empty(1 << 26).pin_memory()
print(dict(before=before, after=held()))
"""


def memory(device: str) -> Figures:
    """Return a process's memory in MiB before and after CUDA starts, once without a memory limit and once under each
    limit.
    """
    found = {}
    for limit in (0, *LIMITS):
        command = [sys.executable, "-c", BEGINS, str(limit), device]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        found[str(limit or "none")] = done.stdout.strip() if done.returncode == 0 else f"{done.returncode}: {last}"
    return found


def place_of(device: str) -> Figures:
    told = Compute.choose(device).description
    return {"device": told, "torch": torch.__version__, "cores": os.cpu_count()}


PARTS: dict[str, Callable[[str], Figures]] = {
    "place": place_of,
    "memory": memory,
    "harmofl": harmofl,
    "loop": loop,
    "busy": busy,
    "rounds": whole_round,
    "fedsm": fedsm,
    "volumes": volumes,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    chosen = arguments.parse_args()
    failed = 0
    for name in chosen.only:
        try:
            found = PARTS[name](chosen.device)
        except Exception as error:
            failed, found = 1, {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({name: found}), flush=True)
    return failed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run(
        main,
        globals(),
        SHAPES={"2-D": (8, 4, (3, 32, 32)), "3-D": (4, 2, (1, 16, 16, 16))},
        FEATURES=(4, 8),
        TURNS=1,
        LIMITS=(4096,),
        PIECES={"patients": 5, "grid": (20, 24, 24), "piece": (16, 16, 16)},
    )
