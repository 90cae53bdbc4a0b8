"""Read a table of a hospital, CSV or Parquet, line by line: bounded, and believing nothing of it."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from medsilo.core.errors import DataError
from medsilo.tasks.listing import plain

MOST_BYTES = 2**30  # of a file
MOST_LINES = 1_000_000
MOST_COLUMNS = 20_000
MOST_CHARACTERS = 2**22  # of a line
MOST_CELLS = 2**28  # of the columns that are read
LONGEST = 1000  # characters of a cell
PARQUET = (".parquet", ".pq")
TOO_MANY = f"the table has more than {MOST_LINES} lines or {MOST_CELLS} values; divide it"
TOO_LONG = f"the table has a line of more than {MOST_CHARACTERS} characters; export it again"


@dataclass
class Sheet:
    """The cells of some columns, line by line, and the lines that could not be read."""

    columns: dict[str, int]  # name -> place in each line's cells
    lines: list[tuple[str, list[str]]] = field(default_factory=list)  # where a line stands, for people; its cells
    uneven: list[str] = field(default_factory=list)  # lines with another number of cells than the first
    long: list[str] = field(default_factory=list)  # lines with a cell that is too long

    def add(self, place: str, cells: Sequence[str]) -> None:
        """Take a line, unless a cell is too long."""
        if any(len(cell) > LONGEST for cell in cells):
            self.long.append(place)
            return
        self.lines.append((place, [plain(cell.strip()) for cell in cells]))
        if len(self.lines) > MOST_LINES or len(self.lines) * len(self.columns) > MOST_CELLS:
            raise DataError(TOO_MANY)


S = TypeVar("S", bound=Sheet)


def read_sheet(path: Path, needed: Mapping[str, str], besides: Sequence[str] = ()) -> Sheet:
    """Return columns of a table. needed: their names there, with the plan's; besides: columns that it may lack."""
    return read_into(Sheet({}), path, needed, besides)


def read_into(sheet: S, path: Path, needed: Mapping[str, str], besides: Sequence[str] = ()) -> S:
    """Give the lines of a table to a sheet, and return it."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError("the table is not there; correct data.table in the site's medsilo.yaml", str(path)) from error
    if size > MOST_BYTES:
        raise DataError(f"the table has more than {MOST_BYTES >> 20} MiB; leave out columns that nobody needs")
    if path.suffix.lower() in PARQUET:
        return _parquet(sheet, path, needed, besides)
    with _opened(path) as file:
        return _csv(sheet, file, needed, besides)


def first_lines(path: Path, most: int) -> list[list[str]]:
    """Return the first lines of a CSV file, that with its columns' names among them."""
    with _opened(path) as file:
        return [[plain(cell.strip()) for cell in cells] for cells in islice(_reader(file), most)]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a CSV file; what is wrong with it is a DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError("the table is not in UTF-8; save it as 'CSV UTF-8'", str(path)) from error
    except (OSError, csv.Error) as error:
        raise DataError("the table can't be read as CSV; export it again", f"{path}: {error}") from error


def _csv(sheet: S, file: TextIO, needed: Mapping[str, str], besides: Sequence[str]) -> S:
    reader = _reader(file)
    head = [plain(name.strip()) for name in next(reader, [])]
    sheet.columns = _of(head, needed, besides)
    places = [head.index(name) for name in sheet.columns]
    for cells in reader:
        place = f"line {reader.line_num}"
        if not cells or not any(cells):
            continue
        if len(cells) != len(head):
            sheet.uneven.append(place)
            continue
        sheet.add(place, [cells[own] for own in places])
    return sheet


def _reader(file: TextIO) -> Any:
    """Return what reads the lines of a CSV file, whatever its separator is."""
    first = file.readline(MOST_CHARACTERS + 1)
    if len(first) > MOST_CHARACTERS:
        raise DataError(TOO_LONG)
    file.seek(0)
    return csv.reader(_bounded(file), delimiter=max(",;\t", key=first.count))


def _bounded(file: TextIO) -> Iterator[str]:
    """Yield lines, none of them endless."""
    while line := file.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise DataError(TOO_LONG)
        yield line


def _of(head: Sequence[str], needed: Mapping[str, str], besides: Sequence[str]) -> dict[str, int]:
    """Return the places of these columns in a sheet's lines; there must be one each."""
    if len(head) > MOST_COLUMNS:
        raise DataError(f"the table has more than {MOST_COLUMNS} columns; leave out those that nobody needs")
    if missing := [name for name in needed if name not in head]:
        raise DataError(
            f"the table lacks {len(missing)} columns of the plan, first {needed[missing[0]]!r}; say in data.names what "
            "they are called here, or add them",
            private=", ".join(missing),
        )
    wanted = dict.fromkeys([*needed, *(name for name in besides if name in head)])
    counted = Counter(head)
    if twice := [name for name in wanted if counted[name] > 1]:
        raise DataError("the table has a column twice that is read; rename one of them", private=", ".join(twice))
    return {name: place for place, name in enumerate(wanted)}


def _parquet(sheet: S, path: Path, needed: Mapping[str, str], besides: Sequence[str]) -> S:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError("a Parquet table needs the package pyarrow: install medsilo[parquet], or save CSV") from error
    try:
        file = parquet.ParquetFile(path)
        groups = (file.metadata.row_group(place) for place in range(file.metadata.num_row_groups))
        if file.metadata.num_rows > MOST_LINES or sum(group.total_byte_size for group in groups) > 4 * MOST_BYTES:
            raise DataError(TOO_MANY)
        head = [plain(name.strip()) for name in file.schema_arrow.names]
        sheet.columns = _of(head, needed, besides)
        own = {plain(name.strip()): name for name in file.schema_arrow.names}
        number = 0
        for batch in file.iter_batches(4096, columns=[own[name] for name in sheet.columns]):
            columns = [batch.column(own[name]).to_pylist() for name in sheet.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                sheet.add(f"row {number}", [_text(cell) for cell in cells])
    except (ArrowException, OSError, ValueError) as error:
        raise DataError("the table can't be read as Parquet; export it again", f"{path}: {error}") from error
    return sheet


def _text(cell: Any) -> str:
    """Return a cell of Parquet as it would stand in CSV."""
    if cell is None:
        return ""
    return repr(cell) if isinstance(cell, float) else str(cell)
