"""Read a hospital's table row by row from CSV, Parquet, Stata, SAS or Excel. Size limits protect against hostile
files.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO
from zipfile import ZipFile

from medsilo.core.errors import DataError
from medsilo.core.text import composed, counted
from medsilo.tasks.cells import level, number

WINDOWS, PIECE = "cp1252", 2**20
UTF16_LE, UTF16_BE = b"\xff\xfe", b"\xfe\xff"
OLD_LETTERS = "the table is not in UTF-8 and was read as Windows writes it (cp1252): look whether its umlauts are right"
MOST_BYTES = 2**30  # largest number of bytes in a file
MOST_COLUMNS = 20_000
MOST_CHARACTERS = 2**22  # largest number of characters in a line
PARQUET = (".parquet", ".pq")
# For each file suffix, the function of pandas that reads the file.
OFFICE = {".dta": "read_stata", ".sas7bdat": "read_sas", ".xpt": "read_sas", ".xlsx": "read_excel"}
Lines = Iterator[tuple[str, list[str]]]  # for each row, the row's name in messages, and the cells
Read = tuple[list[str], Lines]  # the names of a table's columns, and the table's rows
TITLE = 0.6  # a row above the header with a smaller fraction of non-empty cells is a title
TOO_LONG = f"the table has a line of more than {MOST_CHARACTERS} characters; export it again"


def coding_of(path: Path) -> str:
    """Detect the encoding of a CSV file: UTF-8, UTF-16 or cp1252."""
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
class TableReader:
    """Selected columns of a table's rows, and the names of rows that could not be read.

    >>> sheet = TableReader({"age": 0, "dose": 1})
    >>> sheet.add("line 2", [" 61", "2,50"])
    >>> sheet.lines, TableReader.number("2,50", ","), TableReader.level("61.0")
    ([('line 2', ['61', '2,50'])], 2.5, '61')
    """

    PLAIN: ClassVar[tuple[str, ...]] = (".csv", ".tsv", *PARQUET)  # suffixes of files that can be read without pandas
    number, level = staticmethod(number), staticmethod(level)
    MOST_LINES: ClassVar[int] = 1_000_000
    MOST_CELLS: ClassVar[int] = 2**28  # limit on the number of cells in the columns that are read
    LONGEST: ClassVar[int] = 1000  # largest number of characters in a cell
    TOO_MANY: ClassVar[str] = f"the table has more than {MOST_LINES} lines or {MOST_CELLS} values; divide it"

    # index of each column's cell in `lines`
    columns: dict[str, int] = field(default_factory=dict)
    # for each row, the row's name in messages, and the cells
    lines: list[tuple[str, list[str]]] = field(default_factory=list)
    # names of rows that have more or fewer cells than the first row
    uneven: list[str] = field(default_factory=list)
    long: list[str] = field(default_factory=list)  # names of rows with a cell that is too long
    coding: str = ""
    # the column that identifies rows; if the table lacks it, each row is identified by a hash of all its cells
    named_by: str = ""
    nameless: bool = False
    head: Sequence[str] = ()  # names of a CSV file's columns, if the file has no header

    def add(self, where: str, cells: Sequence[str]) -> None:
        """Add a row. A row with a cell that is too long is left out, and its name is recorded.

        Args:
            where: the row's name
            cells: the row's cells
        """
        if any(len(cell) > self.LONGEST for cell in cells):
            self.long.append(where)
            return
        self.lines.append((where, [composed(cell.strip()) for cell in cells]))
        if len(self.lines) > self.MOST_LINES or len(self.lines) * len(self.columns) > self.MOST_CELLS:
            raise DataError(self.TOO_MANY)

    def read(self, path: Path, needed: Mapping[str, str], besides: Sequence[str] | None = ()) -> Self:
        """Read the rows of a table.

        Args:
            path: the table's file
            needed: maps the table's names of the needed columns to the plan's names
            besides: optional columns, which are read if the table has them; None means all columns of the table
        """
        try:
            size = path.stat().st_size
        except OSError as error:
            told = "the table does not exist; correct data.table in the site's medsilo.yaml"
            raise DataError(told, str(path)) from error
        if size > MOST_BYTES:
            raise DataError(f"the table has more than {MOST_BYTES >> 20} MiB; leave out columns that nobody needs")
        if path.suffix.lower() in (*PARQUET, *OFFICE):
            self._take(*_in_columns(path), needed, besides)
        else:
            with _opened(path) as file:
                self.coding = str(file.encoding)
                self._take(*_csv(file, self.head), needed, besides)
        return self

    def _take(
        self, head: Sequence[str], lines: Lines, needed: Mapping[str, str], besides: Sequence[str] | None
    ) -> None:
        self.columns = _of(head, needed, besides)
        spelt = spelling(head)
        places = [head.index(str(spelt(name))) for name in self.columns]
        self.nameless = self.lacks_names(head)
        if self.nameless:  # the hash covers all cells, so that it does not depend on the plan's columns
            self.columns[self.named_by] = len(places)
        for place, cells in lines:
            if len(cells) != len(head):
                self.uneven.append(place)
            else:
                name = [_digest(head, cells)] if self.nameless else []
                self.add(place, [cells[own] for own in places] + name)

    def lacks_names(self, head: Sequence[str]) -> bool:
        return bool(self.named_by) and spelling(head)(self.named_by) is None

    @classmethod
    def first_lines(cls, path: Path, most: int) -> list[list[str]]:
        """Return the first lines of a table, beginning with the header.

        Args:
            path: the table's file
            most: number of lines; a Parquet file or a spreadsheet has the header in addition
        """
        if path.suffix.lower() in PARQUET or path.suffix.lower() in OFFICE:
            sheet = cls().read(path, {}, None)
            return [[*sheet.columns], *(cells for _, cells in sheet.lines[:most])]
        with _opened(path) as file:
            return [[composed(cell.strip()) for cell in cells] for _, cells in islice(_rows(file), most)]


ENDINGS = (*TableReader.PLAIN, *OFFICE)


def _digest(head: Sequence[str], cells: Sequence[str]) -> str:
    """Return a hash of a row, independent of the order of columns."""
    told = (composed(cell.strip()) for _, cell in sorted(zip(head, cells, strict=True)))
    return hashlib.sha256("\x1f".join(told).encode()).hexdigest()[:32]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a CSV file; within the context, convert errors to DataError."""
    try:
        with path.open(encoding=coding_of(path), newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError("the table is not in UTF-8; save it as 'CSV UTF-8'", str(path)) from error
    except (OSError, csv.Error) as error:
        raise DataError("the table can't be read as CSV; export it again", f"{path}: {error}") from error


def _csv(file: TextIO, names: Sequence[str]) -> Read:
    rows = _rows(file)
    head = [*names] or [composed(name.strip()) for name in next(rows, (1, []))[1]]
    return head, ((f"line {number}", cells) for number, cells in rows if any(cells))


def _rows(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Detect the character that separates cells in a CSV file, and yield each row's line number and cells."""
    first = file.readline(MOST_CHARACTERS + 1)
    if len(first) > MOST_CHARACTERS:
        raise DataError(TOO_LONG)
    file.seek(0)
    separator = max(",;\t", key=first.count)
    reader = csv.reader(_bounded(file), delimiter=separator if separator in first else " ")
    yield from ((reader.line_num, cells) for cells in reader)


def _bounded(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raise DataError if a line is too long."""
    while line := file.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise DataError(TOO_LONG)
        yield line


def spelling(names: Iterable[str]) -> Callable[[str], str | None]:
    """Return a function that maps a column's name to the table's spelling of it, or to None.

    Upper and lower case are not distinguished, unless two columns have names that differ only by case.

    >>> [spelling(names)("age") for names in (["Age", "sex"], ["age", "Age"], ["Age", "AGE"])]
    ['Age', 'age', None]
    """
    exact = {*names}
    counted = Counter(map(str.casefold, exact))
    alike = {name.casefold(): name for name in exact if counted[name.casefold()] == 1}
    return lambda asked: asked if asked in exact else alike.get(asked.casefold())


def _of(head: Sequence[str], needed: Mapping[str, str], besides: Sequence[str] | None) -> dict[str, int]:
    """Return the columns to read, each with its index in the rows that are read. Raises DataError if a needed column is
    missing, or if the table has a column twice.
    """
    if len(head) > MOST_COLUMNS:
        raise DataError(f"the table has more than {MOST_COLUMNS} columns; leave out those that nobody needs")
    spelt = spelling(head)
    if missing := [name for name in needed if spelt(name) is None]:
        raise DataError(
            f"the table lacks {counted(len(missing), 'column')} of the plan, first {needed[missing[0]]!r}; "
            "write their local names in data.columns, or add them",
            private=", ".join(missing),
        )
    known = head if besides is None else [name for name in besides if spelt(name) is not None]
    wanted = dict.fromkeys([*needed, *known])
    there, read = Counter(head), Counter(map(spelt, wanted))
    if twice := [name for name in wanted if there[str(spelt(name))] > 1 or read[spelt(name)] > 1]:
        raise DataError("the table has two columns of one name; rename one of them", private=", ".join(twice))
    return {name: place for place, name in enumerate(wanted)}


def titles_above(rows: Sequence[Sequence[Any]]) -> tuple[int, int]:
    """Return the number of title rows above a table's header, and the number of its columns.

    >>> titles_above([["Export 2024", ""], ["", ""], ["age", "sex"], ["61", "f"]]), titles_above([["age", "sex"]])
    ((2, 2), (0, 2))
    """
    filled = [sum(cell is not None and str(cell).strip() != "" for cell in row) for row in rows]
    widths = Counter(len(row) for row in rows if len(row) > 1)
    width = max(widths, key=lambda own: (widths[own], own), default=0)
    for place, row in enumerate(rows):
        if len(row) == width and filled[place] > max(1, TITLE * width):
            above = all(count <= TITLE * width or count == 1 for count in filled[:place])
            return (place if above and widths[width] > 1 else 0), width
    return 0, width


def _in_columns(path: Path) -> Read:
    from medsilo.tasks.columns import read_columns

    own = read_columns(path)
    texts = zip(*(own.column(name).texts() for name in own.names), strict=True)
    return list(own.names), ((f"{own.word} {number}", list(cells)) for number, cells in enumerate(texts, 1))


def frame_of(path: Path) -> Any:
    """Read a Stata, SAS or Excel file as a pandas data frame with None for missing values."""
    try:
        import pandas

        if path.suffix.lower() == ".xlsx":
            with ZipFile(path) as packed:
                if sum(one.file_size for one in packed.infolist()) > 4 * MOST_BYTES:
                    raise DataError(TableReader.TOO_MANY)
            frame = _sheet(pandas.read_excel(path, sheet_name=None, header=None, dtype=object))
        else:
            frame = getattr(pandas, OFFICE[path.suffix.lower()])(path)
    except ImportError as error:
        raise DataError(
            "reading this table needs pandas, and for Excel openpyxl: install medsilo[office], or save it as CSV"
        ) from error
    except DataError:
        raise
    except Exception as error:  # damaged files can make pandas raise any exception
        raise DataError("the table can't be read; export it again, or save CSV", f"{path}: {error}") from error
    return frame.astype(object).where(frame.notna(), None)


def _sheet(sheets: Mapping[str, Any]) -> Any:
    """Return the only sheet of an Excel workbook that contains a table, without the sheet's title rows."""
    tables = {}
    for name, sheet in sheets.items():
        full = sheet.dropna(how="all").dropna(axis=1, how="all")
        if full.shape[1] < 2 or len(full) < 2:
            continue
        top = full.head(20).astype(object).where(full.head(20).notna(), None)
        titles, _ = titles_above(top.to_numpy().tolist())
        below = full.iloc[titles + 1 :]
        below.columns = ["" if name is None else str(name) for name in top.iloc[titles]]
        tables[name] = below
    if not tables:
        raise DataError(
            "the workbook has no sheet with a table; save the sheet with a line per patient as a separate file"
        )
    order = sorted(tables, key=lambda name: -tables[name].size)
    if others := [
        name for name in order[1:] if len(tables[name]) > 4 and tables[name].size > tables[order[0]].size / 10
    ]:
        raise DataError(
            f"the workbook has {1 + len(others)} sheets with tables; join them into one with a line per patient, or "
            f"save only one of them",
            private=", ".join([order[0], *others]),
        )
    return tables[order[0]]


def cell_text(cell: Any) -> str:
    """Convert a cell from Parquet or pandas to the string that a CSV file would contain."""
    if cell is None:
        return ""
    if isinstance(cell, bytes):  # strings in SAS files are bytes
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return cell.decode(WINDOWS, "replace")
    return repr(cell) if isinstance(cell, float) else str(cell)
