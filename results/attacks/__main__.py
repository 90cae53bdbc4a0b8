"""Simulate attacks by dishonest hospitals on every method and defence, on synthetic tasks in one process.

    python -m results.attacks [--write] [--wide] [--minutes N] [--cells DIR]

The program runs the missing studies, stores each study's result in a file under --cells, and prints
results/attacks.csv. With --write, the program also writes results/attacks.csv. If the program is stopped and started
again, it continues with the next study. With `--minutes 0`, no study runs. The whole program takes about 90 minutes on
one core. The option --wide combines all methods with all attacks and defences, and takes many times as long as the
usual studies. The program exits with 1 if studies are missing, or if the best defence misses the goal against an attack
that is no declared exception.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from results import result_files
from results.attacks.cells import SMALLEST, TABLE, WIDE, cells, kept, result_of
from results.attacks.table import study

ROOT = Path(__file__).resolve().parents[2]
FILE = result_files.FOLDER / "attacks.csv"
SIZES = {"tiny": SMALLEST, "quick": SMALLEST[1:], "table": TABLE, "wide": WIDE}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m results.attacks", description="Simulate attacks by dishonest hospitals."
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="run only a few studies, each of about a second"
    )
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="only test that the program runs"
    )
    size.add_argument(
        "--wide",
        dest="size",
        action="store_const",
        const="wide",
        help="combine all methods with all attacks and all defences",
    )
    parser.add_argument("--write", action="store_true", help="write results/attacks.csv")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "attacks", help="folder for results")
    parser.add_argument("--minutes", type=float, help="number of minutes after which the program starts no study")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # torch and MONAI print many warnings
    torch.set_num_threads(1)
    blocks = SIZES[chosen.size or "table"]
    if chosen.size == "quick":
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            return run_cells(blocks, Path(place), None)
    left = run_cells(blocks, chosen.cells, chosen.minutes)
    found, unnamed = study(blocks, chosen.cells, tiny=chosen.size == "tiny")
    if chosen.write:
        FILE.write_text(found.text(), "utf-8")
        result_files.write_index()
    print(found.text())
    for one in unnamed:
        print(f"missed goal without a declared exception: {one}", file=sys.stderr)
    return 1 if left or unnamed else 0


def run_cells(blocks: tuple, folder: Path, minutes: float | None) -> int:
    """Run the missing studies, and return the number of studies that remain."""
    every, started, left = list(cells(blocks)), time.monotonic(), 0
    for number, cell in enumerate(every, 1):
        over = minutes is not None and time.monotonic() - started >= 60 * minutes
        if over and not kept(cell, folder):
            left += 1
            continue
        result = result_of(cell, folder)
        score = "–" if result.score is None else f"{100 * result.score:.1f}"
        what = f"{cell.setting.title}, {cell.method}, {cell.attack}, {cell.bad} bad, {cell.defence}, seed {cell.seed}"
        print(f"{number}/{len(every)} {what}: {score}", file=sys.stderr, flush=True)
    return left


if __name__ == "__main__":
    sys.exit(main())
