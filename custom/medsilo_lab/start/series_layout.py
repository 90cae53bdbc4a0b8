"""Inspect a folder of recordings. Propose a plan, and settings with which the hospital reads the recordings."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.sources import DataSource
from medsilo.tasks.table_reader import TableReader
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_series import waves
from medsilo_series.recordings import Reader, Recording, units_of
from medsilo_series.rhythms import annotations_of, is_ending, rhythms_in
from medsilo_series.series_folder import SeriesFolder, by_patient
from medsilo_series.windows import stretches

LINES = 200  # the meaning of columns is recognised from this number of rows of a recording
TIMES = {"t", "time", "times", "timestamp", "datetime", "date", "seconds", "sec", "s", "ms", "time_ms", "time_s", "us"}
LABELS = {"label", "labels", "class", "activity", "target", "diagnosis", "rhythm", "state", "event"}
PATIENTS = {"patient", "patients", "subject", "subjects", "person", "participant", "pid", "pseudonym", "who"}
ANNOTATIONS = (".atr", ".qrs")  # suffixes of WFDB files with annotations of rhythms and beats
TRIED = 60  # signals and labels are chosen from at most this number of headers and annotation files
MOST_HAVE = 0.9  # a proposed plan includes a signal if at least this fraction of the recordings contain the signal
# codes of rhythms in PhysioNet's databases; none of them is a person's name
RHYTHMS = frozenset(
    """
    A AB AFIB AFL AJR ASYS AT B BI BII BIII BTRI HGEA IVR J JT N NOD NOISE NSR P PAT PM PREX SAB SB SBR ST SVT
    SVTA T TRI VER VF VFIB VFL VT
    """.split()  # noqa: SIM905 - one code beside the other
)
COUNTERS = {"", "index", "row", "nr", "no", "n", "sample", "id"}
# times without a unit are read as milliseconds if, as seconds, they would give a sampling rate below this value in Hz
SLOWEST = 1.0
USUAL_RATE = 50.0  # default sampling rate in Hz
SECONDS = 2.56  # default length of a window in seconds, which is about the duration of a movement
STRIP = 10.0  # default length of a window in seconds for rhythms, which is the usual length of an ECG
SHORTEST = 8  # minimum number of time steps in a window
FEWEST, MOST_CLASSES = 2, 254
Described = tuple[dict[str, Any], tuple[str, ...], tuple[float, ...]]


@dataclass(frozen=True)
class SeriesFacts:
    source: DataSource
    hospitals: tuple[str, ...]
    tops: tuple[str, ...]
    signals: tuple[str, ...]
    labels: dict[str, int]
    where: str
    patients: dict[str, int]
    recordings: dict[str, int]
    rows: int  # median number of rows in a recording
    # median length of sections without a gap or a change of label. For rhythms, the median is weighted by length,
    # because short episodes are frequent.
    stretch: int
    rate: float | None  # sampling rate in Hz
    supposed: bool  # True if the unit of times is unknown and assumed to be seconds
    gaps: int  # number of recordings with gaps or missing values
    opened: int
    left_out: dict[str, int]
    dealt: bool  # True if a column of the recordings' table names the hospital of each recording
    # True if a column names the patient of each recording; False if the patient is part of the file name
    patients_known: bool

    @property
    def annotated(self) -> bool:
        """True if the labels are the rhythms in annotation files."""
        return is_ending(self.source.recording_columns.get("label"))

    @property
    def summary(self) -> list[str]:
        count, patients = sum(self.recordings.values()), sum(self.patients.values())
        lines = [f"classification of time series: {count} recordings of {patients} patients, labels {self.where}"]
        if self.hospitals:
            told = ", ".join(f"{site} {number}" for site, number in self.recordings.items())
            lines.append(
                f"{len(self.hospitals)} hospitals, each {'in column site' if self.dealt else 'a folder'}: {told}"
            )
        rate = f", {self.rate:g} in a second" if self.rate else ""
        lines.append(f"{self.opened} recordings were opened: {len(self.signals)} signals, {self.rows} rows{rate}")
        lines += [f"left out: {what} ({number})" for what, number in self.left_out.items()]
        return lines


def recordings_in(folder: DatasetLayout) -> list[str]:
    """Return the paths of the recordings in a folder, relative to the folder. If the folder also contains images,
    return an empty list.
    """
    names = [name for name in folder.files if name.lower().endswith(CaseIndex.RECORDINGS) and not folder.images]
    return [name for name in names if PurePosixPath(name).name != DataSource.TABLE]


def look_at_series(folder: DatasetLayout, names: Sequence[str]) -> SeriesFacts:
    """Inspect the recordings of a folder; raise DataError if the recordings cannot be used."""
    annotations = _annotations(folder, names)
    beside = folder.table_of(names, labelled=not annotations)
    annotations = "" if beside and beside.label else annotations
    names = [name for name in names if not beside or name != beside.name]
    tops = [] if beside else [*filter(None, folder.by_hospital(names))]
    places = {site: folder.path / top for site, top in folder.sites_of(tops).items()} or {"": folder.path}
    hospitals = tuple(filter(None, places))
    table = next(iter(places.values())) / (beside.name if beside else DataSource.TABLE)
    described, signals, units = _described(folder.path, names, table)
    if annotations:
        described["recording_columns"] = {"label": annotations}
    source = DataSource.model_validate(
        {"folder": folder.path, **described, **(beside.described("recording") if beside else {})}
    )
    listings = {site: CaseIndex.of_recordings(source, place) for site, place in places.items()}
    dealt = not hospitals and all(entry.site for entry in listings[""].entries)
    if dealt:
        hospitals, entries = tuple(sorted({entry.site for entry in listings[""].entries})), listings[""].entries
        listings = {site: CaseIndex([one for one in entries if one.site == site]) for site in hospitals}
    by_folder = not table.is_file() and "label" not in source.recording_columns
    if not table.is_file() and "patient" not in source.recording_columns:
        called = {site: [one.name for one in listing.entries] for site, listing in listings.items()}
        patient = folder.patient_in(called, by_folder)
        source = source.model_copy(update={"patient": patient})
        listings = {site: CaseIndex.of_recordings(source, place) for site, place in places.items()}
    reader = Reader(SeriesFolder.model_validate({"signals": signals}).limits, source, USUAL_RATE)
    reader.units = units[:1]
    cases = {site: own.entries for site, own in listings.items()}
    left_out = {site: own.left_out for site, own in listings.items()}
    every, wrong = folder.opened(cases, lambda entry: reader.read(entry.images[0]), left_out)
    inside = {site: by_patient(own, reader) for site, own in listings.items()} if reader.texts else {}
    for own in listings.values():
        own.refuse_unusable()
    labels = Counter(
        label
        for _, _, label in {
            (site, entry.patient, label)
            for site, own in listings.items()
            for entry in own.entries
            for label in (inside[site].get(entry.name, ()) if reader.label else [str(entry.label)])
        }
    )
    if len(labels) > MOST_CLASSES:
        raise DataError(f"column {reader.label!r} has {len(labels)} different values, which are too many for classes")
    annotated = [name for name in folder.files if name.lower().endswith(ANNOTATIONS)]
    if len(labels) < 2 and by_folder and annotated:
        raise DataError(
            f"annotations beside {len(annotated)} recordings, such as {annotated[0]}, have no rhythms, and medsilo "
            "does not read beats. Write each label into cases.csv, with the columns recording, label and patient"
        )
    if len(labels) < 2:
        raise DataError(
            f"all recordings have one label, {next(iter(labels), 'none')}; add recordings with other labels, or a "
            f"column of labels. For a table with a line per patient, use task table"
        )
    rates = [one.rate for one in every if one.rate]
    column = f"column {reader.label or source.column('label')!r}"
    if annotations:
        column = f"files {annotations} beside recordings, as the rhythm of each row"
    elif beside and beside.head:
        column = f"{beside.name} beside the names of recordings, without a name of its own"
    return SeriesFacts(
        source,
        hospitals,
        tuple(tops),
        signals,
        dict(sorted(labels.items())),
        "are names of folders" if by_folder else f"are in {column}",
        {site: len({entry.patient for entry in own.entries}) for site, own in listings.items()},
        {site: len(case) for site, case in cases.items()},
        int(np.median([len(one.values) for one in every])),
        _stretch([last - first for one in every for first, last in _pieces(one)], bool(annotations)),
        _round_rate(float(np.median(rates))) if rates else None,
        len(units) > 1,
        sum(bool(np.isnan(one.values).any() or (one.gaps is not None and one.gaps.any())) for one in every),
        len(every),
        dict(wrong),
        dealt,
        beside.patient is not None if beside else table.is_file() or "patient" in source.recording_columns,
    )


def _pieces(recording: Recording) -> list[tuple[int, int]]:
    """Divide the rows of a recording wherever the label changes or time steps are missing. Return the limits [start,
    end) of each section.
    """
    begins = recording.begins.copy()
    if recording.labels:
        begins[1:] |= recording.labels.rows[1:] != recording.labels.rows[:-1]
    return list(stretches(begins, np.ones(len(begins), bool)))


def _stretch(lengths: Sequence[int], by_rows: bool) -> int:
    """Return the median of lengths. If `by_rows` is true, the median is weighted by length."""
    if not by_rows:
        return int(np.median(lengths))
    rows = np.cumsum(sorted(lengths))
    return sorted(lengths)[int(np.searchsorted(rows, rows[-1] / 2))]


def _round_rate(rate: float) -> float:
    whole = round(rate)
    return float(whole) if whole and abs(rate / whole - 1) < 0.01 else float(f"{rate:.4g}")


# ---------------------------------------------------------------------------------------------------- contents
def _described(folder: Path, names: Sequence[str], table: Path) -> Described:
    """Propose settings for all recordings of a folder by inspecting the folder's first recording."""
    if table.is_file():  # the recordings' folder may contain files that the table does not name
        told = table.read_text("utf-8", errors="replace")
        names = [name for name in names if PurePosixPath(name).name in told] or names
    endings = {PurePosixPath(name).suffix.lower() for name in names}
    if len(endings) > 1:
        raise DataError(
            f"recordings have several file types, {', '.join(sorted(endings))}; keep one kind in the folder"
        )
    ending = endings.pop()
    if ending in waves.ENDINGS:
        return {}, _signals(folder, names), (1.0,)
    return _columns(folder / names[0], table.is_file())


def _signals(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the signals that most recordings contain. If no signal is in most recordings, return only the most
    frequent signal.
    """
    seen, wrong = list[tuple[str, ...]](), list[DataError]()
    for name in _some(names):
        try:
            seen.append(waves.wave_of(folder / name).names)
        except DataError as error:
            wrong.append(error)
    if not seen:
        raise wrong[0]
    counts = Counter(signal for own in seen for signal in own)
    most = tuple(signal for signal, count in counts.items() if count >= MOST_HAVE * len(seen))
    return most or (counts.most_common(1)[0][0],)


def _some(names: Sequence[str]) -> Sequence[str]:
    return names[:: max(1, -(-len(names) // TRIED))]


def _annotations(folder: DatasetLayout, names: Sequence[str]) -> str:
    """Return the suffix of the WFDB annotation files that contain rhythms. Return an empty text if no annotation file
    has rhythms, or if the user declined the rhythms.
    """
    headers = [name for name in names if name.lower().endswith(waves.WFDB)]
    if not folder.said.get("annotations", True):
        return ""
    for ending in ANNOTATIONS:
        for name in _some([header for header in headers if f"{header[: -len(waves.WFDB)]}{ending}" in folder.files]):
            with suppress(DataError):
                if rhythms_in(annotations_of(folder.path / name, ending), waves.wave_of(folder.path / name)):
                    return ending
    return ""


def _columns(path: Path, by_table: bool) -> Described:
    number, (head, *below) = TableReader.number, TableReader.first_lines(path, LINES) or [[]]
    lines = [line for line in below if len(line) == len(head)]
    time, label, patient = (
        next((name for name in head if name.lower() in words), None) for words in (TIMES, LABELS, PATIENTS)
    )
    cells = {name: [line[place] for line in lines if line[place]] for place, name in enumerate(head)}
    commas = any("," in cell and number(cell, ",") is not None for own in cells.values() for cell in own)
    decimal = "," if commas else "."
    numbers = {name for name, own in cells.items() if own and all(number(cell, decimal) is not None for cell in own)}
    others = {time, label, patient}
    signals = tuple(name for name in cells if name in numbers - others and name.lower() not in COUNTERS)
    if not signals:
        raise DataError("the first recording has no numeric column; its first line must contain the column names")
    roles = {"time": time} if by_table else {"time": time, "label": label, "patient": patient}
    found: dict[str, Any] = {"recording_columns": {role: name for role, name in roles.items() if name}}
    if commas:
        found["decimal"] = decimal
    units = units_of(time or "") if time in numbers else (1.0,)  # a time column with dates needs no unit of time
    return {key: value for key, value in found.items() if value != {}}, signals, units


# ---------------------------------------------------------------------------------------------------- choices
def choose_series(seen: SeriesFacts, folder: DatasetLayout) -> DatasetLayout:
    window, why = _window(seen)
    step = max(1, window // 2)
    codes = seen.annotated and seen.labels.keys() <= RHYTHMS
    words = folder.plans_words(seen.labels, seen.patients_known or codes)
    labels = sorted(set(words.values()))
    if len(labels) < FEWEST:
        raise DataError(
            f"too few patients have the same label, so labels may be names: {len(seen.labels)} labels {seen.where}; "
            f"add patients with each label, or combine rare labels"
        )
    by_time = "by the times of the recordings" if seen.rate else "a guess, as no column has times: correct it"
    if seen.rate and seen.rate < SLOWEST and seen.supposed:
        by_time = f"as times are taken for seconds; {1000 * seen.rate:g} if they are milliseconds: correct it"
    gaps = "some recordings have gaps or missing values" if seen.gaps else "none has gaps"
    plan = {
        "task.signals": (
            list(seen.signals),
            "columns of numbers that most recordings have: leave out those that reveal the answer",
        ),
        "task.labels": (
            labels,
            f"{seen.where}; few patients' is 'other', class-1 may be a name: correct it",
        ),
        "task.rate": (seen.rate or USUAL_RATE, f"steps in a second, {by_time}"),
        "task.window": (window, why),
        "task.step": (step, "windows overlap by half"),
        "task.missing": ("split" if seen.gaps else "leave-out", gaps),
        "task.standardise": ("site", "each hospital by its own training cases: devices differ in gain and offset"),
        **({"task.partition": ({"kind": "column"}, "by the table's column site")} if seen.dealt else {}),
        "network.name": ("activity-cnn", "two convolutions along time"),
        "network.norm": ("group", "no running statistics, which hospitals with other devices would spoil"),
        "training.batch_size": (32, "windows are small: any machine has room"),
    }
    said = seen.source.model_dump(mode="json", exclude_defaults=True, exclude_unset=True)
    reasons = {**WHY, **(OF_ANNOTATIONS if seen.annotated else {})}
    settings = {f"data.{key}": (said[key], why) for key, why in reasons.items() if said.get(key)}
    if changed := {own: plans for own, plans in words.items() if own != plans}:
        settings["data.label_map"] = changed, "labels here: names in the plan"
    windows = {site: count * seen.rows / step for site, count in seen.recordings.items()}
    own = folder.folders_of(seen.tops)
    return folder.choose("series-folder", seen.summary, seen.patients, plan, settings, examples=windows, sites=own)


def _window(seen: SeriesFacts) -> tuple[int, str]:
    rate = seen.rate or USUAL_RATE
    steps = 2 ** max(3, round(math.log2((STRIP if seen.annotated else SECONDS) * rate)))
    while steps > max(seen.stretch, SHORTEST):
        steps //= 2
    if seen.annotated:
        return steps, f"steps, {steps / rate:.3g} s; half of the rows are in stretches of at least {seen.stretch}"
    return steps, f"steps, {steps / rate:.3g} s; stretches of one label have {seen.stretch} in the median"


WHY: Mapping[str, str] = {
    "table": "a line per recording",
    "head": "what its columns are called, as its first line is a recording",
    "columns": "what these are called there: a guess by the names; correct it",
    "recording_columns": "what these are called in the recordings, by their names: correct what is guessed wrong",
    "decimal": "numbers are written with a comma",
    "patient": "a guess from the names; correct it",
}


OF_ANNOTATIONS = {"recording_columns": "the ending of the files whose rhythms are the labels of rows"}


def look(folder: DatasetLayout) -> DatasetLayout | None:
    """Propose a plan for a folder of recordings, or return None if the folder has no recordings."""
    names = recordings_in(folder)
    return choose_series(look_at_series(folder, names), folder) if names else None
