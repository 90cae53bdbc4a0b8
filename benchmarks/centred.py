"""A control for HarmoFL's mean of each channel on nuclei: every picture loses its own mean before anybody trains.

    python -m benchmarks.centred --data DATA --out runs/centred [--seeds 0,1,2] [--quick]

FedAvg and training alone on such pictures, under the terms of docs/results/harmofl-nuclei.md; the comparison's own page
lies in the folder. Nothing is shared and nothing is learned of other hospitals: what these rows gain, HarmoFL's mean of
each channel cannot be needed for. DATA holds nuclei_he.
"""

import argparse
import sys
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
from torch import Tensor

from medsilo.cli import main as medsilo
from medsilo_papers.public_files import PictureTask

ROWS = ("local", "FedAvg: algorithm.name=fedavg algorithm.weighting=uniform")
plain = PictureTask.inputs_of


def centred(task: PictureTask, values: np.ndarray) -> Tensor:
    """Return the picture without the mean of each of its channels."""
    picture = plain(task, values)
    return picture - picture.mean((2, 3), keepdim=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison on centred pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.centred", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--quick", action="store_true", help="one round, three folds, pictures of 32: to see that it runs"
    )
    given = parser.parse_args(arguments)
    size, rounds, folds = (32, 1, 3) if given.quick else (64, 12, 5)
    rows = [part for row in ROWS[1:] for part in ("--row", row)]
    command = [
        "compare",
        "--plan",
        "jobs/harmofl/plans/nuclei-small.yaml",
        "--seeds",
        given.seeds,
        "--folds",
        str(folds),
    ]
    command += [
        "--engine",
        "inprocess",
        "--at-once",
        "1",
        "--device",
        "cpu",
        "--against",
        "FedAvg",
        "--primary",
        "mean",
    ]
    command += ["--set", f"task.size={size}", "--set", f"training.rounds={rounds}", "--methods", ROWS[0], *rows]
    with patch.object(PictureTask, "inputs_of", centred):
        return medsilo([*command, "--data", f"{given.data}/nuclei_he", "--out", given.out])


if __name__ == "__main__":
    sys.exit(main())
