"""Read a table of a hospital line by line, CSV, Parquet or what pandas reads: bounded, believing nothing of it."""

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO
from zipfile import ZipFile

from medsilo.core.errors import DataError
from medsilo.core.text import composed, counted
from medsilo.tasks.cells import level, number

WINDOWS, PIECE = "cp1252", 2**20
UTF16_LE, UTF16_BE = b"\xff\xfe", b"\xfe\xff"
OLD_LETTERS = "the table is not in UTF-8 and was read as Windows writes it (cp1252): look whether its umlauts are right"
MOST_BYTES = 2**30  # of a file
MOST_COLUMNS = 20_000
MOST_CHARACTERS = 2**22  # of a line
PARQUET = (".parquet", ".pq")
OFFICE = {".dta": "read_stata", ".sas7bdat": "read_sas", ".xpt": "read_sas", ".xlsx": "read_excel"}  # pandas' readers
Lines = Iterator[tuple[str, list[str]]]  # with their places, for people
Read = tuple[list[str], Lines]  # a table's columns, and its lines
TOO_LONG = f"the table has a line of more than {MOST_CHARACTERS} characters; export it again"


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
class TableReader:
    """The cells of some columns of a table, line by line, and the lines that could not be read.

    >>> sheet = TableReader({"age": 0, "dose": 1})
    >>> sheet.add("line 2", [" 61", "2,50"])
    >>> sheet.lines, TableReader.number("2,50", ","), TableReader.level("61.0")
    ([('line 2', ['61', '2,50'])], 2.5, '61')
    """

    PLAIN: ClassVar[tuple[str, ...]] = (".csv", ".tsv", *PARQUET)  # endings of tables that need no pandas
    number, level = staticmethod(number), staticmethod(level)
    MOST_LINES: ClassVar[int] = 1_000_000
    MOST_CELLS: ClassVar[int] = 2**28  # of the columns that are read
    LONGEST: ClassVar[int] = 1000  # characters of a cell
    TOO_MANY: ClassVar[str] = f"the table has more than {MOST_LINES} lines or {MOST_CELLS} values; divide it"

    columns: dict[str, int] = field(default_factory=dict)  # name -> place in each line's cells
    lines: list[tuple[str, list[str]]] = field(default_factory=list)  # where a line is, for people; its cells
    uneven: list[str] = field(default_factory=list)  # lines with another number of cells than the first
    long: list[str] = field(default_factory=list)  # lines with a cell that is too long
    coding: str = ""  # in which the letters of a CSV file are written
    named_by: str = ""  # the column that says whose a line is; where a table lacks it, the whole line does
    nameless: bool = False  # whether it does

    def add(self, place: str, cells: Sequence[str]) -> None:
        """Take a line, unless a cell is too long."""
        if any(len(cell) > self.LONGEST for cell in cells):
            self.long.append(place)
            return
        self.lines.append((place, [composed(cell.strip()) for cell in cells]))
        if len(self.lines) > self.MOST_LINES or len(self.lines) * len(self.columns) > self.MOST_CELLS:
            raise DataError(self.TOO_MANY)

    def read(self, path: Path, needed: Mapping[str, str], besides: Sequence[str] | None = ()) -> Self:
        """Take the lines of a table, and return itself. needed: columns by their names there, with the plan's; besides:
        those that it may lack, None: all that it has."""
        try:
            size = path.stat().st_size
        except OSError as error:
            told = "the table is not there; correct data.table in the site's medsilo.yaml"
            raise DataError(told, str(path)) from error
        if size > MOST_BYTES:
            raise DataError(f"the table has more than {MOST_BYTES >> 20} MiB; leave out columns that nobody needs")
        if path.suffix.lower() in PARQUET:
            _parquet(self, path, needed, besides)
        elif path.suffix.lower() in OFFICE:
            self._take(*_office(path), needed, besides)
        else:
            with _opened(path) as file:
                self.coding = str(file.encoding)
                self._take(*_csv(file), needed, besides)
        return self

    def _take(
        self, head: Sequence[str], lines: Lines, needed: Mapping[str, str], besides: Sequence[str] | None
    ) -> None:
        self.columns = _of(head, needed, besides)
        spelt = spelling(head)
        places = [head.index(str(spelt(name))) for name in self.columns]
        self.nameless = self.lacks_names(head)
        if self.nameless:  # whichever of its columns a plan reads, and in what order, a line keeps its name
            self.columns[self.named_by] = len(places)
        for place, cells in lines:
            if len(cells) != len(head):
                self.uneven.append(place)
            else:
                name = [_digest(head, cells)] if self.nameless else []
                self.add(place, [cells[own] for own in places] + name)

    def lacks_names(self, head: Sequence[str]) -> bool:
        """Return whether none of these columns says whose a line is, where that is asked."""
        return bool(self.named_by) and spelling(head)(self.named_by) is None

    @classmethod
    def first_lines(cls, path: Path, most: int) -> list[list[str]]:
        """Return the first lines of a table, that with its columns' names among them."""
        if path.suffix.lower() in PARQUET or path.suffix.lower() in OFFICE:
            sheet = cls().read(path, {}, None)
            return [[*sheet.columns], *(cells for _, cells in sheet.lines[:most])]
        with _opened(path) as file:
            return [[composed(cell.strip()) for cell in cells] for _, cells in islice(_rows(file), most)]


ENDINGS = (*TableReader.PLAIN, *OFFICE)


def _digest(head: Sequence[str], cells: Sequence[str]) -> str:
    """Return what only lines that are alike have in common, wherever a table has its columns."""
    told = (composed(cell.strip()) for _, cell in sorted(zip(head, cells, strict=True)))
    return hashlib.sha256("\x1f".join(told).encode()).hexdigest()[:32]


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


def _csv(file: TextIO) -> Read:
    rows = _rows(file)
    head = [composed(name.strip()) for name in next(rows, (1, []))[1]]
    return head, ((f"line {number}", cells) for number, cells in rows if any(cells))


def _rows(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV file with their numbers, whatever its separator is."""
    first = file.readline(MOST_CHARACTERS + 1)
    if len(first) > MOST_CHARACTERS:
        raise DataError(TOO_LONG)
    file.seek(0)
    separator = max(",;\t", key=first.count)
    reader = csv.reader(_bounded(file), delimiter=separator if separator in first else " ")
    yield from ((reader.line_num, cells) for cells in reader)


def _bounded(file: TextIO) -> Iterator[str]:
    """Yield lines, none of them endless."""
    while line := file.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise DataError(TOO_LONG)
        yield line


def spelling(names: Iterable[str]) -> Callable[[str], str | None]:
    """Return what says how a column is called among these; small and large letters are alike where one is called so.

    >>> [spelling(names)("age") for names in (["Age", "sex"], ["age", "Age"], ["Age", "AGE"])]
    ['Age', 'age', None]
    """
    exact = {*names}
    counted = Counter(map(str.casefold, exact))
    alike = {name.casefold(): name for name in exact if counted[name.casefold()] == 1}
    return lambda asked: asked if asked in exact else alike.get(asked.casefold())


def _of(head: Sequence[str], needed: Mapping[str, str], besides: Sequence[str] | None) -> dict[str, int]:
    """Return the places of these columns in a sheet's lines; there must be one each."""
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


def _parquet(sheet: TableReader, path: Path, needed: Mapping[str, str], besides: Sequence[str] | None) -> None:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError("a Parquet table needs the package pyarrow: install medsilo[parquet], or save CSV") from error
    try:
        file = parquet.ParquetFile(path)
        groups = (file.metadata.row_group(place) for place in range(file.metadata.num_row_groups))
        if (
            file.metadata.num_rows > TableReader.MOST_LINES
            or sum(group.total_byte_size for group in groups) > 4 * MOST_BYTES
        ):
            raise DataError(TableReader.TOO_MANY)
        head = [composed(name.strip()) for name in file.schema_arrow.names]
        own = {composed(name.strip()): name for name in file.schema_arrow.names}
        spelt, asked = spelling(head), _of(head, needed, besides)
        read = [*own] if sheet.lacks_names(head) else [str(spelt(name)) for name in asked]
        names = [own[name] for name in read]
        batches = (
            zip(*(batch.column(name).to_pylist() for name in names), strict=True)
            for batch in file.iter_batches(4096, columns=names)
        )
        rows = enumerate(chain.from_iterable(batches), 1)
        lines = ((f"row {number}", [_text(cell) for cell in cells]) for number, cells in rows)
        sheet._take(read, lines, needed, besides)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError("the table can't be read as Parquet; export it again", f"{path}: {error}") from error


def _office(path: Path) -> Read:
    frame = _frame(path)
    if len(frame) > TableReader.MOST_LINES:
        raise DataError(TableReader.TOO_MANY)
    lines = enumerate(frame.itertuples(index=False, name=None), 1)
    head = [composed(str(name).strip()) for name in frame.columns]
    return head, ((f"row {number}", [_text(cell) for cell in cells]) for number, cells in lines)


def _frame(path: Path) -> Any:
    """Return a table of Stata, SAS or Excel; None stands for no value."""
    try:
        import pandas

        if path.suffix.lower() == ".xlsx":
            with ZipFile(path) as packed:
                if sum(one.file_size for one in packed.infolist()) > 4 * MOST_BYTES:
                    raise DataError(TableReader.TOO_MANY)
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
