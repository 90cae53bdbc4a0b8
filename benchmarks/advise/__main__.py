"""The adviser's proof: every method on generated federations, and what the adviser would have said.

    python -m benchmarks.advise [--only made|held_out] [--write] [--minutes N] [--cells DIR]

Runs what is not done, one folder for each run under --cells, and prints docs/results/advise.md, which --write writes
with the tables that it is made from. Stopped at any time, it goes on with the next run. About an hour and a half of one
core. Exits with 1 where something is left or failed.
"""

import argparse
import csv
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks.advise.federations import HELD_OUT, MADE, drawn
from benchmarks.advise.making import SEEDS, Trial
from benchmarks.advise.outcomes import TABLES, Outcome, read_outcomes, write_outcomes
from benchmarks.advise.page import document, tries_of

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {"made": MADE, "held_out": HELD_OUT}
DOCUMENT = ROOT / "docs" / "results" / "advise.md"
TRIES = ROOT / "custom" / "medsilo" / "study" / "adviser.csv"


def main(arguments: list[str] | None = None) -> int:
    """Make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description="The adviser's proof.")
    parser.add_argument("--only", choices=NUMBERS, help="run these; the others stay as their table has them")
    parser.add_argument("--write", action="store_true", help="write the page and the tables")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "advise", help="where runs are kept")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    until = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes
    whole = True
    for use in [chosen.only] if chosen.only else NUMBERS:
        whole &= _run(use, chosen.cells, until, chosen.write)
    made, held = (read_outcomes(path) if path.exists() else [] for path in TABLES.values())
    text = document(made, held)
    print(text)
    if chosen.write:
        DOCUMENT.write_text(text, "utf-8")
        write_tries(made, held, TRIES)
    return 0 if whole else 1


def _run(use: str, cells: Path, until: float | None, write: bool) -> bool:
    """Run these federations, and write their table; returns whether nothing is left."""
    trials = [Trial.of(own, SEEDS[own.kind], cells) for own in map(drawn, NUMBERS[use])]
    for trial in trials:
        for failure in trial.run(until):
            print(failure, file=sys.stderr)
    outcomes = [Outcome.of(trial) for trial in trials]
    if write:
        write_outcomes([one for one in outcomes if one], TABLES[use])
    return all(trial.done for trial in trials)


def write_tries(made: list[Outcome], held: list[Outcome], path: Path) -> None:
    """Write how often each rule was right, for the adviser to tell."""
    rows = tries_of(made, held)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
