"""A hospital's own time series: windows of recordings that lie in files."""

import json
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
    BETWEEN,
    ByKind,
    Classification,
    DataError,
    DataSource,
    DrawnCases,
    Entry,
    Facts,
    Found,
    HeldEntry,
    Listing,
    Network,
    OwnFolder,
    PartFacts,
    PreparedEntry,
    ReadyCases,
    SiteData,
    Survey,
    Use,
    check_patients,
    columns,
    digest,
    find_recordings,
    labels_of,
    network,
    patients_of,
    range_of,
    records_of,
    seed_for,
    standardising,
    survival,
)
from medsilo_series.recorded_labels import KnownLabels
from medsilo_series.recordings import ROUGH, Coded, Reader, Recording
from medsilo_series.windows import Cutting, Missing, Windows, cut

NEAR = 0.01  # of a rate: times that say another one are not believed
MOST_TERM = 1000  # of the fraction by which recordings are resampled
AT_ONCE = 256  # windows that are measured together
EVERY_SUBJECT = 1_000_000  # are scored together: concordance compares all of a part
OTHERS = "patients have recordings with different times or events; give each patient one of each"
ROWS = ("names", "inside", "label_map", "missing", "rate", "time_unit", "decimal", "order")  # of a site's settings
LOST = "recordings have gaps or missing values; no window holds one, task.missing says what happens"


class SeriesFolder(OwnFolder, ByKind):
    """Windows of recordings (CSV, Parquet, arrays of numpy) and their classes, or a number each, from a folder that the
    site describes.

    A window is `window` steps of all signals, [signals, steps], and the next begins `step` steps later. It never holds
    a gap, a value that is not known, or a change of label or patient, and none is shorter.

    Of survival the cases are patients, not windows: a pass draws one window of each, and a patient's risk is the mean
    of all windows' logarithms of it.
    """

    title: ClassVar[str] = "A hospital's own time series: classification, regression or survival by windows"
    use: ClassVar[Use] = Use("series")
    files: ClassVar[str] = "recordings"
    target: ClassVar[str] = "value"  # what predictions call the number of a regression

    name: Literal["series-folder"] = "series-folder"
    signals: columns.ReadColumns = Field(
        default=(columns.Column(name="signal"),),
        description="what the network reads: names of columns with numbers, in turn; `{name: ..., low: 0, high: 300}` "
        "bounds them ([your-data.md](your-data.md#time-series))",
    )
    most_windows: int = Field(
        64,
        ge=1,
        le=100_000,
        description="of survival: windows of a patient that count; of more, as many that lie evenly",
    )
    rate: float = Field(
        default=50.0, gt=0, le=1e6, description="steps in a second; a site resamples where it says another `data.rate`"
    )
    window: int = Field(default=128, ge=4, le=1_000_000, description="steps that a network reads")
    step: int | None = Field(
        default=None, ge=1, le=1_000_000, description="steps from one window to the next; null: a window's length"
    )
    missing: Missing = Field(
        "leave-out",
        description="recordings with gaps in time or values missing: left out; or windows are cut before and after "
        "(split); or the last value takes the place of missing ones, for `longest_fill` rows at most",
    )
    longest_fill: int = Field(default=5, ge=1, le=100_000, description="rows that `missing: fill` fills in turn")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals {names}: name each once")
        if self.kind == "survival" and len({*names, self.time, self.event}) < len(names) + 2:
            raise ValueError("time and event are no signals, and two columns; name each once")
        if levels := [signal.name for signal in self.signals if signal.levels]:
            raise ValueError(f"signals: {levels[0]!r} has levels, and signals are numbers; remove them")
        standardising.check_scales(self.signals, self.standardise)
        return self

    # ------------------------------------------------------------------------------------------ what is learned
    @property
    def channels(self) -> int:
        """The signals."""
        return len(self.signals)

    @property
    def evaluation_batch(self) -> int:
        """Every patient of a part, where they are the cases."""
        return EVERY_SUBJECT if self.kind == "survival" else super().evaluation_batch

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.window)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the signals."""
        return tuple(signal.name for signal in self.signals)

    @property
    def largest_input(self) -> float:
        """By how numbers are standardised."""
        return standardising.largest(self.signals, self.standardise)

    def default_network(self) -> Network:
        return network("activity-cnn")

    # ------------------------------------------------------------------------------------------ patients as cases
    def varied(self, cases: Dataset, seed: int, names: Sequence[str] | None = None) -> Dataset:
        return self.pieces(cases, seed, names)

    def pieces(self, cases: Dataset, seed: int, names: Sequence[str] | None = None) -> Dataset:
        """Return one window of each patient, where patients are the cases."""
        return DrawnCases(cases, _one_window, seed, names) if self.kind == "survival" else cases

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the network's output for windows, or its mean over each patient's."""
        single = inputs.ndim == 1 + len(self.shape)
        return network(inputs) if single else of_subjects(network, inputs, AT_ONCE)

    # ------------------------------------------------------------------------------------------ in words
    def together(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, float | str]:
        """Return what the mean of a recording's windows says."""
        goal = self.goal
        if not isinstance(goal, Classification):
            told = self.target if self.kind == "regression" else survival.RISK
            return {told: sum(answer[told] for answer in answers) / len(answers)}
        shares = torch.tensor([[answer[f"probability_{label}"] for label in self.labels] for answer in answers])
        return goal.in_words(shares.mean(0).tolist())

    # ------------------------------------------------------------------------------------------ standardised
    def across_patients(self) -> str:
        return standardising.from_training_cases("signal") if self.needs_scales else super().across_patients()

    @property
    def needs_scales(self) -> bool:
        """Return whether a hospital's own numbers are needed to read its recordings."""
        return self.standardise == "site"

    def scales_that_were(self, told: Mapping[str, Sequence[float]]) -> standardising.Scales:
        """Return what a survey told of `scales_of`."""
        return standardising.scales_told(self.input_names, told)

    def scales_of(self, blocks: Iterable[Tensor]) -> standardising.Scales:
        """Return what is subtracted of each signal and what it is divided by. blocks: windows, some at a time."""
        means, deviations = torch.zeros(self.channels).double(), torch.ones(self.channels).double()
        if self.standardise == "plan":
            means = torch.tensor([float(one.mean or 0) for one in self.signals], dtype=torch.float64)
            deviations = torch.tensor([float(one.deviation or 1) for one in self.signals], dtype=torch.float64)
        elif self.standardise == "site":
            means, deviations = _spread(blocks, self.channels)
        return means, deviations

    def finished(self, windows: Tensor, scales: standardising.Scales) -> Tensor:
        """Return what the network reads of windows [..., signals, steps]."""
        if self.standardise == "none":
            return windows
        return standardising.scaled(windows.double().transpose(-1, -2), scales).transpose(-1, -2).float().contiguous()

    def _finished(self, data: SiteData) -> SiteData:
        if self.standardise == "none" and self.kind != "survival":
            return data
        known = data.train if len(data.train) else data.test  # type: ignore[arg-type]
        scales = self.scales_of(_blocks(known))
        train, validation, test = (self._ready(own, scales) for own in (data.train, data.validation, data.test))
        told = {name: (float(a), float(b)) for name, a, b in zip(self.input_names, *scales, strict=True)}
        survey = data.survey and replace(data.survey, scales=told)
        return replace(data, train=train, validation=validation, test=test, survey=survey)

    def _ready(self, data: Dataset, scales: standardising.Scales) -> Dataset:
        finished = _Finished(self, data, scales)
        return Subjects(finished, self.most_windows) if self.kind == "survival" else finished

    # ------------------------------------------------------------------------------------------ from files
    def outcomes(self, source: DataSource) -> tuple[str, ...]:
        """Return the columns of a site's table that say a survival's time and event."""
        if bool(source.inside.outcome) and (self.kind != "survival" or len(source.inside.outcome) != 2):
            raise DataError("data.inside.outcome: names two columns, time and event, and is for survival; correct it")
        if self.kind != "survival":
            return ()
        if source.inside.label:
            raise DataError("data.inside.label is for classes and numbers; name time and event in data.inside.outcome")
        return tuple(source.names.get(name, name) for name in (self.time, self.event))

    def reader(self, source: DataSource, outcome: bool = True) -> Reader:
        """Return what reads a site's recordings. outcome: with what is learned of them."""
        return Reader(self.signals, source, outcome, (self.time, self.event) if self.kind == "survival" else ())

    def _found(self, source: DataSource, folder: Path) -> Found:
        if source.images or source.labels:
            raise DataError("data: recordings have no images or labels; name files under data.recordings")
        if source.each_alone and source.inside.patient:
            raise DataError(
                "data.inside.patient: a file is read or left out as a whole, so one patient in it could change what is "
                "read of the others; write a file for each patient where the plan promises privacy"
            )
        listing = find_recordings(source, folder, self.outcomes(source))
        reader, known = self.reader(source), KnownLabels.of(self, source)
        shown = _opened(listing, reader) if reader.labels or reader.patients else {}
        strangers = [
            f"{entry.name}: {label.replace(BETWEEN, ', ')}"
            for entry in listing.entries
            for label in shown.get(entry.name) or [str(entry.label)]
            if known.number(label) is None
        ]
        where = "" if reader.labels or source.table else ", or name the column that has it under data.inside"
        listing.add("stops", f"{known.stranger}{where}", strangers)
        if self.kind == "survival":
            listing.add("stops", OTHERS, _at_odds(listing.entries, shown))
        classes = {entry.name: int(known.learned(str(entry.label)) or 0) for entry in listing.entries}
        if self.kind != "classification":  # patients are divided by what they have in common, and not by numbers
            listing.entries = [
                replace(entry, outcome=str(entry.label), label=known.group(str(entry.label)))
                for entry in listing.entries
            ]
        settings = json.dumps(source.model_dump(mode="json", include=set(ROWS)))
        return Found(listing, classes, partial(self._made, reader=reader, known=known), settings)

    def _made(self, entry: Entry, reader: Reader, known: KnownLabels) -> PreparedEntry:
        """One patient's windows of a recording."""
        recording = reader.read(entry.images[0])
        own = np.ones(len(recording.begins), bool)
        if recording.patients:
            own = recording.patients.rows == recording.patients.names.index(entry.patient)
        names = recording.labels.names if recording.labels else (entry.outcome or str(entry.label),)
        values = [known.values(name) for name in names]
        usable = [own is not None for own in values]
        found = cut(recording, self.cutting(recording, reader.source), own, usable)
        if not len(found.inputs) or not any(usable):
            raise DataError(
                f"recordings have no window of {self.window} steps in a row that are whole and of one label; correct "
                "task.window or the recordings"
            )
        places = found.labels.tolist()
        targets = np.array([values[place] for place in places], known.stored)
        numbers = [known.learned(names[place]) for place in places]
        rate = recording.rate or reader.source.rate or self.rate
        facts = Facts(
            len(found.inputs),
            digest(torch.from_numpy(found.inputs)),
            (),
            (),
            (float(found.inputs.min()), float(found.inputs.max())),
            (),
            tuple(() if self.kind == "regression" else (int(number or 0),) for number in numbers),
            seconds=float(own.sum() / rate),
            gaps=found.gaps,
            turned=recording.turned,
            outcome=tuple(values[places[0]] or ()) if self.kind == "survival" else (),
        )
        return PreparedEntry(torch.from_numpy(found.inputs), torch.from_numpy(targets), facts)

    def windows(self, path: Path, reader: Reader) -> Iterator[tuple[str, Recording, Windows]]:
        """Yield each patient of a file, its rows, and the patient's windows, whatever they show."""
        recording = reader.read(path)
        patients = recording.patients or Coded(("",), np.zeros(len(recording.begins), np.int64))
        for place, patient in enumerate(patients.names):
            yield patient, recording, cut(recording, self.cutting(recording, reader.source), patients.rows == place)

    def own_scales(self, source: DataSource) -> standardising.Scales:
        """Return `scales_of` all of a hospital's recordings."""
        reader = self.reader(source, outcome=False)
        found = find_recordings(source, source.folder, self.outcomes(source))
        paths = dict.fromkeys(entry.images[0] for entry in found.entries)
        every = (found.inputs for path in paths for _, _, found in self.windows(path, reader))
        return self.scales_of(torch.from_numpy(inputs) for inputs in every if len(inputs))

    def cutting(self, recording: Recording, source: DataSource) -> Cutting:
        """Return how a recording is cut, at the plan's rate."""
        own, told = source.rate or self.rate, recording.rate
        if told and abs(told / own - 1) > NEAR:
            who = "data.rate says" if source.rate else "the plan reads"
            hint = "correct it" if source.rate else "say data.rate, so that they are resampled, or correct the times"
            raise DataError(f"recordings' times say about {told:.3g} Hz where {who} {own:g}; {hint}")
        share = Fraction(str(self.rate)) / Fraction(str(own))
        if max(share.numerator, share.denominator) > MOST_TERM:
            raise DataError(
                f"recordings of {own:g} Hz can't be resampled to {self.rate:g} by whole numbers; do it before"
            )
        return Cutting(
            self.window, self.step or self.window, self.missing, self.longest_fill, share.numerator, share.denominator
        )

    def _note(self, listing: Listing, every: Sequence[HeldEntry], source: DataSource) -> None:
        listing.add("note", LOST, [one.entry.name for one in every if one.facts.gaps])
        listing.add("note", ROUGH, [one.entry.name for one in every if one.facts.turned])

    def _survey_of(
        self,
        listing: Listing,
        held: dict[str, list[HeldEntry]],
        ready: dict[str, ReadyCases],
        source: DataSource,
    ) -> Survey:
        if self.kind == "survival":
            scored = {part: held[part] for part in self._needed(source) if part != "train"}
            own = {part: {one.entry.patient: one.facts.outcome for one in several} for part, several in scored.items()}
            targets = {part: torch.tensor(list(known.values())).reshape(-1, 2) for part, known in own.items()}
            listing.problems += survival.incomparable(targets)
        return super()._survey_of(listing, held, ready, source)

    def _part(self, data: ReadyCases) -> PartFacts:
        """Return windows and patients; of survival, patients alone."""
        if self.kind != "survival":
            return super()._part(data)
        events = Counter({one.entry.patient: one.facts.outcome[1] for one in data.held}.values())
        number = len(set(data.patients))
        return PartFacts(number, number, {name: events[place] for place, name in enumerate(survival.EVENTS)})

    def _ranges(self, every: Sequence[HeldEntry]) -> dict[str, Any]:
        return {"seconds": range_of(one.facts.seconds for one in every)}


def _at_odds(entries: Sequence[Entry], shown: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the entries of patients of whom recordings say different things."""
    told: defaultdict[str, set[str]] = defaultdict(set)
    for entry in entries:
        told[entry.patient] |= set(shown.get(entry.name) or [str(entry.label)])
    return [entry.name for entry in entries if len(told[entry.patient]) > 1]


def _opened(listing: Listing, reader: Reader) -> dict[str, Counter[str]]:
    """Put an entry for each patient into a listing; return the rows of each label that each entry has, by its name."""
    entries, shown, wrong = [], {}, defaultdict(list)
    for entry in listing.entries:
        try:
            found = reader.whose(entry.images[0])
        except DataError as error:
            wrong[str(error)].append(entry.name)
            continue
        for patient, labels in found.items():
            own = entry if patient is None else replace(entry, name=f"{entry.name}/{patient}", patient=patient)
            if not own.patient or own.patient in reader.source.missing:
                wrong["recordings have rows without a patient; fill in the column"].append(entry.name)
                continue
            if reader.labels:
                shown[own.name] = labels
                own = replace(own, label=min(labels, key=lambda name: (-labels[name], name)))
            entries.append(own)
    listing.entries = entries
    for what, names in wrong.items():
        listing.add("left out", what, names)
    check_patients(listing, reader.source)
    return shown


class _Finished(Dataset):
    """Windows as a network reads them."""

    def __init__(self, task: SeriesFolder, data: Dataset, scales: standardising.Scales) -> None:
        self.task, self.data, self.scales = task, data, scales
        self.patients = tuple(patients_of(data))
        self.records = records_of(data)
        self.labels = labels_of(data) if task.goal.classifies else None

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return self.task.finished(inputs, self.scales), target


def _one_window(case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    return drawn_window(case[0], seed), case[1]


def _blocks(data: Dataset) -> Iterator[Tensor]:
    """Yield a data set's windows, some at a time."""
    count = len(data)  # type: ignore[arg-type]
    for first in range(0, count, AT_ONCE):
        yield torch.stack([data[place][0] for place in range(first, min(first + AT_ONCE, count))])


def _spread(blocks: Iterable[Tensor], signals: int) -> standardising.Scales:
    """Return each signal's mean and standard deviation (n - 1) over all steps of all windows; 1 where all are alike."""
    count, means, squares = 0, torch.zeros(signals).double(), torch.zeros(signals).double()
    for block in blocks:
        values = block.double().transpose(1, 2).reshape(-1, signals)
        more, apart = len(values), values.mean(0) - means
        squares += (values - values.mean(0)).square().sum(0) + apart.square() * count * more / (count + more)
        means, count = means + apart * more / (count + more), count + more
    deviations = (squares / max(count - 1, 1)).sqrt()
    return means, deviations.where(deviations > 0, torch.ones(signals).double())


# ---------------------------------------------------------------------------------------- patients as cases
class Subjects(Dataset):
    """The patients of a data set of windows: inputs [windows, signals, steps], and the target that all of them have.

    Where a patient has fewer windows than another of the part, the rest is NaN.
    """

    def __init__(self, data: Dataset, most: int) -> None:
        self.data, self.places = data, places_of(data, most)
        self.patients = tuple(self.places)
        self.longest = max(map(len, self.places.values()), default=0)
        known = [self.data[places[0]][1] for places in self.places.values()]
        self.targets = torch.stack(known) if known else torch.zeros(0, 2)

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        windows = torch.stack([self.data[place][0] for place in self.places[self.patients[index]]])
        whole = windows.new_full((self.longest, *windows.shape[1:]), torch.nan)
        whole[: len(windows)] = windows
        return whole, self.targets[index]


def places_of(data: Dataset, most: int) -> dict[str, list[int]]:
    """Return where each patient's windows are; of more than so many, as many that lie evenly."""
    found: dict[str, list[int]] = {}
    for place, patient in enumerate(patients_of(data)):
        found.setdefault(patient, []).append(place)
    return {
        patient: places if len(places) <= most else [places[n * len(places) // most] for n in range(most)]
        for patient, places in found.items()
    }


def drawn_window(windows: Tensor, seed: int) -> Tensor:
    """Return one window of a patient, [signals, steps], drawn from the seed alone."""
    return windows[seed_for(seed, "window") % int(_known(windows).sum())]


def of_subjects(network: Callable[[Tensor], Tensor], inputs: Tensor, at_once: int) -> Tensor:
    """Return the mean of a network's output over each patient's windows, [patients, windows, signals, steps]."""
    known = _known(inputs)
    output = torch.cat([network(windows) for windows in inputs[known].split(at_once)])
    whole = output.new_zeros((*known.shape, *output.shape[1:]))
    whole[known] = output
    return whole.sum(1) / known.sum(1)[:, None]


def _known(windows: Tensor) -> Tensor:
    """Return which windows are none that only fill up."""
    return ~windows[..., 0, 0].isnan()
