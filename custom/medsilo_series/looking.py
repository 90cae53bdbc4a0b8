"""Look at a folder of recordings, and choose what a plan and a hospital's settings say of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from medsilo.extend import (
    Choice,
    DataError,
    DataSource,
    Folder,
    Listing,
    Sight,
    choices,
    columns,
    files_below,
    folder_layout,
    looks,
    sheet,
)
from medsilo_series import waves
from medsilo_series.recordings import Reader, Recording
from medsilo_series.series_folder import by_patient
from medsilo_series.windows import stretches

LINES = 200  # of a recording, by which its columns are told apart
TIMES = {"t", "time", "times", "timestamp", "datetime", "date", "seconds", "sec", "s", "ms", "time_ms", "time_s", "us"}
LABELS = {"label", "labels", "class", "activity", "target", "diagnosis", "rhythm", "state", "event"}
PATIENTS = {"patient", "patients", "subject", "subjects", "person", "participant", "pid", "pseudonym", "who"}
COUNTERS = {"", "index", "row", "nr", "no", "n", "sample", "id"}
SECONDS = 2.56  # that a window takes, about, of a movement
SHORTEST = 8  # steps of a window
BATCH = 32


@dataclass(frozen=True)
class SeriesLooks:
    """The facts of a folder of recordings."""

    source: DataSource
    hospitals: tuple[str, ...]
    signals: tuple[str, ...]
    labels: dict[str, int]  # and how many rows or recordings have each
    where: str  # labels are found
    patients: dict[str, int]  # by hospital
    recordings: dict[str, int]
    rows: int  # of a recording, in the median
    stretch: int  # rows of one label without a gap, in the median
    rate: float | None  # Hz
    gaps: int  # recordings with gaps or missing values
    opened: int
    left_out: dict[str, int]  # why -> recordings
    dealt: bool  # whether a column of the table says whose a recording is

    @property
    def found(self) -> list[str]:
        """Return what was found, one sentence a line."""
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


def recordings_in(folder: Path) -> list[str]:
    """Return the recordings below a folder by their names from there; none where images lie there, too."""
    names, table = files_below(folder)[0], DataSource.TABLE
    if any(PurePosixPath(item).name != table for item in folder_layout.items_of(names)):
        return []
    recordings = [name for name in names if name.lower().endswith(Listing.RECORDINGS)]
    return [name for name in recordings if PurePosixPath(name).name != table]


def look_at_series(folder: Path, names: Sequence[str]) -> SeriesLooks:
    """Open recordings of a folder; a DataError says what makes them unusable."""
    hospitals = _hospitals(names)
    described, signals = _described(folder, names, folder / (hospitals[0] if hospitals else "") / DataSource.TABLE)
    source = DataSource.model_validate({"folder": folder, **described})
    places = {site: folder / site for site in hospitals} or {"": folder}
    listings = {site: Listing.of_recordings(source, place) for site, place in places.items()}
    dealt = not hospitals and all(entry.site for entry in listings[""].entries)
    if dealt:
        hospitals, entries = tuple(sorted({entry.site for entry in listings[""].entries})), listings[""].entries
        listings = {site: Listing([one for one in entries if one.site == site]) for site in hospitals}
    by_folder = bool(source.recordings) and not source.inside.label
    if source.recordings and not source.inside.patient:
        patient = looks.patient_in(
            {site: [one.name for one in own.entries] for site, own in listings.items()}, by_folder
        )
        source = source.model_copy(update={"patient": patient})
        listings = {site: Listing.of_recordings(source, place) for site, place in places.items()}
    reader = Reader([columns.Column(name=name) for name in signals], source)
    looked, wrong = looks.opened(listings, lambda entry: reader.read(entry.images[0]))
    every, recordings = [one for one, _ in looked], {site: len(own.entries) for site, own in listings.items()}
    labels = Counter(str(entry.label) for own in listings.values() for entry in own.entries)
    inside = [by_patient(own, reader) for own in listings.values()] if reader.texts else []
    looks.refuse_unusable(listings)
    if source.inside.label:
        labels = sum((rows for own in inside for rows in own.values()), Counter())
    if len(labels) > folder_layout.MOST_CLASSES:
        raise DataError(f"column {source.inside.label!r} has {len(labels)} different values, too many for classes")
    if len(labels) < 2:
        raise DataError(
            f"read as recordings, all files here have one label, {next(iter(labels), 'none')}: add the others, or a "
            "column; a table with a line for each patient is task table's (docs/your-data.md)"
        )
    rates = [one.rate for one in every if one.rate]
    return SeriesLooks(
        source,
        hospitals,
        signals,
        dict(sorted(labels.items())),
        "are names of folders" if by_folder else f"are in column {source.inside.label or source.columns.label!r}",
        {site: len({entry.patient for entry in own.entries}) for site, own in listings.items()},
        recordings,
        int(np.median([len(one.values) for one in every])),
        int(np.median([last - first for one in every for first, last in _pieces(one)])),
        _round_rate(float(np.median(rates))) if rates else None,
        sum(bool(np.isnan(one.values).any() or (one.gaps is not None and one.gaps.any())) for one in every),
        len(every),
        dict(wrong),
        dealt,
    )


def _pieces(one: Recording) -> list[tuple[int, int]]:
    """Return the parts of a recording that are of one label and without a gap."""
    begins = one.begins.copy()
    if one.labels:
        begins[1:] |= one.labels.rows[1:] != one.labels.rows[:-1]
    return list(stretches(begins, np.ones(len(begins), bool)))


def _round_rate(rate: float) -> float:
    whole = round(rate)
    return float(whole) if whole and abs(rate / whole - 1) < 0.01 else float(f"{rate:.4g}")


# ---------------------------------------------------------------------------------------------------- what lies there
def _hospitals(names: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of hospitals: those that are called so, or that have folders themselves."""
    parts = [PurePosixPath(name).parts for name in names]
    tops = sorted({own[0] for own in parts if len(own) > 1})
    if len(tops) < 2 or any(len(own) == 1 for own in parts):
        return ()
    called = all(top.lower().startswith(folder_layout.HOSPITAL_WORDS) for top in tops)
    return tuple(tops) if called or all(len(own) > 2 for own in parts) else ()


def _described(folder: Path, names: Sequence[str], table: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what the first recording says of how all are to be read, and its signals."""
    if table.is_file():  # other files may lie there, too
        told = table.read_text("utf-8", errors="replace")
        names = [name for name in names if PurePosixPath(name).name in told] or names
    endings = {PurePosixPath(name).suffix.lower() for name in names}
    if len(endings) > 1:
        raise DataError(f"recordings have several endings, {', '.join(sorted(endings))}; keep one kind in the folder")
    ending = endings.pop()
    found = {} if table.is_file() else {"recordings": f"**/*{ending}"}
    if ending in waves.ENDINGS:
        return found, waves.wave_of(folder / names[0]).names
    own, signals = _columns(folder / names[0], table.is_file())
    return found | own, signals


def _columns(path: Path, by_table: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    head, *below = sheet.first_lines(path, LINES) or [[]]
    lines = [line for line in below if len(line) == len(head)]
    time, label, patient = (_called(head, words) for words in (TIMES, LABELS, PATIENTS))
    cells = {name: [line[place] for line in lines if line[place]] for place, name in enumerate(head)}
    decimal = "," if any("," in cell for own in cells.values() for cell in own if _is_number(cell, ",")) else "."
    taken = {time, label, patient}
    signals = tuple(
        name
        for name, own in cells.items()
        if name not in taken and name.lower() not in COUNTERS and own and all(_is_number(c, decimal) for c in own)
    )
    if not signals:
        raise DataError("the first recording has no column of numbers; its first line has to name the columns")
    roles = {"time": time} if by_table else {"time": time, "label": label, "patient": patient}
    found: dict[str, Any] = {"inside": {role: name for role, name in roles.items() if name}}
    if time:
        found["time_unit"] = _unit(time, cells[time])
    if decimal == ",":
        found["decimal"] = decimal
    return {key: value for key, value in found.items() if value not in ({}, "s")}, signals


def _called(names: Sequence[str], words: set[str]) -> str | None:
    return next((name for name in names if name.lower() in words), None)


def _is_number(cell: str, decimal: str) -> bool:
    return columns.as_number(columns.as_written(cell, decimal)) is not None


def _unit(name: str, cells: Sequence[str]) -> str:
    """Return the unit of a time, by its name or by how it is written."""
    try:
        if cells and columns.as_number(cells[0].replace(",", ".")) is None and datetime.fromisoformat(cells[0]):
            return "datetime"
    except ValueError:
        pass
    word = name.lower().rpartition("_")[2]
    return word if word in ("ms", "us") else "s"


# ---------------------------------------------------------------------------------------------------- choices
def choose_series(seen: SeriesLooks, sites: Sequence[str], device: str | None = None) -> choices.Draft:
    """Return the choices for a folder of recordings. device: one that was asked for."""
    shares, window = choices.shares_of(seen.patients), _window(seen)
    step = max(1, window.value // 2)
    training = choices.trained_of(seen.patients)
    cases = int(shares.value[0] * np.median([seen.recordings[site] for site in training]) * seen.rows / step)
    counts = ", ".join(f"{name} {number}" for name, number in seen.labels.items())
    unit = "recordings" if "folders" in seen.where else "rows"
    rate = seen.rate or 50.0
    by_time = "by the times of the recordings" if seen.rate else "a guess, as no column tells time: correct it"
    gaps = f"{seen.gaps} of {seen.opened} recordings have gaps or missing values" if seen.gaps else "none has gaps"
    plan = (
        choices.METHOD,
        Choice("task.name", "series-folder", seen.found[0]),
        Choice("task.signals", list(seen.signals), "all columns of numbers, in turn: leave out what tells the answer"),
        Choice("task.labels", list(seen.labels), f"{seen.where}, with their {unit}: {counts}"),
        Choice("task.rate", rate, f"steps in a second, {by_time}"),
        window,
        Choice("task.step", step, "windows overlap by half"),
        Choice("task.missing", "split" if seen.gaps else "leave-out", gaps),
        Choice(
            "task.standardise", "site", "each hospital by its own training cases: devices differ in gain and offset"
        ),
        shares,
        *([Choice("task.partition", {"kind": "column"}, "by the table's column site")] if seen.dealt else []),
        Choice("network.name", "activity-cnn", "two convolutions along time"),
        Choice("network.norm", "group", "no running statistics, which hospitals with other devices would spoil"),
        *choices.steps_of(
            cases, Choice("training.batch_size", BATCH, "windows are small: any machine has room"), 0.001
        ),
        *choices.course_of(sites, seen.patients if seen.hospitals else {}),
    )
    settings = (*_settings(seen, shares), *choices.asked_for(device))
    return choices.Draft(plan, settings, choices.shares_of_small(seen.patients, shares))


def _window(seen: SeriesLooks) -> Choice:
    rate = seen.rate or 50.0
    steps = 2 ** max(3, round(math.log2(SECONDS * rate)))
    while steps > max(seen.stretch, SHORTEST):
        steps //= 2
    told = f"steps, {steps / rate:.3g} s; stretches of one label have {seen.stretch} in the median"
    return Choice("task.window", steps, told)


WHY: Mapping[str, str] = {
    "recordings": "the text that * matches is a recording's name",
    "inside": "what these are called in the recordings, by their names: correct what is guessed wrong",
    "time_unit": "of the time's column",
    "decimal": "numbers are written with a comma",
    "patient": "a guess from the names; correct it",
}


def _settings(seen: SeriesLooks, shares: Choice) -> list[Choice]:
    where = "with a folder for each hospital" if seen.hospitals and not seen.dealt else "nothing is written there"
    said = seen.source.model_dump(mode="json", exclude_defaults=True, exclude_unset=True)
    rest = [Choice(f"data.{key}", said[key], why) for key, why in WHY.items() if said.get(key)]
    return [Choice("data.folder", str(seen.source.folder), where), *rest, choices.own_shares(shares)]


def look(folder: Folder) -> Sight | None:
    """Say what suits a folder of recordings; nothing of another."""
    if not folder.path.is_dir() or not (names := recordings_in(folder.path)):
        return None
    series = look_at_series(folder.path, names)
    chosen = choose_series(series, series.hospitals or (folder.site,), folder.device)
    return Sight(series.found, bool(series.hospitals), chosen)
