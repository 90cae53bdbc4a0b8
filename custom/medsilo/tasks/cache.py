"""Cache prepared cases in memory or in files. Cases that do not fit are prepared again at each use.

MONAI's cache data sets limit the number of cases, and write pickle files. The cache of medsilo limits bytes and writes
safetensors. Each file is read once, for both the survey and the cache.
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

NAMES = ("inputs", "targets")  # names of the tensors in a file
MOST = 100 << 30  # limit on bytes in the folder; another limit is a quarter of the free disk space
PLACES = "places"  # name of the tensor of structures' voxels, which some tasks store


class Memory:
    """The memory that a site's cache may use, first come, first served."""

    def __init__(self, source: DataSource) -> None:
        self.left = source.cache_memory << 20  # bytes that are free

    def takes(self, *tensors: Tensor) -> bool:
        """Reserve memory for these tensors; returns False if they do not fit."""
        size = sum(tensor.nbytes for tensor in tensors)
        keeps = size <= self.left
        self.left -= size if keeps else 0
        return keeps


@dataclass(frozen=True)
class Facts:
    """Facts about one entry's files for the survey."""

    digest: str
    shown: tuple[tuple[int, ...], ...]  # for each case, the plan's labels that occur in it
    intensity: tuple[float, float]
    size: tuple[int, ...] = ()  # voxels along x, y (and z)
    spacing: tuple[float, ...] = ()
    values: tuple[int, ...] = ()  # the values in a mask's file
    seconds: float = 0.0  # length of a recording
    gaps: int = 0  # number of gaps in a recording's time and of rows without a value


FACTS = TypeAdapter(Facts)  # converts JSON's lists to tuples


@dataclass(frozen=True)
class PreparedEntry:
    """An entry as tensors for the network. Inputs are [cases, C, *grid]; targets are [cases], or uint8 masks [cases,
    *grid].
    """

    inputs: Tensor
    targets: Tensor
    facts: Facts
    # Voxels of structures as rows (label, z, y, x), [n, 4]; only for an entry with one case
    places: Tensor | None = None


class StoredCase:
    """One case of a tensor [cases, ...] in a file, of which slices are read on demand."""

    def __init__(self, stored: Any, number: int) -> None:
        self.stored, self.number = stored, number

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.get_shape()[1:])

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        return self.stored[(slice(self.number, self.number + 1), *places)][0]


Sliced = Tensor | StoredCase


@dataclass
class Cache:
    """A site's cache of prepared cases."""

    source: DataSource
    make: Callable[[Entry], PreparedEntry]
    settings: str  # the task's settings and code, as part of the cache key
    mark: int = 0  # number added to labels if this hospital did not annotate all structures

    def __post_init__(self) -> None:
        self.memory = Memory(self.source)
        self.room = 0.0  # free bytes on the disk
        if folder := self.source.cache_folder:
            taken = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            self.room = min(MOST - taken, free_disk(folder) / 4)

    def hold(self, entry: Entry) -> "HeldEntry":
        """Prepare an entry once, and keep it in memory or in a file if there is space."""
        if (known := self.source.facts) is not None:
            key = self._key(entry)
            if key not in known:
                known[key] = self.make(entry).facts
            return HeldEntry(entry, known[key], None, None, self.make, self.mark)
        if self.source.cache_folder:
            return self._in_memory(self._on_disk(entry))
        made = self.make(entry)
        keeps = self.memory.takes(made.inputs, made.targets)
        return HeldEntry(entry, made.facts, made if keeps else None, None, self.make, self.mark)

    def _in_memory(self, held: "HeldEntry") -> "HeldEntry":
        """Load an entry from its file into memory, if there is space."""
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
            facts = None  # the file is incomplete, so the entry is prepared again
        if facts is None:
            made = self.make(entry)
            facts = made.facts
            self.room -= made.inputs.nbytes + made.targets.nbytes
            if self.room < 0:  # the folder is full, so the entry is prepared at each use
                return HeldEntry(entry, facts, None, None, self.make, self.mark)
            kept = dict(zip(NAMES, (made.inputs, made.targets), strict=True))
            if made.places is not None:
                kept[PLACES] = made.places
            save_tensors(path, kept, asdict(facts))
        return HeldEntry(entry, facts, None, path, self.make, self.mark)

    def _key(self, entry: Entry) -> str:
        """Return an entry's cache key, which depends on its files, its transforms and their code."""
        images = [*entry.images, *([entry.label] if isinstance(entry.label, Path) else [])]
        try:
            files = [file for image in images for file in files_of(image)]
            states = [(file, file.stat()) for file in files]
            known = [[str(file.resolve()), state.st_size, state.st_mtime_ns] for file, state in states]
        except OSError as error:
            raise DataError("a file can't be read; is it a link to a missing file?", str(error)) from error
        return hashlib.sha256(json.dumps([known, entry.name, str(entry.label), self.settings]).encode()).hexdigest()


@dataclass(frozen=True)
class HeldEntry:
    """The cases of one entry, in memory or in a file."""

    entry: Entry
    facts: Facts
    made: PreparedEntry | None
    file: Path | None
    make: Callable[[Entry], PreparedEntry] = field(repr=False)
    mark: int = 0  # number added to labels if this hospital did not annotate all structures

    def case(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the inputs [C, *grid] and the target of one case."""
        inputs, targets, _ = self.kept(number)
        return inputs, marked(targets if targets.is_floating_point() else targets.long(), self.mark)

    @contextmanager
    def opened(self, number: int) -> Iterator[tuple["Sliced", "Sliced", Tensor | None]]:
        """Yield the tensors that `kept` returns, but read tensors in a file only where they are indexed."""
        if self.file is None:
            made = self.made or self.make(self.entry)
            yield made.inputs[number], made.targets[number], made.places
            return
        with safetensors.safe_open(self.file, framework="pt") as file:
            inputs, targets = (StoredCase(file.get_slice(name), number) for name in NAMES)
            yield inputs, targets, file.get_tensor(PLACES).clone() if PLACES in file.keys() else None  # noqa: SIM118 - no dict

    def kept(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the stored inputs and target of one case, and the voxels of its structures."""
        with self.opened(number) as (*case, places):
            # Copy the tensors, which are memory-mapped, so that the mapping can be freed.
            inputs, targets = (one[()].clone() if isinstance(one, StoredCase) else one for one in case)
            return inputs, targets, places


class ReadyCases(Dataset):
    """The cases of one part of the data. Cases of one entry, such as slices of a volume, are consecutive."""

    def __init__(self, held: Sequence[HeldEntry], chosen: Sequence[Sequence[int]]) -> None:
        self.held, self.chosen = held, chosen
        self.ends = list(accumulate(map(len, chosen)))
        self.patients = tuple(one.entry.patient for one, cases in zip(held, chosen, strict=True) for _ in cases)

    @property
    def records(self) -> tuple[str, ...]:
        """For each case, the name of its entry."""
        return tuple(one.entry.name for one, cases in zip(self.held, self.chosen, strict=True) for _ in cases)

    @property
    def names(self) -> tuple[str, ...]:
        """For each case, a name that does not depend on other entries."""
        numbers = (number for cases in self.chosen for number in cases)
        return tuple(f"{record}\x1f{number}" for record, number in zip(self.records, numbers, strict=True))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def labels(self) -> Tensor | None:
        """The class of every case, [cases]; None if targets are no classes."""
        pairs = zip(self.held, self.chosen, strict=True)
        shown = [one.facts.shown[case] for one, cases in pairs for case in cases]
        return torch.tensor([own[0] for own in shown], dtype=torch.long) if all(shown) else None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held, number = self.at(index)
        return held.case(number)

    def at(self, index: int) -> tuple[HeldEntry, int]:
        """Return the entry of a case, and the index of the case in the entry."""
        place = bisect_right(self.ends, index)
        return self.held[place], self.chosen[place][index - (self.ends[place - 1] if place else 0)]


def held_case(cases: Dataset, index: int) -> tuple[HeldEntry, int]:
    """Return the entry of a case, and the index of the case in the entry. `index` is the case's index in
    the data set.
    """
    if isinstance(cases, ReadyCases):
        return cases.at(index)
    if isinstance(cases, ConcatDataset):
        part = bisect_right(cases.cumulative_sizes, index)
        return held_case(cases.datasets[part], index - [0, *cases.cumulative_sizes][part])
    assert isinstance(cases, Subset)
    return held_case(cases.dataset, cases.indices[index])
