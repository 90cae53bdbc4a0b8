"""Run FLamby's published tables again, and compare each cell with the published cell.

    python -m results.flamby --data DATA [--seeds 42,43,44,45,46]

A cell agrees with the published cell if the means over seeds differ by at most two standard errors of this difference.
The program exits with 1 if a cell disagrees with the published cell. With one seed, no cell is judged, because one
value has no standard deviation. The program takes minutes. The program downloads no data: DATA must contain the folders
of the sets.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medsilo.core.errors import MedsiloError
from results.flamby import HEADS, HEART, compare
from tests.patients import write_hearts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.flamby", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", default="42,43,44,45,46", help="seeds (default: the published seeds)")
    parser.add_argument("--quick", action="store_true", help="only test on synthetic patients that the program runs")
    given = parser.parse_args(arguments)
    if given.quick:
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            write_hearts(Path(place, HEART.folder))
            short = replace(HEART, rounds=1, rates=dict([*HEART.rates.items()][:1]), personal=())
            print(*compare(Path(place), [42], print, [short]), sep="\n")
        return 0
    try:
        cells = list(compare(given.data, [int(seed) for seed in given.seeds.split(",")], print))
    except MedsiloError as error:
        print(error, file=sys.stderr)
        return 1
    rows = [HEADS, *(cell.row() for cell in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    judged = [cell for cell in cells if cell.judged]
    agree = sum(cell.agrees for cell in judged)
    print(f"{agree} of {len(judged)} cells are within two standard errors")
    if len(judged) < len(cells):
        print(
            f"{len(cells) - len(judged)} are not judged: one seed has no standard deviation; give two --seeds or more"
        )
    return 0 if agree == len(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
