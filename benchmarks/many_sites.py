"""Measure time, memory and disk of a study for growing numbers of sites, in one process or in NVFlare's simulator.

    python benchmarks/many_sites.py [--engine inprocess|simulator] [--sites 2 8 32 64 144 1000] [--rounds 3] [--large]
    python benchmarks/many_sites.py --engine simulator --sites 144 --rounds 20 --kills 6

The study is FedAvg over a few synthetic activity windows at each site, so that a site's fixed cost dominates. With
--large, a round is one training step of fully connected layers with 29 million parameters, and each case is a row of a
table. Every number of sites is measured in a separate process. Time is processor time in one process, and wall-clock
time in the simulator, whose processes share the cores. In one process, memory is the peak minus the memory at the
start. In the simulator, memory is the peak of all processes together (Linux's PSS). A ratio is the cost per site
divided by the cost per site in the smallest study of the same run.

The option --kills N kills the processes of N sites at random times during a study in the simulator. The study must
continue with the remaining sites, and every round must name the sites that are missing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from timing import note, run

from medsilo.core.parent_watch import most_held
from medsilo.plan import Plan, parse_plan
from medsilo.runs.rounds import Round
from medsilo.site.settings import ALL_MINE, make_settings
from medsilo_lab.engines import inprocess, simulator

GROWTH = (2, 8, 32, 64, 144, 1000)
ROUNDS = 3
SILENCE = 300  # seconds that a site may take for a round if the benchmark kills some sites
LOOK = 1.0  # seconds between two measurements of the processes' memory
HEAD = (
    "| sites | joining and first round, s | each further round, s | end, s | MB | disk, MB |\n|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Cost:
    sites: int
    first: float  # seconds until the end of the first round
    each: float  # seconds of each round after the first
    end: float  # seconds for sending the final model and for testing it
    memory: float  # MB
    disk: float  # MB

    @property
    def row(self) -> str:
        numbers = (f"{number:.2f}" for number in (self.first, self.each, self.end))
        return f"| {self.sites} | {' | '.join(numbers)} | {self.memory:.0f} | {self.disk:.1f} |"

    def beside(self, fewest: "Cost") -> dict[str, float]:
        pairs = {name: (getattr(self, name), getattr(fewest, name)) for name in ("each", "memory", "disk")}
        return {name: own / self.sites * fewest.sites / other for name, (own, other) in pairs.items() if other}


SMALL = {"task": {"name": "synthetic-activity", "persons": 8, "windows": 10}}
LARGE = {
    "task": {"name": "table", "columns": ["x"], "labels": ["0", "1"], "standardise": "none", "partition": {}},
    "network": {"name": "mlp", "hidden": [4096, 4096, 3000], "norm": "none"},
}
LINES = 20


def plan_of(sites: int, rounds: int, large: bool = False, lost: int = 0) -> Plan:
    """Return the plan of a study with `sites` sites, which continues after `lost` sites have stopped."""
    steps = {"local_steps": 1} if large else {}
    losing = {"when_missing": "continue", "minimum": sites - lost, "timeout": SILENCE} if lost else {"timeout": 3600}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            **(LARGE if large else SMALL),
            "training": {"rounds": rounds, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.9, **steps},
            "participation": {"sites": [f"hospital-{place:04}" for place in range(sites)], **losing},
        },
        [],
    )


def cost(engine: str, sites: int, rounds: int, large: bool = False, kills: int = 0) -> Cost:
    clock = time.process_time if engine == "inprocess" else time.monotonic
    plan = plan_of(sites, rounds, large, kills)
    ended = Ended.drawn(plan, kills)
    before, times = most_held(), [clock()]

    def on_round(line: Round) -> None:
        times.append(clock())
        ended.after(line)

    with tempfile.TemporaryDirectory() as place:
        folder, data = Path(place) / "run", {"data": write_lines(Path(place) / "data", sites)} if large else {}
        settings = make_settings({**ALL_MINE, "device": "cpu", **data}, "this benchmark")
        if engine == "inprocess":
            inprocess.run(plan, folder=folder, settings=settings, on_round=on_round)
            memory = most_held() - before
        else:
            with Watch() as watch:
                simulator.run(plan, folder, settings, on_round=on_round)
            memory = watch.most
        times.append(clock())
        ended.tell()
        disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    start, first, *_, last, end = times
    return Cost(sites, first - start, (last - first) / (rounds - 1), end - last, memory / 1e6, disk / 1e6)


def write_lines(folder: Path, sites: int) -> str:
    folder.mkdir()
    lines = (f"p{number},{number % 2},{number % 7}" for number in range(LINES * sites))
    (folder / "cases.csv").write_text("\n".join(["patient,outcome,x", *lines]), "utf-8")
    return str(folder)


@dataclass
class Ended:
    last: dict[str, int]

    @classmethod
    def drawn(cls, plan: Plan, kills: int) -> "Ended":
        """Choose at random which sites to kill and after which round; equal arguments give equal choices."""
        dice = random.Random(0)
        return cls({site: dice.randint(1, plan.rounds - 2) for site in dice.sample(plan.participation.everyone, kills)})

    def after(self, line: Round) -> None:
        gone = {site for site, last in self.last.items() if last < line.round - 1}
        may_be = {site for site, last in self.last.items() if last < line.round}
        missing = set(line.asked) - set(line.answered)
        if not gone <= missing | (set(self.last) - set(line.asked)) or not missing <= may_be:
            sys.exit(f"round {line.round}: {sorted(missing)} are missing, and {sorted(gone)} have ended")
        if line.round not in self.last.values():
            return
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if self.last.get(Path(process.cwd()).name) == line.round:
                    process.kill()

    def tell(self) -> None:
        if self.last:
            told = ", ".join(f"{site} after round {last}" for site, last in sorted(self.last.items()))
            print(f"killed: {told}; the others finished, and every round named the missing sites", file=sys.stderr)


class Watch:
    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            held = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    held += process.memory_full_info().pss
            self.most = max(self.most, held)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("inprocess", "simulator"), default="inprocess")
    parser.add_argument("--sites", type=int, nargs="+", default=GROWTH)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--large", action="store_true", help="use a network of 29 million parameters")
    parser.add_argument("--kills", type=int, default=0, help="number of sites to kill during the study (simulator)")
    parser.add_argument("--row", action="store_true", help="measure in this process, and print only the numbers")
    given = parser.parse_args(arguments)
    if given.kills and (given.engine != "simulator" or given.rounds < 3 or given.kills >= min(given.sites)):
        parser.error("--kills needs --engine simulator, 3 rounds or more, and fewer than --sites")
    if given.row:
        print(json.dumps(asdict(cost(given.engine, given.sites[0], given.rounds, given.large, given.kills))))
        return
    print(HEAD, flush=True)
    found = list[Cost]()
    for sites in given.sites:
        command = [sys.executable, __file__, "--row", "--engine", given.engine, "--sites", str(sites)]
        command += ["--rounds", str(given.rounds), "--kills", str(given.kills), *(["--large"] if given.large else [])]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, env=alone, stdout=subprocess.PIPE, text=True)
        found.append(Cost(**json.loads(done.stdout.splitlines()[-1])))
        print(found[-1].row, flush=True)
    for one in found[1:]:
        ratios = one.beside(found[0])
        print(f"a site of {one.sites}:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        for name, ratio in ratios.items():
            note(f"many sites: {given.engine}, {one.sites}, {name}", ratio)


if __name__ == "__main__":
    run(main, globals(), GROWTH=(2, 3), ROUNDS=2)
