"""Train on the time series of a hospital, which are cut into windows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.extend import (
    CaseIndex,
    Classification,
    Column,
    DataError,
    DataSource,
    Inference,
    OwnFolder,
    SiteData,
    Standardised,
    TableReader,
    classification,
)
from medsilo_series import rhythms
from medsilo_series.recordings import Reader, Recording
from medsilo_series.windows import Cutting, Missing, Windows, cut

# maximum relative difference between two sampling rates: that in the settings, and that computed from the times
NEAR = 0.01
MOST_TERM = 1000  # maximum numerator and maximum denominator of the resampling factor
MOST_SIGNALS = 5000
AT_ONCE = 256
Scales = tuple[Tensor, Tensor]  # offset and divisor that standardise each signal
# maps each label to the plan's class number, or to None if rows with this label are not used
Known = dict[str, int | None]
LOST = "recordings have gaps or missing values; no window holds one, task.missing says what happens"
SHORT = "recordings have stretches of one label that are shorter than a window; no window is cut from these"


class SeriesFolder(OwnFolder, Standardised):
    """Windows of recordings (CSV, Parquet, WFDB, EDF) and their classes, read from the folder that the site's settings
    describe.

    A window consists of `window` steps of all signals, [signals, steps]; each window starts `step` steps after the
    start of the previous window. No window contains a gap, a missing value, or rows with different labels or patients.
    All windows have the same length.
    """

    title: ClassVar[str] = "A hospital's own time series: classification by windows"
    use: ClassVar[Inference] = Inference("series")
    files: ClassVar[str] = "recordings"
    target: ClassVar[str] = "class"

    name: Literal["series-folder"] = "series-folder"
    signals: tuple[Column, ...] = Field(
        default=(Column(name="signal"),),
        min_length=1,
        max_length=MOST_SIGNALS,
        description="the network's inputs: names of numeric columns in order; `{name: ..., low: 0, high: 300}` sets "
        "plausible limits",
    )
    rate: float = Field(
        default=50.0,
        gt=0,
        le=1e6,
        description="samples per second; a site whose settings have another `data.rate` resamples its recordings",
    )
    window: int = Field(default=128, ge=4, le=1_000_000, description="length of a window in steps")
    step: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="steps between the starts of two windows; null: the length of a window",
    )
    missing: Missing = Field(
        "leave-out",
        description="handling of recordings with gaps in time or missing values: `leave-out` excludes them, `split` "
        "cuts windows before and after each gap",
    )

    @model_validator(mode="after")
    def _are_numbers(self) -> Self:
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals {names}: name each once")
        if levels := [signal.name for signal in self.signals if signal.levels]:
            raise ValueError(f"signals: {levels[0]!r} has levels, and signals are numbers; remove the levels")
        return self

    # ------------------------------------------------------------------------------------------ objective
    @property
    def goal(self) -> Classification:
        return classification(self.labels, self.score)

    @property
    def words(self) -> tuple[str, ...]:
        return (*super().words, *(signal.name for signal in self.signals))

    @property
    def numbers(self) -> Sequence[Column]:
        return self.signals

    @property
    def channels(self) -> int:
        return len(self.signals)

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest value that each signal can have. The keys are the signals' names in the order of
        the plan.
        """
        return {signal.name: (signal.low, signal.high) for signal in self.signals}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.window)

    def default_network(self) -> str:
        return "activity-cnn"

    # ------------------------------------------------------------------------------------------ answers
    def together(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, float | str]:
        """Return the prediction for a recording, computed from each class's mean probability over the windows of the
        recording.
        """
        shares = torch.tensor([[answer[f"probability_{label}"] for label in self.labels] for answer in answers])
        return self.goal.in_words(shares.mean(0).tolist())

    def across_patients(self) -> str:
        return self.from_training_cases("signal") if self.needs_scales else super().across_patients()

    # ------------------------------------------------------------------------------------------ standardisation
    def scales_of(self, blocks: Iterable[Tensor]) -> Scales:
        """Return the offset and the divisor that standardise each signal over the given batches of windows."""
        means, deviations = torch.zeros(self.channels).double(), torch.ones(self.channels).double()
        if self.standardise == "plan":
            means = torch.tensor([float(signal.mean or 0) for signal in self.signals], dtype=torch.float64)
            deviations = torch.tensor([float(one.deviation or 1) for one in self.signals], dtype=torch.float64)
        elif self.standardise == "site":
            means, deviations = _spread(blocks, self.channels)
        return means, deviations

    def finished(self, windows: Tensor, scales: Scales) -> Tensor:
        if self.standardise == "none":
            return windows
        return self.scaled(windows.double().transpose(-1, -2), scales).transpose(-1, -2).float().contiguous()

    def completed(self, data: SiteData) -> SiteData:
        if self.standardise == "none":
            return data
        known = data.train if len(data.train) else data.test  # type: ignore[arg-type]
        scales = self.scales_of(_blocks(known))
        train, validation, test = (_Finished(self, own, scales) for own in (data.train, data.validation, data.test))
        told = {name: (float(a), float(b)) for name, a, b in zip(self.input_names, *scales, strict=True)}
        surveyed = data.survey and replace(data.survey, scales=told)
        return replace(data, train=train, validation=validation, test=test, survey=surveyed)

    # ------------------------------------------------------------------------------------------ files
    def known_labels(self, source: DataSource) -> Known:
        """Return a dictionary from the names that a site gives to labels, spelled as by `TableReader.level`, to the
        plan's class numbers. Names that stand for rows without a label are mapped to None.
        """
        said = source.label_map
        known = self.class_numbers(self.labels, {own: plans for own, plans in said.items() if plans != ""})
        nothing = dict.fromkeys(TableReader.level(str(own)) for own, plans in said.items() if plans == "")
        return {**dict.fromkeys(map(TableReader.level, source.missing)), **known, **nothing}

    def listing_of(self, source: DataSource, folder: Path) -> CaseIndex:
        if source.images or source.labels:
            raise DataError("data: recordings have no images or labels; leave these keys out, or name a data.table")
        if source.each_alone and "patient" in source.recording_columns:
            raise DataError(
                "data.recording_columns.patient: under privacy, a file must hold one patient, because a fault in it "
                "leaves out the whole file; write one file per patient"
            )
        listing = CaseIndex.of_recordings(source, folder)
        reader, known = Reader(self.limits, source, self.rate), self.known_labels(source)
        shown = by_patient(listing, reader) if reader.texts else {}
        labels = {entry.name: [*(shown.get(entry.name) or [str(entry.label)])] for entry in listing.entries}
        listing.leave_out_rare(source, labels)
        strangers = [
            f"{entry.name}: {label}"
            for entry in listing.entries
            for label in labels[entry.name]
            if TableReader.level(label) not in known
        ]
        where = "" if reader.label or source.table else ", or name the column that has it under data.recording_columns"
        what = f"recordings have a label that is not among the plan's ({', '.join(self.labels)})"
        listing.add("stops", f"{what}; add it to data.label_map{where}", strangers)
        return listing

    def classes_of(self, listing: CaseIndex, source: DataSource) -> Known:
        known = self.known_labels(source)
        return {entry.name: known.get(TableReader.level(str(entry.label))) for entry in listing.entries}

    def maker(self, source: DataSource) -> Callable[..., Any]:
        reader, known = Reader(self.limits, source, self.rate), self.known_labels(source)
        return _LastMade(partial(self._made, reader=reader, known=known))

    def _made(self, files: tuple[Path, ...], label: int | None, patient: str, reader: Reader, known: Known) -> Any:
        recording = reader.read(files[0])
        own = np.ones(len(recording.begins), bool)
        if recording.patients:
            own = recording.patients.rows == recording.patients.names.index(patient)
        told = recording.labels
        values = [known.get(TableReader.level(name)) for name in told.names] if told else [label]
        usable = [value is not None for value in values]
        found = cut(recording, self.cutting(recording, reader.source), own, usable)
        if not len(found.inputs) or not any(usable):
            raise DataError(
                f"no recording has {self.window} complete steps in a row with one label; correct task.window or the "
                f"recordings"
            )
        places = found.labels.tolist()
        targets = np.array([values[place] for place in places], np.uint8)
        rate = recording.rate or reader.source.rate or self.rate
        inputs, shown = torch.from_numpy(found.inputs), [(values[place] or 0,) for place in places]
        seconds = float(own.sum() / rate)
        gaps, short = found.gaps, found.short
        return self.prepared(inputs, torch.from_numpy(targets), shown, seconds=seconds, gaps=gaps, short=short)

    def windows(self, path: Path, reader: Reader) -> Iterator[tuple[str, Recording, Windows]]:
        recording = reader.read(path)
        for patient, own in recording.by_patient():
            yield patient, recording, cut(recording, self.cutting(recording, reader.source), own)

    def own_scales(self, source: DataSource) -> tuple[Tensor, Tensor]:
        """Return the offset and the divisor that standardise each signal over all recordings of a hospital."""
        reader = Reader(self.limits, source, self.rate, label=False)
        found = CaseIndex.of_recordings(source, source.folder)
        paths = dict.fromkeys(entry.images[0] for entry in found.entries)
        every = (found.inputs for path in paths for _, _, found in self.windows(path, reader))
        return self.scales_of(torch.from_numpy(inputs) for inputs in every if len(inputs))

    def cutting(self, recording: Recording, source: DataSource) -> Cutting:
        """Return the length of windows, the distance between windows, and the resampling factor. Raise DataError if the
        sampling rates of the recording and of the settings disagree.
        """
        own, told = source.rate or self.rate, recording.rate
        if told and abs(told / own - 1) > NEAR:
            who = "data.rate says" if source.rate else "the plan reads"
            hint = "correct it" if source.rate else "say data.rate, so that they are resampled, or correct the times"
            raise DataError(f"recordings' times say about {told:.3g} Hz where {who} {own:g}; {hint}")
        share = Fraction(str(self.rate)) / Fraction(str(own))
        if max(share.numerator, share.denominator) > MOST_TERM:
            raise DataError(
                f"recordings of {own:g} Hz can't be resampled to {self.rate:g} by whole numbers; resample them before"
            )
        return Cutting(self.window, self.step or self.window, self.missing, share.numerator, share.denominator)

    def note(self, listing: CaseIndex, every: Sequence[Any], source: DataSource) -> None:
        listing.add("note", LOST, [one.entry.name for one in every if one.facts.gaps])
        listing.add("note", SHORT, [one.entry.name for one in every if one.facts.short])

    def told_of(self, every: Sequence[Any]) -> dict[str, Any]:
        seconds = [one.facts.seconds for one in every]
        return {"seconds": (min(seconds), max(seconds)) if seconds else None}


def by_patient(listing: CaseIndex, reader: Reader) -> dict[str, Counter[str]]:
    """Replace each recording in a listing by one entry for each patient in the recording. For each entry, return the
    number of rows with each label. Rows without a label are not counted.
    """
    entries, shown, wrong, missing = [], {}, defaultdict(list), reader.source.missing
    for entry in listing.entries:
        try:
            found = reader.whose(entry.images[0])
        except DataError as error:
            wrong[str(error)].append(entry.name)
            continue
        for patient, labels in found.items():
            own = replace(entry, name=f"{entry.name}/{patient}", patient=patient) if reader.patients else entry
            if not own.patient or own.patient in missing:
                wrong["recordings have rows without a patient; fill in the column"].append(entry.name)
                continue
            if reader.label:
                shown[own.name] = known = Counter({name: labels[name] for name in labels if name not in missing})
                if not known:
                    wrong["recordings have no row with a label; write the labels"].append(entry.name)
                    continue
                own = replace(own, label=min(known, key=lambda name: (-known[name], name)))
            # an entry must contain all files on which its windows depend, so the annotation file is added
            if rhythms.is_ending(reader.label):
                own = replace(own, images=(*own.images, rhythms.annotations_of(own.images[0], str(reader.label))))
            entries.append(own)
    listing.entries = entries
    for what, names in wrong.items():
        listing.add("left out", what, names)
    listing.check_patients(reader.source)
    return shown


class _LastMade:
    """Cuts recordings into windows, and caches the windows of the latest recording. Without this cache, a recording
    would be cut again for each of its thousands of windows.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.last: tuple[Any, Any] | None = None

    def __call__(self, files: tuple[Path, ...], label: int | None, patient: str) -> Any:
        asked, last = (files, label, patient), self.last
        if last is None or last[0] != asked:
            self.last = last = None  # memory might not hold two recordings at the same time
            self.last = last = asked, self.make(*asked)
        return last[1]


class _Finished(Dataset):
    def __init__(self, task: SeriesFolder, data: Dataset, scales: Scales) -> None:
        self.task, self.data, self.scales = task, data, scales
        self.patients, self.labels = data.patients, data.labels  # type: ignore[attr-defined]
        self.records = getattr(data, "records", None)

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return self.task.finished(inputs, self.scales), target


def _blocks(data: Dataset) -> Iterator[Tensor]:
    count = len(data)  # type: ignore[arg-type]
    for first in range(0, count, AT_ONCE):
        yield torch.stack([data[place][0] for place in range(first, min(first + AT_ONCE, count))])


def _spread(blocks: Iterable[Tensor], signals: int) -> Scales:
    """Return the mean and the standard deviation (n - 1) of each signal over all steps of all windows. The standard
    deviation of a constant signal is set to 1.
    """
    count, means, squares = 0, torch.zeros(signals).double(), torch.zeros(signals).double()
    for block in blocks:
        values = block.double().transpose(1, 2).reshape(-1, signals)
        more, apart = len(values), values.mean(0) - means
        squares += (values - values.mean(0)).square().sum(0) + apart.square() * count * more / (count + more)
        means, count = means + apart * more / (count + more), count + more
    deviations = (squares / max(count - 1, 1)).sqrt()
    return means, deviations.where(deviations > 0, torch.ones(signals).double())
