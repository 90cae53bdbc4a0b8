"""Measure AdaFed's costs at the server and at a site, relative to a plain implementation in the same run.

    python benchmarks/adafed.py

The first measurement is mixing, θ_i ← Σ_j w_ij θ_j, for N sites with networks of LeNet5's size. The reference is a
double loop over sites and tensors. For each tensor, the loop looks up a weight in W and the tensor in a `state_dict()`.
Medsilo's time is for a whole round. The server's aggregator receives models one by one, mixes them as rows of a
matrix, and sends the results. The second measurement is the peak memory of a round with N = 20 networks of AlexNet's
size. The peak memory must not exceed the size of N models plus one block of tensors. The program creates models one at
a time, and passes each model to the aggregator. The third measurement compares an evaluation pass that collects
AdaFed's statistics with a plain evaluation pass, for LeNet5 and for the activity network.

Evaluation passes with and without AdaFed's statistics use the same number of threads. Each reported time is the fastest
of several calls. The program exits with 1 if a bound is exceeded. The program needs Linux, because it forks and reads
the peak memory from /proc.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from mixing import in_a_fork
from timing import fastest, fastest_in_turn, note, run
from torch import Tensor, nn

from medsilo.core.parent_watch import most_held
from medsilo.learning.layers import batch_norm_names
from medsilo.learning.statistics import batch_norm_input_statistics
from medsilo.mixing.aggregators import SimilarityMix
from medsilo.mixing.layout import WIDEST
from medsilo.registry import NETWORKS

FASTER = {20: 50.0, 100: 150.0}
SLOWER = 1.3
SITES, REPEATS = 20, 15
SLACK = 64 << 20  # allowance in bytes for torch's internal memory and for the allocator's rounding


def matrix(count: int) -> Tensor:
    weights = torch.rand(count, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return weights / weights.sum(1, keepdim=True)


def shared_names(network: nn.Module) -> list[str]:
    norms = set(batch_norm_names(network))
    return [name for name in network.state_dict() if name not in norms]


def double_loop(networks: list[nn.Module], weights: Tensor, names: list[str]) -> list[dict[str, Tensor]]:
    results = []
    for i in range(len(networks)):
        mixed = {}
        for name in names:
            total = torch.zeros_like(networks[0].state_dict()[name])
            for j, network in enumerate(networks):
                total += weights[i, j] * network.state_dict()[name]
            mixed[name] = total
        results.append(mixed)
    return results


def mixer_round(models: list[dict[str, Tensor]], weights: Tensor) -> list[dict[str, Tensor]]:
    sites = [f"site{place:03}" for place in range(len(models))]
    aggregator = SimilarityMix(weights)
    aggregator.start(sites)
    for site, model in zip(sites, models, strict=True):
        aggregator.add(site, model, 1)
    aggregator.finish()
    return [aggregator.current(site) for site in sites]


def mixing(count: int) -> tuple[float, float]:
    torch.manual_seed(0)
    networks = [NETWORKS["lenet5"]().build(1, 11) for _ in range(count)]
    names = shared_names(networks[0])
    models = [{name: network.state_dict()[name].clone() for name in names} for network in networks]
    weights = matrix(count)
    ours = mixer_round(models, weights)
    plainly = double_loop(networks, weights, names)
    for mine, theirs in zip(ours, plainly, strict=True):
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in names)
    return fastest(lambda: double_loop(networks, weights, names), 1), fastest(lambda: mixer_round(models, weights), 30)


def alexnet_memory() -> tuple[float, float]:
    """Return by how many bytes memory grows in a round at its peak, and the upper bound of this growth."""
    with torch.device("meta"):
        network = NETWORKS["alexnet"]().build(3, 4)
    shapes = {name: network.state_dict()[name].shape for name in shared_names(network)}
    size = sum(shape.numel() for shape in shapes.values()) * 4
    mixer_round([{"x": torch.ones(9)}] * 2, matrix(2))
    before = most_held()
    sites = [f"site{place:03}" for place in range(SITES)]
    aggregator = SimilarityMix(matrix(SITES))
    aggregator.start(sites)
    for place, site in enumerate(sites):
        aggregator.add(site, {name: torch.full(shape, float(place)) for name, shape in shapes.items()}, 1)
    aggregator.finish()
    # received tensors, and their double-precision copies before and after mixing
    block = SITES * WIDEST * (4 + 8 + 8)
    # An arriving model is briefly in memory twice: as it was received, and as a row of the matrix.
    return most_held() - before, SITES * size + size + block


def statistics_pass(name: str, shape: tuple[int, ...], batch: int) -> tuple[float, float]:
    torch.manual_seed(0)
    network = NETWORKS[name]().build(shape[0], 10).eval()
    data = torch.randn(batch * 20, *shape).split(batch)

    @torch.no_grad()
    def plain() -> None:
        for inputs in data:
            network(inputs)

    def ours() -> None:
        batch_norm_input_statistics(network, data, "cpu")

    return fastest_in_turn(plain, ours, REPEATS)


def main() -> int:
    kept = True

    def say(text: str, good: bool) -> None:
        nonlocal kept
        kept = kept and good
        print(f"{text}  {'kept' if good else 'MISSED'}", flush=True)

    for count, bound in FASTER.items():
        slow, fast = in_a_fork(mixing, count)
        ratio = slow / fast
        note(f"adafed: mixing {count} LeNet5", fast / slow)
        say(
            f"mixing {count} LeNet5: loop {slow * 1e3:.0f} ms, mixer {fast * 1e3:.2f} ms, {ratio:.0f}x (at least "
            f"{bound:.0f}x)",
            ratio >= bound,
        )
    used, bound = in_a_fork(alexnet_memory)
    note(f"adafed: mixing {SITES} AlexNet, memory", used / bound)
    say(
        f"mixing {SITES} AlexNet: peak {used / 2**20:.0f} MiB (models, one arriving, a block: {bound / 2**20:.0f} MiB)",
        used <= bound + SLACK,
    )
    for name, shape, batch in (("lenet5", (1, 28, 28), 64), ("activity-cnn", (27, 200), 64)):
        plain, ours = in_a_fork(statistics_pass, name, shape, batch)
        ratio = ours / plain
        note(f"adafed: statistics of {name}", ratio)
        say(
            f"statistics of {name}: pass {plain * 1e3:.1f} ms, with statistics {ours * 1e3:.1f} ms, {ratio:.2f}x (at "
            f"most {SLOWER}x)",
            ratio <= SLOWER,
        )
    return 0 if kept else 1


if __name__ == "__main__":
    # The process keeps freed memory, because returning memory to the system would add random costs.
    if "MALLOC_TOP_PAD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_TOP_PAD_": str(64 << 20)})
    run(main, globals(), FASTER={2: 0.0}, SITES=3, NETWORKS={**NETWORKS, "alexnet": NETWORKS["lenet5"]}, REPEATS=1)
