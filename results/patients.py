"""FLamby's two tables of patients.

A fifth of each hospital's training cases of heart disease validate; TCGA-BRCA has too few deaths for that.
"""

from pathlib import Path

from medsilo.core.errors import DataError
from results.flamby import HEART, TABLES, Lines, write_tables

EACH = 5  # of so many training cases, as they stand, one validates


def validated(lines: Lines) -> Lines:
    """Return the lines with every fifth training case of a hospital for validation."""
    found: Lines = {}
    for site, own in lines.items():
        trained = [place for place, line in enumerate(own) if line["part"] == "train"]
        held = set(trained[EACH - 1 :: EACH])
        found[site] = [line | {"part": "validation"} if place in held else line for place, line in enumerate(own)]
    return found


def write_patients(source: Path, target: Path) -> Path:
    """Write the hospitals' tables of the set that lies in `source`, and return their folder."""
    benchmark = next(one for one in TABLES if one.folder == source.name)
    if lacking := benchmark.lacking(source.parent):
        raise DataError(f"no {', '.join(lacking)} in the data folder; --data names the folder with {source.name}")
    if not target.exists():
        lines = benchmark.read(source)
        write_tables(validated(lines) if benchmark is HEART else lines, target)
    return target
