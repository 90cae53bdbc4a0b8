"""The files of results/ that compare methods.

    python -m results PAGE... [--write] [--minutes N] [--seeds N] [--cells DIR] [--data DIR] [--shift N]

Runs what is not done of these studies ("all": of every one) and prints their files; --write writes those into results/
of which three seeds are done. Runs are kept under --cells, so that it may be stopped at any time and goes on with the
next run; `--minutes 0` runs none. A file always says how much of it is there. Exits with 1 where something is left or
failed.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from medsilo.core.errors import MedsiloError
from results import result_files
from results.making import ROOT, Places, comparisons, make
from results.page import REMARK, study
from results.pages import PAGES
from results.shifts import picture

FOLDER = result_files.FOLDER
PICTURES = ROOT / "docs" / "pictures"
ALL, NONE = "all", "none"
LEAST_SEEDS = 3  # with fewer a file would say less than the one that stands there


def main(arguments: list[str] | None = None) -> int:
    """Make files."""
    parser = argparse.ArgumentParser(prog="python -m results", description="The files of results/.")
    names = f"{', '.join(PAGES)}, {ALL}"
    parser.add_argument("pages", nargs="*", default=NONE, choices=[*PAGES, ALL, NONE], metavar="PAGE", help=names)
    parser.add_argument("--write", action="store_true", help="write results/PAGE.csv")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--seeds", type=int, help="run no more than so many seeds now (default: all of the page)")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "results", help="where runs are kept")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="har_uci and nuclei_he")
    parser.add_argument("--shift", type=int, help="another seed of the shift that is induced in recorded activity")
    parser.add_argument("--quick", action="store_true", help="run nothing: only say how much of a page is there")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.minutes, chosen.pages = 0, ["harmofl-synthetic"]
    if NONE in chosen.pages:
        parser.error(f"which page? {names}")
    warnings.filterwarnings("ignore")  # of torch and MONAI
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


def _page(name: str, places: Places, chosen: argparse.Namespace, until: float | None) -> bool:
    """Run and print one study; returns whether nothing is left to be done."""
    parts = comparisons(name, PAGES[name], places, chosen.shift)
    failures = make(parts, places, until, chosen.seeds)
    file = FOLDER / f"{name}.csv"
    remarks = result_files.header_of(file).get(REMARK, []) if file.exists() else []
    text = study(name, PAGES[name], parts, failures, remarks).text()
    print(text)
    if chosen.write and (fewest := min(len(part.whole_seeds()) for part in parts)) < LEAST_SEEDS:
        print(f"{name}: {fewest} seeds are done; a file is written from {LEAST_SEEDS} on", file=sys.stderr)
    elif chosen.write:
        file.write_text(text, "utf-8")
        result_files.write_index(FOLDER)
        if PAGES[name].parts[0].made_up:
            picture(parts, PICTURES / f"{name}.png")
    return all(cell.summary() for part in parts for cell in part.cells)


if __name__ == "__main__":
    sys.exit(main())
