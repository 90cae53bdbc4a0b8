"""Read a hospital's recordings (CSV, Parquet, WFDB, EDF) as arrays. Because files may be damaged or hostile, their
sizes are limited and their contents are checked.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from medsilo.extend import DataError, DataSource, TableReader
from medsilo_series import rhythms, waves

KINDS = (*TableReader.PLAIN, ".txt", *waves.ENDINGS)
MOST_NAMES = 100_000  # maximum number of different labels or patients in a file
# Limits on the time between two consecutive rows, as multiples of the recording's usual time between rows. If the time
# between two rows is outside the limits, the recording has a gap.
FEWEST = 0.5, 1.5
UNITS = (1.0, 1e-3, 1e-6)
NAMED_UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6}


def units_of(column: str) -> tuple[float, ...]:
    """Return the possible units of a time column, each as a number of seconds. If the column's name ends with a unit,
    as in ms or time_ms, return only this unit.
    """
    named = NAMED_UNITS.get(column.lower().rpartition("_")[2])
    return (named,) if named else UNITS


@dataclass(frozen=True)
class Coded:
    """One text for each row; each text is stored as an index into the list of different texts."""

    names: tuple[str, ...]
    rows: np.ndarray

    def counts(self, own: np.ndarray | None = None) -> Counter[str]:
        """Return the number of rows for each text, without texts that have no rows.

        Args:
            own: A mask of the rows to count; None counts all rows.
        """
        found = np.bincount(self.rows if own is None else self.rows[own], minlength=len(self.names)).tolist()
        return +Counter(dict(zip(self.names, found, strict=True)))


@dataclass(frozen=True)
class Recording:
    values: np.ndarray  # [rows, signals], float32; missing values are NaN
    begins: np.ndarray  # [rows]; True for a row that does not directly follow the previous row
    seconds: np.ndarray | None = None  # [rows]; seconds since the first row, if the recording has times
    labels: Coded | None = None
    patients: Coded | None = None
    rate: float | None = None  # sampling rate in Hz, which is computed from the time column
    gaps: np.ndarray | None = None  # [rows]; True for a row that follows a gap in time

    def by_patient(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name of each patient, with a mask of the patient's rows. If the recording names no patient, yield
        an empty name with a mask of all rows.
        """
        if self.patients is None:
            yield "", np.ones(len(self.begins), bool)
            return
        for place, patient in enumerate(self.patients.names):
            yield patient, self.patients.rows == place


class Reader:
    def __init__(
        self, limits: Mapping[str, tuple[float, float]], source: DataSource, rate: float, label: bool = True
    ) -> None:
        """Create a reader for the recordings of a site.

        Args:
            limits: The smallest and largest plausible value of each signal in the plan.
            label: True to read labels, too.
        """
        self.limits, self.source, self.rate = limits, source, source.rate or rate
        roles = {role: source.recording_columns.get(role) for role in ("label", "patient", "time")}
        self.label, self.patients = roles["label"] if label else None, roles["patient"]
        self.units = units_of(roles["time"] or "")
        self.texts = tuple(filter(None, (self.label, self.patients)))
        self.names = source.own_names([*limits], roles, "recording_columns")
        self.last: tuple[Path, Recording] | None = None

    def read(self, path: Path) -> Recording:
        if self.last is None or self.last[0] != path:
            self.last = None  # only one recording is cached, because two large recordings might not fit into memory
            self.last = path, self._read(path)
        return self.last[1]

    def whose(self, path: Path) -> dict[str, Counter[str]]:
        found = self._read(path, signals=False)
        labels = found.labels
        return {patient: labels.counts(own) if labels else Counter() for patient, own in found.by_patient()}

    def _read(self, path: Path, signals: bool = True) -> Recording:
        suffix = path.suffix.lower()
        if suffix not in KINDS:
            raise DataError(f"recordings have another file type than {', '.join(KINDS)}; save them as CSV")
        try:
            if suffix in waves.ENDINGS:
                return self._from_wave(path, signals)
            return self._from_rows(path, signals)
        except DataError as error:
            words = str(error).replace("the table", "a recording").replace("data.columns", "data.recording_columns")
            raise DataError(words, f"{path.name} {error.private}".strip()) from error

    # ------------------------------------------------------------------------------------------ tables
    def _from_rows(self, path: Path, signals: bool) -> Recording:
        read = {self.names[name]: name for name in self.limits} if signals else {}
        time = self.source.recording_columns.get("time") if signals else None
        needed = read | {name: name for name in (*self.texts, *([time] if time else []))}
        rows = _Rows(source=self.source, numbers=tuple(read), texts=self.texts, time=time).read(path, needed)
        if rows.uneven:
            raise DataError("recordings have rows with more or fewer cells than the first; export them again")
        if rows.long or rows.wrong:
            raise DataError(
                "recordings have cells that are not numbers; name them under data.missing, or set data.decimal",
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
        if not time:
            return found
        return _timed(found, np.array(rows.times, np.float64), (1.0,) if rows.dated else self.units, self.rate)

    def _bounded(self, values: np.ndarray) -> np.ndarray:
        """Replace all values outside their plausible limits by NaN."""
        low, high = np.array([*self.limits.values()]).T[:, : values.shape[1]]
        with np.errstate(invalid="ignore"):
            return np.where((values >= low) & (values <= high), values, np.float32("nan"))

    def _from_wave(self, path: Path, signals: bool) -> Recording:
        annotated = rhythms.is_ending(self.label)
        if self.patients or (self.label and not annotated) or "time" in self.source.recording_columns:
            raise DataError(
                "WFDB and EDF files have no columns of labels, patients or times; write labels and patients to "
                f"{DataSource.TABLE}"
            )
        if signals:
            wave, values = waves.rows_of(path, [self.names[name] for name in self.limits])
        else:
            wave = waves.wave_of(path)
            values = np.empty((wave.rows, 0), np.float32)
        labels = (
            Coded(*rhythms.rhythm_of_rows(rhythms.annotations_of(path, str(self.label)), wave)) if annotated else None
        )
        return Recording(self._bounded(values), np.arange(wave.rows) == 0, labels=labels, rate=wave.rate)


@dataclass
class _Rows(TableReader):
    """The rows of a CSV file, which are collected in NumPy arrays, because lists of Python numbers would need far more
    memory.
    """

    source: DataSource = field(kw_only=True)
    numbers: tuple[str, ...] = field(kw_only=True)
    texts: tuple[str, ...] = field(kw_only=True)
    time: str | None = field(kw_only=True)
    count: int = 0
    dated: bool = False
    wrong: list[str] = field(default_factory=list)  # descriptions of rows in which a signal's cell is not a number
    values: array = field(default_factory=lambda: array("f"))
    times: array = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self.missing = frozenset(self.source.missing)
        self.known: dict[str, dict[str, int]] = {name: {} for name in self.texts}
        self.codes = {name: array("i") for name in self.texts}

    def add(self, where: str, cells: Sequence[str]) -> None:
        places = self.columns
        try:
            self.values.extend([self._number(cells[places[name]]) for name in self.numbers])
            if self.time:
                self.times.append(self._time(cells[places[self.time]]))
        except (ValueError, OverflowError):
            self.wrong.append(where)
        for name in self.texts:
            known = self.known[name]
            self.codes[name].append(known.setdefault(cells[places[name]].strip()[: TableReader.LONGEST], len(known)))
            if len(known) > MOST_NAMES:
                raise DataError(
                    f"a column of labels or patients has more than {MOST_NAMES} different values; correct it"
                )
        self.count += 1
        if self.count * len(cells) > TableReader.MOST_CELLS:
            raise DataError(f"the table has more than {TableReader.MOST_CELLS} numbers; divide the table")

    def _number(self, cell: str) -> float:
        text = cell.strip()
        if text in self.missing:
            return math.nan
        if "_" in text:  # Python's float() would also accept numbers with underscores, such as 1_000
            raise ValueError(text)
        return float(text if self.source.decimal == "." else text.replace(",", "."))

    def _time(self, cell: str) -> float:
        """Parse the cell of the time column, which is a date, or a number in the unit of the column."""
        try:
            return self._number(cell)
        except ValueError:
            known, self.dated = datetime.fromisoformat(cell.strip()), True
            return (known if known.tzinfo else known.replace(tzinfo=UTC)).timestamp()


def _timed(recording: Recording, times: np.ndarray, units: Sequence[float], rate: float) -> Recording:
    """Add times to a recording, and mark each row that follows a gap. Of the possible units of time, the unit is chosen
    that agrees best with the sampling rate.
    """
    if not np.isfinite(times).all():
        raise DataError("recordings have rows without a time; fill in the times")
    between = np.diff(times)
    inside = ~recording.begins[1:]
    if (between[inside] <= 0).any():
        raise DataError("recordings have times that repeat or go back; sort them by time, each row once")
    if not inside.any():
        return replace(recording, seconds=times - times[0])
    usual = float(np.median(between[inside]))
    times = times * min(units, key=lambda unit: abs(math.log(usual * unit * rate)))
    between, usual = np.diff(times), float(np.median(np.diff(times)[inside]))
    regular = inside & (between >= FEWEST[0] * usual) & (between <= FEWEST[1] * usual)
    gaps = np.concatenate([[False], inside & ~regular])
    rate = float(regular.sum() / between[regular].sum())
    return replace(recording, begins=recording.begins | gaps, seconds=times - times[0], rate=rate, gaps=gaps)
