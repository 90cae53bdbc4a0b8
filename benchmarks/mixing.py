"""Measure mixers relative to plain dictionary loops: a round's time and peak memory, for 6, 20 and 100 sites.

    python benchmarks/mixing.py

The loops keep every site's dictionary and iterate over sites and names, in the most direct way. Every measurement runs
in a separate process, and each time is a median. The program needs Linux, because it forks and reads the peak memory
from /proc.

Time: the seconds from the first contribution to the last site's result. All contributions exist before the measurement,
and arrive in sorted order. "reverse": the contributions arrive in reverse order, so that all except the last must wait.
"on the disk": waiting contributions are on the disk, as in a round that exceeds the memory limit. "in files": all
contributions arrive in files, as over NVFlare. Memory: the peak minus the memory at the start; the program creates
contributions one at a time, and keeps all results.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from medsilo.core.mmap_store import stored
from medsilo.core.parent_watch import most_held
from medsilo.mixing import contributions
from medsilo.mixing.aggregators import Identity, SimilarityMix, SoftPull, UniformMean, WeightedMean

Model = dict[str, Tensor]
Round = Callable[[Iterable[Model], int], list[Any]]

SITES = (6, 20, 100)
QUICKLY: list[str] = []
PULL = 0.7
LENET = {
    **{"conv1.weight": (6, 1, 5, 5), "conv1.bias": (6,), "conv2.weight": (16, 6, 5, 5), "conv2.bias": (16,)},
    **{"fc1.weight": (120, 256), "fc1.bias": (120,), "fc2.weight": (84, 120), "fc2.bias": (84,)},
    **{"fc3.weight": (11, 84), "fc3.bias": (11,)},
}
MEDIUM = {f"layer{place:02}.weight": (60 + 5 * place, 256) for place in range(30)}
MEDIUM |= {f"layer{place:02}.bias": (60 + 5 * place,) for place in range(30)}
MODELS: dict[str, dict[str, tuple[int, ...]]] = {"LeNet": LENET, "1 M": MEDIUM}


def make(name: str, value: float) -> Model:
    return {key: torch.full(shape, value) for key, shape in MODELS[name].items()}


def matrix(count: int) -> Tensor:
    weights = torch.rand(count, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return weights / weights.sum(1, keepdim=True)


# -- the loops --------------------------------------------------------------------------------------------------------


def loop_mean(models: Iterable[Model], count: int) -> list[Any]:
    kept = list(models)
    total = sum(range(1, count + 1))
    mean = {name: torch.zeros_like(tensor) for name, tensor in kept[0].items()}
    for place, model in enumerate(kept):
        for name in mean:
            mean[name] += (place + 1) / total * model[name]
    return [mean] * count


def loop_matrix(weights: list[list[float]], models: list[Model]) -> list[Any]:
    results = []
    for row in weights:
        mixed = {name: torch.zeros_like(tensor) for name, tensor in models[0].items()}
        for weight, model in zip(row, models, strict=True):
            for name in mixed:
                mixed[name] += weight * model[name]
        results.append(mixed)
    return results


def loop_similarity(models: Iterable[Model], count: int) -> list[Any]:
    return loop_matrix(matrix(count).tolist(), list(models))


def loop_soft_pull(models: Iterable[Model], count: int) -> list[Any]:
    others = (1 - PULL) / (count - 1)
    weights = [[PULL if i == j else others for j in range(count)] for i in range(count)]
    return loop_matrix(weights, list(models))


def loop_identity(models: Iterable[Model], count: int) -> list[Any]:
    return list(models)


def loop_modules(models: Iterable[Model], count: int) -> list[Any]:
    networks = [network(model) for model in models]
    results = []
    for row in matrix(count).tolist():
        mixed = {}
        for name in LENET:
            total = torch.zeros(LENET[name])
            for weight, site in zip(row, networks, strict=True):
                total += weight * site.state_dict()[name]
            mixed[name] = total
        results.append(mixed)
    return results


def network(model: Model) -> nn.Module:
    layers = {"conv1": nn.Conv2d(1, 6, 5), "norm1": nn.BatchNorm2d(6), "conv2": nn.Conv2d(6, 16, 5)}
    layers |= {"norm2": nn.BatchNorm2d(16), "fc1": nn.Linear(256, 120), "fc2": nn.Linear(120, 84)}
    net = nn.Sequential()
    for name, layer in {**layers, "fc3": nn.Linear(84, 11)}.items():
        net.add_module(name, layer)
    net.load_state_dict(model, strict=False)
    return net


# -- the mixers -------------------------------------------------------------------------------------------------------


def mixed_by(build: Callable[[int], Any], reverse: bool = False) -> Round:
    mixers: dict[int, Any] = {}

    def play(models: Iterable[Model], count: int) -> list[Any]:
        sites = [f"site{place:03}" for place in range(count)]
        aggregator = mixers.get(count) or mixers.setdefault(count, build(count))
        aggregator.start(sites)
        for place, model in enumerate(models):
            turn = count - 1 - place if reverse else place
            aggregator.add(sites[turn], model, turn + 1)
        aggregator.finish()
        return [aggregator.current(site) for site in sites]

    return play


def in_files(play: Round) -> Round:
    filed: dict[tuple[int, int], list[Model]] = {}

    def play_filed(models: Iterable[Model], count: int) -> list[Any]:
        given = list(models)
        size = sum(tensor.nbytes for tensor in given[0].values())
        known = filed.get((count, size))
        if known is None:
            known = filed[count, size] = [dict(zip(model, stored(model.values()), strict=True)) for model in given]
        return play(known, count)

    return play_filed


def on_disk(play: Round) -> Round:
    def play_on_disk(models: Iterable[Model], count: int) -> list[Any]:
        usual, contributions.MEMORY = contributions.MEMORY, 0
        try:
            return play(models, count)
        finally:
            contributions.MEMORY = usual

    return play_on_disk


CASES: dict[str, tuple[Round, Round]] = {
    "WeightedMean": (loop_mean, mixed_by(lambda count: WeightedMean())),
    "WeightedMean, reverse": (loop_mean, mixed_by(lambda count: WeightedMean(), reverse=True)),
    "WeightedMean, reverse, on the disk": (loop_mean, on_disk(mixed_by(lambda count: WeightedMean(), reverse=True))),
    "WeightedMean, reverse, in files": (loop_mean, in_files(mixed_by(lambda count: WeightedMean(), reverse=True))),
    "UniformMean": (loop_mean, mixed_by(lambda count: UniformMean())),
    "SoftPull": (loop_soft_pull, mixed_by(lambda count: SoftPull(PULL))),
    "SimilarityMix": (loop_similarity, mixed_by(lambda count: SimilarityMix(matrix(count)))),
    "SimilarityMix, state_dict() loop": (loop_modules, mixed_by(lambda count: SimilarityMix(matrix(count)))),
    "Identity": (loop_identity, mixed_by(lambda count: Identity())),
}
ROWS = [
    (name, count, case)
    for name in MODELS
    for count in SITES
    for case in CASES
    if name == "LeNet" or "state_dict" not in case
]


# -- measuring --------------------------------------------------------------------------------------------------------


def milliseconds(play: Round, name: str, count: int) -> float:
    """Return the median time of up to five rounds after a warm-up round; long rounds are repeated less often."""
    models = [make(name, float(place)) for place in range(count)]
    taken: list[float] = []
    while len(taken) < 6 and sum(taken) < 800:
        begin = time.perf_counter()
        play(models, count)
        taken.append((time.perf_counter() - begin) * 1000)
    return statistics.median(taken[1:] or taken)


def mebibytes(play: Round, name: str, count: int) -> float:
    play((make("LeNet", 1.0) for _ in range(2)), 2)  # a warm-up round, so that torch's initial memory does not count
    before = most_held()
    results = play((make(name, float(place)) for place in range(count)), count)
    assert len(results) == count
    return (most_held() - before) / 2**20


def in_a_fork(function: Callable[..., float], *arguments: Any) -> float:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(function(*arguments)).encode())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        sys.exit("the measuring process failed: see its error message above")
    return json.loads(text)


def measure(what: str) -> None:
    function = {"time": milliseconds, "memory": mebibytes}[what]
    torch.set_num_threads(1)
    for name, count, case in ROWS:
        print(*(in_a_fork(function, play, name, count) for play in CASES[case]), flush=True)


def measured(what: str) -> list[tuple[float, float]]:
    # Freed memory returns to the system at once, so that heap fragmentation does not change the peak.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if what == "memory":
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, __file__, what, *QUICKLY]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [(float(loop), float(aggregator)) for loop, aggregator in map(str.split, done.stdout.splitlines())]


def main() -> None:
    if sys.argv[1:]:
        measure(sys.argv[1])
        return
    times = measured("time")
    peaks = times if QUICKLY else measured("memory")
    print("| model | sites | mixer | loop ms | mixer ms | faster | loop MiB | mixer MiB | less memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, count, case), (slow, fast), (big, small) in zip(ROWS, times, peaks, strict=True):
        note(f"mixing: {name}, {count} sites, {case}, time", fast / slow)
        note(f"mixing: {name}, {count} sites, {case}, memory", max(small, 0.1) / big)
        print(
            f"| {name} | {count} | {case} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f}x "
            f"| {big:.1f} | {small:.1f} | {big / max(small, 0.1):.1f}x |"
        )


if __name__ == "__main__":
    # imported here, because other benchmarks import this module but do not need the module timing
    from timing import note, run

    run(main, globals(), ROWS=[("LeNet", 2, case) for case in CASES])
