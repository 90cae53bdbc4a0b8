"""Measure the cost of making a data set relative to reading and hashing the same bytes, for images, a table and a
registry.

    python benchmarks/data_sets.py

`scan` lists and hashes the files of a folder; after 20 files have changed, a second scan reads only the changed files.
`read_columns` reads a table as columns. The program compares `scan` and `read_columns` with a loop that reads and
hashes the same bytes. Times are wall-clock times. A scan may take at most 1.5 times the loop's time, and a second scan
may read only the changed files. Reading a table may use at most twice the memory of the table's columns, and scanning
images at most 1 GiB. `read_columns` misses the goal: to parse the text and index the values, pyarrow alone takes four
times as long as hashing. For comparison, the program prints the times of pyarrow and of
`pandas.read_csv(engine="pyarrow")`.

The measurement `registry` is the processor time of whole commands on one table of 16 hospitals. Three rounds of a study
may take at most 8 s; `medsilo data` may take at most 1 s more than starting Python and importing the libraries. The
program compiles Python modules before measuring, because an installation also compiles the modules.
"""

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas
import pyarrow
from pyarrow import csv
from timing import note, run, seconds

from medsilo.site.data_set import files_of, scan
from medsilo.tasks.columns import Columns, read_columns
from medsilo.tasks.sources import DataSource

IMAGES, BYTES, LINES, COLUMNS, CHANGED, PATIENTS = 100_000, 4096, 10_000_000, 6, 20, 40_830
MOST = 1.5


def hashed(paths: list[Path]) -> None:
    for path in paths:
        hashlib.sha256(path.read_bytes()).hexdigest()


def images(folder: Path) -> bool:
    content = np.random.default_rng(0).bytes(BYTES)
    for number in range(IMAGES):
        place = folder / f"{number // 1000:03}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(number.to_bytes(4, "big") + content)
    files = files_of(DataSource(folder=folder))
    loop = min(seconds(lambda: hashed([*files.values()])) for _ in range(2))
    first = min(seconds(lambda: scan(files_of(DataSource(folder=folder)), {})) for _ in range(2))
    known = {own.name: own for own in scan(files, {})}
    for path in [*files.values()][:CHANGED]:
        path.write_bytes(b"another")
    again: list[object] = []
    second = seconds(lambda: again.extend(scan(files, known)))
    other = len({*again} - {*known.values()})
    note("data sets: a scan of images", first / loop)
    print(
        f"{IMAGES} files: loop {loop:.1f} s, scan {first:.1f} s, ratio {first / loop:.2f}; second scan {second:.1f} s,"
    )
    print(f"  {other} files read again; memory {peak():.0f} MiB")
    return first / loop <= MOST and other == CHANGED and peak() <= 1024


def table(folder: Path) -> bool:
    drawn = np.random.default_rng(0)
    folder.mkdir()
    path = folder / "cases.csv"
    block = min(LINES, 100_000)
    texts = [",".join(map(str, row)) for row in drawn.integers(0, 999, (block, COLUMNS)).tolist()]
    with path.open("w") as file:
        file.write(",".join(f"c{number}" for number in range(COLUMNS)) + "\n")
        for _ in range(LINES // block):
            file.write("\n".join(texts) + "\n")
    loop = min(seconds(lambda: hashed([path])) for _ in range(2))
    before, found = peak(), list[Columns]()
    taken = seconds(lambda: found.append(read_columns(path)))
    grown = peak() - before
    used = seconds(lambda: [found[0].column(name) for name in found[0].names])
    indexed = min(seconds(lambda: indices_of(path)) for _ in range(2))
    parsed = min(seconds(lambda: pandas.read_csv(path, engine="pyarrow")) for _ in range(2))
    columns = LINES * COLUMNS * 4 / 2**20  # size of the encoded columns in MiB
    note("data sets: columns of a table", taken / loop)
    ratios = (
        f"ratio {taken / loop:.2f}, of pyarrow's {indexed:.1f} s {taken / indexed:.2f}, of pandas' {taken / parsed:.2f}"
    )
    print(f"{LINES} lines, {path.stat().st_size >> 20} MiB: loop {loop:.1f} s, columns {taken:.1f} s, {ratios};")
    print(f"  all texts {used:.1f} s more; codes take {columns:.0f} MiB, reading grew memory by {grown:.0f} MiB")
    return taken / loop <= MOST and grown <= 2 * columns


def indices_of(path: Path) -> pyarrow.Table:
    kinds = {f"c{number}": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) for number in range(COLUMNS)}
    options = csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
    return csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=options)


def registry(folder: Path) -> bool:
    drawn, (data, study) = np.random.default_rng(0), (folder / "data", folder / "study")
    data.mkdir(parents=True)
    age = drawn.integers(18, 95, PATIENTS)
    columns: dict[str, list[object]] = {"patient_id": [f"P{number}" for number in range(PATIENTS)]}
    columns["hospital"] = [f"clinic-{'ABCDEFGHIJKLMNOP'[place]}" for place in drawn.integers(0, 16, PATIENTS)]
    columns |= {"age": age.tolist(), "sex": drawn.choice(["male", "female"], PATIENTS).tolist()}
    columns |= {f"lab{n}": drawn.normal(50 + n, 10, PATIENTS).round(1).tolist() for n in range(12)}
    columns |= {f"cat{n}": drawn.choice(["low", "medium", "high"], PATIENTS).tolist() for n in range(7)}
    died = drawn.random(PATIENTS) < 1 / (1 + np.exp(-(age - 75) / 10))
    columns["died"] = np.where(died, "yes", "no").tolist()
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (data / "registry.csv").write_text("\n".join(lines))
    processor("-m", "medsilo", "data", str(data), "-o", str(folder / "first"), "--yes")
    start = processor("-c", "import pandas, torch, medsilo.cli")
    made = processor("-m", "medsilo", "data", str(data), "-o", str(folder / "set"), "--yes")
    processor("-m", "medsilo", "init", str(data), "-o", str(study), "--yes", "--no-train", "--device", "cpu")
    given = ("--settings", str(study), "--set", "training.rounds=3", "--engine", "inprocess")
    ran = processor("-m", "medsilo", "run", str(study / "job"), *given, "--out", str(folder / "run"))
    print(
        f"{PATIENTS} lines of 16 hospitals, load {os.getloadavg()[0]:.1f}; seconds of the processor: start {start:.2f},"
    )
    print(f"  start {start:.2f}, data {made - start:.2f} more, three rounds {ran:.2f}")
    return ran <= 8 and made - start <= 1


def processor(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "medsilo-compiled")),
    }
    environment = {**os.environ, **compiled}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


KINDS = {"images": images, "table": table, "registry": registry}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        results = [work(Path(place, name)) for name, work in KINDS.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    run(main, globals(), IMAGES=200, LINES=2000, PATIENTS=1600)
