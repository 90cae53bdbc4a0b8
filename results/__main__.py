"""Create those files of results/ that compare methods.

    python -m results PAGE... [--write] [--minutes N] [--seeds N] [--cells DIR] [--data DIR] [--shift N]

The program runs the missing runs of the named studies ("all" names every study), and prints the result files of these
studies. With --write, the program writes those files into results/ for which at least three seeds are finished. The
program keeps finished runs under --cells, so that a stopped program continues with the next run. With `--minutes 0`, no
run starts. Each written file states its number of finished seeds. The program exits with 1 if a run is missing or has
failed.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_text
from results import kept, result_files
from results.contrasts import declaration
from results.kept import Kept
from results.making import ROOT, Comparison, Places, comparisons, make
from results.page import REMARK, study
from results.pages import ENSEMBLE, PAGES

FOLDER = result_files.FOLDER
ALL, NONE = "all", "none"
# minimum number of seeds in a file, because fewer seeds would make the file less certain than the stored file
LEAST_SEEDS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results", description="Create the files of results/.")
    names = f"{', '.join(PAGES)}, {ALL}"
    parser.add_argument("pages", nargs="*", default=NONE, choices=[*PAGES, ALL, NONE], metavar="PAGE", help=names)
    parser.add_argument("--write", action="store_true", help="write results/PAGE.csv")
    parser.add_argument("--minutes", type=float, help="start no run after this number of minutes")
    parser.add_argument(
        "--seeds", type=int, help="run at most this number of seeds now (default: all seeds of the page)"
    )
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "results", help="folder for runs")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of real data")
    parser.add_argument(
        "--shift", type=int, help="seed of the shift that is induced in recorded activity (default: that of the page)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="start no run; only print the number of finished runs of a page"
    )
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.minutes, chosen.pages = 0, ["harmofl-synthetic"]
    if NONE in chosen.pages:
        parser.error(f"no such page; choose among: {names}")
    warnings.filterwarnings("ignore")  # torch and MONAI print many warnings
    torch.set_num_threads(1)
    until = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes
    places = Places(chosen.cells.resolve(), chosen.data.resolve())
    whole = True
    for name in PAGES if ALL in chosen.pages else dict.fromkeys(chosen.pages):
        try:
            whole &= _page(name, places, chosen, until)
        except MedsiloError as error:
            print(f"{name}: {error} {error.private}", file=sys.stderr)
            whole = False
    return 0 if whole or chosen.quick else 1


def seeds_done(part: Comparison) -> int:
    return len(part.whole_seeds())


def _page(name: str, places: Places, chosen: argparse.Namespace, until: float | None) -> bool:
    parts = comparisons(name, PAGES[name], places, chosen.shift)
    failures = make(parts, places, until, chosen.seeds)
    file = FOLDER / f"{name}.csv"
    remarks = result_files.header_of(file).get(REMARK, []) if file.exists() else []
    text = study(name, PAGES[name], parts, failures, remarks).text()
    print(text)
    if chosen.write and (fewest := min(filter(None, map(seeds_done, parts)), default=0)) < LEAST_SEEDS:
        print(f"{name}: {fewest} seeds are done; a file needs {LEAST_SEEDS}", file=sys.stderr)
    elif chosen.write:
        file.write_text(text, "utf-8")
        result_files.write_index(FOLDER)
        _keep(name, parts, places)
    return all(cell.summary() for part in parts for cell in part.cells)


def _keep(page: str, parts: Sequence[Comparison], places: Places) -> None:
    for part in parts:
        name = f"{page}-{part.part.name}"
        if name in declaration().sets and seeds_done(part) == part.part.seeds:
            cells = part.compared()
            settings = part.ready(part.settings(places), cells[0].row)
            found = Kept.of(part.part.title, cells, settings, declaration().asks_of(name, ENSEMBLE))
            write_text(kept.FOLDER / f"{name}.csv", found.text())


if __name__ == "__main__":
    sys.exit(main())
