"""The cost of medsilo around a training script of one's own: a round's time and the server's memory.

    python -m benchmarks.own_script [small|large|all] [--sites 3,6]

Reference: NVFlare's `FedAvgRecipe` with the same script, network, sites, and polling in the same simulator, tensors as
torch has them. The script does not train: what is left is what a recipe and a client API add to a round. How both are
measured: federation.py.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
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
from medsilo.recipes import FedAvgRecipe

SITES = "3,6"
SIZES = {"small": SMALL, "large": LARGE}
MOST_TIME, MOST_MEMORY = 1.05, 1.0
NAME = "own-script"


def recipe_of(make: Callable[..., Any], api: str, size: Size, sites: int, rounds: int, **more: Any) -> Any:
    """Return a recipe of the benchmark's script."""
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


def measure(size: Size, sites: int) -> tuple[Outcome, Outcome]:
    """Return NVFlare's cost and medsilo's."""
    sides: list[tuple[Any, Any]] = [
        # its last round has no next whose start would end it
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
    found = []
    for recipe, mark in sides:
        with tempfile.TemporaryDirectory() as folder:
            recipe.export(folder)
            poll_every(POLLING, Path(folder))
            found.append(simulate(Path(folder) / NAME, sites, Path(folder), mark, size.rounds))
    return found[0], found[1]


def main() -> int:
    """Print the table; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--sites", default=SITES)
    asked = parser.parse_args()
    holds = True
    print(f"{'':<32} {'stock s':>8} {'medsilo':>8} {'ratio':>6} {'stock MB':>9} {'medsilo':>8} {'ratio':>6}")
    for name in SIZES if asked.table == "all" else (asked.table,):
        for sites in map(int, asked.sites.split(",")):
            stock, ours = measure(SIZES[name], sites)
            slower, larger = ours.round_seconds / stock.round_seconds, ours.server_mb / stock.server_mb
            note(f"own script: a {name} round, {sites} sites, time", slower)
            note(f"own script: a {name} round, {sites} sites, memory", larger)
            seconds = f"{stock.round_seconds:>8.2f} {ours.round_seconds:>8.2f} {slower:>6.2f}"
            memory = f"{stock.server_mb:>9.0f} {ours.server_mb:>8.0f} {larger:>6.2f}"
            print(f"{f'{SIZES[name].title}, {sites} sites':<32} {seconds} {memory}", flush=True)
            holds &= slower <= MOST_TIME and larger <= MOST_MEMORY
    return 0 if holds else 1


if __name__ == "__main__":
    run(main, globals(), SIZES={"small": SMALL}, SITES="2")
