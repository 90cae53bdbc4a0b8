"""Compare methods by AUC and calibration on IMPACT: 15 studies of brain injury, each of which is left out of training
once.

    python -m results.impact [--write] [--data DIR] [--cells DIR] [--at-once N] [--quick]

The program prints the content of results/impact.csv; with --write, the program also writes the file. Predictions are
stored under --cells, so a stopped run continues. The questions in questions.md were declared before the first run.
"""

import argparse
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from medsilo.core.errors import MedsiloError
from results import result_files
from results.flamby import Lines
from results.impact import LEVELS, TRAINING, Work, begin, read
from results.impact.page import study

ROOT = Path(__file__).resolve().parents[2]
FILE = result_files.FOLDER / "impact.csv"


def drawn(studies: int, patients: int) -> Lines:
    draw = random.Random(0)

    def patient(place: int) -> dict[str, object]:
        cells = {name: draw.choice(levels) for name, levels in LEVELS.items()}
        age, part = draw.randint(15, 80), "validation" if place % 5 == 4 else "train"
        return {"age": age, **cells, "outcome": int(draw.random() < 0.1 + 0.006 * age), "part": part}

    return {f"study-{number}": [patient(place) for place in range(patients)] for number in range(studies)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m results.impact", description="Compare methods on IMPACT, with each study left out once."
    )
    parser.add_argument("--write", action="store_true", help="write results/impact.csv")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with impact/impact.csv"
    )
    parser.add_argument("--cells", type=Path, default=ROOT / "runs" / "impact", help="folder for predictions")
    parser.add_argument(
        "--at-once", type=int, default=2, help="number of left-out studies that are computed at the same time"
    )
    parser.add_argument("--quick", action="store_true", help="only test on synthetic patients that the program runs")
    chosen = parser.parse_args(arguments)
    begin()
    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        cells = Path(place, "cells") if chosen.quick else chosen.cells
        try:
            studies = drawn(3, 60) if chosen.quick else read(chosen.data / "impact" / "impact.csv")
        except MedsiloError as error:
            print(error, file=sys.stderr)
            return 1
        work = Work(studies, Path(place, "tables"), TRAINING | ({"rounds": 1} if chosen.quick else {}))
        predict = partial(work.all_of, cells=cells)
        if chosen.quick or chosen.at_once == 1:
            every = [*map(predict, studies)]
        else:
            with ProcessPoolExecutor(chosen.at_once, get_context("spawn"), begin) as pool:
                every = [*pool.map(predict, studies)]
    predictions = dict(zip(studies, every, strict=True))
    found = study(studies, predictions).text()
    if chosen.write and not chosen.quick:
        FILE.write_text(found, "utf-8")
        result_files.write_index()
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
