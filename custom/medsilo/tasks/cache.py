"""Cases that are ready for the network: kept in memory or in files, or made again from the hospital's own.

MONAI's cache data sets do the same with a number of cases as their bound and, on the disk, with pickle; here the bound
is memory, files are safetensors, and one reading serves both the survey and the cache.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import free_disk, load_facts, load_tensors, save_tensors
from medsilo.learning.partial_labels import marked
from medsilo.tasks.case_index import Entry, files_of
from medsilo.tasks.sources import DataSource

NAMES = ("inputs", "targets")  # of the tensors in a file
MOST = 100 << 30  # bytes in the folder, and no more than a quarter of what is free on its disk
PLACES = "places"  # of another one, where a task keeps it


class Memory:
    """The memory that a site may fill. Those that come first take their share first."""

    def __init__(self, source: DataSource) -> None:
        self.left = source.cache_memory << 20  # bytes

    def takes(self, *tensors: Tensor) -> bool:
        """Return whether these have a place, which is theirs then."""
        size = sum(tensor.nbytes for tensor in tensors)
        keeps = size <= self.left
        self.left -= size if keeps else 0
        return keeps


@dataclass(frozen=True)
class Facts:
    """The facts of one entry's files that a survey wants."""

    digest: str
    shown: tuple[tuple[int, ...], ...]  # the plan's labels that each case shows
    intensity: tuple[float, float]
    size: tuple[int, ...] = ()  # voxels along x, y (and z)
    spacing: tuple[float, ...] = ()
    values: tuple[int, ...] = ()  # a mask's values in the file
    seconds: float = 0.0  # of a recording
    gaps: int = 0  # of a recording: in time, and rows without a value


FACTS = TypeAdapter(Facts)  # of which JSON has lists for tuples


@dataclass(frozen=True)
class PreparedEntry:
    """An entry as the network takes it: inputs [cases, C, *grid]; targets [cases], or as bytes [cases, *grid] where
    they are labels."""

    inputs: Tensor
    targets: Tensor
    facts: Facts
    places: Tensor | None = None  # of an entry of one case: voxels that show structures, [n, 4]: label, z, y, x


class StoredCase:
    """A tensor [cases, ...] of a file, seen as one case of it: what is asked for by slices is read then."""

    def __init__(self, stored: Any, number: int) -> None:
        self.stored, self.number = stored, number

    @property
    def shape(self) -> tuple[int, ...]:
        """The case's shape."""
        return tuple(self.stored.get_shape()[1:])

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        return self.stored[(slice(self.number, self.number + 1), *places)][0]


Sliced = Tensor | StoredCase


@dataclass
class Cache:
    """The place where a site keeps what is ready."""

    source: DataSource
    make: Callable[[Entry], PreparedEntry]
    settings: str  # what else `make` depends on, its code included
    mark: int = 0  # on labels, of structures that nobody drew here

    def __post_init__(self) -> None:
        self.memory = Memory(self.source)
        self.room = 0.0  # bytes on the disk
        if folder := self.source.cache_folder:
            taken = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            self.room = min(MOST - taken, free_disk(folder) / 4)

    def hold(self, entry: Entry) -> "HeldEntry":
        """The entry, read once."""
        if self.source.cache_folder:
            return self._in_memory(self._on_disk(entry))
        made = self.make(entry)
        keeps = self.memory.takes(made.inputs, made.targets)
        return HeldEntry(entry, made.facts, made if keeps else None, None, self.make, self.mark)

    def _in_memory(self, held: "HeldEntry") -> "HeldEntry":
        """Return an entry that lies in a file with its tensors in memory, where they have a place there."""
        if held.file is None:
            return held
        kept = {name: tensor.clone() for name, tensor in load_tensors(held.file)[0].items()}
        inputs, targets, places = (kept.get(name) for name in (*NAMES, PLACES))
        assert inputs is not None and targets is not None
        if not self.memory.takes(inputs, targets):
            return held
        return replace(held, made=PreparedEntry(inputs, targets, held.facts, places), file=None)

    def _on_disk(self, entry: Entry) -> "HeldEntry":
        assert self.source.cache_folder is not None
        path = self.source.cache_folder / f"{self._key(entry)}.safetensors"
        try:
            facts = FACTS.validate_python(load_facts(path)) if path.exists() else None
        except MedsiloError:
            facts = None  # was cut off: made again
        if facts is None:
            made = self.make(entry)
            facts = made.facts
            self.room -= made.inputs.nbytes + made.targets.nbytes
            if self.room < 0:  # made again whenever it is needed
                return HeldEntry(entry, facts, None, None, self.make, self.mark)
            kept = dict(zip(NAMES, (made.inputs, made.targets), strict=True))
            if made.places is not None:
                kept[PLACES] = made.places
            save_tensors(path, kept, asdict(facts))
        return HeldEntry(entry, facts, None, path, self.make, self.mark)

    def _key(self, entry: Entry) -> str:
        """Changes with the files, with what is made of them, and with the code that makes it."""
        images = [*entry.images, *([entry.label] if isinstance(entry.label, Path) else [])]
        try:
            files = [file for image in images for file in files_of(image)]
            known = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        except OSError as error:
            raise DataError("a file can't be read; is it a link to nowhere?", str(error)) from error
        return hashlib.sha256(json.dumps([known, entry.name, str(entry.label), self.settings]).encode()).hexdigest()


@dataclass(frozen=True)
class HeldEntry:
    """One entry's cases, wherever they are."""

    entry: Entry
    facts: Facts
    made: PreparedEntry | None
    file: Path | None
    make: Callable[[Entry], PreparedEntry] = field(repr=False)
    mark: int = 0  # on labels, of structures that nobody drew here

    def case(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs [C, *grid] and target of one case."""
        inputs, targets, _ = self.kept(number)
        return inputs, marked(targets if targets.is_floating_point() else targets.long(), self.mark)

    @contextmanager
    def opened(self, number: int) -> Iterator[tuple["Sliced", "Sliced", Tensor | None]]:
        """Give what `kept` returns; of what lies in a file, only the parts that are looked at are read."""
        if self.file is None:
            made = self.made or self.make(self.entry)
            yield made.inputs[number], made.targets[number], made.places
            return
        with safetensors.safe_open(self.file, framework="pt") as file:
            inputs, targets = (StoredCase(file.get_slice(name), number) for name in NAMES)
            yield inputs, targets, file.get_tensor(PLACES).clone() if PLACES in file.keys() else None  # noqa: SIM118 - no dict

    def kept(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs and target of one case as they are kept, and the places of its structures."""
        with self.opened(number) as (*case, places):
            # Copies: what the file maps into memory goes with the file.
            inputs, targets = (one[()].clone() if isinstance(one, StoredCase) else one for one in case)
            return inputs, targets, places


class ReadyCases(Dataset):
    """The cases of one part; several of one entry, as the slices of a volume, follow each other."""

    def __init__(self, held: Sequence[HeldEntry], chosen: Sequence[Sequence[int]]) -> None:
        self.held, self.chosen = held, chosen
        self.ends = list(accumulate(map(len, chosen)))
        self.patients = tuple(one.entry.patient for one, cases in zip(held, chosen, strict=True) for _ in cases)

    @property
    def records(self) -> tuple[str, ...]:
        """The entry that each case is of."""
        return tuple(one.entry.name for one, cases in zip(self.held, self.chosen, strict=True) for _ in cases)

    @property
    def names(self) -> tuple[str, ...]:
        """A name of each case, whatever other entries there are."""
        numbers = (number for cases in self.chosen for number in cases)
        return tuple(f"{record}\x1f{number}" for record, number in zip(self.records, numbers, strict=True))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def labels(self) -> Tensor | None:
        """The class of every case of a classification, [cases]; None where cases have numbers."""
        pairs = zip(self.held, self.chosen, strict=True)
        shown = [one.facts.shown[case] for one, cases in pairs for case in cases]
        return torch.tensor([own[0] for own in shown], dtype=torch.long) if all(shown) else None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held, number = self.at(index)
        return held.case(number)

    def at(self, index: int) -> tuple[HeldEntry, int]:
        """Return a case's entry, and its number there."""
        place = bisect_right(self.ends, index)
        return self.held[place], self.chosen[place][index - (self.ends[place - 1] if place else 0)]


def held_case(cases: Dataset, index: int) -> tuple[HeldEntry, int]:
    """Return the entry of one of some cases, and which of the entry's cases it is."""
    if isinstance(cases, ReadyCases):
        return cases.at(index)
    if isinstance(cases, ConcatDataset):
        part = bisect_right(cases.cumulative_sizes, index)
        return held_case(cases.datasets[part], index - [0, *cases.cumulative_sizes][part])
    assert isinstance(cases, Subset)
    return held_case(cases.dataset, cases.indices[index])
