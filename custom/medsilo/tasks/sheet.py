"""Read a table of a hospital line by line, CSV, Parquet or what pandas reads: bounded, believing nothing of it."""

import csv
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeVar
from zipfile import ZipFile

from medsilo.core.errors import DataError
from medsilo.core.package import NAME

WINDOWS, PIECE = "cp1252", 2**20
UTF16_LE, UTF16_BE = b"\xff\xfe", b"\xfe\xff"
OLD_LETTERS = "the table is not in UTF-8 and was read as Windows writes it (cp1252): look whether its umlauts are right"
MOST_BYTES = 2**30  # of a file
MOST_LINES = 1_000_000
MOST_COLUMNS = 20_000
MOST_CHARACTERS = 2**22  # of a line
MOST_CELLS = 2**28  # of the columns that are read
LONGEST = 1000  # characters of a cell
PARQUET = (".parquet", ".pq")
OFFICE = {".dta": "read_stata", ".sas7bdat": "read_sas", ".xpt": "read_sas", ".xlsx": "read_excel"}  # pandas' readers
ENDINGS = (".csv", ".tsv", *PARQUET, *OFFICE)
SHEETS = "medsilo.sheets"  # entry points by the ending of a file
PEEKED = 3  # lines that tell whether the first has one name too few, as R's write.table writes it
TOO_MANY = f"the table has more than {MOST_LINES} lines or {MOST_CELLS} values; divide it"
TOO_LONG = f"the table has a line of more than {MOST_CHARACTERS} characters; export it again"


def plain(text: str) -> str:
    """Return a text in the one of the two ways in which letters with marks are written."""
    return unicodedata.normalize("NFC", text)


def coding_of(path: Path) -> str:
    """Return how the letters of a table are written: in UTF-8, or as programs on Windows do."""
    with path.open("rb") as file:
        if file.read(2) in (UTF16_LE, UTF16_BE):
            return "utf-16"
    try:
        with path.open(encoding="utf-8-sig") as file:
            while file.read(PIECE):
                pass
    except UnicodeDecodeError:
        return WINDOWS
    return "utf-8-sig"


@dataclass
class Sheet:
    """The cells of some columns, line by line, and the lines that could not be read."""

    columns: dict[str, int]  # name -> place in each line's cells
    lines: list[tuple[str, list[str]]] = field(default_factory=list)  # where a line is, for people; its cells
    uneven: list[str] = field(default_factory=list)  # lines with another number of cells than the first
    long: list[str] = field(default_factory=list)  # lines with a cell that is too long
    coding: str = ""  # in which the letters of a CSV file are written

    def add(self, place: str, cells: Sequence[str]) -> None:
        """Take a line, unless a cell is too long."""
        if any(len(cell) > LONGEST for cell in cells):
            self.long.append(place)
            return
        self.lines.append((place, [plain(cell.strip()) for cell in cells]))
        if len(self.lines) > MOST_LINES or len(self.lines) * len(self.columns) > MOST_CELLS:
            raise DataError(TOO_MANY)


S = TypeVar("S", bound=Sheet)
Read = tuple[list[str], Iterator[tuple[str, list[str]]]]  # a table's columns, and its lines with their places


def read_sheet(path: Path, needed: Mapping[str, str], besides: Sequence[str] | None = ()) -> Sheet:
    """Return columns of a table. needed: their names there, with the plan's; besides: columns that it may lack, None:
    all that it has."""
    return read_into(Sheet({}), path, needed, besides)


def read_into(sheet: S, path: Path, needed: Mapping[str, str], besides: Sequence[str] | None = ()) -> S:
    """Give the lines of a table to a sheet, and return it."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError("the table is not there; correct data.table in the site's medsilo.yaml", str(path)) from error
    if size > MOST_BYTES:
        raise DataError(f"the table has more than {MOST_BYTES >> 20} MiB; leave out columns that nobody needs")
    if path.suffix.lower() in PARQUET:
        return _parquet(sheet, path, needed, besides)
    if read := _office if path.suffix.lower() in OFFICE else _brought(path):
        head, lines = read(path)
        sheet.columns = _of(head, needed, besides)
        places = [head.index(name) for name in sheet.columns]
        for place, cells in lines:
            sheet.add(place, [cells[own] for own in places])
        return sheet
    with _opened(path) as file:
        sheet.coding = str(file.encoding)
        return _csv(sheet, file, needed, besides)


def _brought(path: Path) -> Callable[[Path], Read] | None:
    """Return what a plug-in that comes with medsilo reads tables of this ending with: its columns and lines."""
    return next((entry.load() for entry in _kinds() if path.name.lower().endswith(f".{entry.name}")), None)


@cache
def _kinds() -> tuple[EntryPoint, ...]:
    """Return the kinds of tables that plug-ins read which come with medsilo. Finding them takes long."""
    return tuple(entry for entry in entry_points(group=SHEETS) if entry.dist and entry.dist.name == NAME)


def mixes_patients(path: Path) -> bool:
    """Return whether a plug-in reads this table so that a patient changes other patients' cells."""
    return bool(getattr(_brought(path), "mixes_patients", False))


def first_lines(path: Path, most: int) -> list[list[str]]:
    """Return the first lines of a table, that with its columns' names among them."""
    if path.suffix.lower() in PARQUET or path.suffix.lower() in OFFICE:
        sheet = read_sheet(path, {}, None)
        return [[*sheet.columns], *(cells for _, cells in sheet.lines[:most])]
    with _opened(path) as file:
        return [[plain(cell.strip()) for cell in cells] for _, cells in islice(_rows(file), most)]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a CSV file; what is wrong with it is a DataError."""
    try:
        with path.open(encoding=coding_of(path), newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError("the table is not in UTF-8; save it as 'CSV UTF-8'", str(path)) from error
    except (OSError, csv.Error) as error:
        raise DataError("the table can't be read as CSV; export it again", f"{path}: {error}") from error


def _csv(sheet: S, file: TextIO, needed: Mapping[str, str], besides: Sequence[str] | None) -> S:
    rows = _rows(file)
    head = [plain(name.strip()) for name in next(rows, (1, []))[1]]
    sheet.columns = _of(head, needed, besides)
    places = [head.index(name) for name in sheet.columns]
    for number, cells in rows:
        place = f"line {number}"
        if not cells or not any(cells):
            continue
        if len(cells) != len(head):
            sheet.uneven.append(place)
            continue
        sheet.add(place, [cells[own] for own in places])
    return sheet


def _rows(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV file with their numbers. Where the lines below the first all have one cell more, these
    are names of rows, as R's write.table writes them, and their column has none."""
    reader = _reader(file)
    head, *below = [(reader.line_num, cells) for cells in islice(reader, 1 + PEEKED)] or [(1, [])]
    if below and all(len(cells) == len(head[1]) + 1 for _, cells in below):
        head = (head[0], ["", *head[1]])
    yield from chain((head, *below), ((reader.line_num, cells) for cells in reader))


def _reader(file: TextIO) -> Any:
    """Return what reads the lines of a CSV file, whatever its separator is."""
    first = file.readline(MOST_CHARACTERS + 1)
    if len(first) > MOST_CHARACTERS:
        raise DataError(TOO_LONG)
    file.seek(0)
    separator = max(",;\t", key=first.count)
    return csv.reader(_bounded(file), delimiter=separator if separator in first else " ")


def _bounded(file: TextIO) -> Iterator[str]:
    """Yield lines, none of them endless."""
    while line := file.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise DataError(TOO_LONG)
        yield line


def _of(head: Sequence[str], needed: Mapping[str, str], besides: Sequence[str] | None) -> dict[str, int]:
    """Return the places of these columns in a sheet's lines; there must be one each."""
    if len(head) > MOST_COLUMNS:
        raise DataError(f"the table has more than {MOST_COLUMNS} columns; leave out those that nobody needs")
    if missing := [name for name in needed if name not in head]:
        raise DataError(
            f"the table lacks {len(missing)} columns of the plan, first {needed[missing[0]]!r}; say in data.names what "
            "they are called here, or add them",
            private=", ".join(missing),
        )
    wanted = dict.fromkeys([*needed, *(head if besides is None else (name for name in besides if name in head))])
    counted = Counter(head)
    if twice := [name for name in wanted if counted[name] > 1]:
        raise DataError("the table has a column twice that is read; rename one of them", private=", ".join(twice))
    return {name: place for place, name in enumerate(wanted)}


def _parquet(sheet: S, path: Path, needed: Mapping[str, str], besides: Sequence[str] | None) -> S:
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


def _office(path: Path) -> Read:
    frame = _frame(path)
    if len(frame) > MOST_LINES:
        raise DataError(TOO_MANY)
    lines = enumerate(frame.itertuples(index=False, name=None), 1)
    return _names_of(frame), ((f"row {number}", [_text(cell) for cell in cells]) for number, cells in lines)


def _names_of(frame: Any) -> list[str]:
    return [plain(str(name).strip()) for name in frame.columns]


def _frame(path: Path) -> Any:
    """Return a table of Stata, SAS or Excel; None stands for no value."""
    try:
        import pandas

        if path.suffix.lower() == ".xlsx":
            with ZipFile(path) as packed:
                if sum(one.file_size for one in packed.infolist()) > 4 * MOST_BYTES:
                    raise DataError(TOO_MANY)
        frame = getattr(pandas, OFFICE[path.suffix.lower()])(path)
    except ImportError as error:
        raise DataError(
            "such a table needs pandas, Excel openpyxl, too: install medsilo[office], or save CSV"
        ) from error
    except DataError:
        raise
    except Exception as error:  # pandas' readers raise anything over damaged files
        raise DataError("the table can't be read; export it again, or save CSV", f"{path}: {error}") from error
    return frame.astype(object).where(frame.notna(), None)


def _text(cell: Any) -> str:
    """Return a cell of Parquet or pandas as it would stand in CSV."""
    if cell is None:
        return ""
    return repr(cell) if isinstance(cell, float) else str(cell)
