"""Measure the cost of each defence at the server, relative to the plain mean in the same run.

Five hospitals send a U-Net's weights; every measurement runs in a separate process. The reported time is the fastest
processor time of several rounds, from the first contribution to the result. The reported memory is the increase of the
process's peak during a round; the program creates contributions one at a time. The program needs Linux, because it
forks and reads the peak memory from /proc.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.mixing import in_a_fork
from medsilo.core.files import write_json
from medsilo.core.parent_watch import most_held
from medsilo.core.tensors import Tensors
from medsilo.mixing.aggregators import Aggregator, WeightedMean
from medsilo.mixing.robust import AggregationSettings
from medsilo.models.architectures import UNet
from results.attacks.cells import DEFENCES, PLAIN, SITES

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 5
LARGE, SMALL = (32, 64, 128, 256, 512), (4, 8)  # numbers of features of the large and the small U-Net


@dataclass(frozen=True)
class Cost:
    """The processor time and the peak memory that a defence needs at the server, divided by those of the plain mean."""

    defence: str
    seconds: float
    memory: float


def kept_costs(folder: Path, tiny: bool) -> list[Cost]:
    """Return the stored measurements; without any, measure in a separate process."""
    file = folder / "costs.json"
    if not file.exists():
        # Freed memory returns to the system at once, so that heap fragmentation does not change the peak.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "results.attacks.costs", *(["--tiny"] if tiny else [])]
        done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        write_json(file, json.loads(done.stdout))
    return [Cost(**values) for values in json.loads(file.read_text("utf-8"))]


def costs(features: tuple[int, ...], repeats: int) -> list[Cost]:
    UNet(features=SMALL).build(1, 2)  # imports MONAI once, before the processes start
    found = {
        name: (in_a_fork(seconds_of, name, features, repeats), in_a_fork(bytes_of, name, features)) for name in DEFENCES
    }
    plain = found[PLAIN]
    return [Cost(name, seconds / plain[0], held / (plain[1] or 1)) for name, (seconds, held) in found.items()]


def seconds_of(defence: str, features: tuple[int, ...], repeats: int) -> float:
    """Return the processor time of a round in seconds; other processes hardly change this time."""
    torch.set_num_threads(1)
    sent = list(models(features))
    a_round(defence, features, iter(sent))  # a warm-up round
    times = []
    for _ in range(repeats):
        began = time.process_time()
        a_round(defence, features, iter(sent))
        times.append(time.process_time() - began)
    return min(times)


def bytes_of(defence: str, features: tuple[int, ...]) -> int:
    torch.set_num_threads(1)
    # a warm-up round that does not count, because torch takes memory at its first use
    a_round(defence, SMALL, models(SMALL))
    before = most_held()
    a_round(defence, features, models(features))
    return most_held() - before


def a_round(defence: str, features: tuple[int, ...], sent: Iterator[Tensors]) -> Tensors:
    aggregator = aggregator_of(defence, features)
    aggregator.start(SITES)
    for site, tensors in zip(SITES, sent, strict=True):
        aggregator.add(site, tensors, 1)
    aggregator.finish()
    return aggregator.current(SITES[0])


def models(features: tuple[int, ...]) -> Iterator[Tensors]:
    """Yield the hospitals' models one by one, so that only one model exists at a time."""
    torch.manual_seed(0)
    given = UNet(features=features).build(1, 2).state_dict()
    for _ in SITES:
        yield {
            name: tensor + 0.01 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor.clone()
            for name, tensor in given.items()
        }


def aggregator_of(defence: str, features: tuple[int, ...]) -> Aggregator:
    with torch.device("meta"):
        apart = [name for name, _ in UNet(features=features).build(1, 2).named_buffers()]
    aggregator = WeightedMean()
    shield = AggregationSettings.model_validate(DEFENCES[defence].mixing).shield(frozenset(apart))
    if shield:
        aggregator.defend(shield)
    return aggregator


if __name__ == "__main__":
    size = (SMALL, 1) if {"--tiny", "--quick"} & {*sys.argv} else (LARGE, REPEATS)
    print(json.dumps([asdict(cost) for cost in costs(*size)]))
