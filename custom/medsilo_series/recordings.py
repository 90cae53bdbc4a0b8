"""Read a hospital's recordings (CSV, Parquet, arrays of numpy) as rows of numbers: bounded, and believing nothing."""

import math
import zipfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import numpy as np

from medsilo.extend import TABLE, DataError, DataSource, columns, sheet
from medsilo_series import waves

ARRAYS, ARRAY = ".npz", ".npy"
KINDS = (".csv", ".tsv", ".txt", *sheet.PARQUET, ARRAYS, ARRAY, *waves.ENDINGS)
MOST_NAMES = 100_000  # of labels or patients in a file
MOST_HEADER = 10_000  # characters of an array's header
FEWEST = 0.5, 1.5  # of the usual time between rows: what is shorter or longer is a gap
TRIED = 200  # windows by which the order of axes is judged
SMOOTHER = 0.5  # times the change from step to step: then the axes lie the other way round
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
ROUGH = (
    "arrays change far less from step to step when their axes are read the other way round; look at one, and correct "
    "data.order or write the array again"
)


@dataclass(frozen=True)
class Coded:
    """A text for each row, as its place among those that occur."""

    names: tuple[str, ...]
    rows: np.ndarray


@dataclass(frozen=True)
class Recording:
    """The rows of one file, in turn."""

    values: np.ndarray  # [rows, signals], float32; NaN where a value is not known
    begins: np.ndarray  # [rows]: whether a row is not the next step after the one before it
    seconds: np.ndarray | None = None  # [rows], since the first, where there is a time
    labels: Coded | None = None
    patients: Coded | None = None
    rate: float | None = None  # Hz, by the times
    gaps: np.ndarray | None = None  # [rows]: whether time is missing before a row
    turned: bool = False  # whether an array's axes seem to lie the other way round


class Reader:
    """One site's way to read its recordings. It keeps the file that was read last."""

    def __init__(self, signals: Sequence[columns.Column], source: DataSource, label: bool = True) -> None:
        """label: whether it is read, too."""
        self.signals, self.source, inside = tuple(signals), source, source.inside
        self.label, self.patients = inside.label if label else None, inside.patient
        self.texts = tuple(filter(None, (self.label, self.patients)))
        others = [name for name in (inside.label, inside.patient, inside.time) if name]
        self.names = columns.own_names([one.name for one in self.signals], source.names, others, source.names)
        self.last: tuple[Path, Recording] | None = None

    def read(self, path: Path) -> Recording:
        """Return a file's rows."""
        if self.last is None or self.last[0] != path:
            self.last = None  # two need not fit into the memory
            self.last = path, self._read(path)
        return self.last[1]

    def whose(self, path: Path) -> dict[str | None, Counter[str]]:
        """Return the rows of each label that each patient has, where rows name patients and labels."""
        known: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
        found = self._read(path, signals=False)
        patients, labels = found.patients, found.labels
        for place, patient in enumerate(patients.names if patients else (None,)):
            own = np.ones(len(found.begins), bool) if patients is None else patients.rows == place
            if labels is None:
                known[patient][""] += int(own.sum())
                continue
            counts = np.bincount(labels.rows[own], minlength=len(labels.names)).tolist()
            known[patient].update({name: count for name, count in zip(labels.names, counts, strict=True) if count})
        return known

    def _read(self, path: Path, signals: bool = True) -> Recording:
        suffix = path.suffix.lower()
        if suffix not in KINDS:
            raise DataError(f"recordings have an ending that is none of {', '.join(KINDS)}; save them as CSV")
        try:
            if suffix in (ARRAYS, ARRAY):
                return self._from_arrays(_arrays(path, self._wanted(signals)), signals)
            if suffix in waves.ENDINGS:
                return self._from_wave(path, signals)
            return self._from_rows(path, signals)
        except DataError as error:
            words = str(error).replace("the table", "a recording")
            raise DataError(words, f"{path.name} {error.private}".strip()) from error

    # ------------------------------------------------------------------------------------------ rows
    def _from_rows(self, path: Path, signals: bool) -> Recording:
        read = {self.names[one.name]: one.name for one in self.signals} if signals else {}
        time = self.source.inside.time if signals else None
        needed = read | {name: name for name in (*self.texts, *([time] if time else []))}
        rows = sheet.read_into(
            _Rows({}, source=self.source, numbers=tuple(read), texts=self.texts, time=time), path, needed
        )
        if rows.uneven:
            raise DataError("recordings have rows with more or fewer cells than the first; export them again")
        if rows.long or rows.wrong:
            raise DataError(
                "recordings have cells that are not numbers; name them under data.missing, or say data.decimal",
                private=(rows.wrong or rows.long)[0],
            )
        count = rows.count
        if not count:
            raise DataError("recordings have no rows; export them again")
        values = np.array(rows.values, np.float32).reshape(count, len(read))
        coded = {name: Coded(tuple(known), np.array(rows.codes[name], np.int32)) for name, known in rows.known.items()}
        begins = np.zeros(count, bool)
        begins[0] = True
        patients = coded.get(self.patients or "")
        if patients:
            begins[1:] |= patients.rows[1:] != patients.rows[:-1]
        found = Recording(self._bounded(values), begins, None, coded.get(self.label or ""), patients)
        return _timed(found, np.array(rows.times, np.float64)) if time else found

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        """Return values of which those that can't be are not known."""
        low = np.array([one.low for one in self.signals])[: values.shape[1]]
        high = np.array([one.high for one in self.signals])[: values.shape[1]]
        with np.errstate(invalid="ignore"):
            return np.where((values >= low) & (values <= high), values, np.float32("nan"))

    def _from_wave(self, path: Path, signals: bool) -> Recording:
        if self.texts or self.source.inside.time:
            raise DataError(f"WFDB and EDF hold no labels and patients that are read; write them to {TABLE}")
        wave, values = waves.rows_of(path, [self.names[one.name] for one in self.signals] if signals else [])
        return Recording(self._bounded(values), np.arange(wave.rows) == 0, rate=wave.rate)

    # ------------------------------------------------------------------------------------------ arrays
    def _wanted(self, signals: bool) -> list[str]:
        names = [self.source.inside.windows] if signals else []
        return [*names, *self.texts]

    def _from_arrays(self, arrays: Mapping[str, np.ndarray], signals: bool) -> Recording:
        texts = {name: arrays[name] for name in self.texts}
        turned, values = False, np.zeros((0, 0), np.float32)
        if signals:
            raw = arrays[self.source.inside.windows]
            windows, turned = self._in_order(raw)  # [windows, steps, signals]
            count, steps = windows.shape[:2]
            values = self._bounded(windows.reshape(count * steps, -1).astype(np.float32))
        else:
            count, steps = min((len(one) if one.ndim else 0 for one in texts.values()), default=0), 1
        if not count or any(one.shape != (count,) for one in texts.values()):
            raise DataError("arrays of labels and patients need one entry for each window, [windows]; correct them")
        coded = {name: _coded(own, steps) for name, own in texts.items()}
        begins = np.arange(count * steps) % steps == 0
        labels, patients = (coded.get(name or "") for name in (self.label, self.patients))
        return Recording(values, begins, None, labels, patients, turned=turned)

    def _in_order(self, raw: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return windows [windows, steps, signals], and whether their axes seem to lie the other way round."""
        count, order = len(self.signals), self.source.order
        if order is None:
            raise DataError(
                "data.order is missing; say how the axes of arrays lie after that of the windows: signals-steps or "
                "steps-signals"
            )
        signals = 1 if order == "signals-steps" else 2
        if raw.ndim != 3 or raw.dtype.kind not in "fiu" or raw.shape[signals] != count or not raw.size:
            told = ", ".join(map(str, raw.shape[1:]))
            raise DataError(
                f"arrays are [windows{', ' * bool(told)}{told}] where data.order is {order} and the plan reads {count} "
                "signals; correct data.order, or write numbers as [windows, signals, steps]"
            )
        windows = raw.transpose(0, 2, 1) if signals == 1 else raw
        tried = np.ascontiguousarray(raw[:TRIED], np.float32)
        other = tried.reshape(len(tried), tried.shape[2], tried.shape[1])
        as_read, otherwise = (tried, other.transpose(0, 2, 1)) if signals == 1 else (tried.transpose(0, 2, 1), other)
        return windows, _roughness(otherwise) < SMOOTHER * _roughness(as_read)


def _roughness(windows: np.ndarray) -> float:
    """Return how much values change from step to step, of windows [windows, signals, steps]."""
    changes = np.abs(np.diff(windows, axis=2))
    return float(changes[np.isfinite(changes)].sum()) / max(changes.size, 1)


@dataclass
class _Rows(sheet.Sheet):
    """The rows of a CSV file as numbers, which are kept in little memory."""

    source: DataSource = field(kw_only=True)
    numbers: tuple[str, ...] = field(kw_only=True)
    texts: tuple[str, ...] = field(kw_only=True)
    time: str | None = field(kw_only=True)
    count: int = 0
    wrong: list[str] = field(default_factory=list)  # rows with a cell that is no number
    values: array = field(default_factory=lambda: array("f"))
    times: array = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self.missing = frozenset(self.source.missing)
        self.known: dict[str, dict[str, int]] = {name: {} for name in self.texts}
        self.codes = {name: array("i") for name in self.texts}

    def add(self, place: str, cells: Sequence[str]) -> None:
        places = self.columns
        try:
            self.values.extend([self._number(cells[places[name]]) for name in self.numbers])
            if self.time:
                self.times.append(self._time(cells[places[self.time]]))
        except (ValueError, OverflowError):
            self.wrong.append(place)
        for name in self.texts:
            known = self.known[name]
            self.codes[name].append(known.setdefault(cells[places[name]].strip()[: sheet.LONGEST], len(known)))
            if len(known) > MOST_NAMES:
                raise DataError(f"a column of labels or patients has more than {MOST_NAMES} different ones; correct it")
        self.count += 1
        if self.count * len(cells) > sheet.MOST_CELLS:
            raise DataError(f"the table has more than {sheet.MOST_CELLS} numbers; divide it")

    def _number(self, cell: str) -> float:
        text = cell.strip()
        if text in self.missing:
            return math.nan
        if "_" in text:  # Python's own way to write numbers
            raise ValueError(text)
        return float(text if self.source.decimal == "." else text.replace(",", "."))

    def _time(self, cell: str) -> float:
        if self.source.time_unit == "datetime":
            known = datetime.fromisoformat(cell.strip())
            return (known if known.tzinfo else known.replace(tzinfo=UTC)).timestamp()
        return self._number(cell) * UNITS[self.source.time_unit]


def _timed(found: Recording, times: np.ndarray) -> Recording:
    """Return a recording with its times, and with a beginning after every gap."""
    if not np.isfinite(times).all():
        raise DataError("recordings have rows without a time; fill it in")
    between = np.diff(times)
    inside = ~found.begins[1:]
    if (between[inside] <= 0).any():
        raise DataError("recordings have times that repeat or go back; sort them by time, each row once")
    if not inside.any():
        return replace(found, seconds=times - times[0])
    usual = float(np.median(between[inside]))
    regular = inside & (between >= FEWEST[0] * usual) & (between <= FEWEST[1] * usual)
    gaps = np.concatenate([[False], inside & ~regular])
    rate = float(regular.sum() / between[regular].sum())
    return replace(found, begins=found.begins | gaps, seconds=times - times[0], rate=rate, gaps=gaps)


def _coded(texts: np.ndarray, steps: int) -> Coded:
    """Return an array of labels or patients row by row."""
    if texts.dtype.kind not in "fiuUSb":
        raise DataError("arrays of labels and patients have to be texts or numbers")
    if texts.dtype.kind == "S":
        texts = np.char.decode(texts, "utf-8", "replace")
    names, codes = np.unique(texts, return_inverse=True)
    return Coded(
        tuple(columns.as_level(str(name)) for name in names), np.repeat(codes.reshape(-1).astype(np.int32), steps)
    )


def _arrays(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return arrays of a file of numpy."""
    found = {}
    with _believed_nothing():
        if path.suffix.lower() == ARRAY:
            if len(wanted) > 1:
                raise DataError("a file .npy has one array and neither labels nor patients; write .npz")
            with path.open("rb") as stream:
                return {name: _array(stream, path.stat().st_size) for name in wanted}
        with zipfile.ZipFile(path) as file:
            missing = [name for name in wanted if f"{name}{ARRAY}" not in file.namelist()]
            if missing:
                raise DataError("a file .npz lacks an array that data.inside names; correct one", ", ".join(missing))
            for name in wanted:
                with file.open(f"{name}{ARRAY}") as stream:
                    found[name] = _array(stream, file.getinfo(f"{name}{ARRAY}").file_size)
    return found


def arrays_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's arrays by their names; none of them is read."""
    if path.suffix.lower() == ARRAY:
        with path.open("rb") as stream, _believed_nothing():
            return {"x": _header(stream)[0]}
    found = {}
    with _believed_nothing(), zipfile.ZipFile(path) as file:
        for name in file.namelist():
            with file.open(name) as member:
                found[name.removesuffix(ARRAY)] = _header(member)[0]
    return found


@contextmanager
def _believed_nothing() -> Iterator[None]:
    """Say of whatever goes wrong with a file of numpy that it can't be read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # numpy raises anything over damaged headers, and zipfile over damaged files
        raise DataError("a file of arrays can't be read; write it with numpy.savez", str(error)) from error


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return an array's shape, whether columns lie together, and its type; Python objects are refused."""
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in header:
        raise DataError("an array has a header of another version; write it with numpy.savez")
    shape, by_column, kind = header[version](stream, max_header_size=MOST_HEADER)
    if kind.hasobject:
        raise DataError(
            "an array holds Python objects, which are never read; write numbers, and texts as numpy has them"
        )
    return shape, by_column, kind


def _array(stream: IO[bytes], size: int) -> np.ndarray:
    """Return an array whose header says what it is; nothing of it is run, and no memory is taken on its word."""
    if size > sheet.MOST_BYTES:
        raise DataError(f"an array has more than {sheet.MOST_BYTES >> 20} MiB; divide it")
    shape, by_column, kind = _header(stream)
    left = size - stream.tell()
    if left != math.prod(shape) * kind.itemsize:
        raise DataError("an array is shorter or longer than its header says; write it again")
    data = stream.read(left)
    return np.frombuffer(data, kind, count=math.prod(shape)).reshape(shape, order="F" if by_column else "C")
