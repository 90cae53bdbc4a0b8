"""Measure the cost that medsilo adds to a user's training script: a round's time and the server's memory.

    python -m benchmarks.own_script [small|large|all] [--sites 3,6] [--airlock] [--times 3]
    python -m benchmarks.own_script --start

The reference is NVFlare's `FedAvgRecipe` with the same script, network, sites and polling in the same simulator, and
with PyTorch tensors. The script does not train, so a round's time is the cost of the recipe and of the client API;
federation.py describes the measurement.

A run of medsilo or NVFlare can take 1.5 times as long as another run of the same program. With --times N, medsilo and
NVFlare run N times each, in turn, and all reported numbers are medians.

With --airlock, medsilo's recipe runs the script in an airlock (a sandbox), and the reference is medsilo's recipe
without an airlock. With --airlock, memory is measured in a site's main process, in which no script runs.

With --start, the benchmark measures the seconds until a script's first line, by turns inside and outside of an airlock.
When a process starts its first airlock, the process also tests the machine and looks for Python's folders. The bound
applies to the difference of two medians: the time inside an airlock minus the time outside.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from socket import socketpair
from typing import Any

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe as StockRecipe
from nvflare.client.config import ExchangeFormat

from benchmarks.federation import (
    LARGE,
    OUR_ROUND,
    PARTS,
    POLLING,
    SMALL,
    STOCK_ROUND,
    Outcome,
    Size,
    poll_every,
    simulate,
)
from benchmarks.timing import note, run
from medsilo.airlock.room import CODE, Room, ability, environment
from medsilo.recipes import FedAvgRecipe
from medsilo.site.airlock_settings import RoomSettings

SITES = "3,6"
SIZES = {"small": SMALL, "large": LARGE}
IN_ROOM = 1.05  # maximum ratio of the time inside the airlock to the time outside
# maximum ratios of medsilo to the reference; several runs have a median time ratio of 0.9, from which single runs
# differ by a tenth
MOST_TIME, MOST_MEMORY = 1.0, 1.0
START_MOST = 0.3  # maximum seconds by which an airlock delays a script's first line
STARTS = 15  # number of starts inside an airlock, and number of starts outside
NAME = "own-script"


def recipe_of(make: Callable[..., Any], api: str, size: Size, sites: int, rounds: int, **more: Any) -> Any:
    features = ",".join(map(str, size.features))
    return make(
        name=NAME,
        model=size.unet,
        min_clients=sites,
        num_rounds=rounds,
        train_script=str(PARTS / "script_site.py"),
        train_args=f"--api {api} --features {features} --residual-units {size.residual_units}",
        **more,
    )


def measure(size: Size, sites: int, airlock: bool = False, times: int = 1) -> tuple[Outcome, Outcome]:
    found: tuple[list[Outcome], list[Outcome]] = ([], [])
    for _ in range(times):
        sides = _in_and_out(size, sites) if airlock else _both(size, sites)
        for outcomes, (recipe, mark) in zip(found, sides, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                recipe.export(folder)
                poll_every(POLLING, Path(folder))
                outcomes.append(simulate(Path(folder) / NAME, sites, Path(folder), mark, size.rounds))
    before, after = (Outcome(*map(statistics.median, zip(*map(astuple, outcomes), strict=True))) for outcomes in found)
    return before, after


def _in_and_out(size: Size, sites: int) -> list[tuple[Any, Any]]:
    make = partial(recipe_of, FedAvgRecipe, "medsilo.client", size, sites, size.rounds)
    return [(make(airlock=airlock), OUR_ROUND) for airlock in (False, True)]


def _both(size: Size, sites: int) -> list[tuple[Any, Any]]:
    return [
        # one more round than is measured, because the time of a round ends only when the next round starts
        (
            recipe_of(
                StockRecipe,
                "nvflare.client",
                size,
                sites,
                size.rounds + 1,
                server_expected_format=ExchangeFormat.PYTORCH,
            ),
            STOCK_ROUND,
        ),
        (recipe_of(FedAvgRecipe, "medsilo.client", size, sites, size.rounds), OUR_ROUND),
    ]


def start_in_room(folder: Path, first: bool) -> float:
    started = time.monotonic()
    if first:
        ability.cache_clear()
        environment.cache_clear()
        ability()
    ours, theirs = socketpair()
    room = Room(("python3", "-u", str(CODE / "script.py")), {folder: CODE}, RoomSettings(), 8 << 30, 1)
    with ours, theirs:
        process, writes, _ = room.start(theirs, folder / "log")
        code = process.wait()
        writes.join()
    if code:
        sys.exit((folder / "log").read_text())
    return float((folder / "log").read_text().split()[-1]) - started


def start_outside(folder: Path) -> float:
    started = time.monotonic()
    python = str(Path(sys.executable).with_name("python3"))
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    said = subprocess.check_output([python, "-u", str(folder / "script.py")], env=environment, text=True)
    return float(said) - started


def compare_starts() -> bool:
    holds = True
    print(f"{'':<32} {'outside s':>12} {'room s':>12} {'later by':>9}    (median, slowest)")
    for imported, first in (("time", True), ("time", False), ("torch, time", True)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "script.py").write_text(f"import {imported}\nprint(time.monotonic())\n")
            works = partial(start_outside, folder), partial(start_in_room, folder, first)
            outside, inside = zip(*([work() for work in works] for _ in range(STARTS)), strict=True)
        later = statistics.median(inside) - statistics.median(outside)
        what = f"import {imported}, {'first' if first else 'later'} room"
        sides = (f"{statistics.median(side):.2f} {max(side):.2f}" for side in (outside, inside))
        print("{:<32} {:>12} {:>12} {:>9.2f}".format(what, *sides, later), flush=True)
        note(f"a room: {what}, time", statistics.median(inside) / statistics.median(outside))
        holds &= later <= START_MOST
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--sites", default=SITES)
    parser.add_argument(
        "--airlock", action="store_true", help="compare a script in an airlock (a sandbox) with the same script outside"
    )
    parser.add_argument(
        "--times", type=int, default=1, help="number of runs of medsilo and of the reference; the results are medians"
    )
    parser.add_argument("--start", action="store_true", help="compare the start of a script in an airlock and outside")
    asked = parser.parse_args()
    if asked.start:
        return 0 if compare_starts() else 1
    holds = True
    one, other = ("outside", "room") if asked.airlock else ("stock", "medsilo")
    print(f"{'':<32} {f'{one} s':>9} {other:>8} {'ratio':>6} {f'{one} MB':>10} {other:>8} {'ratio':>6}")
    for name in SIZES if asked.table == "all" else (asked.table,):
        for sites in map(int, asked.sites.split(",")):
            stock, ours = measure(SIZES[name], sites, asked.airlock, asked.times)
            before, after = (own.site_mb if asked.airlock else own.server_mb for own in (stock, ours))
            slower, larger = ours.round_seconds / stock.round_seconds, after / before
            what = "a room" if asked.airlock else "own script"
            note(f"{what}: a {name} round, {sites} sites, time", slower)
            note(f"{what}: a {name} round, {sites} sites, memory", larger)
            seconds = f"{stock.round_seconds:>9.2f} {ours.round_seconds:>8.2f} {slower:>6.2f}"
            memory = f"{before:>10.0f} {after:>8.0f} {larger:>6.2f}"
            print(f"{f'{SIZES[name].title}, {sites} sites':<32} {seconds} {memory}", flush=True)
            most = IN_ROOM if asked.airlock else MOST_TIME
            holds &= slower <= most and larger <= MOST_MEMORY
    return 0 if holds else 1


if __name__ == "__main__":
    run(main, globals(), SIZES={"small": SMALL}, SITES="2", STARTS=2)
