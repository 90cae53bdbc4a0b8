"""Read device recordings in the formats WFDB (a header `.hea` with signal files), EDF and BDF. Because files may be
damaged or hostile, their sizes are limited.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medsilo.extend import DataError, MedsiloError, TableReader

WFDB, EDF = ".hea", (".edf", ".bdf")
ENDINGS = (WFDB, *EDF)
WIDTHS = {"16": 2, "61": 2, "24": 3, "32": 4, "80": 1, "212": 1.5}  # number of bytes of one sample in each WFDB format
LONGEST_HEADER = 1 << 20
GAIN = 200.0  # WFDB's default gain, which is used if a header contains no gain
DAMAGED = "a recording's header can't be read; export it again"
ABSENT = "a WFDB header names a file that is not in its folder; copy both"


@dataclass(frozen=True)
class Wave:
    """The contents of a recording's header: names of the signals in their order, sampling rate and number of rows."""

    names: tuple[str, ...]
    rate: float
    rows: int


@dataclass(frozen=True)
class _Line:
    file: str
    form: str
    gain: float
    baseline: float
    name: str
    skipped: int  # number of bytes in a signal file before the first sample


def wave_of(path: Path) -> Wave:
    return _wfdb(path)[0] if path.suffix.lower() == WFDB else _edf(path, None)[0]


def rows_of(path: Path, names: Sequence[str]) -> tuple[Wave, np.ndarray]:
    """Return the header of a recording and its values [rows, signals] in physical units. Missing values are NaN."""
    if path.suffix.lower() != WFDB:
        return _edf(path, names)
    wave, lines = _wfdb(path)
    places = _places(wave.names, names)
    if len({(line.file, line.form, line.skipped) for line in lines}) > 1 or lines[0].form not in WIDTHS:
        forms = ", ".join(WIDTHS)
        raise DataError(f"WFDB signals are in several files, or have another format than {forms}; convert them (xform)")
    raw = _samples(beside(path, lines[0].file), lines[0], wave.rows * len(lines)).reshape(wave.rows, len(lines))
    values = np.empty((wave.rows, len(places)), np.float32)
    lost = {"16": -(1 << 15), "61": -(1 << 15), "24": -(1 << 23), "32": -(1 << 31), "80": -128, "212": -2048}
    for column, place in enumerate(places):
        own = (raw[:, place] - lines[place].baseline) / lines[place].gain
        values[:, column] = np.where(raw[:, place] == lost[lines[0].form], np.nan, own)
    return wave, values


def _places(there: Sequence[str], names: Sequence[str]) -> list[int]:
    if missing := [name for name in names if name not in there]:
        raise DataError("recordings lack a signal of the plan; give its name in data.recording_columns", missing[0])
    return [there.index(name) for name in names]


def _bounded(wave: Wave) -> Wave:
    if not wave.names or not 0 < wave.rate < 1e7 or len(set(wave.names)) < len(wave.names):
        raise DataError(DAMAGED)
    if not 0 < wave.rows * len(wave.names) <= TableReader.MOST_CELLS:
        raise DataError(f"a recording has no samples, or more than {TableReader.MOST_CELLS}; divide the recording")
    return wave


# ---------------------------------------------------------------------------------------------------- WFDB
def _wfdb(path: Path) -> tuple[Wave, list[_Line]]:
    try:
        if path.stat().st_size > LONGEST_HEADER:
            raise ValueError("too long")
        texts = path.read_text("utf-8", errors="replace").splitlines()
        first, *rest = [text.split() for text in texts if text.strip() and not text.startswith("#")]
        count = int(first[1])
        lines = [_line(words) for words in rest[:count]]
        if "/" in first[0] or len(lines) != count:
            raise ValueError("several segments, or fewer signals than announced")
        rate = float(first[2].partition("/")[0].partition("(")[0]) if len(first) > 2 else 250.0
        rows = int(first[3]) if len(first) > 3 else 0
        if not rows and count and lines[0].form in WIDTHS:
            size = beside(path, lines[0].file).stat().st_size - lines[0].skipped
            rows = int(size / WIDTHS[lines[0].form]) // count
    except DataError:
        raise
    except (OSError, ValueError, IndexError) as error:
        raise DataError(DAMAGED, str(error)) from error
    return _bounded(Wave(tuple(line.name for line in lines), rate, rows)), lines


def _line(words: Sequence[str]) -> _Line:
    """Parse the line of a WFDB header about a signal: FILE FORMAT[xSAMPLES][:SKEW][+OFFSET] GAIN[(BASELINE)][/UNITS]
    RESOLUTION ZERO FIRST CHECKSUM BLOCK NAME.
    """
    form, _, skipped = words[1].partition("+")
    told = [*words[2:8], *["0"] * (6 - len(words[2:8]))]
    gain, _, baseline = told[0].partition("/")[0].partition("(")
    number = float(gain or 0) or GAIN
    zero = float(baseline.rstrip(")")) if baseline else float(told[2])
    if not (math.isfinite(number) and math.isfinite(zero)):
        raise ValueError("a gain that is zero or not a number")
    return _Line(words[0], form, number, zero, " ".join(words[8:]) or words[0], int(skipped or 0))


def beside(header: Path, name: str, absent: str = ABSENT) -> Path:
    """Return the path of a file of a recording; raise DataError with the message `absent` unless the file is in the
    header's folder.
    """
    path = header.parent / name
    if Path(name).name != name or name in (".", "..") or path.is_symlink() or not path.is_file():
        raise DataError(absent, name)
    return path


def _samples(path: Path, line: _Line, count: int) -> np.ndarray:
    """Return the samples of a WFDB signal file as integers. For each time step, the file contains one sample of each
    signal in turn.
    """
    size = math.ceil(count * WIDTHS[line.form])
    with path.open("rb") as file:
        file.seek(line.skipped)
        data = file.read(size)
    if len(data) < size:
        raise DataError("a recording is shorter than its header says; copy it again")
    if line.form == "212":
        three = np.frombuffer(data + bytes(-len(data) % 3), np.uint8).reshape(-1, 3).astype(np.int16)
        pairs = np.stack([three[:, 0] | (three[:, 1] & 15) << 8, three[:, 2] | (three[:, 1] >> 4) << 8], axis=1)
        return np.where(pairs > 2047, pairs - 4096, pairs).ravel()[:count]
    if line.form == "24":
        bytes_ = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return np.pad(bytes_, ((0, 0), (1, 0))).view("<i4").ravel() >> 8
    if line.form == "80":
        return np.frombuffer(data, np.uint8).astype(np.int16) - 128
    return np.frombuffer(data, {"16": "<i2", "61": ">i2", "32": "<i4"}[line.form])


# ---------------------------------------------------------------------------------------------------- EDF
def _edf(path: Path, names: Sequence[str] | None) -> tuple[Wave, np.ndarray]:
    """Return the header of an EDF recording, and also its values if the names of signals are given.

    The library pyedflib checks that the file has the size that the header states, so this function does not check the
    size.
    """
    with MedsiloError.needing("EDF needs another package; install medsilo[edf]"):
        from pyedflib import EdfReader
    try:
        file = EdfReader(str(path))
    except (OSError, ValueError) as error:
        what = "an EDF file is damaged, or has gaps (EDF+D); export it again without"
        raise DataError(what, str(error)) from error
    try:
        there = [name.strip() for name in file.getSignalLabels()]
        rates, rows = file.getSampleFrequencies(), file.getNSamples()
        fastest = [place for place, rate in enumerate(rates) if rate == max(rates)]
        places = fastest if names is None else _places(there, names)
        if len({(float(rates[place]), int(rows[place])) for place in places}) > 1:
            raise DataError(
                "signals of an EDF file have different sampling rates; list only signals of one rate in task.signals"
            )
        found = Wave(tuple(there[place] for place in places), float(rates[places[0]]), int(rows[places[0]]))
        wave = _bounded(found)
        if names is None:
            return wave, np.empty((0, 0), np.float32)
        return wave, np.stack([file.readSignal(place).astype(np.float32) for place in places], axis=1)
    finally:
        file.close()
