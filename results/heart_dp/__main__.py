"""Repeat FLamby's heart study under differential privacy, and compare settings that may score higher.

    python -m results.heart_dp [--write] [--minutes N] [--data DIR] [--published FILE] [--cells DIR]

The program runs the missing studies and stores each result in a file under --cells. The program prints the content of
results/heart-dp.csv; with --write, the program also writes this file. A stopped program continues with the next study.
The program takes about half an hour on one free core. The program exits with 1 if a goal is missed or a study is
missing.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from results import result_files
from results.heart_dp.cells import OPEN, PUBLISHED, published, result_of
from results.heart_dp.data import read
from results.heart_dp.federation import Setup, run
from results.heart_dp.page import read_published, study
from tests.patients import write_hearts

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
FILE = result_files.FOLDER / "heart-dp.csv"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m results.heart_dp", description="Run the heart study under differential privacy."
    )
    parser.add_argument("--write", action="store_true", help="write results/heart-dp.csv")
    parser.add_argument(
        "--minutes", type=float, help="number of minutes after which no study of the published table starts"
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "heart_uci", help="folder with UCI's four files")
    parser.add_argument("--published", type=Path, default=SHARED / "published" / "flamby_dp_heart.csv")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "heart-dp", help="folder for results")
    parser.add_argument("--quick", action="store_true", help="only test on synthetic patients that the program runs")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if chosen.quick:
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            write_hearts(Path(place, "hearts"))
            print(run(read(Path(place, "hearts")), Setup(rounds=1, steps=1), OPEN, 42))
        return 0
    hospitals, started = read(chosen.data), time.monotonic()
    for cell in (cell for promise in PUBLISHED for cell in published(promise)):
        if chosen.minutes is None or time.monotonic() - started < 60 * chosen.minutes:
            result_of(cell, hospitals, chosen.cells)
    found, met = study(hospitals, read_published(chosen.published), chosen.cells)
    if chosen.write:
        FILE.write_text(found.text(), "utf-8")
        result_files.write_index()
    print(found.text())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
