"""Read a hospital's table into columns. A column stores each distinct string only once. The last tables stay in memory
until their files change.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medsilo.core.errors import DataError
from medsilo.core.text import composed, counted
from medsilo.tasks.cells import LIMIT, NUMBER, days, level, number
from medsilo.tasks.table_reader import (
    MOST_BYTES,
    MOST_CHARACTERS,
    MOST_COLUMNS,
    OFFICE,
    PARQUET,
    TOO_LONG,
    TableReader,
    cell_text,
    coding_of,
    frame_of,
    spelling,
    titles_above,
)

if TYPE_CHECKING:
    import pyarrow

MOST_LINES = 20_000_000
TOO_MANY = f"the table has more than {MOST_LINES} lines or {TableReader.MOST_CELLS} values; divide it"
# Limit on the number of title lines above the header, and limit on the number of characters in a title line.
MOST_TITLES, LONGEST_TITLE = 20, 100_000
SEPARATORS = ",;\t"
KEPT = 2  # number of tables that stay in memory
SHOWN = 1_000_000  # limit on the number of rows that one problem lists
BEGINS = r"^\s*[+-]?[.\d]"  # regular expression for the beginning of a cell that may contain a number
LANES = 2  # number of 64-bit integers in the hash of a row


@dataclass(frozen=True)
class TextColumn:
    """A column of strings in a table. The column stores each distinct string once, and for each row the index of the
    row's string.
    """

    values: tuple[str, ...]
    codes: np.ndarray  # for each row, the index of the row's string, [rows]

    def texts(self) -> list[str]:
        return [self.values[code] for code in self.codes.tolist()]

    def isin(self, texts: "frozenset[str] | set[str]") -> np.ndarray:
        return np.array([value in texts for value in self.values], dtype=bool)[self.codes]

    def numbers(self, decimal: str = ".") -> np.ndarray:
        """Convert the string in each row to a number, [rows]; a string that is not a number becomes NaN."""
        return numbers_in(self.values, decimal)[self.codes]

    def levels(self) -> tuple[str, ...]:
        return tuple(map(level, self.values))

    def shown(self) -> "TextColumn":
        """Return the column without distinct strings that no row uses."""
        there = np.flatnonzero(np.bincount(self.codes, minlength=len(self.values)))
        places = np.zeros(len(self.values), np.intp)
        places[there] = np.arange(len(there))
        return TextColumn(tuple(self.values[code] for code in there.tolist()), places[self.codes])

    def __getitem__(self, lines: np.ndarray) -> "TextColumn":
        return TextColumn(self.values, self.codes[lines])


# words that mark a row as a summary of other rows
TOTALS = frozenset(("total", "sum", "mean", "summe", "gesamt", "mittelwert", "somme", "moyenne", "suma", "totale"))


def lines_of_totals(named: Sequence[TextColumn], lines: int) -> np.ndarray:
    """For each row, return True if its patient or hospital is a word such as "total", because the row then sums up
    other rows.
    """
    found = np.zeros(lines, bool)
    for column in named:
        found |= np.array([value.strip().casefold() in TOTALS for value in column.values], bool)[column.codes]
    return found


def filled(column: TextColumn, patients: TextColumn, missing: "frozenset[str]") -> TextColumn:
    """Replace each missing value by the value in the previous row of the same patient."""
    order = np.argsort(patients.codes, kind="stable")
    known = ~column.isin(missing)[order]
    first = np.flatnonzero(np.diff(patients.codes[order], prepend=-1))
    # for each row, the position of its patient's first row
    starts = np.repeat(first, np.diff(first, append=len(order)))
    last = np.maximum.accumulate(np.where(known, np.arange(len(order)), -1))
    source = np.where(last >= starts, last, np.arange(len(order)))
    codes = np.empty_like(column.codes)
    codes[order] = column.codes[order[source]]
    return TextColumn(column.values, codes)


def at_limits(column: TextColumn) -> TextColumn:
    """Replace values beyond a limit of measurement by the limit: <0,5 becomes 0,5."""
    return TextColumn(
        tuple(LIMIT.sub("", value, 1) if LIMIT.match(value) else value for value in column.values), column.codes
    )


def span(first: TextColumn, last: TextColumn) -> TextColumn:
    """Return a column with the number of days between the dates in two columns; rows without both dates are empty."""
    own = np.array(days(last.values), float)[last.codes] - np.array(days(first.values), float)[first.codes]
    values, codes = np.unique(own, return_inverse=True)
    return TextColumn(tuple("" if np.isnan(value) else f"{value:.0f}" for value in values.tolist()), codes.reshape(-1))


def numbers_in(values: Sequence[str], decimal: str = ".") -> np.ndarray:
    """Convert strings to numbers, and strings that are not numbers to NaN.

    >>> numbers_in(["61", "2,5", "1 200", "k.A."], ",").tolist()
    [61.0, 2.5, 1200.0, nan]
    """
    import pyarrow
    from pyarrow import compute

    # encode the strings here, because pyarrow would import pandas to do it
    written_in = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, written_in)], dtype=np.int64)
    buffers = pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(written_in))
    texts = pyarrow.LargeStringArray.from_buffers(len(values), *buffers)
    plain = compute.match_substring_regex(texts, f"^(?:{NUMBER.pattern})$")
    written = compute.cast(compute.utf8_ltrim(texts.filter(plain), "+"), pyarrow.float64())
    is_plain = _as_numpy(compute.cast(plain, pyarrow.int8()), np.int8).astype(bool)
    found = np.full(len(values), np.nan)
    found[is_plain] = _as_numpy(written, np.float64)
    begins = _as_numpy(compute.cast(compute.match_substring_regex(texts, BEGINS), pyarrow.int8()), np.int8)
    for place in np.flatnonzero(~is_plain & begins.astype(bool)).tolist():
        if (value := number(values[place], decimal)) is not None:
            found[place] = value
    found[~np.isfinite(found)] = np.nan
    return found


def _as_numpy(array: Any, kind: type) -> np.ndarray:
    """Convert a pyarrow array without missing values to numpy. The function does not call pyarrow's to_numpy, because
    to_numpy would import pandas.
    """
    if not len(array):
        return np.zeros(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * np.dtype(kind).itemsize)


@dataclass(frozen=True)
class Columns:
    """A table whose columns contain strings.

    A row is left out if the row has more or fewer cells than the first row. Strings that are too long count as missing
    values.
    """

    path: Path
    names: tuple[str, ...]
    count: int
    # columns that are not yet converted to strings; all chunks of a column share one dictionary
    _columns: dict[str, "pyarrow.ChunkedArray"] = field(repr=False)
    coding: str = ""  # encoding of the CSV file
    uneven: int = 0  # number of rows that have more or fewer cells than the first row
    word: str = "row"  # word for a row in messages: "line" for a CSV file, and otherwise "row"
    _known: dict[str, TextColumn] = field(default_factory=dict, repr=False)

    def find(self, name: str) -> str | None:
        """Return a column's name as the table spells it, or None if the table lacks the column.

        Upper and lower case are not distinguished, unless two columns have names that differ only by case.
        """
        return spelling(self.names)(name)

    def column(self, name: str) -> TextColumn:
        if name not in self._known:
            self._known[name] = _texts(self._columns[name])
            del self._columns[name]
        return self._known[name]

    def lines_called(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return the names of the given rows in messages, such as "line 12": at most SHOWN names, in the order of the
        file.
        """
        numbers = self._numbers
        return tuple(f"{self.word} {numbers[place]}" for place in np.sort(indices)[:SHOWN].tolist())

    def uneven_lines(self) -> tuple[str, ...]:
        """Return the names of at most SHOWN rows that have more or fewer cells than the first row."""
        return tuple(f"line {number}" for number, even in self._lines() if not even)[:SHOWN]

    @cached_property
    def _numbers(self) -> Sequence[int]:
        if self.word == "row":
            return range(1, self.count + 1)
        _, titles = beginning(self.path, self.coding)
        # if the file has as many lines as rows, each row is one line, and counting is enough
        if not self.uneven and _line_ends(self.path) == titles + self.count:
            return range(titles + 2, titles + 2 + self.count)
        return [number for number, even in self._lines() if even]

    def _lines(self) -> Iterator[tuple[int, bool]]:
        """For each row of a CSV file, yield the line number, and True if the row has as many cells as the first row."""
        with self.path.open(encoding=self.coding, newline="") as file:
            separator, titles = beginning(self.path, self.coding)
            reader = csv.reader(file, delimiter=separator)
            while reader.line_num <= titles and next(reader, None) is not None:
                pass
            yield from ((reader.line_num, len(cells) == len(self.names)) for cells in reader if any(cells))

    @cached_property
    def digests(self) -> np.ndarray:
        """The hash of each row, [rows, 2]; the hash depends on the strings in all columns."""
        found = np.zeros((self.count, LANES), np.uint64)
        for name in self.names:
            own = self.column(name)
            texts = (hashlib.sha256(f"{name}\x1f{value}".encode()).digest()[: 8 * LANES] for value in own.values)
            found += np.frombuffer(b"".join(texts), np.uint64).reshape(-1, LANES)[own.codes]
        return found

    def line_names(self) -> TextColumn:
        """Return a column that names each row by a hash of its content; equal rows get equal names."""
        pairs = np.ascontiguousarray(self.digests).view([("a", np.uint64), ("b", np.uint64)]).reshape(-1)
        each, codes = np.unique(pairs, return_inverse=True)
        return TextColumn(tuple(f"{a:016x}{b:016x}" for a, b in each.tolist()), codes.reshape(-1))

    def require(self, needed: Mapping[str, str], besides: Sequence[str] = ()) -> None:
        """Raise DataError if a needed column is missing, or if the table has a column twice.

        Args:
            needed: Maps the table's names of the needed columns to the plan's names.
            besides: Optional columns, which the table must not have twice.
        """
        if missing := [name for name in needed if self.find(name) is None]:
            raise DataError(
                f"the table lacks {counted(len(missing), 'column')} of the plan, first {needed[missing[0]]!r}; "
                "write their local names in data.columns, or add them",
                private=", ".join(missing),
            )
        wanted = dict.fromkeys(name for name in (*needed, *besides) if self.find(name) is not None)
        own = [str(self.find(name)) for name in wanted]
        if len(set(own)) < len(own) or any(self.names.count(name) > 1 for name in own):
            raise DataError("the table has two columns of one name; rename one of them", private=", ".join(own))


def _line_ends(path: Path) -> int:
    """Count the line breaks in a file, except a line break at the end of the file."""
    ends, last = 0, b""
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            ends, last = ends + piece.count(b"\n"), piece[-1:]
    return ends - (last == b"\n")


def _texts(column: "pyarrow.ChunkedArray") -> TextColumn:
    """Convert a pyarrow column, remove blanks around strings, and normalise Unicode."""
    index: dict[str, int] = {}
    texts = (composed(text.strip()) for text in (column.chunk(0).dictionary.to_pylist() if len(column) else ()))
    own = [index.setdefault(text if len(text) <= TableReader.LONGEST else "", len(index)) for text in texts]
    return TextColumn(tuple(index), _looked_up(np.asarray(own, np.int32), column))


def _looked_up(indices: np.ndarray, column: "pyarrow.ChunkedArray") -> np.ndarray:
    codes = [_as_numpy(chunk.indices, np.int32) for chunk in column.chunks]
    return np.concatenate([indices[code] for code in codes]) if len(column) else indices[:0]


def read_columns(path: Path) -> Columns:
    """Read a table from CSV, Parquet, Stata, SAS or Excel into columns; the columns stay in memory until the file
    changes.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise DataError("the table does not exist; correct data.table in the site's medsilo.yaml", str(path)) from error
    if state.st_size > MOST_BYTES:
        raise DataError(f"the table has more than {MOST_BYTES >> 20} MiB; leave out columns that nobody needs")
    return _read(path.resolve(), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _read(path: Path, size: int, changed: int) -> Columns:
    suffix = path.suffix.lower()
    if suffix in PARQUET:
        return _of_parquet(path)
    return _of_frame(path) if suffix in OFFICE else _of_csv(path)


def beginning(path: Path, coding: str) -> tuple[str, int]:
    """Return the character that separates cells in a CSV file, and the number of title lines above the header."""
    with path.open(encoding=coding, newline="") as file:
        first = [line for _ in range(MOST_TITLES) if (line := file.readline(MOST_CHARACTERS + 1))]
    if any(len(line) > MOST_CHARACTERS for line in first[:1]):
        raise DataError(TOO_LONG)
    usual = max(SEPARATORS, key=first[0].count) if first else ","
    if len(first) > 2 and max(map(len, first)) <= LONGEST_TITLE:
        found = {own: titles_above([*csv.reader(first, delimiter=own)]) for own in SEPARATORS}
        separator = max(found, key=lambda own: (found[own][1], own == usual))
        titles, width = found[separator]
        if titles and width > 1 and not (found[usual][1] == width and not found[usual][0]):
            return separator, titles
    return (usual if first and usual in first[0] else " "), 0


def _of_csv(path: Path) -> Columns:
    import pyarrow
    from pyarrow import csv as reading

    coding = coding_of(path)
    uneven: list[int] = []

    def skip(row: Any) -> str:
        uneven.append(row.actual_columns)
        return "skip"

    try:
        separator, titles = beginning(path, coding)
        with path.open(encoding=coding, newline="") as file:
            for _ in range(titles):
                file.readline(MOST_CHARACTERS)
            width = len(next(csv.reader(file, delimiter=separator), []))
        if not width:
            raise DataError("the table has no column names in its first line; export it again", str(path))
        types = {f"f{place}": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) for place in range(width)}
        table = reading.read_csv(
            path,
            reading.ReadOptions(
                autogenerate_column_names=True,
                skip_rows=titles,
                block_size=2 * MOST_CHARACTERS,
                encoding="utf-8" if coding == "utf-8-sig" else coding,
            ),
            reading.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip),
            reading.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except UnicodeError as error:
        raise DataError("the table is not in UTF-8; save it as 'CSV UTF-8'", str(path)) from error
    except (pyarrow.ArrowException, OSError, csv.Error) as error:
        raise DataError("the table can't be read as CSV; export it again", f"{path}: {error}") from error
    columns = table.unify_dictionaries().columns
    head = [composed(column[0].as_py().strip()) for column in columns]
    return _checked(path, head, [column[1:] for column in columns], coding, len(uneven), "line")


def _of_parquet(path: Path) -> Columns:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        groups = (file.metadata.row_group(place) for place in range(file.metadata.num_row_groups))
        if file.metadata.num_rows > MOST_LINES or sum(group.total_byte_size for group in groups) > 4 * MOST_BYTES:
            raise DataError(TOO_MANY)
        table = file.read()
        columns = [pyarrow.chunked_array([_of_any(column.combine_chunks())]) for column in table.columns]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError("the table can't be read as Parquet; export it again", f"{path}: {error}") from error
    return _checked(path, [composed(name.strip()) for name in table.column_names], columns)


def _of_any(array: Any) -> Any:
    """Convert a pyarrow column of any type to the strings that a CSV file would contain."""
    import pyarrow

    encoded = array if pyarrow.types.is_dictionary(array.type) else array.dictionary_encode("encode")
    texts = [cell_text(value) for value in encoded.dictionary.to_pylist()]
    indices = encoded.indices
    if indices.null_count:
        texts.append("")
        indices = indices.fill_null(len(texts) - 1)
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(texts, pyarrow.string()))


def _of_frame(path: Path) -> Columns:
    import pyarrow

    frame = frame_of(path)
    if len(frame) > MOST_LINES:
        raise DataError(TOO_MANY)
    head = [composed(str(name).strip()) for name in frame.columns]
    texts = ([cell_text(value) for value in frame.iloc[:, place]] for place in range(len(head)))
    columns = [pyarrow.chunked_array([text], pyarrow.string()).dictionary_encode() for text in texts]
    return _checked(path, head, columns)


def _checked(
    path: Path,
    head: Sequence[str],
    found: Sequence["pyarrow.ChunkedArray"],
    coding: str = "",
    uneven: int = 0,
    word: str = "row",
) -> Columns:
    """Create a table without empty rows. Raises DataError if the table is too large."""
    from pyarrow import compute

    if len(head) > MOST_COLUMNS:
        raise DataError(f"the table has more than {MOST_COLUMNS} columns; leave out those that nobody needs")
    count = len(found[0]) if found else 0
    if count > MOST_LINES or count * len(head) > TableReader.MOST_CELLS:
        raise DataError(TOO_MANY)
    filled = np.zeros(count, bool)
    for column in found if count else ():
        filled |= _looked_up(_as_numpy(compute.utf8_length(column.chunk(0).dictionary), np.int32) > 0, column)
        if filled.all():
            break
    else:
        found = [column.take(np.flatnonzero(filled)) for column in found]
        count = int(filled.sum())
    columns: dict[str, pyarrow.ChunkedArray] = {}
    for name, column in zip(head, found, strict=True):
        columns.setdefault(name, column)
    return Columns(path, tuple(head), count, columns, coding, uneven, word)
