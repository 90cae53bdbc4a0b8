"""Measure the seconds and memory of a differentially private training step, relative to a plain step with the same
network, batch and optimizer.

    python benchmarks/privacy.py

The private step runs on one thread; it computes and clips the gradients of single cases, adds secret noise, and samples
cases by patient. The goal is that a private step takes at most as long as 2.5 plain steps, for two networks: the small
CNN and the slices' U-Net.
"""

import ctypes
import gc
import warnings
from collections.abc import Callable, Mapping

import torch
from timing import fastest_in_turn, note, run
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.parent_watch import forget_most, most_held
from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, TrainStep, train_step
from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.models.architectures import SmallCnn, UNet
from medsilo.privacy.noise import NoiseSource

MOST = 2.5
REPEATS = 15
CASES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small-cnn, 48 x 48": (lambda: SmallCnn(norm="group").build(3, 2), (16, 3, 48, 48)),
    "small-cnn, 96 x 96": (lambda: SmallCnn(norm="group").build(3, 2), (32, 3, 96, 96)),
    "unet, 64 x 64": (lambda: UNet(norm="instance").build(1, 2), (16, 1, 64, 64)),
    "unet, 128 x 128": (lambda: UNet(norm="instance", features=(16, 32, 64, 128)).build(1, 2), (16, 1, 128, 128)),
}


def train_steps(model: nn.Module, cases: int) -> dict[str, TrainStep]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    secret = NoiseSource()
    sample = PoissonSample([str(case // 2) for case in range(cases)], cases, cases, secret)
    sample.owners = torch.arange(cases) // 2
    private = PrivateSteps(sample, 1.0, 1.0, secret)
    return {
        "plain": train_step(model, OutputLoss(functional.cross_entropy), optimizer, Compute()),
        "private": private.train_step(model, functional.cross_entropy, optimizer),
    }


def batch(model: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = model(inputs[:1])
    return inputs, torch.randint(0, 2, (shape[0], *outputs.shape[2:]), generator=torch.Generator().manual_seed(1))


def compare(name: str) -> tuple[dict[str, float], dict[str, float]]:
    build, shape = CASES[name]
    model = build()
    inputs, targets = batch(model, shape)
    ways = train_steps(model, shape[0])
    memory = {way: peak(lambda learn=learn: learn(inputs, targets)) for way, learn in ways.items()}
    plain, private = (lambda learn=learn: learn(inputs, targets) for learn in ways.values())
    seconds = dict(zip(ways, fastest_in_turn(plain, private, REPEATS), strict=True))
    return seconds, memory


def peak(work: Callable[[], object]) -> float:
    work()
    gc.collect()
    # returns freed memory to the system at once, because reused memory would be missing from the measurement
    ctypes.CDLL(None).malloc_trim(0)
    forget_most()
    before = most_held()
    work()
    return max(0.0, (most_held() - before) / 2**20)


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{'network, batch':<34} {'plain':>8} {'private':>8} {'ratio':>6} {'MiB':>6} {'MiB':>6}")
    fine = True
    for name, (_, shape) in CASES.items():
        seconds, memory = compare(name)
        ratio = seconds["private"] / seconds["plain"]
        fine &= ratio <= MOST
        note(f"privacy: a private step, {name}", ratio)
        times = f"{1000 * seconds['plain']:>8.1f} {1000 * seconds['private']:>8.1f} {ratio:>6.2f}"
        print(f"{name + ', ' + str(shape[0]) + ' cases':<34} {times} {memory['plain']:>6.0f} {memory['private']:>6.0f}")
    print("fine" if fine else f"missed: a private step takes more than {MOST} plain ones")
    return 0 if fine else 1


if __name__ == "__main__":
    run(main, globals(), REPEATS=1, CASES=dict(list(CASES.items())[:1]))
